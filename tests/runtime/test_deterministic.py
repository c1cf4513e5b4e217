"""Deterministic mode: a request's tokens and log-probabilities are bitwise the same whatever else happens."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.structure import build
from jaxserve.ops.linear import Products
from jaxserve.runtime.compilation.compiler import compiler_options
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.sampling import SamplingParams
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.runtime.hand_scheduler import HandScheduler, Sequence

V = 96
PARAMS = SamplingParams(temperature=1.1, top_p=0.95, frequency_penalty=0.2, logprobs=20)
PROMPT = [random.Random(1).randrange(V) for _ in range(77)]
NUM_TOKENS = 20


@pytest.fixture(scope="module")
def deterministic(tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner(tiny_model, deterministic=True)


def trace(seq: Sequence) -> tuple[object, ...]:
    """Everything a client could see, to the bit: floats compare exactly here."""
    return tuple(seq.output), tuple((p, rank, *ids, *top) for p, rank, ids, top in seq.logprobs)


def alone(runner: ModelRunner, chunk: int) -> tuple[object, ...]:
    scheduler = HandScheduler(runner)
    seq = scheduler.add(PROMPT, PARAMS, seed=99)
    scheduler.generate([seq], NUM_TOKENS, chunk=chunk)
    return trace(seq)


@pytest.fixture(scope="module")
def reference(deterministic: ModelRunner) -> tuple[object, ...]:
    return alone(deterministic, 32)


@pytest.mark.parametrize("chunk", [1, 2, 7, 8, 9, 31])
def test_chunked_any_way(deterministic: ModelRunner, reference: tuple[object, ...], chunk: int) -> None:
    assert alone(deterministic, chunk) == reference


@pytest.mark.parametrize("seed", range(4))
def test_among_random_neighbours(deterministic: ModelRunner, reference: tuple[object, ...], seed: int) -> None:
    rng = random.Random(seed)
    scheduler = HandScheduler(deterministic)
    seqs = [
        scheduler.add([rng.randrange(V) for _ in range(rng.randint(1, 50))], PARAMS, seed=i)
        for i in range(rng.randint(1, 7))
    ]
    mine = scheduler.add(PROMPT, PARAMS, seed=99)
    seqs.insert(rng.randint(0, len(seqs)), mine)
    scheduler.generate(seqs, NUM_TOKENS, chunk=rng.choice([3, 8, 20, 32]))
    assert trace(mine) == reference


def test_after_a_prefix_hit(deterministic: ModelRunner, reference: tuple[object, ...]) -> None:
    scheduler = HandScheduler(deterministic)
    first = scheduler.add(PROMPT, PARAMS, seed=1)
    scheduler.generate([first], 5, chunk=13)
    second = scheduler.add(PROMPT, PARAMS, seed=99)
    second.pages, second.computed = first.pages[:8], 64
    scheduler.generate([second], NUM_TOKENS)
    assert trace(second) == reference


def test_after_a_retraction(deterministic: ModelRunner, reference: tuple[object, ...]) -> None:
    """The output so far is computed again as part of the prompt, in chunks that cut it elsewhere."""
    scheduler = HandScheduler(deterministic)
    seq = scheduler.add(PROMPT, PARAMS, seed=99)
    scheduler.generate([seq], 8)
    again = scheduler.add(PROMPT, PARAMS, seed=99, output=seq.output)
    again.logprobs = seq.logprobs.copy()
    while again.computed < len(PROMPT) + 8:
        scheduler.step([(again, min(19, len(PROMPT) + 8 - again.computed))])
    while len(again.output) < NUM_TOKENS:
        scheduler.step([(again, None)])
    assert trace(again) == reference


@pytest.mark.slow  # 25 s, mostly for compiling; test_chunked_any_way holds that no bit depends on a step's size
def test_on_a_runner_of_other_sizes(
    tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner], reference: tuple[object, ...]
) -> None:
    """Fewer slots, another page table width, other buckets: no bit depends on them."""
    other = make_runner(tiny_model, deterministic=True, max_num_seqs=3, max_model_len=104, max_num_batched_tokens=16)
    assert alone(other, 13) == reference


def test_experts_of_a_token_alone(tmp_path: Path, mesh: DeviceMesh, make_runner: Callable[..., ModelRunner]) -> None:
    """XLA sums a router's products of a single row in another order."""
    directory = write_checkpoint(tmp_path, CASES["mixtral"], random_tensors(CASES["mixtral"], seed=3))
    model = load_model(directory, dtype=jnp.dtype("float32"), mesh=mesh.mesh)
    runner = make_runner(model, deterministic=True, max_num_seqs=1, max_num_batched_tokens=8)
    assert alone(runner, 1) == alone(runner, 8)


def test_latent_heads_beside_any_number_of_tokens() -> None:
    """XLA sums the products of all heads at once in an order that depends on the number of tokens."""
    config = from_hf(CASES["deepseek_v3"] | {"kv_lora_rank": 32, "num_hidden_layers": 1})
    structure = build(config, jnp.dtype("float32"))
    rng = np.random.default_rng(0)
    leaves = tuple(rng.standard_normal(spec.shape).astype(spec.dtype) * 0.2 for spec in structure.specs)

    @partial(jax.jit, compiler_options=dict(compiler_options("cpu", deterministic=True)))
    def forward(leaves: tuple[jax.Array, ...], tokens: jax.Array) -> jax.Array:
        """Return hidden states [T, D] of tokens int32 [T], which attend to nothing."""

        def attend_nothing(layer_index: int, heads: Any, cache: Any, sinks: Any = None) -> tuple[jax.Array, Any]:
            return heads.q, cache

        positions = jnp.arange(len(tokens), dtype=jnp.int32)
        hidden, _ = structure.bind(leaves)(tokens, positions, (None,), attend_nothing, Products(True))
        return hidden

    tokens = rng.integers(0, V, 64).astype(np.int32)
    whole = np.asarray(forward(leaves, tokens))
    for count in (2, 9):
        np.testing.assert_array_equal(forward(leaves, tokens[:count]), whole[:count])


def test_the_seed_still_matters(deterministic: ModelRunner, reference: tuple[object, ...]) -> None:
    scheduler = HandScheduler(deterministic)
    seq = scheduler.add(PROMPT, PARAMS, seed=100)
    scheduler.generate([seq], NUM_TOKENS)
    assert trace(seq) != reference
