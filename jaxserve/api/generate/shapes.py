"""Generation modes other than one plain engine request: beam search, repetition detection, sessions, thinking budget.

A Shape makes the stream of outputs of one prompt in place of the engine. The thinking budget needs no Shape, because
the
engine itself enforces it.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import msgspec

from jaxserve.api.generate.beam_search import MAX_WIDTH, Beam, beam_search
from jaxserve.api.generate.details import check_no_details, mark
from jaxserve.api.generate.generation import Generate, Job, Stream
from jaxserve.api.generate.stream_rules import RepetitionRule, end_repetitions
from jaxserve.api.protocol.common import SamplingFields, SessionParams
from jaxserve.api.shared.keys import Caller
from jaxserve.api.shared.state import ServerState
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidValueError
from jaxserve.text.output.sequence_text import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.output import FinishReason
from jaxserve.types.sampling import ThinkingBudget


def shaped(job: Job, body: SamplingFields, tokenizer: Tokenizer, eos_token_ids: list[int]) -> Job:
    """Return `job` with the generation mode that the body asks for. Raises InvalidValueError for conflicting fields."""
    if body.use_beam_search:
        return _beams(job, body, tokenizer, frozenset(eos_token_ids))
    if body.length_penalty is not None:
        raise InvalidValueError("length_penalty needs use_beam_search.", param="length_penalty")
    return _without_repetitions(job, body)


def budgeted(job: Job, budget: ThinkingBudget | None) -> Job:
    """Return `job` with a limit on its reasoning. Raises InvalidValueError for fields that conflict with one."""
    if budget is None:
        return job
    if job.params.experts:
        message = "thinking_token_budget does not go with return_routed_experts."
        raise InvalidValueError(message, param="return_routed_experts")
    return replace(job, params=msgspec.structs.replace(job.params, thinking=budget))


def marked(job: Job, body: SamplingFields, state: ServerState) -> Job:
    """Return `job` with the server's watermark in its sampled tokens. Raises InvalidValueError."""
    param = "watermarking" if body.watermark is None else "watermark"
    asked = body.watermarking if body.watermark is None else body.watermark
    return replace(job, params=mark(job.params, asked, reveal(state.config.server.watermark_key), param))


def _beams(job: Job, body: SamplingFields, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Job:
    params = job.params
    if body.stream:
        raise InvalidValueError("A beam search cannot be streamed.", param="use_beam_search")
    if params.n > MAX_WIDTH:
        raise InvalidValueError(f"n is the width of the beam search, at most {MAX_WIDTH}.", param="n")
    others = {
        "stop": params.stop,
        "stop_regex": params.stop_regex,
        "grammar": params.grammar,
        "thinking_token_budget": params.thinking,
        "repetition_detection": body.repetition_detection,
    }
    for name, value in others.items():
        if value:
            raise InvalidValueError(f"use_beam_search does not go with {name}.", param="use_beam_search")
    check_no_details(params, "use_beam_search")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty

    async def search(generate: Generate) -> Stream:
        ids = job.prompt_token_ids
        found = await beam_search(generate, ids, params, eos_token_ids, width=params.n, length_penalty=penalty)
        for index, beam in enumerate(found):
            yield _beam_output(index, beam, job, tokenizer)

    return replace(job, shape=search)


def _beam_output(index: int, beam: Beam, job: Job, tokenizer: Tokenizer) -> RequestOutput:
    params, ids = job.params, list(beam.token_ids)
    ended = beam.finish_reason is FinishReason.STOP
    shown = ids[:-1] if ended and not params.include_stop_str_in_output else ids
    top = params.logprobs
    entries = [
        msgspec.structs.replace(entry, top_ids=entry.top_ids[:top], top_logprobs=entry.top_logprobs[:top])
        for entry in beam.logprobs
    ]
    return RequestOutput(
        "",
        index,
        text=tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens),
        token_ids=ids,
        logprobs=None if top is None else entries,
        finish_reason=beam.finish_reason or FinishReason.LENGTH,
        matched_stop=ids[-1] if ended else None,
        num_prompt_tokens=len(job.prompt_token_ids),
        num_output_tokens=len(ids),
    )


def _without_repetitions(job: Job, body: SamplingFields) -> Job:
    wanted = body.repetition_detection
    if wanted is None or not wanted.max_pattern_size:
        return job
    smallest = wanted.min_pattern_size or 1
    if smallest > wanted.max_pattern_size:
        message = "repetition_detection: min_pattern_size is more than max_pattern_size."
        raise InvalidValueError(message, param="repetition_detection")
    rule = RepetitionRule(smallest, wanted.max_pattern_size, wanted.min_count or 2)
    inner = job.shape

    def shape(generate: Generate) -> Stream:
        stream = generate(job.prompt_token_ids, job.params) if inner is None else inner(generate)
        return end_repetitions(stream, rule, job.params.n)

    return replace(job, shape=shape)


def remembered(
    job: Job, state: ServerState, wanted: SessionParams | None, request_id: str, caller: Caller, *, silent: bool = False
) -> Job:
    """Return `job` so that its tokens are kept in its session. silent: not its output, which was not requested.

    Raises InvalidValueError for more than one choice.
    """
    if wanted is None:
        return job
    if job.params.n > 1:
        raise InvalidValueError("A request of a session has one choice.", param="n")
    inner, sessions = job.shape, state.sessions

    async def shape(generate: Generate) -> Stream:
        """Run the prompt as a turn of its session and append its output to the turn."""
        turn = sessions.begin(wanted, request_id, job.prompt_token_ids, job.signal, caller.owner)
        stream = generate(job.prompt_token_ids, job.params) if inner is None else inner(generate)
        reason: FinishReason | None = None
        try:
            async with aclosing(stream):
                async for output in stream:
                    sessions.extend(turn, [] if silent else output.token_ids)
                    reason = output.finish_reason
                    yield output
        finally:
            sessions.end(turn, reason)

    return replace(job, shape=shape)
