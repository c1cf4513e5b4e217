"""Extra outputs per token, for few requests: log-probabilities of given ids, candidates, hidden states, experts.

Maps fields of a body to those of SamplingParams. The answers are written by jaxserve/api/respond/extras.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidValueError
from jaxserve.types.extras import MAX_CANDIDATES, HiddenStates
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import SamplingParams

MAX_HIDDEN_NUMBERS = 2**22  # per answer: 4 million, some 80 MB of JSON
MAX_EXPERT_NUMBERS = 2**24  # per answer: 64 MiB

SamplingMode = Literal["selected", "support"]
_EXPERTS_START = "routed_experts_start_len goes with return_routed_experts and is at most the prompt's length."


def _with_extras(params: SamplingParams, **changes: Any) -> SamplingParams:
    """Return `params` that also ask for these extras. changes: fields of ExtraParams"""
    extras = msgspec.structs.replace(params.extras, **changes)
    return msgspec.structs.replace(params, extras=extras, logprobs=params.logprobs or 0)


def watch(params: SamplingParams, ids: Sequence[int] | None, info: EngineInfo, param: str) -> SamplingParams:
    """Add log-probabilities of `ids` to `params`. Raises InvalidValueError unless the request asks for
    log-probabilities.
    """
    if not ids:
        return params
    if params.logprobs is None:
        raise InvalidValueError(f"{param} needs log-probabilities to be asked for.", param=param)
    for token_id in ids:
        if token_id >= info.vocab_size:
            message = f"{param}: {token_id} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param=param)
    return _with_extras(params, logprob_token_ids=tuple(dict.fromkeys(ids)))


def tell_candidates(params: SamplingParams, wanted: bool | None, mode: SamplingMode | None) -> SamplingParams:
    """Ask for the candidates of each draw in `params`, if `wanted`.

    Raises InvalidValueError if too many tokens could be candidates, or for a mode without `wanted`.
    """
    if not wanted:
        if mode is not None:
            message = "sampling_logprobs_mode needs return_sampling_mask: true."
            raise InvalidValueError(message, param="sampling_logprobs_mode")
        return params
    cut = 0 < params.top_k <= MAX_CANDIDATES or params.top_p < 1 or params.min_p > 0
    if params.temperature > 0 and not cut:
        message = f"return_sampling_mask needs top_k (at most {MAX_CANDIDATES}), top_p or min_p: all tokens are drawn."
        raise InvalidValueError(message, param="return_sampling_mask")
    return _with_extras(params, sampling_mask=True)


def show_hidden(params: SamplingParams, mode: HiddenStates) -> SamplingParams:
    """Add hidden states to `params`."""
    return _with_extras(params, hidden_states=mode) if mode else params


def route(params: SamplingParams, wanted: bool | None, start: int | None, info: EngineInfo) -> SamplingParams:
    """Add the routed experts of every token to `params`. Raises InvalidValueError if the model has none."""
    if start is not None and not wanted:
        raise InvalidValueError(_EXPERTS_START, param="routed_experts_start_len")
    if not wanted:
        return params
    if not info.routed[0]:
        raise InvalidValueError("return_routed_experts: the model has no experts.", param="return_routed_experts")
    return _with_extras(params, routed_experts=True)


def check_sizes(params: SamplingParams, experts_from: int | None, num_prompt_tokens: int, info: EngineInfo) -> None:
    """Raises InvalidValueError if the hidden states or routed experts of an answer would be too many numbers.

    params: with the final max_tokens
    """
    tokens = num_prompt_tokens + (params.max_tokens or 0)
    shown = {"": 0, "last": 1, "all": tokens}[params.extras.hidden_states]
    if shown * info.embedding_size * params.n > MAX_HIDDEN_NUMBERS:
        message = f"return_hidden_states: {shown} tokens of {info.embedding_size} numbers each are too many; "
        message += 'use "last", or fewer tokens.'
        raise InvalidValueError(message, param="return_hidden_states")
    if experts_from is not None and experts_from > num_prompt_tokens:
        raise InvalidValueError(_EXPERTS_START, param="routed_experts_start_len")
    layers, each = info.routed
    if params.extras.routed_experts and tokens * layers * each * params.n > MAX_EXPERT_NUMBERS:
        message = "return_routed_experts: too many numbers for one answer; ask for fewer tokens."
        raise InvalidValueError(message, param="return_routed_experts")


def mark(params: SamplingParams, asked: bool | None, key: int | None, param: str) -> SamplingParams:
    """Add the server's watermark to `params`, unless `asked` is False. Raises InvalidValueError without a key."""
    if asked and key is None:
        raise InvalidValueError(f"{param}: the server has no watermark key (server.watermark_key).", param=param)
    if asked is False or key is None or params.temperature == 0:
        return params
    return msgspec.structs.replace(params, watermark_key=key)


def check_no_extras(params: SamplingParams, shape: str) -> None:
    """Raises InvalidValueError if the body asks for per-token outputs that this generation mode cannot give."""
    asked = {
        "logprob_token_ids": params.extras.logprob_token_ids,
        "return_sampling_mask": params.extras.sampling_mask,
        "return_hidden_states": params.extras.hidden_states,
        "return_routed_experts": params.extras.routed_experts,
    }
    for name, value in asked.items():
        if value:
            raise InvalidValueError(f"{shape} does not go with {name}.", param=name)
