"""A rule that ends a sequence from outside the engine: its output repeats itself.

It wraps the engine's stream of one prompt and yields a stream of the same kind.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from jaxserve.api.generate.generation import Stream
from jaxserve.types.output import FinishReason

REPETITION = "repetition"  # what matched_stop says then


@dataclass(frozen=True)
class RepetitionRule:
    """An output ends when its last tokens are `min_count` times the same pattern of `smallest` to `largest` tokens."""

    smallest: int
    largest: int
    min_count: int

    def holds(self, token_ids: list[int]) -> bool:
        """Whether an output of these tokens ends."""
        return Repetitions(self).add(token_ids)


class Repetitions:
    """The end of one output, as far as the rule needs it. A token costs one comparison for each size of pattern."""

    def __init__(self, rule: RepetitionRule) -> None:
        self._rule = rule
        self._tokens: list[int] = []  # the last `largest`, at least
        self._runs = [0] * (rule.largest + 1)  # by size: how many of the last tokens equal the one so far before them

    def add(self, token_ids: list[int]) -> bool:
        """Take tokens; whether the output repeats itself now."""
        rule, tokens, runs = self._rule, self._tokens, self._runs
        sizes = range(rule.smallest, rule.largest + 1)
        for token in token_ids:
            known = len(tokens)
            for size in sizes:
                runs[size] = runs[size] + 1 if size <= known and tokens[-size] == token else 0
            tokens.append(token)
        if len(tokens) > 2 * rule.largest:
            del tokens[: -rule.largest]
        return any(runs[size] >= size * (rule.min_count - 1) for size in sizes)


async def end_repetitions(stream: Stream, rule: RepetitionRule, num_choices: int) -> Stream:
    """The stream with each choice cut where it begins to repeat itself. With all ended, the rest is aborted."""
    found: dict[int, Repetitions] = {}
    ended: set[int] = set()
    async with aclosing(stream):
        async for output in stream:
            if output.index in ended:
                continue
            repeats = found.setdefault(output.index, Repetitions(rule)).add(output.token_ids)
            if output.finish_reason is None and repeats:
                output = msgspec.structs.replace(output, finish_reason=FinishReason.STOP, matched_stop=REPETITION)
            if output.finish_reason is not None:
                ended.add(output.index)
            yield output
            if len(ended) == num_choices:
                return
