"""Outputs of the engine, per request and step. They are msgspec Structs because they cross the socket."""

from __future__ import annotations

import enum

import msgspec

from jaxserve.types.extras import TokenExtras

FIRST_VERSION = "default"  # label of the weights that the engine started with, as in SGLang


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence token, a stop token, or a stop string (found by the API process)
    LENGTH = "length"  # max_tokens or the context length was reached
    ABORT = "abort"  # the client disconnected or aborted the request
    ERROR = "error"  # the request failed; see TokenOutput.error


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural logarithm, at temperature 1) of one position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely token
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    watched: list[float] = []  # of the request's logprob_token_ids, in their order


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """The output of one request in one step. The last output of a request has a `finish_reason`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # sent once, before or with the first token
    extras: TokenExtras | None = None  # if the request asks for some
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the stop token; it is also the last of token_ids
    embedding: bytes | None = None  # float32 [D], little-endian; set with finish_reason if the request asked for it
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    queue_seconds: float = 0.0  # arrival to admission; set on the first output with a token
    first_token_seconds: float = 0.0  # arrival to the first token on the host; set on that output
    num_preemptions: int = 0  # set with finish_reason
    num_accepted_drafts: int = 0  # of token_ids, those that were drafts
    num_rejected_drafts: int = 0  # drafts that were computed and are not in token_ids
    weight_versions: tuple[str, ...] = ()  # labels of the weights that made it, if `is_made`; empty: FIRST_VERSION
    weights: int = 0  # number of the update that brought these weights, see ServingState; 0: they are of the start
    error: str | None = None
    error_status: int = 500  # HTTP status of the answer if nothing was streamed yet
    error_param: str | None = None  # the request field that caused the error

    @property
    def is_made(self) -> bool:
        """Whether the model computed something of it: tokens, an embedding, or a prompt of which no token is kept."""
        return bool(self.token_ids or self.embedding or self.first_token_seconds)


def joined_versions(*groups: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of several groups, each once, in order."""
    return tuple(dict.fromkeys(label for group in groups for label in group))
