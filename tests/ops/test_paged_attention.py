"""One body for all attention backends against dense numpy: ragged rows around page and tile edges, every option."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.ops.moe import kernels_of
from jaxserve.ops.paged_attention import Backend, get_backend
from jaxserve.ops.paged_attention.mosaic_gpu import PageScalesLayout
from jaxserve.ops.paged_attention.native import NativeBackend
from jaxserve.ops.paged_attention.reference import ReferenceBackend
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.ops.paged_attention.tpu import TpuBackend, TpuTuning
from jaxserve.ops.paged_attention.triton.backend import TritonBackend, TritonTuning
from jaxserve.ops.paged_attention.triton.latent import LatentTuning
from jaxserve.ops.paged_attention.xla import XlaBackend
from tests.ops.attention_cases import Case, empty_cache, expected, filled_cache, make_batch, run

SMALL_TILES = TritonTuning(decode_tile=16, extend_rows=16, extend_tile=16, programs=8)
SMALL_LATENT = LatentTuning(rows=32, scaled_rows=16, tile=16, programs=8)
BACKENDS: dict[str, Backend] = {
    "reference": ReferenceBackend(),
    "xla": XlaBackend(),
    "triton": TritonBackend(interpret=True, tuning=SMALL_TILES, latent=SMALL_LATENT),
    "tpu": TpuBackend(interpret=True, tuning=TpuTuning(tile=32, rows=16)),
}
with contextlib.suppress(ConfigError):  # a machine without a C compiler: test_native.py says so
    BACKENDS["native"] = NativeBackend()
INTERPRETED = ("triton", "tpu")
EDGES = ((1, 1), (1, 15), (1, 16), (0, 0), (1, 17), (1, 255), (1, 256), (1, 257), (1, 300))
MIXED = ((1, 40), (1, 1), (0, 0), (5, 5), (17, 33), (70, 300), (64, 64), (2, 258), (1, 256))

CASES = [
    Case("decode-edges", EDGES, decode_only=True, kernels=False),
    Case("decode-bfloat16", EDGES, decode_only=True, dtype="bfloat16"),
    Case("decode-all-empty", ((0, 0), (0, 0)), decode_only=True, kernels=False),
    Case("decode-multi-head", ((1, 20), (1, 40)), num_kv_heads=4, group=1, head_dim=80, decode_only=True),
    Case("decode-group-7", ((1, 33), (1, 257)), group=7, head_dim=128, decode_only=True),
    Case(
        "decode-group-8-page-128",
        ((1, 127), (1, 129), (0, 0)),
        num_kv_heads=1,
        group=8,
        page_size=128,
        decode_only=True,
    ),
    Case("decode-long-and-short", ((1, 1500), (1, 30), (0, 0), (1, 700)), group=4, decode_only=True, kernels=False),
    Case("decode-window", EDGES, window=20, decode_only=True, kernels=False),
    Case("decode-window-soft-cap-sinks", EDGES, window=200, soft_cap=5.0, sinks=True, decode_only=True),
    Case("mixed", MIXED, padding=9),
    Case("mixed-bfloat16", MIXED, dtype="bfloat16", padding=3, kernels=False),
    Case("mixed-window", MIXED, window=24, kernels=False),
    Case("mixed-wide-window", ((3, 600), (140, 700)), window=300, num_kv_heads=1, head_dim=16),
    # chunks of 24: rows that end, begin and cross at their borders, several in a block of queries
    Case("decode-chunks", ((1, 1), (1, 24), (1, 25), (0, 0), (1, 48), (1, 49), (1, 300)), chunk=24, decode_only=True),
    Case("mixed-chunks", ((24, 48), (25, 49), (1, 25), (70, 90), (0, 0), (2, 25), (64, 64)), chunk=24, padding=3),
    Case("mixed-wide-chunks", ((3, 514), (140, 700)), chunk=256, num_kv_heads=1, head_dim=16, kernels=False),
    Case("mixed-soft-cap-sinks", MIXED, soft_cap=3.0, sinks=True, padding=5),
    Case("mixed-group-4-head-512", ((1, 30), (9, 20)), group=4, head_dim=512),
    Case("decode-latent", EDGES, num_kv_heads=1, group=8, head_dim=72, latent=True, decode_only=True),
    Case("decode-latent-of-whole-vectors", EDGES, num_kv_heads=1, group=6, head_dim=80, latent=True, decode_only=True),
    Case("mixed-latent", MIXED, num_kv_heads=1, group=4, head_dim=72, latent=True, padding=2),
    # Two blocks of heads, and the columns of V alone: what DeepSeek-V3 asks for.
    Case(
        "decode-latent-values", ((1, 1), (1, 300), (0, 0)), 1, 36, 72, latent=True, value_columns=64, decode_only=True
    ),
    Case("mixed-latent-values", ((1, 300), (5, 40), (0, 0)), 1, 36, 72, latent=True, value_columns=64, padding=2),
    Case("mixed-latent-window", ((1, 90), (30, 70)), 1, 4, 80, latent=True, value_columns=64, window=24, soft_cap=4.0),
    Case("mixed-latent-chunks", ((1, 90), (30, 70)), 1, 4, 80, latent=True, value_columns=64, chunk=24),
    Case("mixed-head-96-page-128", ((1, 130), (130, 140)), group=1, head_dim=96, page_size=128),
    Case("chunk-before-single", ((3, 3), (1, 20), (2, 9), (1, 5)), kernels=False),
    Case("prefill-only", ((65, 65),), group=4, num_kv_heads=1, head_dim=80, kernels=False),
    Case("padding-only", ((0, 0), (0, 0)), padding=4, kernels=False),
]
CASES += [  # in 8 bits
    Case(
        "decode-window-sinks-int8", EDGES, window=20, sinks=True, group=3, head_dim=80, decode_only=True, pages="int8"
    ),
    Case("mixed-window-int8", MIXED, window=24, page_size=4, pages="int8"),
    Case("mixed-latent-int8", MIXED, num_kv_heads=1, group=4, head_dim=72, latent=True, padding=2, pages="int8"),
    Case("decode-bfloat16-fp8", EDGES, decode_only=True, dtype="bfloat16", num_kv_heads=4, pages="float8_e4m3fn"),
    Case("mixed-soft-cap-fp8", MIXED, soft_cap=3.0, padding=5, pages="float8_e4m3fn", kernels=False),
]


# of these the plain backends see nothing but other sizes of the same arrays
SIZES = ("multi-head", "group-7", "group-8-page-128", "group-4-head-512", "head-96-page-128", "whole-vectors")
LONG = [(name, case) for name in ("reference", "xla") for case in CASES if case.id.endswith(SIZES)]


# Each of XLA's options and dtypes once as a user's program; the other sizes of the same code by QUICK.
OPTIMIZED = (
    "decode-window-soft-cap-sinks",
    "mixed-bfloat16",
    "mixed-window-int8",
    "decode-bfloat16-fp8",
    "mixed-latent-window",
)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=pytest.mark.slow if (name, case) in LONG else ())
        for name in BACKENDS
        for case in CASES
        if case.kernels or name not in INTERPRETED
    ],
    ids=lambda value: value if isinstance(value, str) else value.id,
)
def test_matches_dense_attention(case: Case, name: str) -> None:
    batch = make_batch(case)
    got = run(BACKENDS[name], batch, optimized=name == "xla" and case.id in OPTIMIZED)
    want = expected(batch)
    tolerance = 2e-2 if case.dtype == "bfloat16" else 2e-5
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)
    assert np.all(got[want == 0] == 0)  # padding and empty rows, exactly


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", [name for name in ("xla", "native") if name in BACKENDS])
def test_a_row_that_is_not_finite_spoils_no_other(name: str, alone: bool) -> None:
    """On a CPU tiles of several rows are taken in one product; 0 * NaN must not cross from row to row."""
    batch = make_batch(Case("", ((1, 40), (1, 100), (0, 0), (1, 70), (1, 900)), decode_only=True))
    metadata = dataclasses.replace(batch.metadata, alone=alone)
    backend, spec = BACKENDS[name], batch.case.spec
    attend = jax.jit(backend.attend, static_argnums=3)
    cache = filled_cache(backend, batch)
    good = np.asarray(attend(batch.q, cache, metadata, spec))
    page = metadata.page_table[3, 1:2]
    bad = backend.import_pages(cache, page, jnp.full((1, 16, 4, 64), jnp.nan))
    out = np.asarray(attend(batch.q, bad, metadata, spec))
    assert np.isnan(out[3]).all()
    np.testing.assert_array_equal(np.delete(out, 3, axis=0), np.delete(good, 3, axis=0))


def test_xla_does_not_depend_on_the_page_table_width() -> None:
    narrow = Case("", ((1, 40), (6, 50)), wide_table=1)
    wide = Case("", narrow.rows, wide_table=90)
    outputs = [run(BACKENDS["xla"], make_batch(case), optimized=True) for case in (narrow, wide)]
    np.testing.assert_array_equal(outputs[0], outputs[1])


LAYOUTS: dict[str, Any] = BACKENDS | {"page_scales": PageScalesLayout()}  # Mosaic's; test_mosaic_gpu.py runs its kernel
EACH_PAGES = pytest.mark.parametrize("kept", [None, "int8", "float8_e4m3fn"])


@EACH_PAGES
@pytest.mark.parametrize(("name", "columns"), [*((name, 8) for name in LAYOUTS), ("tpu", 64)])
def test_write_drops_what_has_no_slot(name: str, columns: int, kept: str | None) -> None:
    backend = LAYOUTS[name]
    cache = empty_cache(backend, Case("", (), head_dim=columns, page_size=4, pages=kept), 3)
    tokens = np.arange(4 * 2 * columns, dtype=np.float32).reshape(4, 2, columns) % 16 + 1
    written = backend.write(
        cache, jnp.asarray(tokens), jnp.asarray(-tokens), jnp.asarray([11, 12, 2, 10**6], jnp.int32)
    )
    exported = backend.export_pages(written, jnp.arange(3, dtype=jnp.int32), 2).astype(jnp.float32)
    pages, near = np.asarray(exported).reshape(12, 2, 2, columns), 0.07 if kept else 0
    np.testing.assert_allclose(pages[11], np.stack([tokens[0], -tokens[0]], axis=1), rtol=near)
    np.testing.assert_allclose(pages[2, :, 0], tokens[2], rtol=near)
    assert np.count_nonzero(np.any(pages != 0, axis=(1, 2, 3))) == 2


@EACH_PAGES
@pytest.mark.parametrize(("name", "columns"), [*((name, 64) for name in LAYOUTS), ("tpu", 80)])
def test_pages_have_one_common_form(name: str, columns: int, kept: str | None) -> None:
    """Exported pages are the same from every backend, and come back in at other places."""
    batch = make_batch(Case("", ((1, 30), (1, 45)), head_dim=columns, decode_only=True, pages=kept))
    backend, cache = LAYOUTS[name], filled_cache(LAYOUTS[name], batch)
    ids = jnp.asarray([2, 0, 1], jnp.int32)
    pages = backend.export_pages(cache, ids, 2)
    reference = BACKENDS["reference"]
    assert_same(pages, reference.export_pages(filled_cache(reference, batch), ids, 2))
    target = jnp.asarray([0, 10**6, 2], jnp.int32)
    moved = backend.export_pages(backend.import_pages(cache, target, pages), jnp.asarray([0, 2], jnp.int32), 2)
    assert_same(moved, jax.tree.map(lambda leaf: leaf[np.array([0, 2])], pages))


def test_on_a_tpu_k_and_v_of_64_columns_are_one_row() -> None:
    """XLA would copy an array of 64 columns for the kernel. Whether it copies this one, `benchmarks.compiled` shows."""
    backend = BACKENDS["tpu"]
    assert backend.cache_shape(9, 16, 8, 64) == (9, 1, 8, 16, 128)
    assert backend.cache_shape(9, 16, 8, 80) == (9, 2, 8, 16, 80)
    assert backend.cache_shape(9, 16, 1, 64, latent=True) == (9, 1, 1, 16, 64)
    with pytest.raises(ConfigError, match="no latent rows of 128 numbers"):  # they would look the same
        backend.cache_shape(9, 16, 1, 128, latent=True)


def assert_same(pages: Pages, others: Pages) -> None:
    as_float32 = functools.partial(jax.tree.map, lambda leaf: np.asarray(leaf).astype(np.float32))
    jax.tree.map(np.testing.assert_array_equal, as_float32(pages), as_float32(others))


@EACH_PAGES
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_latent_row_is_kept_once(name: str, kept: str | None) -> None:
    backend = LAYOUTS[name]
    assert backend.cache_shape(9, 16, 1, 576, latent=True)[0] == 9
    once, twice = (np.prod(backend.cache_shape(9, 16, 1, 576, latent=latent)) for latent in (True, False))
    assert 2 * once == twice
    batch = make_batch(
        Case("", ((1, 30), (1, 45)), num_kv_heads=1, head_dim=24, latent=True, decode_only=True, pages=kept)
    )
    pages = backend.export_pages(filled_cache(backend, batch), jnp.arange(3, dtype=jnp.int32), 1)
    assert pages.shape == (3, 16, 1, 24)
    empty = empty_cache(backend, batch.case, batch.num_pages)
    back = backend.import_pages(empty, jnp.arange(3, dtype=jnp.int32), pages)
    assert_same(backend.export_pages(back, jnp.arange(3, dtype=jnp.int32), 1), pages)


IN_PLACE = [(name, kept) for name in BACKENDS if name not in INTERPRETED for kept in (None, "int8")]  # that one copies
BITS = [("xla", "bfloat16"), ("xla", "float8_e4m3fn")]  # on a CPU XLA converts all of a page's numbers of these dtypes


@pytest.mark.parametrize(("name", "kept"), [*IN_PLACE, *BITS])
def test_step_writes_in_place(name: str, kept: str | None) -> None:
    """Write and attend compile to a program whose cache output is its cache input, without a copy of it."""
    backend, batch = BACKENDS[name], make_batch(Case("", ((1, 40), (1, 20)), decode_only=True, pages=kept))
    case, metadata = batch.case, batch.metadata
    cache = jax.eval_shape(lambda: empty_cache(backend, case, 4096))
    new = jax.ShapeDtypeStruct((2, case.num_kv_heads, case.head_dim), jnp.float32)

    def step(cache, q, k, v, metadata):
        cache = backend.write(cache, k, v, metadata.slot_mapping)
        return cache, backend.attend(q, cache, metadata, case.spec)

    compiled = jax.jit(step, donate_argnums=0).lower(cache, batch.q, new, new, metadata).compile()
    memory = compiled.memory_analysis()
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert memory is not None
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 8


@pytest.mark.parametrize(("platform", "name"), [("cpu", "native"), ("gpu", "triton"), ("tpu", "tpu")])
def test_auto_takes_the_best_of_the_platform(platform: str, name: str) -> None:
    assert get_backend("auto", platform).name == name


def test_auto_goes_on_where_a_kernel_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxserve.ops.paged_attention.triton.backend", None)
    assert get_backend("auto", "gpu").name == "xla"
    with pytest.raises(ConfigError, match="'triton' cannot be loaded with this jax"):
        get_backend("triton", "gpu")


def test_mosaic_needs_no_triton_module_of_pallas(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is deprecated, and a jax without it must do."""
    for name in [name for name in sys.modules if re.fullmatch(r"jaxserve\.ops\..*(triton[\w.]*|mosaic_gpu|moe)", name)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton")
    with pytest.raises(ConfigError, match="'triton' cannot be loaded with this jax"):
        get_backend("triton", "gpu")
    assert get_backend("mosaic_gpu", "gpu").name == "mosaic_gpu" and kernels_of("auto", "gpu") == "xla"


@pytest.mark.parametrize(
    ("name", "platform"),
    [("triton", "cpu"), ("mosaic_gpu", "tpu"), ("tpu", "gpu"), ("native", "gpu"), ("flash", "gpu")],
)
def test_explicit_backend_that_cannot_serve_is_an_error(name: str, platform: str) -> None:
    with pytest.raises(ConfigError, match=name):
        get_backend(name, platform)


@pytest.mark.parametrize("name", ["reference", "xla", "triton", "mosaic_gpu"])
def test_explicit_backend_is_taken_at_its_word(name: str) -> None:
    assert get_backend(name, "gpu").name == name
