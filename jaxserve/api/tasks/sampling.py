"""Read SamplingParams from a body: apply the model's defaults and the checks that need the model, not the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.api.protocol.common import SamplingFields
from jaxserve.api.protocol.generate import NativeSampling
from jaxserve.api.protocol.limits import DEFAULT_NATIVE_TOKENS, MAX_BAD_WORD_TOKENS, MAX_STOP_CHARS
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.extras import mark, route, show_hidden, tell_candidates, watch
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidValueError
from jaxserve.text.stop import StopPatterns
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import SamplingParams

_HARD_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(
    body: SamplingFields, state: ServerState, *, max_tokens: int | None, logprobs: int | None, **others: Any
) -> SamplingParams:
    """Return the parameters of one prompt. Raises InvalidValueError.

    max_tokens: as requested; None: the rest of the context. others: further fields of SamplingParams
    """
    info = state.engine.info
    fields: dict[str, Any] = _shared_fields(body, info) | {
        "allowed_token_ids": _allowed(body.allowed_token_ids, info),
        "bad_words_token_ids": _bad_words(body.bad_words or [], state.engine.tokenizer),
        "seed": _seed(body.seed),
        "max_tokens": max_tokens,
        "min_tokens": _min_tokens(body.min_tokens, max_tokens, "min_tokens"),
        "include_stop_str_in_output": bool(body.include_stop_str_in_output or body.no_stop_trim),
        "logprobs": logprobs,
        "prompt_logprobs": body.prompt_logprobs,
    }
    params = SamplingParams(**(fields | others))
    params = watch(params, body.logprob_token_ids, info, "logprob_token_ids")
    params = tell_candidates(params, body.return_sampling_mask, body.sampling_logprobs_mode)
    params = route(params, body.return_routed_experts, body.routed_experts_start_len, info)
    params = show_hidden(params, "last" if body.return_hidden_states else "")
    param = "watermarking" if body.watermark is None else "watermark"
    asked = body.watermarking if body.watermark is None else body.watermark
    return mark(params, asked, reveal(state.config.server.watermark_key), param)


def native_params(body: NativeSampling, info: EngineInfo, **others: Any) -> SamplingParams:
    """Return the parameters of /generate; `others` are further fields of SamplingParams. Raises InvalidValueError."""
    max_tokens = DEFAULT_NATIVE_TOKENS if body.max_new_tokens is None else body.max_new_tokens
    return SamplingParams(
        **_shared_fields(body, info),
        seed=_seed(body.sampling_seed),
        max_tokens=max_tokens,
        min_tokens=_min_tokens(body.min_new_tokens, max_tokens, "min_new_tokens"),
        include_stop_str_in_output=bool(body.no_stop_trim),
        **others,
    )


def _shared_fields(body: SamplingFields | NativeSampling, info: EngineInfo) -> dict[str, Any]:
    """Read the fields that have the same names on all routes."""
    return _distribution(body, info) | {
        "n": body.n or 1,
        "logit_bias": _logit_bias(body.logit_bias, info),
        "ignore_eos": bool(body.ignore_eos),
        "speculate": body.speculate is not False,
        "stop_token_ids": _vocabulary(body.stop_token_ids, info, "stop_token_ids"),
        "stop": _stops(body.stop),
        "stop_regex": _patterns(body.stop_regex, body.n or 1),
        "skip_special_tokens": body.skip_special_tokens is not False,
        "spaces_between_special_tokens": body.spaces_between_special_tokens is not False,
    }


def _distribution(body: SamplingFields | NativeSampling, info: EngineInfo) -> dict[str, Any]:
    values: dict[str, Any] = {
        "frequency_penalty": body.frequency_penalty or 0.0,
        "presence_penalty": body.presence_penalty or 0.0,
    }
    for name, hard in _HARD_DEFAULTS.items():
        given = getattr(body, name)
        values[name] = info.generation_defaults.get(name, hard) if given is None else given
    values["top_k"] = max(0, int(values["top_k"]))
    return values


def logit_changes(params: SamplingParams, info: EngineInfo) -> dict[str, Any]:
    """Return the fields of a request that change the model's logits, each with a value that is false if it is unset."""
    usual = info.generation_defaults.get("repetition_penalty", _HARD_DEFAULTS["repetition_penalty"])
    return {
        "logit_bias": params.logit_bias,
        "bad_words": params.bad_words_token_ids,
        "allowed_token_ids": params.allowed_token_ids,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty != usual,
        "min_tokens": params.min_tokens,
    }


def _seed(seed: int | None) -> int | None:
    return None if seed is None else seed & (2**63 - 1)


def _min_tokens(asked: int | None, max_tokens: int | None, param: str) -> int:
    if asked and max_tokens is not None and asked > max_tokens:
        raise InvalidValueError(f"{param} ({asked}) is more than the maximum ({max_tokens}).", param=param)
    return asked or 0


def _logit_bias(bias: dict[str, float] | None, info: EngineInfo) -> dict[int, float]:
    table = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < info.vocab_size):
            message = f"logit_bias: {key[:40]!r} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param="logit_bias")
        table[int(key)] = value
    return table


def _vocabulary(token_ids: Sequence[int] | None, info: EngineInfo, param: str) -> tuple[int, ...]:
    for token_id in token_ids or ():
        if token_id >= info.vocab_size:
            message = f"{param}: {token_id} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param=param)
    return tuple(dict.fromkeys(token_ids or ()))


def _allowed(token_ids: list[int] | None, info: EngineInfo) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    if not token_ids:
        raise InvalidValueError("allowed_token_ids is empty: no token could be sampled.", param="allowed_token_ids")
    return _vocabulary(token_ids, info, "allowed_token_ids")


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Tokenize each word as it is at the start of a text and after a space."""
    variants = [text for word in words for text in (word, " " + word.lstrip())]
    found = dict.fromkeys(tuple(tokenizer.encode(text, add_special_tokens=False)) for text in variants)
    sequences = tuple(sequence for sequence in found if sequence)
    if sum(map(len, sequences)) > MAX_BAD_WORD_TOKENS:
        raise InvalidValueError(f"bad_words are over {MAX_BAD_WORD_TOKENS} tokens.", param="bad_words")
    return sequences


def _texts(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def _stops(value: str | list[str] | None) -> tuple[str, ...]:
    stops = _texts(value)
    if sum(map(len, stops)) > MAX_STOP_CHARS:
        raise InvalidValueError(f"stop has more than {MAX_STOP_CHARS} characters in all", param="stop")
    return stops


def _patterns(value: str | list[str] | None, num_choices: int) -> tuple[str, ...]:
    patterns = _texts(value)
    StopPatterns(patterns, num_choices=num_choices)  # raises if a pattern cannot be searched
    return patterns
