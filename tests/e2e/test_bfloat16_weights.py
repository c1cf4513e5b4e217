"""bfloat16 weights on a CPU: the tokens and log-probabilities of the same numbers in float32, bit by bit, in half."""

from typing import Any

import jax.numpy as jnp

from jaxserve import Engine, SamplingParams
from tests.conftest import FEW_PAGES

PROMPTS = [
    "Once upon a time",
    "The capital of France is",
    "A dog and a cat went to the sea. They",
    "2 + 3 =",
    "I am",
    "a",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=0.9, seed=7, max_tokens=24, logprobs=3),
]


def answers(compile_cache: str, **options: Any) -> tuple[list[Any], int]:
    """Return what the engine generates, alone and several at once, and the bytes of its weights."""
    with Engine(compile_cache=compile_cache, **FEW_PAGES | options) as engine:
        found = []
        for params in PARAMS:
            rows = [*engine.generate(PROMPTS[0], params), *engine.generate(PROMPTS, params)]
            found += [(one.token_ids, one.logprobs) for [one] in rows]
        assert engine.runner.config.cache_dtype == jnp.float32
        return found, sum(leaf.nbytes for leaf in engine.runner.leaves)


def test_tokens_are_those_of_float32(compile_cache: str) -> None:
    """By default too, for the demo checkpoint is bfloat16."""
    want, wide = answers(compile_cache, dtype="float32")
    for dtype in ("bfloat16", "auto"):
        assert answers(compile_cache, dtype=dtype) == (want, wide // 2)
