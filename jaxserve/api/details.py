"""What few requests ask for of each token: log-probabilities of chosen ids, the candidates of the draw, hidden states.

From a body's fields to those of SamplingParams, and from outputs to the forms of the wire.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from jaxserve.api.growing_json import GrowingArray
from jaxserve.api.logprobs import floor
from jaxserve.engine.messages import EngineInfo
from jaxserve.engine.output import RequestOutput
from jaxserve.engine.request import HiddenStates, SamplingParams, Support
from jaxserve.errors import InvalidValueError

MAX_CANDIDATES = 256  # of a token: what the device gives
MAX_HIDDEN_NUMBERS = 2**22  # of one answer: 4 million, some 80 MB of JSON
MAX_EXPERT_NUMBERS = 2**24  # of one answer, 64 MiB

SamplingMode = Literal["selected", "support"]


def watch(params: SamplingParams, ids: Sequence[int] | None, info: EngineInfo, param: str) -> SamplingParams:
    """`params` with the log-probabilities of `ids` too. Raises InvalidValueError unless log-probabilities are asked."""
    if not ids:
        return params
    if params.logprobs is None:
        raise InvalidValueError(f"{param} needs log-probabilities to be asked for.", param=param)
    for token_id in ids:
        if token_id >= info.vocab_size:
            message = f"{param}: {token_id} is no token id; the vocabulary has {info.vocab_size}."
            raise InvalidValueError(message, param=param)
    return msgspec.structs.replace(params, watched_token_ids=tuple(dict.fromkeys(ids)))


def tell_candidates(params: SamplingParams, wanted: bool | None, mode: SamplingMode | None) -> SamplingParams:
    """`params` with the candidates of each draw, if `wanted`. Raises InvalidValueError where they cannot be told."""
    if not wanted:
        if mode is not None:
            message = "sampling_logprobs_mode needs return_sampling_mask: true."
            raise InvalidValueError(message, param="sampling_logprobs_mode")
        return params
    cut = 0 < params.top_k <= MAX_CANDIDATES or params.top_p < 1 or params.min_p > 0
    if params.temperature > 0 and not cut:
        message = f"return_sampling_mask needs top_k (at most {MAX_CANDIDATES}), top_p or min_p: all tokens are drawn."
        raise InvalidValueError(message, param="return_sampling_mask")
    return msgspec.structs.replace(params, support=True, logprobs=params.logprobs or 0)


def show_hidden(params: SamplingParams, mode: HiddenStates, num_prompt_tokens: int, info: EngineInfo) -> SamplingParams:
    """`params` with hidden states. Raises InvalidValueError for more numbers than one answer may have."""
    if not mode:
        return params
    tokens = num_prompt_tokens + (params.max_tokens or 0) if mode == "all" else 1
    if tokens * info.embedding_size * params.n > MAX_HIDDEN_NUMBERS:
        message = f"return_hidden_states: {tokens} tokens of {info.embedding_size} numbers each are too many; "
        message += 'use "last", or fewer tokens.'
        raise InvalidValueError(message, param="return_hidden_states")
    return msgspec.structs.replace(params, hidden_states=mode, logprobs=params.logprobs or 0)


def route(
    params: SamplingParams, wanted: bool | None, start: int | None, num_prompt_tokens: int, info: EngineInfo
) -> SamplingParams:
    """`params` with the experts of every token. Raises InvalidValueError where there are none, or too many."""
    if start is not None and not (wanted and start <= num_prompt_tokens):
        message = "routed_experts_start_len goes with return_routed_experts and is at most the prompt's length."
        raise InvalidValueError(message, param="routed_experts_start_len")
    if not wanted:
        return params
    layers, each = info.routed
    if not layers:
        raise InvalidValueError("return_routed_experts: the model has no experts.", param="return_routed_experts")
    if (num_prompt_tokens + (params.max_tokens or 0)) * layers * each * params.n > MAX_EXPERT_NUMBERS:
        message = "return_routed_experts: too many numbers for one answer; ask for fewer tokens."
        raise InvalidValueError(message, param="return_routed_experts")
    return msgspec.structs.replace(params, experts=True, logprobs=params.logprobs or 0)


def mark(params: SamplingParams, asked: bool | None, key: int | None, param: str) -> SamplingParams:
    """`params` with the server's watermark, unless `asked` is False. Raises InvalidValueError without a key."""
    if asked and key is None:
        raise InvalidValueError(f"{param}: the server has no watermark key (server.watermark_key).", param=param)
    if asked is False or key is None or params.temperature == 0:
        return params
    return msgspec.structs.replace(params, watermark_key=key)


def check_no_details(params: SamplingParams, shape: str) -> None:
    """Raises InvalidValueError for a way of generating whose tokens have no details."""
    asked = {
        "logprob_token_ids": params.watched_token_ids,
        "return_sampling_mask": params.support,
        "return_hidden_states": params.hidden_states,
        "return_routed_experts": params.experts,
    }
    for name, value in asked.items():
        if value:
            raise InvalidValueError(f"{shape} does not go with {name}.", param=name)


def last_vector(output: RequestOutput) -> list[float] | None:
    """The hidden state that the output's last token was drawn after."""
    vectors = hidden_vectors(output)
    return vectors[-1].tolist() if len(vectors) else None


def hidden_vectors(output: RequestOutput) -> np.ndarray:
    """float32 [tokens, D]"""
    return matrix(output.hidden, len(output.token_ids))


def matrix(data: bytes | None, rows: int) -> np.ndarray:
    """float32 [rows, D] of what crossed the wire; [0, 0] for none."""
    return np.zeros((0, 0), np.float32) if not data else np.frombuffer(data, "<f4").reshape(rows, -1)


class Candidates:
    """SGLang's sampling mask of one choice, token by token. A token that was not drawn has none.

    mode: "support" gives the log-probabilities of all candidates, else of the token among them
    """

    def __init__(self, mode: SamplingMode | None) -> None:
        self._mode = mode
        self._masks, self._logprobs = GrowingArray(), GrowingArray()

    def note(self, output: RequestOutput) -> None:
        found = output.support or [None] * len(output.token_ids)
        self._masks.extend([None if each is None else each.ids for each in found])
        self._logprobs.extend([None if each is None else self._values(each) for each in found])

    def _values(self, support: Support) -> float | list[float]:
        return _floored(support.logprobs) if self._mode == "support" else floor(support.logprob)

    def clear(self) -> None:
        self._masks.clear()
        self._logprobs.clear()

    def as_dict(self) -> dict[str, Any]:
        """As values that orjson encodes."""
        return {
            "output_token_sampling_mask": self._masks.fragment,
            "output_token_sampling_logprobs": self._logprobs.fragment,
        }


class RoutedExperts:
    """The experts of one choice: of every token but the last, which nothing was computed of."""

    def __init__(self) -> None:
        self._prompt = b""
        self._output = bytearray()  # of the token before each one of the output; the first is the prompt's last

    def note(self, output: RequestOutput) -> None:
        self._prompt = output.prompt_experts or self._prompt
        self._output += output.experts or b""

    def encoded(self, start: int, num_prompt_tokens: int) -> str:
        """SGLang's form: base64 of int32 [tokens from `start` on, sparse layers, experts each]."""
        size = len(self._prompt) // num_prompt_tokens
        return base64.b64encode((self._prompt + self._output[size:])[start * size :]).decode()


def _floored(values: list[float]) -> list[float]:
    return [floor(value) for value in values]
