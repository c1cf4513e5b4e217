import dataclasses
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Backend
from jaxserve.ops.paged_attention.triton.backend import TritonBackend
from jaxserve.runtime import memory, runner_setup
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.kv_cache import LayerCache
from jaxserve.runtime.memory import (
    MIB,
    MemoryPlan,
    Sizes,
    device_memory,
    plan_memory,
    plan_states,
    scratch_bytes,
    split_pool,
)
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup, check_reach
from jaxserve.types.scheduling import Reach, Span

GIB = 2**30
SIZES = Sizes(
    weight_bytes=16 * GIB,
    state_bytes=GIB,
    scratch_bytes=2 * GIB,
    page_bytes=2 * MIB,
    page_size=16,
    max_num_seqs=512,
)


CONFIG = RunnerConfig(
    max_num_seqs=512,
    max_num_batched_tokens=8192,
    max_model_len=8192,
    page_size=16,
    cache_dtype=jnp.dtype("bfloat16"),
)


def plan(sizes: Sizes = SIZES, *, platform: str = "gpu", device_bytes: int = 80 * GIB, **changes: Any) -> MemoryPlan:
    config = dataclasses.replace(CONFIG, **changes)
    return plan_memory(sizes, config, platform=platform, device_bytes=device_bytes)


def test_pages_take_what_the_budget_leaves() -> None:
    result = plan()
    assert result.num_pages == (72 - 16 - 1 - 2) * 512
    assert result.kv_bytes == 53 * GIB and result.kv_tokens == result.num_pages * 16
    assert result.max_concurrency == pytest.approx(53)


def test_no_more_pages_than_all_slots_can_use_twice() -> None:
    assert plan(device_bytes=10**15).num_pages == 2 * 512 * 512


def test_a_cpu_pool_is_capped_at_the_weights_or_half_a_gibibyte() -> None:
    assert plan(platform="cpu").kv_bytes == 16 * GIB
    small = dataclasses.replace(SIZES, weight_bytes=10 * MIB)
    assert plan(small, platform="cpu", max_model_len=4096).kv_bytes == 512 * MIB


def test_a_number_of_pages_is_taken_as_given() -> None:
    assert plan(num_pages=600, max_model_len=100).num_pages == 600


@pytest.mark.parametrize("changes", [{"num_pages": 511}, {"device_bytes": 22 * GIB}, {"memory_fraction": 0.1}])
def test_too_little_for_one_request_says_what_to_do(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="one request may have 8192") as caught:
        plan(**changes)
    assert "memory_fraction" in str(caught.value.fix)


def test_a_context_nobody_asked_for_shrinks_to_what_fits() -> None:
    assert plan(num_pages=100, shrink_context=True).max_model_len == 1600
    with pytest.raises(ConfigError):
        plan(num_pages=0, shrink_context=True)


def test_measured_sizes() -> None:
    assert device_memory(jax.devices("cpu")) > GIB
    compiled = jax.jit(lambda x: jnp.sin(x @ x) @ x).lower(jax.ShapeDtypeStruct((256, 256), jnp.float32)).compile()
    assert scratch_bytes(compiled) >= 256 * 256 * 4


def test_programs_that_copy_the_cache_leave_room_for_the_copy() -> None:
    copied = plan(dataclasses.replace(SIZES, scratch_page_bytes=2 * MIB))
    assert copied.num_pages == (72 - 16 - 1 - 2) * 256 and copied.page_bytes == SIZES.page_bytes
    assert copied.scratch_bytes == 2 * GIB + copied.kv_bytes
    windows = dataclasses.replace(ALTERNATING, page_bytes=0)
    more = plan(dataclasses.replace(windows, scratch_page_bytes=MIB), device_bytes=30 * GIB)
    assert more.groups[0].num_pages < plan(windows, device_bytes=30 * GIB).groups[0].num_pages
    assert more.scratch_bytes == 2 * GIB + more.kv_bytes <= (27 - 17) * GIB - more.kv_bytes


@pytest.mark.parametrize(("platform", "found"), [("tpu", (1000, 40)), ("gpu", (1000, 0))])
def test_the_probe_of_a_tpu_shows_copies_of_the_cache(
    platform: str, found: tuple[int, int], tiny_model: LoadedModel, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`extend` needs more memory, and `decode` more for each page."""
    config = dataclasses.replace(CONFIG, attention="xla", max_model_len=128, page_size=8)
    setup = RunnerSetup.of(tiny_model, config, mesh)
    monkeypatch.setattr(DeviceMesh, "platform", platform)

    def compiled(programs: Sequence[Program]) -> dict[str, int]:
        """Return the bytes of each program: 40 for a page of those that decode, and 1000 for all others."""
        pages = {program.name: jax.tree.leaves(program.args[1])[0].shape[0] for program in programs}
        return {name: 40 * pages[name] if name.startswith("decode") else 1000 for name in pages}

    monkeypatch.setattr(runner_setup, "compile_all", compiled)
    monkeypatch.setattr(memory, "scratch_bytes", lambda size: size)
    assert setup._probe_scratch(GIB) == found


@pytest.mark.parametrize("room", [GIB, 30 * 512])
def test_the_probe_of_a_tpu_has_a_cache_that_fits_and_is_not_in_the_fast_memory(
    room: int, tiny_model: LoadedModel, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XLA refuses a program whose arguments and copies do not fit, and shows no copy of a cache that is very small."""
    config = dataclasses.replace(CONFIG, attention="xla", max_model_len=128, page_size=8)
    setup = RunnerSetup.of(tiny_model, config, mesh)
    monkeypatch.setattr(DeviceMesh, "platform", "tpu")
    caches: list[int] = []

    def compiled(programs: Sequence[Program]) -> dict[str, int]:
        for leaves in (jax.tree.leaves(each.args[1]) for each in programs if each.name.startswith("decode")):
            caches.append(sum(leaf.size * leaf.dtype.itemsize for leaf in leaves))
        return {program.name: 0 for program in programs}

    monkeypatch.setattr(runner_setup, "compile_all", compiled)
    monkeypatch.setattr(memory, "scratch_bytes", lambda size: size)
    setup._probe_scratch(room)
    assert room / 8 < min(caches) and max(caches) < room / 2


# --- 8-bit pages in the Triton kernels

SCALED = dataclasses.replace(SIZES, page_bytes=MIB, reached=(2**15,))  # 32 layers of 8 kv heads of 128 numbers


@pytest.mark.parametrize(("gib", "pages"), [(80, 54272), (100, 65536), (160, 65536), (170, 134 * 1024)])
def test_8_bit_pages_end_at_what_an_offset_with_a_sign_reaches(gib: int, pages: int) -> None:
    """65,536 pages of a layer are 2 GiB. Above 4 GiB offsets have 64 bits."""
    assert plan(SCALED, device_bytes=gib * GIB, memory_fraction=0.9).num_pages == pages


def test_more_8_bit_pages_than_the_kernels_reach_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"cache.num_pages is 65537.*at most 2048 MiB") as caught:
        plan(SCALED, num_pages=65537, device_bytes=140 * GIB)
    assert caught.value.fix == "set it to 65536"
    windows = dataclasses.replace(ALTERNATING, reached=(0, 2**17))
    with pytest.raises(ConfigError, match=r"cache.num_window_pages is 18000"):
        plan(windows, num_window_pages=18000)
    assert plan(windows).groups[0].num_pages == 16384


def test_pages_that_only_triton_reads_in_part(tiny_model: LoadedModel, mesh: DeviceMesh) -> None:
    """Pages of int8, on the one backend that counts in 32 bits."""
    many = 3 * 2**22

    def planned(backend: Backend | None, dtype: str) -> int:
        config = dataclasses.replace(CONFIG, max_model_len=128, cache_dtype=jnp.dtype(dtype), num_pages=many)
        setup = RunnerSetup.of(tiny_model, dataclasses.replace(config, attention="xla"), mesh)
        layer = setup.layers[0]
        assert isinstance(layer, LayerCache)
        assert 2**31 < math.prod(layer.page_shape) * many < 2**32
        return dataclasses.replace(setup, backend=backend or setup.backend).plan(2**40).num_pages

    assert planned(None, "int8") == planned(TritonBackend(), "bfloat16") == many
    with pytest.raises(ConfigError, match=f"cache.num_pages is {many}"):
        planned(TritonBackend(), "int8")


@pytest.mark.parametrize(("gib", "axes", "products"), [(1, (), "few"), (3, (), "few"), (3, ("expert",), "experts")])
def test_a_weight_that_triton_reads_in_part_is_refused(gib: int, axes: tuple[str, ...], products: str) -> None:
    spec = SimpleNamespace(name="head.values", axes=axes)
    leaf = jax.ShapeDtypeStruct((gib, 2**15, 2**15), jnp.int8)
    loaded: Any = SimpleNamespace(structure=SimpleNamespace(specs=[spec]), leaves=[leaf])
    found = Products(few_bits="gpu", experts="xla") if products == "few" else Products(experts="triton")
    if gib == 1:
        check_reach(loaded, found)
        return
    with pytest.raises(ConfigError, match=r"head\.values has 3\.00 GiB"):
        check_reach(loaded, found)
    check_reach(loaded, Products(few_bits="gpu", experts="triton", deterministic=True) if not axes else Products())
    wide = jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16)
    check_reach(SimpleNamespace(structure=loaded.structure, leaves=[wide]), found)  # type: ignore[arg-type]


# --- layers with a sliding window

WINDOW = Span(Reach("window", 1024), 16, prompt_tokens=8192)
ONE, CHUNKS = WINDOW.decoding, 2 * 512  # pages of a request's window, and of two chunks
ALTERNATING = dataclasses.replace(SIZES, page_bytes=MIB, groups=((WINDOW, MIB),))


def test_windows_of_all_requests_and_the_rest_for_the_others() -> None:
    sizes = dataclasses.replace(ALTERNATING, max_num_seqs=64)
    result = plan(sizes)
    assert result.groups[0].num_pages == 2 * 64 * ONE + CHUNKS == WINDOW.for_requests(64)
    assert result.num_pages == 53 * 1024 - result.groups[0].num_pages
    assert result.kv_bytes == 53 * GIB and result.groups[0].reach == ("window", 1024)
    assert result.kv_tokens > 1.5 * plan(dataclasses.replace(SIZES, max_num_seqs=64)).kv_tokens
    assert result.max_concurrency == pytest.approx(result.kv_tokens / 8192)


def test_where_memory_is_short_windows_get_half_as_many_pages() -> None:
    pages, (windows,) = split_pool(6 * GIB, ALTERNATING, 131072)
    assert (pages, windows) == (4096, 2048)
    pages, (windows,) = split_pool(6 * GIB, ALTERNATING, 1600)  # 100 pages, 67 of them in the window
    assert windows == pytest.approx(0.67 * pages, rel=0.02) and pages + windows == 6 * 1024
    for context, found in ((4096, (4096, 2048)), (4500, (4500, 1644)), (5120, (5120, 1024)), (5124, (4096, 2048))):
        pages, (windows,) = split_pool(6 * GIB, ALTERNATING, 16 * context)
        assert (pages, windows) == found, "a full context fits if windows give up at most half of their pages"


def test_where_every_layer_has_a_window_the_other_pages_cost_nothing() -> None:
    sizes = dataclasses.replace(ALTERNATING, page_bytes=0)
    result = plan(sizes, device_bytes=30 * GIB, max_model_len=32768)
    assert result.kv_bytes == result.groups[0].num_pages * MIB <= (27 - 19) * GIB
    assert result.num_pages == result.groups[0].num_pages * 2048 // ONE
    assert result.max_concurrency == pytest.approx(result.groups[0].num_pages / ONE, rel=1e-3)


def test_windowed_pages_as_configured() -> None:
    assert plan(ALTERNATING, num_pages=600).groups[0].num_pages == 600
    result = plan(ALTERNATING, num_window_pages=200)
    assert (result.groups[0].num_pages, result.num_pages) == (200, 53 * 1024 - 200)
    with pytest.raises(ConfigError, match=f"131 pages, and one request may need {2 * ONE}") as caught:
        plan(ALTERNATING, num_window_pages=131)
    assert f"cache.num_window_pages to at least {2 * ONE}" in str(caught.value.fix)


@pytest.mark.parametrize(("page_bytes", "pages"), [(MIB, 38), (0, 77)])
def test_too_little_for_a_context_and_its_windows_is_a_shorter_context(page_bytes: int, pages: int) -> None:
    """77 MiB; two windows of a page's group alone are 132. A context of 77 pages needs no more than these."""
    sizes = dataclasses.replace(ALTERNATING, page_bytes=page_bytes)
    tight: dict[str, Any] = {"device_bytes": 21 * GIB + 200 * MIB}
    result = plan(sizes, **tight, shrink_context=True)
    assert (result.num_pages, result.groups[0].num_pages, result.max_model_len) == (pages, pages, pages * 16)
    with pytest.raises(ConfigError, match=f"room for {pages * 16} tokens.*{pages * (page_bytes + MIB) // MIB} MiB for"):
        plan(sizes, **tight)


def test_several_widths_share_by_what_a_request_needs() -> None:
    """A request has 65 pages of the wider windows and 18 of the chunks, and each group as many for each of these."""
    chunk = Span(Reach("chunk", 256), 16, prompt_tokens=8192)
    sizes = dataclasses.replace(ALTERNATING, max_num_seqs=64, groups=((WINDOW, MIB), (chunk, 2 * MIB)))
    result = plan(sizes)
    wide, narrow = result.groups
    assert wide.num_pages == WINDOW.for_requests(64) and wide.page_bytes * 2 == narrow.page_bytes
    assert narrow.num_pages == -(-wide.num_pages * chunk.decoding // WINDOW.decoding)
    assert result.num_pages == 53 * 1024 - wide.num_pages - 2 * narrow.num_pages and result.kv_bytes == 53 * GIB
    assert result.pages_by_group == (result.num_pages, wide.num_pages, narrow.num_pages)
    assert result.max_concurrency == pytest.approx(result.kv_tokens / 8192)
    again = plan(sizes, num_pages=result.num_pages, num_window_pages=wide.num_pages)
    assert again.groups == result.groups, "as a replacement engine plans"
    exact = plan(sizes, num_window_pages=(200, 150))
    assert [group.num_pages for group in exact.groups] == [200, 150]
    with pytest.raises(
        ConfigError, match=f"a chunk of 256 tokens have 30 pages, and one request may need {2 * chunk.decoding}"
    ):
        plan(sizes, num_window_pages=(200, 30))


def test_several_widths_where_no_layer_sees_all() -> None:
    narrow = Span(Reach("window", 128), 16, prompt_tokens=8192)
    sizes = dataclasses.replace(ALTERNATING, page_bytes=0, groups=((WINDOW, MIB), (narrow, MIB)))
    result = plan(sizes, device_bytes=30 * GIB, max_model_len=32768)
    counts = [group.num_pages for group in result.groups]
    assert result.kv_bytes == sum(counts) * MIB <= (27 - 19) * GIB
    assert counts[1] == -(-counts[0] * narrow.decoding // WINDOW.decoding)
    assert result.num_pages >= max(
        count * 2048 // span.decoding for count, span in zip(counts, (WINDOW, narrow), strict=True)
    )


def test_states_of_running_requests_and_as_many_cached_take_at_most_half() -> None:
    small = dataclasses.replace(SIZES, state_page_bytes=MIB)
    result = plan(small)
    assert (result.num_state_pages, result.num_pages) == (1024, (53 - 1) * 512)
    assert result.pages_by_group == (result.num_pages, 1024) and result.kv_bytes == 53 * GIB
    large = dataclasses.replace(SIZES, state_page_bytes=144 * MIB)
    result = plan(large)
    assert result.num_state_pages == 53 * 1024 // 2 // 144
    assert plan(large, num_state_pages=40).num_state_pages == 40
    assert plan(large, num_pages=600, num_state_pages=40, max_model_len=64).pages_by_group == (600, 40)
    with pytest.raises(ConfigError, match=r"cache.num_pages is 600"):
        plan(large, num_pages=600, num_state_pages=500, max_model_len=64)
    assert plan().num_state_pages == 0
    with pytest.raises(ConfigError, match=r"recurrent states 72000 MiB.*\n-> lower cache.num_state_pages"):
        plan(large, num_state_pages=500)


def test_states_of_one_request_are_enough_to_replace_the_one_that_it_begins_with() -> None:
    counts = [plan_states(None, dataclasses.replace(SIZES, max_num_seqs=n, state_page_bytes=MIB)) for n in (1, 2, 3, 4)]
    assert counts == [4, 5, 6, 8]


def test_states_beside_configured_pages_leave_the_programs_their_memory() -> None:
    large = dataclasses.replace(SIZES, state_page_bytes=144 * MIB)
    result = plan(large, num_pages=600, max_model_len=64)
    assert result.num_state_pages == (53 * 1024 - 1200) // 144
    assert plan(large, num_pages=27_000, max_model_len=64).num_state_pages == 2, "and the pages are more than that"
