"""Turn a validated body into SamplingParams: apply the model's defaults and the checks that need the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxserve.api.generate.details import route, show_hidden, tell_candidates, watch
from jaxserve.api.protocol.common import SamplingFields
from jaxserve.api.protocol.generate import NativeSampling
from jaxserve.api.protocol.limits import DEFAULT_NATIVE_TOKENS, MAX_BAD_WORD_TOKENS, MAX_STOP_CHARS
from jaxserve.errors import InvalidValueError
from jaxserve.text.patterns import StopPatterns
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineInfo
from jaxserve.types.sampling import GrammarSpec, SamplingParams

_HARD_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


def sampling_params(
    body: SamplingFields,
    info: EngineInfo,
    tokenizer: Tokenizer,
    *,
    max_tokens: int | None,
    num_prompt_tokens: int,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    grammar: GrammarSpec | None = None,
) -> SamplingParams:
    """Return the parameters of one prompt. `max_tokens` None: the rest of the context.

    Raises InvalidValueError.
    """
    limit = clamp_max_tokens(max_tokens, num_prompt_tokens, info)
    params = SamplingParams(
        **_distribution(body, info),
        n=body.n or 1,
        logit_bias=_logit_bias(body.logit_bias, info),
        allowed_token_ids=_allowed(body.allowed_token_ids, info),
        bad_words_token_ids=_bad_words(body.bad_words or [], tokenizer),
        seed=_seed(body.seed),
        max_tokens=limit,
        min_tokens=_min_tokens(body.min_tokens, max_tokens, limit, "min_tokens"),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_vocabulary(body.stop_token_ids, info, "stop_token_ids"),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        stop=_stops(body.stop),
        stop_regex=_patterns(body.stop_regex, body.n or 1),
        include_stop_str_in_output=bool(body.include_stop_str_in_output or body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
    )
    params = watch(params, body.logprob_token_ids, info, "logprob_token_ids")
    params = tell_candidates(params, body.return_sampling_mask, body.sampling_logprobs_mode)
    params = route(params, body.return_routed_experts, body.routed_experts_start_len, num_prompt_tokens, info)
    return show_hidden(params, "last" if body.return_hidden_states else "", num_prompt_tokens, info)


def native_params(body: NativeSampling, info: EngineInfo, num_prompt_tokens: int, **extra: Any) -> SamplingParams:
    """Return the parameters of /generate; `extra` are fields of SamplingParams."""
    asked = DEFAULT_NATIVE_TOKENS if body.max_new_tokens is None else body.max_new_tokens
    limit = clamp_max_tokens(asked, num_prompt_tokens, info)
    return SamplingParams(
        **_distribution(body, info),
        n=body.n or 1,
        logit_bias=_logit_bias(body.logit_bias, info),
        seed=_seed(body.sampling_seed),
        max_tokens=limit,
        min_tokens=_min_tokens(body.min_new_tokens, asked, limit, "min_new_tokens"),
        ignore_eos=bool(body.ignore_eos),
        stop_token_ids=_vocabulary(body.stop_token_ids, info, "stop_token_ids"),
        stop=_stops(body.stop),
        stop_regex=_patterns(body.stop_regex, body.n or 1),
        include_stop_str_in_output=bool(body.no_stop_trim),
        skip_special_tokens=body.skip_special_tokens is not False,
        spaces_between_special_tokens=body.spaces_between_special_tokens is not False,
        **extra,
    )


def clamp_max_tokens(asked: int | None, num_prompt_tokens: int, info: EngineInfo) -> int:
    """Limit to the rest of the context, and to at least 1: the engine always samples; the caller drops it for 0."""
    room = info.max_model_len - num_prompt_tokens
    return room if asked is None else max(1, min(asked, room))


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


def _seed(seed: int | None) -> int | None:
    return None if seed is None else seed & (2**63 - 1)


def _min_tokens(asked: int | None, max_tokens: int | None, limit: int, param: str) -> int:
    if asked and max_tokens is not None and asked > max_tokens:
        raise InvalidValueError(f"{param} ({asked}) is more than the maximum ({max_tokens}).", param=param)
    return min(asked or 0, limit)


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
