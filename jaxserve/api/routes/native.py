"""POST /generate: SGLang's native form, with one prompt or many, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.constraints import checked_grammar
from jaxserve.api.generate.details import mark, route, show_hidden, tell_candidates, watch
from jaxserve.api.generate.generation import Generation, Job, new_id, prefix_namespace
from jaxserve.api.generate.prompts import as_prompts, check_ids, check_length, session_context
from jaxserve.api.generate.sampling import native_params
from jaxserve.api.generate.shapes import remembered
from jaxserve.api.http.body import read_body, refuse_unsupported
from jaxserve.api.http.sse import EventStream, event, until_disconnect
from jaxserve.api.protocol.answers import Generated
from jaxserve.api.protocol.generate import GenerateRequest, NativeSampling
from jaxserve.api.respond.native_logprobs import LogprobOptions
from jaxserve.api.respond.native_output import NativeChoice
from jaxserve.api.respond.wire import json_answer
from jaxserve.api.shared.keys import Caller, caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import HiddenStates

router = APIRouter()
T = TypeVar("T")

_HIDDEN: dict[bool | str, HiddenStates] = {False: "", True: "all", "last": "last"}


@router.post("/generate", **documented(Generated, body=GenerateRequest, events=Generated, many=True))
@router.put("/generate", include_in_schema=False)
async def generate(request: Request) -> Response:
    """Continue a text or token ids; `meta_info` describes the generation."""
    state = server_state(request)
    body = await read_body(request, GenerateRequest)
    answer = await _Native.prepare(body, state, caller_of(request))
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state.unread)
    return await json_answer(await until_disconnect(request, answer.whole()))


class _Native:
    def __init__(self, body: GenerateRequest, generation: Generation, choices: list[list[NativeChoice]]) -> None:
        self._body = body
        self._generation = generation
        self._choices = choices
        self._single = not _is_batch(body)
        self.held_bytes = generation.held_bytes

    @classmethod
    async def prepare(cls, body: GenerateRequest, state: ServerState, caller: Caller) -> _Native:
        """Check everything that can be wrong with the request and start its generation. Raises InvalidValueError."""
        state.check_generates(None)
        prompts = _prompts(body)
        count = len(prompts)
        sampling = _spread(body.sampling_params or NativeSampling.model_validate({}), count, "sampling_params")
        for each in sampling:
            refuse_unsupported(each, "sampling_params.")
        options = _options(body, count)
        if count > 1 and body.session_params is not None:
            raise InvalidValueError("A request of a session has one prompt.", param="session_params")
        rid = body.rid if isinstance(body.rid, str) else (body.rid[0] if body.rid else None)
        request_id = new_id("gen", rid)
        jobs = [await _job(body, *each, state, caller) for each in zip(prompts, sampling, options, strict=True)]
        silent = sampling[0].max_new_tokens == 0
        jobs = [remembered(job, state, body.session_params, request_id, caller, silent=silent) for job in jobs]
        salts = set(_spread(body.extra_key or "", count, "extra_key"))
        if len(salts) > 1:
            raise InvalidValueError("extra_key: one for all prompts of a request.", param="extra_key")
        interval = min(each.stream_interval or 1 for each in sampling)
        many = [f"{request_id}_{number}" for number in range(count)]
        given = body.rid if isinstance(body.rid, list) else many if _is_batch(body) else [request_id]
        ids = _spread(given, count, "rid")
        jobs = [replace(job, request_id=rid) for job, rid in zip(jobs, ids, strict=True)]
        generation = Generation(
            state, request_id, jobs, body.priority or 0, prefix_namespace(None, salts.pop()), interval, caller
        )
        incremental = bool(body.stream and body.incremental)
        choices = [
            [
                NativeChoice(rid, job, option, state.token_texts, each.max_new_tokens == 0, incremental)
                for _ in range(job.params.n)
            ]
            for rid, job, option, each in zip(ids, jobs, options, sampling, strict=True)
        ]
        return cls(body, generation, choices)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the text so far in every event, or only what is new with `incremental`."""
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                choice = self._choices[number][output.index]
                choice.add(output)
                result = choice.result()
                if not self._single or len(self._choices[number]) > 1:
                    result["index"] = number * len(self._choices[number]) + output.index
                yield event(orjson.dumps(result))

    async def whole(self) -> Any:
        async with aclosing(self._generation.outputs()) as outputs:
            async for number, output in outputs:
                self._choices[number][output.index].add(output)
        results = [choice.result() for group in self._choices for choice in group]
        return results[0] if self._single and len(results) == 1 else results


def _is_batch(body: GenerateRequest) -> bool:
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and not (given and isinstance(given[0], int))


def _prompts(body: GenerateRequest) -> list[str | list[int]]:
    if (body.text is None) == (body.input_ids is None):
        raise InvalidValueError("Give text or input_ids, one of them.", param="text")
    if body.text is not None:
        return as_prompts(body.text, "text")
    return as_prompts(body.input_ids or [], "input_ids")


def _spread(value: T | list[T], count: int, param: str) -> list[T]:
    """Return one value per prompt."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidValueError(f"{param} has {len(value)} entries for {count} prompts.", param=param)
    return value


def _options(body: GenerateRequest, count: int) -> list[LogprobOptions]:
    wanted = _spread(body.return_logprob or False, count, "return_logprob")
    starts = _spread(-1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len")
    tops: Sequence[int] = _spread(body.top_logprobs_num or 0, count, "top_logprobs_num")
    text, mode = bool(body.return_text_in_logprobs), body.sampling_logprobs_mode
    watched = _watched(body, count)
    masks = _spread(body.return_sampling_mask or False, count, "return_sampling_mask")
    hidden = _spread(body.return_hidden_states or False, count, "return_hidden_states")
    experts = (body.routed_experts_start_len or 0) if body.return_routed_experts else None
    return [
        LogprobOptions(want, start, top, text, ids, mask, mode, _HIDDEN[shown], experts)
        for want, start, top, ids, mask, shown in zip(wanted, starts, tops, watched, masks, hidden, strict=True)
    ]


def _watched(body: GenerateRequest, count: int) -> list[tuple[int, ...]]:
    """Return the ids of each prompt. A single list applies to all prompts."""
    given = body.token_ids_logprob or []
    lists = given if given and isinstance(given[0], list) else [given] * count
    if len(lists) != count:
        message = f"token_ids_logprob has {len(lists)} entries for {count} prompts."
        raise InvalidValueError(message, param="token_ids_logprob")
    return [tuple(dict.fromkeys(ids)) for ids in lists]  # type: ignore[arg-type]


async def _job(
    body: GenerateRequest,
    prompt: str | list[int],
    sampling: NativeSampling,
    options: LogprobOptions,
    state: ServerState,
    caller: Caller,
) -> Job:
    info = state.engine.info
    if isinstance(prompt, str):
        param = "text"
        token_ids = await state.encoder.encode(prompt, add_special_tokens=True, limit=info.max_model_len, param=param)
    else:
        param, token_ids = "input_ids", prompt
        check_ids(token_ids, info, param)
    token_ids = session_context(body, state, token_ids, caller)
    check_length(token_ids, info, param)
    if options.start > len(token_ids):
        message = f"logprob_start_len is {options.start}, and the prompt has {len(token_ids)} tokens."
        raise InvalidValueError(message, param="logprob_start_len")
    params = native_params(
        sampling,
        info,
        len(token_ids),
        grammar=await checked_grammar(sampling, state.engine, state.grammars),
        logprobs=options.top if options.wanted else None,
        prompt_logprobs=options.top if options.wanted and options.start >= 0 else None,
    )
    params = watch(params, options.watched, info, "token_ids_logprob")
    params = tell_candidates(params, options.candidates, options.sampling_mode)
    params = route(params, body.return_routed_experts, body.routed_experts_start_len, len(token_ids), info)
    params = mark(params, body.watermark, reveal(state.config.server.watermark_key), "watermark")
    return Job(token_ids, show_hidden(params, options.hidden, len(token_ids), info))
