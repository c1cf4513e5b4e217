"""Generate in other modes than one plain engine request: beam search, repetition detection, sessions.

A mode makes the stream of outputs of one prompt in place of the engine, or wraps the engine's stream. The engine has no
beam search: each step of a beam is a request for one token, and the prefix cache shares the common tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

import msgspec

from jaxserve.api.generate.generation import Generate, PromptTask, Stream
from jaxserve.api.generate.task import Mode, RepetitionRule, check_no_extras, logit_changes
from jaxserve.api.keys import Caller
from jaxserve.api.state import ServerState
from jaxserve.errors import InvalidValueError
from jaxserve.text.detokenizer import RequestOutput, SequenceText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason, TokenLogprobs, TokenOutput, joined_versions

MAX_WIDTH = 10  # a step needs twice as many log-probabilities as beams, and the engine gives 20


@dataclass(frozen=True)
class Beam:
    """The tokens of one candidate output, their log-probabilities, and the sum of these.

    prompt_logprobs: log-probabilities of the prompt's tokens, if the request asks for them
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
        """Return the beam with one more token. entry: the log-probabilities at the token's position"""
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
    """Return the `width` best outputs, best first. The search ends at that many complete outputs, max_tokens or abort.

    The score of an output is the sum of its tokens' log-probabilities / number of tokens ** length_penalty.
    """
    ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    first = msgspec.structs.replace(
        params, n=1, max_tokens=1, min_tokens=0, temperature=0.0, logprobs=2 * width, ignore_eos=True
    )
    later = msgspec.structs.replace(first, prompt_logprobs=None)
    live = [Beam()]
    complete: list[Beam] = []
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
        # Only the beams that are kept are built, because each copies all its tokens.
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
    """Return the beam and the log-probabilities of its next token; None if the request is aborted."""
    stream = generate([*prompt_token_ids, *beam.token_ids], params)
    async with aclosing(stream):
        async for output in stream:
            if output.logprobs:
                return _noted(beam, output), output.logprobs[0]
            if output.finish_reason is FinishReason.ABORT:
                return None
    raise RuntimeError("a step of the beam search made no token")


def _noted(beam: Beam, output: RequestOutput) -> Beam:
    """Return the beam with the weight labels of its next step, and after the first step with the prompt's values."""
    beam = replace(beam, weight_versions=joined_versions(beam.weight_versions, output.weight_versions))
    if beam.token_ids:
        return beam
    return replace(beam, prompt_logprobs=output.prompt_logprobs, num_cached_tokens=output.num_cached_tokens)


REPETITION = "repetition"  # value of matched_stop if an output ends because it repeats itself


class Repetitions:
    """Search one output for repetitions. Each token costs one comparison for each pattern size."""

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


def with_beam_search(prompt: PromptTask, mode: Mode, state: ServerState) -> PromptTask:
    """Return `prompt` as a beam search of width n. Raises InvalidValueError for fields that conflict with one."""
    penalty, params = mode.beam_length_penalty, prompt.params
    if penalty is None:
        return prompt
    if params.n > MAX_WIDTH:
        raise InvalidValueError(f"n is the width of the beam search, at most {MAX_WIDTH}.", param="n")
    others = {
        "stop": params.stop,
        "stop_regex": params.stop_regex,
        "grammar": params.grammar,
        "thinking_token_budget": params.thinking,
        "repetition_detection": mode.repetition,
        # beams are made of the model's own probabilities
        **logit_changes(params, state.engine.info),
    }
    for name, value in others.items():
        if value:
            raise InvalidValueError(f"use_beam_search does not go with {name}.", param="use_beam_search")
    check_no_extras(params, "use_beam_search")
    tokenizer, eos_token_ids = state.engine.tokenizer, frozenset(state.engine.info.eos_token_ids)

    async def run(generate: Generate) -> Stream:
        ids = prompt.prompt_token_ids
        found = await beam_search(generate, ids, params, eos_token_ids, width=params.n, length_penalty=penalty)
        for index, beam in enumerate(found):
            yield _beam_output(index, beam, prompt, tokenizer)

    return replace(prompt, run=run)


def _beam_output(index: int, beam: Beam, prompt: PromptTask, tokenizer: Tokenizer) -> RequestOutput:
    params, top = prompt.params, prompt.params.logprobs
    entries = [
        msgspec.structs.replace(entry, top_ids=entry.top_ids[:top], top_logprobs=entry.top_logprobs[:top])
        for entry in beam.logprobs
    ]
    output = TokenOutput(
        request_id="",
        token_ids=list(beam.token_ids),
        logprobs=None if top is None else entries,
        prompt_logprobs=beam.prompt_logprobs,
        num_cached_tokens=beam.num_cached_tokens,
        weight_versions=beam.weight_versions,
        finish_reason=beam.finish_reason or FinishReason.LENGTH,
        stop_token_id=beam.token_ids[-1] if beam.finish_reason is FinishReason.STOP else None,
    )
    return SequenceText("", index, prompt.prompt_token_ids, params, tokenizer).push(output)


def with_repetition_rule(prompt: PromptTask, rule: RepetitionRule | None) -> PromptTask:
    """Return `prompt` so that an output that repeats itself ends.

    It gets no drafts and no grouped outputs, because an output of several tokens could not be cut at the repetition.
    """
    if rule is None:
        return prompt
    prompt = replace(prompt, params=msgspec.structs.replace(prompt.params, speculate=False, grouped=False))

    def run(generate: Generate) -> Stream:
        return end_repetitions(_stream(prompt, generate), rule, prompt.params.n, prompt.signal.abort_choice)

    return replace(prompt, run=run)


def with_session(prompt: PromptTask, mode: Mode, request_id: str, state: ServerState, caller: Caller) -> PromptTask:
    """Return `prompt` so that its tokens are kept in its session. Raises InvalidValueError for several choices."""
    session, sessions = mode.session, state.sessions
    if session is None:
        return prompt
    if prompt.params.n > 1:
        raise InvalidValueError("A request of a session has one choice.", param="n")

    async def run(generate: Generate) -> Stream:
        """Run the prompt as a turn of its session and append its output to the turn."""
        turn = sessions.begin(session, request_id, prompt.prompt_token_ids, prompt.signal, caller.owner)
        reason: FinishReason | None = None
        try:
            async with aclosing(_stream(prompt, generate)) as stream:
                async for output in stream:
                    sessions.extend(turn, output.token_ids if mode.keeps_output else [])
                    reason = output.finish_reason
                    yield output
        finally:
            sessions.end(turn, reason)

    return replace(prompt, run=run)


def _stream(prompt: PromptTask, generate: Generate) -> Stream:
    return generate(prompt.prompt_token_ids, prompt.params) if prompt.run is None else prompt.run(generate)
