"""Read a task from the body of /generate: one prompt or many, each with its own parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxserve.api.generate.task import (
    Mode,
    RequestOptions,
    SamplingMode,
    TextPrompt,
    as_prompts,
    constraint,
    named_replica,
    native_params,
    new_id,
    spread,
    with_hidden_states,
    with_logprob_ids,
    with_routed_experts,
    with_sampling_mask,
    with_watermark,
)
from jaxserve.api.sglang.protocol import GenerateRequest, NativeSampling
from jaxserve.api.state import ServerState
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidValueError
from jaxserve.types.extras import HiddenStates
from jaxserve.types.page_keys import salt_of
from jaxserve.types.sampling import SamplingParams

_HIDDEN: dict[bool | str, HiddenStates] = {False: "", True: "all", "last": "last"}


@dataclass(frozen=True, kw_only=True)
class NativeOptions:
    """The options of the answer to one prompt.

    start: first prompt position with log-probabilities; -1: outputs only
    scoring: whether max_new_tokens is 0. The engine always samples one token, which is dropped.
    incremental: whether events have only the new part, so that the sent part is not kept
    experts_from: first prompt position of the routed experts; None: not requested
    """

    logprobs: bool = False
    start: int = -1
    top: int = 0
    with_text: bool = False
    token_ids: tuple[int, ...] = ()
    sampling_mask: bool = False
    sampling_mode: SamplingMode | None = None
    hidden: HiddenStates = ""
    experts_from: int | None = None
    scoring: bool = False
    incremental: bool = False


@dataclass(frozen=True, kw_only=True)
class NativeTask:
    """The prompts to continue, the name and queueing of the request, and the options of the answer.

    single: whether the answer is an object, not a list
    """

    prompts: list[TextPrompt]
    options: list[NativeOptions]
    request: RequestOptions
    single: bool


async def native_task(body: GenerateRequest, state: ServerState) -> NativeTask:
    """Read and check a body. Yields to the event loop between prompts. Raises a RequestError that names the field."""
    param, contents = _contents(body)
    count = len(contents)
    sampling = spread(body.sampling_params or NativeSampling.model_validate({}), count, "sampling_params")
    options = _options(body, sampling)
    _check_session(body, count)
    single = not _is_batch(body)
    request = _request(body, sampling).for_adapter(_adapter(body, count, state))
    many = [f"{request.request_id}_{number}" for number in range(count)]
    ids = spread(body.rid if isinstance(body.rid, list) else [request.request_id] if single else many, count, "rid")
    read: dict[tuple[int, NativeOptions], TextPrompt] = {}  # prompts with the same sampling_params read them once
    prompts = []
    for content, rid, each, shown in zip(contents, ids, sampling, options, strict=True):
        if (id(each), shown) not in read:
            await asyncio.sleep(0)
            read[id(each), shown] = _prompt(body, each, shown, state)
        prompts.append(replace(read[id(each), shown], content=content, param=param, request_id=rid))
    return NativeTask(prompts=prompts, options=options, request=request, single=single)


def _prompt(body: GenerateRequest, sampling: NativeSampling, options: NativeOptions, state: ServerState) -> TextPrompt:
    """Read a prompt without its text."""
    return TextPrompt(
        content="",
        sampling=_params(body, sampling, options, state),
        constraint=constraint(sampling, state.engine.tokenizer),
        mode=Mode(session=body.session_params, keeps_output=not options.scoring),
        experts_from=body.routed_experts_start_len,
    )


def _contents(body: GenerateRequest) -> tuple[str, list[str | list[int]]]:
    """Return (name of the prompts' field, prompts)."""
    if (body.text is None) == (body.input_ids is None):
        raise InvalidValueError("Give text or input_ids, one of them.", param="text")
    if body.text is not None:
        return "text", as_prompts(body.text, "text")
    return "input_ids", as_prompts(body.input_ids or [], "input_ids")


def _is_batch(body: GenerateRequest) -> bool:
    given = body.input_ids if body.text is None else body.text
    return isinstance(given, list) and not (given and isinstance(given[0], int))


def _check_session(body: GenerateRequest, num_prompts: int) -> None:
    if body.session_params is None:
        return
    if num_prompts > 1:
        raise InvalidValueError("A request of a session has one prompt.", param="session_params")
    if body.session_id is not None:
        raise InvalidValueError("Give session_params or session_id, not both.", param="session_id")


def _request(body: GenerateRequest, sampling: list[NativeSampling]) -> RequestOptions:
    keys = set(spread(body.extra_key or "", len(sampling), "extra_key"))
    if len(keys) > 1:
        raise InvalidValueError("extra_key: one for all prompts of a request.", param="extra_key")
    rid = body.rid if isinstance(body.rid, str) else (body.rid[0] if body.rid else None)
    return RequestOptions(
        request_id=new_id("gen", rid),
        priority=body.priority or 0,
        cache_salt=salt_of(None, keys.pop()),
        interval=min(each.stream_interval or 1 for each in sampling),
        replica=named_replica(body.data_parallel_rank, body.routed_dp_rank),
    )


def _adapter(body: GenerateRequest, count: int, state: ServerState) -> str:
    """Return the digest of the adapter; "" if there is none."""
    names = set(spread(body.lora_path, count, "lora_path"))
    if len(names) > 1:
        raise InvalidValueError("lora_path: one for all prompts of a request.", param="lora_path")
    return state.adapter_digest(names.pop())


def _options(body: GenerateRequest, sampling: list[NativeSampling]) -> list[NativeOptions]:
    count = len(sampling)
    wanted = spread(body.return_logprob or False, count, "return_logprob")
    starts = spread(-1 if body.logprob_start_len is None else body.logprob_start_len, count, "logprob_start_len")
    tops: Sequence[int] = spread(body.top_logprobs_num or 0, count, "top_logprobs_num")
    masks = spread(body.return_sampling_mask or False, count, "return_sampling_mask")
    hidden = spread(body.return_hidden_states or False, count, "return_hidden_states")
    token_ids = _logprob_token_ids(body, count)
    return [
        NativeOptions(
            logprobs=wanted[i],
            start=starts[i],
            top=tops[i],
            with_text=bool(body.return_text_in_logprobs),
            token_ids=token_ids[i],
            sampling_mask=masks[i],
            sampling_mode=body.sampling_logprobs_mode,
            hidden=_HIDDEN[hidden[i]],
            experts_from=(body.routed_experts_start_len or 0) if body.return_routed_experts else None,
            scoring=sampling[i].max_new_tokens == 0,
            incremental=bool(body.stream and body.incremental),
        )
        for i in range(count)
    ]


def _logprob_token_ids(body: GenerateRequest, count: int) -> list[tuple[int, ...]]:
    """Return the ids of each prompt. A single list applies to all prompts."""
    given = body.token_ids_logprob or []
    lists = given if given and isinstance(given[0], list) else [given] * count
    if len(lists) != count:
        message = f"token_ids_logprob has {len(lists)} entries for {count} prompts."
        raise InvalidValueError(message, param="token_ids_logprob")
    return [tuple(dict.fromkeys(ids)) for ids in lists]  # type: ignore[arg-type]


def _params(
    body: GenerateRequest, sampling: NativeSampling, options: NativeOptions, state: ServerState
) -> SamplingParams:
    info = state.engine.info
    params = native_params(
        sampling,
        info,
        logprobs=options.top if options.logprobs else None,
        prompt_logprobs=options.top if options.logprobs and options.start >= 0 else None,
    )
    params = with_logprob_ids(params, options.token_ids, info, "token_ids_logprob")
    params = with_sampling_mask(params, options.sampling_mask, options.sampling_mode)
    params = with_routed_experts(params, body.return_routed_experts, body.routed_experts_start_len, info)
    params = with_watermark(params, body.watermark, reveal(state.config.server.watermark_key), "watermark")
    return with_hidden_states(params, options.hidden)
