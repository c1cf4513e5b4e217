"""What the runner's tests compare with: the model's plain forward, in the vocabulary of `tiny_model`."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from jaxserve.types.sampling import SamplingParams

V = 96
GREEDY = SamplingParams(temperature=0)


def prompts(count: int, seed: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(V) for _ in range(rng.randint(1, longest))] for _ in range(count)]


def greedy_oracle(dense: Callable[[list[int]], np.ndarray], prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(dense(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def exact_logprobs(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
