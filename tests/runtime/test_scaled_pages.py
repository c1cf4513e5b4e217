"""Pages of 8 bits through scheduler and runner: the tokens of dense attention to K and V that were rounded alike.

They hold alone and in a crowd, whatever the prefix cache, the chunks, a shortage of pages, drafts and the devices.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.errors import ConfigError
from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import AttentionLayer
from jaxserve.models.layers import Cache, StateInputs
from jaxserve.ops.paged_attention import Heads, mosaic_gpu
from jaxserve.ops.paged_attention.mosaic_gpu import MosaicGpuBackend
from jaxserve.ops.paged_attention.scaled_pages import ScaledPages
from jaxserve.runtime import kv_cache
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.speculation.ngram import NGramDrafter
from jaxserve.types.scheduling import SchedulerConfig
from tests.fakes import groups_of, make_request, run_all
from tests.models import families
from tests.models.checkpoints import write_checkpoint
from tests.quick import QUICK, QUICK_FLAGS

LONGEST, PAGE, NEW = 128, 4, 20
FP8, INT8 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype("int8")
# family, dtype of the pages, changes of the runner: windows, sinks, latent rows
SERVED: dict[str, tuple[str, jnp.dtype, dict[str, Any]]] = {
    "drafts": ("llama3", INT8, {"max_drafts": 3}),
    "windows": ("gemma3", FP8, {}),
    "sinks": ("gpt_oss", INT8, {}),
    "latent": ("deepseek_v3", INT8, {}),
    "deterministic": ("llama3", FP8, {"attention": "xla", "deterministic": True}),
}
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "max_model_len": LONGEST,
    "page_size": PAGE,
    "num_pages": 512,
}


@dataclass(frozen=True)
class Served:
    runner: ModelRunner
    prompts: dict[str, list[int]]
    greedy: dict[str, list[int]]  # of dense attention

    def core(self, **changes: Any) -> EngineCore:
        self.runner.rebuild()
        plan, config = self.runner.plan, self.runner.config
        sizes: dict[str, Any] = {
            "num_pages": plan.num_pages,
            "groups": groups_of(plan, changes),
            "page_size": PAGE,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "max_model_len": LONGEST,
            "max_drafts": config.max_drafts,
            "verify_sizes": self.runner.buckets.verify,
        }
        drafter = NGramDrafter(2, 4) if config.max_drafts else None
        options = CoreOptions(vocab_size=families.VOCAB, eos_token_ids=(10**6,), drafter=drafter)
        return EngineCore(self.runner, SchedulerConfig(**(sizes | changes)), options)


# they differ from the others in what the kernels' own tests and those of pages of 16 bits hold
LONG = ("windows", "sinks", "deterministic", "drafts")
PARAMS = [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in SERVED]


@pytest.fixture(scope="module", params=PARAMS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, make_runner: Callable[..., ModelRunner]
) -> Iterator[Served]:
    family, dtype, changes = SERVED[request.param]
    model = tiny(family, tmp_path_factory.mktemp("model"), make_mesh("cpu"))
    runner = make_runner(model, cache_dtype=dtype, host_memory=2**20, **SIZES, **changes)
    prompts = crowd()
    yield Served(runner, prompts, {name: dense_greedy(model, prompt, dtype) for name, prompt in prompts.items()})
    runner.close()


def tiny(family: str, directory: Path, mesh: DeviceMesh) -> LoadedModel:
    tensors = families.golden_tensors(family)
    checkpoint = write_checkpoint(directory, families.CASES[family], tensors)
    return load_model(checkpoint, dtype=jnp.dtype("float32"), mesh=mesh.mesh)


def crowd() -> dict[str, list[int]]:
    rng = random.Random(3)
    stem = rng.choices(range(3, families.VOCAB), k=30)
    return {f"r{i}": stem[: rng.randrange(31)] + rng.choices(range(3, 90), k=rng.randrange(1, 30)) for i in range(7)}


def dense_greedy(model: LoadedModel, prompt: list[int], dtype: jnp.dtype) -> list[int]:
    logits = jax.jit(rounded_logits, static_argnums=(0, 3), compiler_options=QUICK)
    ids = np.zeros(LONGEST, np.int32)
    ids[: len(prompt)] = prompt
    for length in range(len(prompt), len(prompt) + NEW):
        ids[length] = np.asarray(logits(model.structure, model.leaves, ids, dtype))[length - 1].argmax()
    return ids[len(prompt) : len(prompt) + NEW].tolist()


def rounded_logits(
    structure: ModelStructure, leaves: tuple[jax.Array, ...], token_ids: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    """`dense_logits` with each row of K and V as the pages hold it."""
    dense, model = dense_attend(structure.config), structure.bind(leaves)

    def attend(
        layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        assert not isinstance(heads, StateInputs) and heads.k is not None and heads.v is not None
        k, v = (ScaledPages.of(x, dtype).astype(jnp.float32) for x in (heads.k, heads.v))
        return dense(layer_index, Heads(heads.q, k, v), cache, sinks)

    positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
    hidden, _ = model(token_ids, positions, (None,) * structure.config.num_layers, attend)
    return model.logits(hidden)


def tokens_of(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    transcripts = run_all(core, [make_request(name, prompt, max_tokens=NEW) for name, prompt in prompts.items()])
    return {name: transcripts[name].token_ids for name in prompts}


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_tokens_in_a_crowd(served: Served, prefix_cache: bool) -> None:
    core = served.core(prefix_cache=prefix_cache)
    assert tokens_of(core, served.prompts) == served.greedy
    assert tokens_of(core, served.prompts) == served.greedy, "the second time from the prefix cache"
    assert (core.scheduler.counters.cached_tokens > 0) == prefix_cache


def test_tokens_alone_in_small_chunks(served: Served) -> None:
    core = served.core(prefill_chunk_size=5, prefix_cache=False)
    for name, prompt in served.prompts.items():
        assert tokens_of(core, {name: prompt})[name] == served.greedy[name]


def test_tokens_after_preemption(served: Served) -> None:
    core = served.core(num_pages=30, max_model_len=100)  # with 33 those with windows all fit
    assert tokens_of(core, served.prompts) == served.greedy
    assert core.scheduler.counters.retractions > 0


def test_evicted_pages_with_scales_and_of_latent_rows(served: Served) -> None:
    """A cache that holds one request: the others' pages are in the memory of the host."""
    plan = served.runner.plan
    host = {"num_host_pages": plan.num_host_pages, "num_host_window_pages": plan.host_pages_by_group[-1]}
    core = served.core(num_pages=LONGEST // PAGE + 1, **host)
    first, counters = core.stats(), core.scheduler.counters
    computed = [counters.prefill_tokens]
    for _ in range(2):
        for name, prompt in served.prompts.items():
            assert tokens_of(core, {name: prompt})[name] == served.greedy[name]
        computed.append(counters.prefill_tokens)
    assert computed[2] - computed[1] <= PAGE * len(served.prompts), "the second time from the host"
    last = core.stats()
    assert last.details["host_pages_loaded"] > 0 and last.compiles == first.compiles


def test_the_plan_counts_the_scales(served: Served) -> None:
    caches = jax.tree.leaves(served.runner.caches)
    assert served.runner.plan.kv_bytes == sum(shard.data.nbytes for leaf in caches for shard in leaf.addressable_shards)
    scales = [leaf for leaf in caches if leaf.dtype == jnp.float32]
    assert len(scales) == len(caches) // 2
    assert sum(leaf.nbytes for leaf in caches) == sum(leaf.size for leaf in caches) + 3 * sum(x.size for x in scales)


def test_no_step_copies_the_cache(served: Served) -> None:
    """A conversion of all 8-bit numbers to write a few would be such a copy."""
    leaves = jax.tree.leaves(served.runner.caches)
    for name, compiled in served.runner.compiled.items():
        analysis = compiled.memory_analysis()
        assert analysis is not None
        if name.startswith(("decode", "extend")):
            own = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
            assert analysis.alias_size_in_bytes >= own, name


def test_pages_are_moved_with_their_scales(served: Served) -> None:
    runner = served.runner
    if runner.plan.groups:
        pytest.skip("pages of two groups have no common ids")
    tokens_of(served.core(prefix_cache=False), served.prompts)
    pages = list(range(70))
    content = runner.pages.export(runner.caches, pages)
    runner.caches = runner.pages.fill(runner.caches, [page + 100 for page in pages], content)
    moved = runner.pages.export(runner.caches, [page + 100 for page in pages])
    assert len(content) == len(runner.caches) and any(leaf.any() for leaf in jax.tree.leaves(content))
    for one, other in zip(jax.tree.leaves(content), jax.tree.leaves(moved), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_backend_that_this_jax_cannot_compile_for_8_bit_pages_says_so(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mosaic_gpu, "CONCATENATES", False)
    layer = AttentionLayer(8, 4, 64, 0.125)
    for dtype in (INT8, FP8):
        with pytest.raises(ConfigError, match="'mosaic_gpu' needs jax 0"):
            kv_cache.layer_caches([layer], MosaicGpuBackend(), 16, dtype, mesh)


@pytest.mark.parametrize("family", ["llama3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_over_two_devices(family: str, tmp_path: Path) -> None:
    flags = f"--xla_force_host_platform_device_count=2 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.runtime.test_scaled_pages", family, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(family: str, directory: Path) -> None:
    """Serve two kv heads, or one latent head, on two devices: each has its heads' scales, or all of them."""
    mesh = make_mesh("cpu", tensor=2)
    model = tiny(family, directory / family, mesh)
    sizes: dict[str, Any] = SIZES | {"max_num_seqs": 1}
    config = RunnerConfig(cache_dtype=INT8, **sizes)
    runner = ModelRunner(model, config, mesh)
    for leaf in jax.tree.leaves(runner.caches):
        assert leaf.addressable_shards[0].data.size * {"llama3": 2, "deepseek_v3": 1}[family] == leaf.size
    prompt = crowd()["r1"]
    assert tokens_of(Served(runner, {}, {}).core(), {"r": prompt}) == {"r": dense_greedy(model, prompt, INT8)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
