"""Beam search over the engine's log-probabilities: each step requests one token for every beam.

The engine has no beam search mode. Each step of a beam is a request, and the prefix cache shares the common tokens.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from jaxserve.api.generate.generation import Generate
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason, TokenLogprobs, joined_versions

MAX_WIDTH = 10  # a step needs twice as many log-probabilities as beams, and the engine gives 20


@dataclass(frozen=True)
class Beam:
    """The tokens of one candidate output with their log-probabilities, and the sum of these.

    prompt_logprobs: of the tokens of the prompt, if the request asks for them
    num_cached_tokens: tokens of the prompt that the first step found in the prefix cache
    weight_versions: labels of the weights that made the log-probabilities
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    total: float = 0.0
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    weight_versions: tuple[str, ...] = ()

    def score(self, length_penalty: float) -> float:
        return self.total / max(1, len(self.token_ids)) ** length_penalty

    def extended(self, entry: TokenLogprobs, token_id: int, logprob: float, ended: bool) -> Beam:
        """Return the beam with one more token. entry: the log-probabilities at its position, the token's among them"""
        chosen = msgspec.structs.replace(
            entry, token_id=token_id, logprob=logprob, rank=1 + entry.top_ids.index(token_id)
        )
        return replace(
            self,
            token_ids=(*self.token_ids, token_id),
            logprobs=(*self.logprobs, chosen),
            total=self.total + logprob,
            finish_reason=FinishReason.STOP if ended else None,
        )


async def beam_search(
    generate: Generate,
    prompt_token_ids: list[int],
    params: SamplingParams,
    eos_token_ids: frozenset[int],
    *,
    width: int,
    length_penalty: float,
) -> list[Beam]:
    """Return the `width` best outputs, best first. Ends once that many are complete, at max_tokens, or at an abort.

    score: sum of log-probabilities / length ** length_penalty, over output tokens
    """
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    first = msgspec.structs.replace(
        params, n=1, max_tokens=1, min_tokens=0, temperature=0.0, logprobs=2 * width, ignore_eos=True
    )
    later = msgspec.structs.replace(first, prompt_logprobs=None)
    live, complete = [Beam()], list[Beam]()
    for number in range(params.max_tokens or 1):
        step = later if number else first
        entries = await asyncio.gather(*(_next(generate, prompt_token_ids, beam, step) for beam in live))
        if None in entries:  # aborted: return the beams so far, filled up to the requested number
            live = [replace(beam, finish_reason=FinishReason.ABORT) for beam in live] * width
            break
        candidates = [
            (beam, entry, token_id, logprob)
            for beam, entry in filter(None, entries)
            for token_id, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True)
        ]
        candidates.sort(key=lambda each: -(each[0].total + each[3]))
        # Only beams that are kept are built: each copies all its tokens.
        best = [beam.extended(entry, i, value, i in ends) for beam, entry, i, value in candidates[: 2 * width]]
        complete += [beam for beam in best if beam.finish_reason is not None]
        live = [beam for beam in best if beam.finish_reason is None][:width]
        if len(complete) >= width or not live:
            break
    found = sorted([*complete, *live], key=lambda beam: -beam.score(length_penalty))
    return found[:width]


async def _next(
    generate: Generate, prompt_token_ids: list[int], beam: Beam, params: SamplingParams
) -> tuple[Beam, TokenLogprobs] | None:
    """Return the beam and the model's predictions after it; None if the request is aborted."""
    stream = generate([*prompt_token_ids, *beam.token_ids], params)
    async with aclosing(stream):
        async for output in stream:
            if output.logprobs:
                return _noted(beam, output), output.logprobs[0]
            if output.finish_reason is FinishReason.ABORT:
                return None
    raise RuntimeError("a step of the beam search made no token")


def _noted(beam: Beam, output: RequestOutput) -> Beam:
    """Return the beam with what the output of its next step says of it, the first one of the prompt too."""
    beam = replace(beam, weight_versions=joined_versions(beam.weight_versions, output.weight_versions))
    if beam.token_ids:
        return beam
    return replace(beam, prompt_logprobs=output.prompt_logprobs, num_cached_tokens=output.num_cached_tokens)
