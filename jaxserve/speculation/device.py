"""Drafts that the device proposes after a step: kept by request until the step that computes them.

`speedup` estimates whether a draft model is worth its time, from sizes alone, so that two starts decide alike.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.types.step import Request

MODEL_RATE = 0.7  # assumed before any draft was compared: the operator chose a model that guesses well


# By platform: seconds of a layer's small kernels, bytes of weights read in a second, and how many times as long a step
# takes with the drafts of one row. They are of a CPU with few cores (BENCHMARKS.md), an H200
# (docs/experiments/compiled.md) and a v5e.
_MACHINES = {"cpu": (60e-6, 20e9, 1.35), "gpu": (27e-6, 4.3e12, 1.1), "tpu": (10e-6, 0.8e12, 1.1)}


@dataclass(frozen=True)
class Size:
    """The part of a model that a step of one token reads.

    experts: experts of a sparse model and how many a token takes; (1, 1) for a dense one
    """

    layers: int
    weight_bytes: int
    experts: tuple[int, int] = (1, 1)

    def share(self, tokens: int) -> float:
        """Return the share of the weights that `tokens` tokens read, if they choose experts evenly."""
        count, taken = self.experts
        return 1 - (1 - taken / count) ** tokens


def speedup(platform: str, served: Size, draft: Size, count: int) -> float:
    """Estimate how many times as fast one row decodes with `count` drafts, MODEL_RATE of which are right."""
    layer, bandwidth, longer = _MACHINES[platform]
    plain, guess = (layer * size.layers + size.weight_bytes * size.share(1) / bandwidth for size in (served, draft))
    more = served.weight_bytes * (served.share(1 + count) - served.share(1)) / bandwidth
    tokens = sum(MODEL_RATE**place for place in range(count + 1))
    # the draft model also computes the tokens of the step
    return tokens * plain / (longer * plain + more + (1 + count) * guess)


class DeviceDrafts:
    """The `Drafter` of a draft model or head. Its guesses arrive with the tokens of the step before.

    vocab_size: of the served model. Drafts end at the first number outside of it
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._found: dict[str, tuple[int, list[int]]] = {}  # by request: position of the first draft, and the drafts

    def take(self, request: Request, drafts: Sequence[int]) -> None:
        """Keep the drafts that follow a request's known tokens, up to the first that is not a token, such as -1."""
        tokens = itertools.takewhile(lambda draft: 0 <= draft < self._vocab_size, drafts)
        self._found[request.request_id] = request.num_tokens, list(tokens)

    def propose(self, request: Request, most: int) -> list[int]:
        """See `Drafter`. As long as new tokens are the drafts, those after them are still guesses."""
        first, drafts = self._found.get(request.request_id, (0, []))
        passed = request.num_tokens - first
        if passed > len(drafts) or request.token_ids(first, request.num_tokens) != drafts[:passed]:
            return []
        return drafts[passed : passed + most]

    def forget(self, request_id: str) -> None:
        """Drop the drafts of a request that has ended."""
        self._found.pop(request_id, None)
