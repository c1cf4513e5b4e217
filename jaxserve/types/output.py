"""What the engine gives back of one request, step by step. msgspec Structs: they cross the socket."""

from __future__ import annotations

import enum

import msgspec


class FinishReason(enum.StrEnum):
    STOP = "stop"  # an end-of-sequence or stop token (or, found by the text side, a stop string)
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # this request failed; see TokenOutput.error


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities (natural log, of the model's distribution at temperature 1) of one position."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top_ids: list[int] = []
    top_logprobs: list[float] = []
    watched: list[float] = []  # of the request's watched_token_ids, in their order


class Support(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one token was drawn from, after temperature, masks, top-k, top-p and min-p; likeliest first.

    Log-probabilities are those of the draw: over the candidates they add up to one.
    """

    logprob: float  # of the token
    ids: list[int]
    logprobs: list[float]


class TokenOutput(msgspec.Struct, kw_only=True, omit_defaults=True, gc=False):
    """What one request gained in one step. The last one of a request carries `finish_reason`."""

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # once, before or with the first token
    support: list[Support] | None = None  # aligned with token_ids
    hidden: bytes | None = None  # float32, little endian, [tokens, D]: each token's logits are made of its row
    prompt_hidden: bytes | None = None  # likewise of the prompt's tokens; once
    experts: bytes | None = None  # int32, little endian, [tokens, L, K]: of the token before each
    prompt_experts: bytes | None = None  # likewise of the prompt's tokens; once
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the token that ended it; it is the last of token_ids
    embedding: bytes | None = None  # float32, little endian; with finish_reason, of a request that asked for it
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache
    queue_seconds: float = 0.0  # arrival to admission; on the first output with a token
    first_token_seconds: float = 0.0  # arrival to the first token on the host; on that output
    num_preemptions: int = 0  # with finish_reason
    error: str | None = None
    error_status: int = 500  # HTTP status to answer with when nothing was streamed yet
    error_param: str | None = None  # the field at fault
