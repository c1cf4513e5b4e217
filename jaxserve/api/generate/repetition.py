"""End a sequence from outside the engine if its output repeats itself.

The rule wraps the engine's stream of one prompt and yields a stream of the same kind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing

import msgspec

from jaxserve.api.generate.generation import Stream
from jaxserve.api.tasks.task import RepetitionRule
from jaxserve.types.step import FinishReason

REPETITION = "repetition"  # value of matched_stop in that case


class Repetitions:
    """State of the search in one output. Each token costs one comparison per pattern size."""

    def __init__(self, rule: RepetitionRule) -> None:
        self._rule = rule
        self._tokens: list[int] = []  # at least the last `largest`
        # per pattern size: how many of the last tokens equal the token one pattern size earlier
        self._runs = [0] * (rule.largest + 1)

    def add(self, token_ids: list[int]) -> bool:
        """Append tokens; return whether the output now repeats itself."""
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


async def end_repetitions(
    stream: Stream, rule: RepetitionRule, num_choices: int, abort_choice: Callable[[int], object]
) -> Stream:
    """Cut each choice at the point where it begins to repeat itself, and abort it."""
    found: dict[int, Repetitions] = {}
    ended: set[int] = set()
    async with aclosing(stream):
        async for output in stream:
            if output.index in ended:
                continue
            repeats = found.setdefault(output.index, Repetitions(rule)).add(output.token_ids)
            if output.finish_reason is None and repeats:
                output = msgspec.structs.replace(output, finish_reason=FinishReason.STOP, matched_stop=REPETITION)
                if len(ended) < num_choices - 1:
                    abort_choice(output.index)
            if output.finish_reason is not None:
                ended.add(output.index)
            yield output
            if len(ended) == num_choices:
                return
