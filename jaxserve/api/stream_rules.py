"""Rules that end or bend a sequence from outside the engine: repetitions, and a budget for thinking.

Both wrap the engine's stream of one prompt and yield a stream of the same kind.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from jaxserve.api.generation import Generate, Stream
from jaxserve.engine.output import RequestOutput
from jaxserve.engine.request import FinishReason, SamplingParams
from jaxserve.text.reasoning import ThinkTags

REPETITION = "repetition"  # what matched_stop says then


@dataclass(frozen=True)
class RepetitionRule:
    """An output ends when its last tokens are `min_count` times the same pattern of `smallest` to `largest` tokens."""

    smallest: int
    largest: int
    min_count: int

    def holds(self, token_ids: list[int]) -> bool:
        return any(self._repeats(token_ids, size) for size in range(self.smallest, self.largest + 1))

    def _repeats(self, token_ids: list[int], size: int) -> bool:
        """The last size * min_count tokens equal themselves shifted by one pattern."""
        need = size * self.min_count
        return len(token_ids) >= need and token_ids[-need:-size] == token_ids[len(token_ids) - need + size :]


async def end_repetitions(stream: Stream, rule: RepetitionRule, num_choices: int) -> Stream:
    """The stream with each choice cut where it begins to repeat itself. With all ended, the rest is aborted."""
    tails: dict[int, list[int]] = {}
    ended: set[int] = set()
    async with aclosing(stream):
        async for output in stream:
            if output.index in ended:
                continue
            tail = [*tails.get(output.index, ()), *output.token_ids][-rule.largest * rule.min_count :]
            tails[output.index] = tail
            if output.finish_reason is None and rule.holds(tail):
                output = msgspec.structs.replace(output, finish_reason=FinishReason.STOP, matched_stop=REPETITION)
            if output.finish_reason is not None:
                ended.add(output.index)
            yield output
            if len(ended) == num_choices:
                return


@dataclass(frozen=True)
class ThinkingBudget:
    """At most so many tokens of thinking; then its end is written for the model.

    inside: the prompt leaves the model within its thinking; else the output may open it
    end_token_ids: of `end_text`
    """

    tokens: int
    tags: ThinkTags
    inside: bool
    end_text: str
    end_token_ids: list[int]

    def thinking(self, text: str) -> bool | None:
        """Whether an output that begins with `text` is within its thinking; None: not to be told yet."""
        if self.tags.end in text:
            return False
        begin = text.lstrip()
        if self.inside or begin.startswith(self.tags.start):
            return True
        return None if self.tags.start.startswith(begin) else False


async def think_at_most(
    generate: Generate, prompt_token_ids: list[int], params: SamplingParams, budget: ThinkingBudget
) -> Stream:
    """One choice whose thinking is cut at the budget: the rest is generated after the thinking's end."""
    token_ids: list[int] = []
    text, last = "", None
    stream = generate(prompt_token_ids, params, "")
    async with aclosing(stream):
        async for output in stream:
            token_ids += output.token_ids
            text, last = text + output.text, output
            yield output
            if budget.thinking(text) is False:
                async for rest in stream:
                    yield rest
                return
            if output.finish_reason is not None:
                return
            if len(token_ids) >= budget.tokens and budget.thinking(text):
                break
    assert last is not None
    async for output in _after_thinking(generate, prompt_token_ids, params, budget, token_ids, last):
        yield output


async def _after_thinking(
    generate: Generate,
    prompt_token_ids: list[int],
    params: SamplingParams,
    budget: ThinkingBudget,
    token_ids: list[int],
    last: RequestOutput,
) -> Stream:
    spent = len(token_ids) + len(budget.end_token_ids)
    room = (params.max_tokens or spent) - spent
    end = msgspec.structs.replace(
        last,
        text=budget.end_text,
        token_ids=budget.end_token_ids,
        logprobs=None,  # nothing predicted these tokens
        support=None,
        hidden=None,
        prompt_logprobs=None,
        num_output_tokens=spent,
        finish_reason=None if room > 0 else FinishReason.LENGTH,
    )
    yield end
    if room <= 0:
        return
    grammar = params.grammar
    if grammar is not None:
        grammar = msgspec.structs.replace(grammar, begin_after=(), begin_unless=())
    least = max(0, params.min_tokens - spent)
    rest = msgspec.structs.replace(params, max_tokens=room, min_tokens=least, grammar=grammar, prompt_logprobs=None)
    stream = generate([*prompt_token_ids, *token_ids, *budget.end_token_ids], rest, "rest")
    async with aclosing(stream):
        async for output in stream:
            yield msgspec.structs.replace(
                output,
                num_prompt_tokens=last.num_prompt_tokens,
                num_cached_tokens=last.num_cached_tokens,
                num_output_tokens=output.num_output_tokens + spent,
            )
