"""Which ways of generating other than one plain engine request a body asks for: beams, a thinking budget, a stop at
repetitions, a session. A Shape stands in for the engine's stream of one prompt.
"""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import replace

import msgspec

from jaxserve.api.beam_search import MAX_WIDTH, Beam, beam_search
from jaxserve.api.details import check_no_details, mark
from jaxserve.api.generation import Generate, Job, Stream, merge
from jaxserve.api.protocol.common import SamplingFields, SessionParams
from jaxserve.api.state import ServerState
from jaxserve.api.stream_rules import RepetitionRule, ThinkingBudget, end_repetitions, think_at_most
from jaxserve.engine.output import RequestOutput
from jaxserve.engine.request import FinishReason, SamplingParams
from jaxserve.errors import InvalidValueError
from jaxserve.text.tokenizer import Tokenizer


def shaped(
    job: Job, body: SamplingFields, tokenizer: Tokenizer, eos_token_ids: list[int], budget: ThinkingBudget | None = None
) -> Job:
    """`job` as the body wants it generated. Raises InvalidValueError for what does not go together."""
    if body.use_beam_search:
        return _beams(job, body, tokenizer, frozenset(eos_token_ids))
    if body.length_penalty is not None:
        raise InvalidValueError("length_penalty needs use_beam_search.", param="length_penalty")
    if budget is not None and job.params.experts:
        message = "thinking_token_budget does not go with return_routed_experts."
        raise InvalidValueError(message, param="return_routed_experts")
    if budget is not None:
        job = replace(job, shape=lambda generate: _budgeted(generate, job, budget))
    return _without_repetitions(job, body)


def marked(job: Job, body: SamplingFields, state: ServerState) -> Job:
    """`job` with the server's watermark in what it draws. Raises InvalidValueError."""
    param = "watermarking" if body.watermark is None else "watermark"
    asked = body.watermarking if body.watermark is None else body.watermark
    return replace(job, params=mark(job.params, asked, state.config.server.watermark_key, param))


def _beams(job: Job, body: SamplingFields, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> Job:
    params = job.params
    if body.stream:
        raise InvalidValueError("A beam search cannot be streamed.", param="use_beam_search")
    if params.n > MAX_WIDTH:
        raise InvalidValueError(f"n is the width of the beam search, at most {MAX_WIDTH}.", param="n")
    for name, set_ in (("stop", params.stop), ("stop_regex", params.stop_regex), ("grammar", params.grammar)):
        if set_:
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
    ended = beam.finish_reason is not None
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


async def _budgeted(generate: Generate, job: Job, budget: ThinkingBudget) -> Stream:
    """Each choice alone: they end their thinking at different times."""

    async def choice(index: int) -> Stream:
        seed = None if job.params.seed is None else (job.params.seed + index) & (2**63 - 1)
        params = msgspec.structs.replace(job.params, n=1, seed=seed)

        def one(token_ids: list[int], own: SamplingParams, name: str) -> Stream:
            return generate(token_ids, own, f"{index}{name}")

        stream = think_at_most(one, job.prompt_token_ids, params, budget)
        async with aclosing(stream):
            async for output in stream:
                yield msgspec.structs.replace(output, index=index)

    merged = merge([choice(index) for index in range(job.params.n)])
    async with aclosing(merged):
        async for output in merged:
            yield output


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
        stream = generate(job.prompt_token_ids, job.params, "") if inner is None else inner(generate)
        return end_repetitions(stream, rule, job.params.n)

    return replace(job, shape=shape)


def remembered(
    job: Job, state: ServerState, wanted: SessionParams | None, request_id: str, *, silent: bool = False
) -> Job:
    """`job`, whose tokens its session keeps; silent: not the output, which nobody asked for.

    Raises InvalidValueError for more than one choice.
    """
    if wanted is None:
        return job
    if job.params.n > 1:
        raise InvalidValueError("A request of a session has one choice.", param="n")
    inner = job.shape

    async def shape(generate: Generate) -> Stream:
        turn = await state.sessions.begin(wanted, request_id, job.prompt_token_ids, state.engine.abort)
        stream = generate(job.prompt_token_ids, job.params, "") if inner is None else inner(generate)
        failed = True
        try:
            async with aclosing(stream):
                async for output in stream:
                    turn.tokens.extend(() if silent else output.token_ids)
                    failed = failed and output.finish_reason is None
                    yield output
        finally:
            state.sessions.end(wanted, turn, failed=failed)

    return replace(job, shape=shape)
