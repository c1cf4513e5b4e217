"""The example of reinforcement learning learns, twice the same, and Tunix's rollout over an engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.reinforce import Step, plot, train
from examples.tunix_rollout import EngineRollout
from jaxserve import Engine
from tests.conftest import FEW_PAGES

BOUND = 1e-4  # between log-probabilities of the sampler and of the plain forward pass


@dataclass
class RolloutConfig:
    """Those of Tunix's fields that are read."""

    max_tokens_to_generate: int = 6
    temperature: float = 0.9
    top_p: float | None = None
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 8
    eos_tokens: list[int] | None = None


@pytest.mark.slow
def test_it_learns_and_two_runs_with_one_seed_give_one_curve(compile_cache: str, tmp_path: Path) -> None:
    with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an integer power
        whole, again, other = (
            train(steps, seed, compile_cache=compile_cache) for steps, seed in ((30, 0), (5, 0), (5, 99))
        )
    assert whole[0].reward < 0.3 and whole[-1].reward > 0.6
    assert max(step.difference for step in whole) < BOUND
    assert again == whole[:5] != other
    plot(whole, tmp_path / "curve.svg")
    assert "polyline" in (tmp_path / "curve.svg").read_text(encoding="utf-8")
    plot([Step(0.5, 0.0)], tmp_path / "curve.svg")


@pytest.fixture(scope="module")
def rollout(compile_cache: str) -> Iterator[EngineRollout]:
    with Engine(compile_cache=compile_cache, **FEW_PAGES) as engine:
        yield EngineRollout(engine, pad=2036)


PROMPTS = ["Once upon a time there was a", "a"]


def test_rollout(rollout: EngineRollout) -> None:
    config = RolloutConfig(seed=jax.random.key(3))
    found = rollout.generate(PROMPTS, config)
    assert found.tokens.shape == (2, 6) and found.left_padded_prompt_tokens.shape == (2, 8)
    assert found.left_padded_prompt_tokens[1, 0] == rollout.pad_id() == 2036 and rollout.eos_id() == 2038
    again = rollout.generate(PROMPTS, config)
    assert again.text == found.text and (again.tokens == found.tokens).all()
    prompts, tokens = jnp.asarray(found.left_padded_prompt_tokens), jnp.asarray(found.tokens)
    scored = np.asarray(rollout.get_per_token_logps(prompts, tokens))
    for row, sampled in zip(scored, found.logprobs, strict=True):
        np.testing.assert_allclose(row[: len(sampled)], sampled, atol=BOUND)
    mask = np.zeros(tokens.shape, bool)
    mask[:, :2] = True
    assert (np.asarray(rollout.get_per_token_logps(prompts, tokens, jnp.asarray(mask)))[:, 2:] == 0).all()


def test_new_parameters(rollout: EngineRollout) -> None:
    config, structure = RolloutConfig(temperature=0.0), rollout.model()
    before = rollout.generate(PROMPTS, config)
    old = [np.array(leaf) for leaf in rollout._engine.runner.leaves]
    rng = np.random.default_rng(0)
    noise = [(1 + 0.3 * rng.normal(size=spec.shape)).astype(np.float32) for spec in structure.specs]
    rollout.update_params([(leaf * factor).astype(leaf.dtype) for leaf, factor in zip(old, noise, strict=True)])
    assert rollout.generate(PROMPTS, config).text != before.text
    rollout.update_params(old)
    assert rollout.generate(PROMPTS, config).text == before.text
    with pytest.raises(ValueError, match="filter_types"):
        rollout.update_params(old, filter_types=(int,))
