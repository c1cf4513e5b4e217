"""Reinforcement learning in one process: python examples/reinforce.py [STEPS] [SEED] [CURVE.svg]

The demo model learns to go on with the word "brave". In each step the engine samples answers, the policy gradient of
the plain forward pass changes the weights, and `engine.update_weights` gives them to the engine. Two runs with one
seed give one curve. reinforce_adapter.py trains an adapter instead. Needs the extra `train`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxserve import Completion, Engine, SamplingParams
from jaxserve.library.dense import dense_logits

WORD = "brave"
PROMPTS = ["Once upon a time there was a", "Once there was a", "Long ago there was a", "One day there was a"]
SAMPLES = 16  # answers to each prompt and step
TOKENS = 4  # of an answer
LENGTH = 16  # tokens of a prompt and its answer, padded
LEARNING_RATE = 1e-4

Leaves = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Step:
    """reward: the share of answers that begin with the word. difference: the largest between the log-probabilities of
    the sampler and those of the plain forward pass. versions: labels of the weights and of the adapter that sampled
    """

    reward: float
    difference: float
    versions: tuple[str, ...] = ()


class Trainer:
    """Trains all weights: a copy of its own in the engine's form, float32. adapter: name of the one that samples"""

    adapter: str | None = None
    learning_rate = LEARNING_RATE

    def __init__(self, engine: Engine) -> None:
        self.structure = engine.runner.structure
        self.base: Leaves = tuple(jnp.array(np.asarray(leaf)) for leaf in engine.runner.leaves)
        self.parameters: Any = self.first_parameters()
        self._optimizer = optax.adam(self.learning_rate)
        self._state = self._optimizer.init(self.parameters)
        self._gradient = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    def first_parameters(self) -> Any:
        """Return the arrays that are trained."""
        return self.base

    def leaves(self, parameters: Any) -> Leaves:
        """Return the weights of the whole model, one array per parameter of its structure."""
        return parameters

    def publish(self, engine: Engine) -> None:
        """Give the parameters to the engine."""
        engine.update_weights(self.parameters)

    def logprobs(self, leaves: Leaves, tokens: jax.Array) -> jax.Array:
        """Return the log-probability of each token after the first. tokens: int32 [B, L] -> float32 [B, L - 1]"""

        def of_row(row: jax.Array) -> jax.Array:
            scores = jax.nn.log_softmax(dense_logits(self.structure, leaves, row)[:-1], axis=-1)
            return jnp.take_along_axis(scores, row[1:, None], axis=-1)[:, 0]

        return jax.vmap(of_row)(tokens)

    def _loss(
        self, parameters: Any, tokens: jax.Array, mask: jax.Array, advantages: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        logprobs = self.logprobs(self.leaves(parameters), tokens)
        chosen = jnp.where(mask, logprobs, 0.0)
        return -jnp.mean(advantages * jnp.sum(chosen, axis=1)), logprobs

    def learn(self, tokens: np.ndarray, mask: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        """Take one step. rewards: float32 [prompts, samples]. Returns the log-probabilities before it, [B, L - 1]."""
        advantages = (rewards - rewards.mean(axis=1, keepdims=True)).reshape(-1)
        (_, logprobs), gradient = self._gradient(self.parameters, tokens, mask, advantages)
        updates, self._state = self._optimizer.update(gradient, self._state)
        self.parameters = optax.apply_updates(self.parameters, updates)
        return np.asarray(logprobs)


def reward_of(answer: Completion) -> float:
    return float(answer.text.strip().lower().startswith(WORD))


def train_step(engine: Engine, trainer: Trainer, seed: int) -> Step:
    """Sample answers, learn from them, and give what was learnt to the engine."""
    prompts = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    params = [
        SamplingParams(n=SAMPLES, max_tokens=TOKENS, temperature=1.0, seed=seed + number, logprobs=0, ignore_eos=True)
        for number in range(len(prompts))
    ]
    groups = engine.generate(prompts, params, adapter=trainer.adapter)
    tokens = np.zeros((len(prompts) * SAMPLES, LENGTH), np.int32)
    mask, sampled = np.zeros((2, len(tokens), LENGTH - 1), np.float32)
    pairs = [(prompt, answer) for prompt, group in zip(prompts, groups, strict=True) for answer in group]
    for i, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer.token_ids)
        tokens[i, :end] = prompt + answer.token_ids
        mask[i, len(prompt) - 1 : end - 1] = 1
        sampled[i, len(prompt) - 1 : end - 1] = [entry.logprob for entry in answer.logprobs or []]
    rewards = np.array([[reward_of(answer) for answer in group] for group in groups], np.float32)
    computed = trainer.learn(tokens, mask > 0, rewards)
    trainer.publish(engine)
    difference = float(np.abs(mask * computed - sampled).max())
    return Step(float(rewards.mean()), difference, groups[0][0].weight_versions)


def train(steps: int, seed: int = 0, make: Callable[[Engine], Trainer] = Trainer, **keys: Any) -> list[Step]:
    """Return the steps of one run. make: makes the trainer. keys: of the engine's configuration"""
    keys = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "dtype": "float32", "deterministic": True} | keys
    with Engine(**keys) as engine:
        trainer, found = make(engine), []
        for number in range(steps):
            found.append(train_step(engine, trainer, seed + number * len(PROMPTS)))
            bar = "#" * round(40 * found[-1].reward)
            numbers = f"reward {found[-1].reward:.3f}  difference {found[-1].difference:.1e}"
            print(f"step {number:3}  {numbers}  {' '.join(found[-1].versions)}  {bar}")
        return found


def plot(steps: list[Step], path: Path) -> None:
    """Write the curve of rewards as an SVG."""
    width, height = 600, 300
    across = width / max(1, len(steps) - 1)
    points = " ".join(f"{i * across:.1f},{height * (1 - step.reward):.1f}" for i, step in enumerate(steps))
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-40 -20 {width + 60} {height + 50}">'
        f'<path d="M0 0V{height}H{width}" fill="none" stroke="gray"/>'
        f'<polyline points="{points}" fill="none" stroke="black" stroke-width="2"/>'
        f'<text x="-25" y="5">1</text><text x="-25" y="{height}">0</text>'
        f'<text x="{width // 2 - 120}" y="{height + 25}">share of answers with "{WORD}", by step</text></svg>\n',
        encoding="utf-8",
    )


def main(make: Callable[[Engine], Trainer] = Trainer, **keys: Any) -> None:
    arguments = [*sys.argv[1:], *("30", "0", "reinforce.svg")[len(sys.argv) - 1 :]]
    steps = train(int(arguments[0]), int(arguments[1]), make, **keys)
    plot(steps, Path(arguments[2]))
    print(f"reward {steps[0].reward:.3f} -> {steps[-1].reward:.3f}; the curve is in {arguments[2]}")
    print(f"largest difference of log-probabilities: {max(step.difference for step in steps):.1e}")


if __name__ == "__main__":
    main()
