"""Read the fields that several routes share: prompts, id, priority and cache namespace, generation mode, output."""

from __future__ import annotations

import uuid
from typing import TypeVar

from jaxserve.api.protocol.common import SamplingFields
from jaxserve.api.tasks.task import ExtraFields, Mode, OutputOptions, RepetitionRule, RequestOptions, Truncation
from jaxserve.errors import InvalidValueError

T = TypeVar("T")


def as_prompts(prompt: str | list[str] | list[int] | list[list[int]], param: str) -> list[str | list[int]]:
    """Return one entry per prompt. Raises InvalidValueError for an empty one."""
    prompts: list[str | list[int]]
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        prompts = [prompt]  # type: ignore[list-item]
    else:
        prompts = list(prompt)  # type: ignore[arg-type]
    if not prompts or not all(prompts):
        raise InvalidValueError(f"{param} is empty.", param=param)
    return prompts


def request_options(body: SamplingFields, prefix: str) -> RequestOptions:
    """Return the id, priority, namespace, interval and replica of a request. prefix: of an id that is made here."""
    return RequestOptions(
        request_id=new_id(prefix, body.request_id or body.rid),
        priority=body.priority or 0,
        cache_salt=prefix_namespace(body.cache_salt, body.extra_key),
        interval=body.stream_interval or 1,
        replica=named_replica(body.data_parallel_rank, body.routed_dp_rank),
    )


def named_replica(rank: int | None, routed: int | None) -> int | None:
    """Return the engine that a request names. Raises InvalidValueError if it names two."""
    if rank is not None and routed is not None and rank != routed:
        raise InvalidValueError("data_parallel_rank and routed_dp_rank differ.", param="routed_dp_rank")
    return routed if rank is None else rank


def new_id(prefix: str, given: str | None = None) -> str:
    return given or f"{prefix}-{uuid.uuid4().hex}"


def prefix_namespace(salt: str | None, key: str | None) -> str:
    """Return the key of the prefix cache's namespace: requests share it if `cache_salt` and `extra_key` are equal."""
    if not (salt and key):
        return f":{salt or key}" if salt or key else ""
    return f"{len(salt)}:{salt}{key}"


def truncation(body: SamplingFields) -> Truncation:
    return Truncation(keep=body.truncate_prompt_tokens, side=body.truncation_side or "left")


def generation_mode(body: SamplingFields, *, keeps_output: bool = True) -> Mode:
    """Read beam search, repetition detection and session. Raises InvalidValueError for conflicting fields."""
    if body.use_beam_search and body.stream:
        raise InvalidValueError("A beam search cannot be streamed.", param="use_beam_search")
    if body.length_penalty is not None and not body.use_beam_search:
        raise InvalidValueError("length_penalty needs use_beam_search.", param="length_penalty")
    if body.session_params is not None and body.session_id is not None:
        raise InvalidValueError("Give session_params or session_id, not both.", param="session_id")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return Mode(
        beam_length_penalty=penalty if body.use_beam_search else None,
        repetition=_repetition_rule(body),
        session=body.session_params,
        keeps_output=keeps_output,
    )


def _repetition_rule(body: SamplingFields) -> RepetitionRule | None:
    wanted = body.repetition_detection
    if wanted is None or not wanted.max_pattern_size:
        return None
    smallest = wanted.min_pattern_size or 1
    if smallest > wanted.max_pattern_size:
        message = "repetition_detection: min_pattern_size is more than max_pattern_size."
        raise InvalidValueError(message, param="repetition_detection")
    return RepetitionRule(smallest=smallest, largest=wanted.max_pattern_size, min_count=wanted.min_count or 2)


def output_options(body: SamplingFields, *, logprobs: int | None) -> OutputOptions:
    """Read what the answer shows. Raises InvalidValueError if stream_options is given without stream.

    logprobs: number of most likely tokens to show; None: no log-probabilities
    """
    if body.stream_options is not None and not body.stream:
        raise InvalidValueError("stream_options is only allowed with stream: true.", param="stream_options")
    usage = body.stream_options
    return OutputOptions(
        include_usage=bool(usage and usage.include_usage),
        continuous_usage=bool(usage and usage.continuous_usage_stats and usage.include_usage is not False),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        token_ids=bool(body.return_token_ids),
        prompt_token_ids=bool(body.return_token_ids or body.return_prompt_token_ids),
        prompt_text=bool(body.return_prompt_text),
        hidden_state=bool(body.return_hidden_states),
        extras=_extra_fields(body),
    )


def _extra_fields(body: SamplingFields) -> ExtraFields:
    return ExtraFields(
        meta_info=bool(body.return_meta_info),
        sampling_mask=bool(body.return_sampling_mask),
        sampling_mode=body.sampling_logprobs_mode,
        experts_from=(body.routed_experts_start_len or 0) if body.return_routed_experts else None,
        weight_versions=bool(body.return_weight_versions),
        cached_tokens=bool(body.return_cached_tokens_details),
        spec_tokens=bool(body.return_spec_tokens_details),
        input_ids=bool(body.return_input_ids_in_sglext),
        output_ids=bool(body.return_output_ids_in_sglext),
    )


def spread(value: T | list[T], count: int, param: str) -> list[T]:
    """Return one value per prompt. Raises InvalidValueError for another number of values."""
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise InvalidValueError(f"{param} has {len(value)} entries for {count} prompts.", param=param)
    return value
