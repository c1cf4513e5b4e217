"""Decides when a request ends: by its tokens, by the clock, or because its parameters exclude every token.

Stop strings are found in the API process (text/stop.py).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason, Request


def resolve(request: Request, eos_token_ids: tuple[int, ...]) -> None:
    """Set the fields that follow from a new request's parameters: stop tokens, last token to compute, extra outputs."""
    params = request.params
    eos = () if params.ignore_eos else eos_token_ids
    request.stop_token_ids = frozenset((*eos, *params.stop_token_ids))
    request.extras = params.extras if params.extras.wanted else None
    request.max_computed_tokens = request.num_prompt_tokens + request.max_tokens - 1


def end_of(request: Request, count: int) -> tuple[int, FinishReason | None, int | None]:
    """Check whether the last `count` tokens of the output end the request.

    Returns how many of them belong to the output, the finish reason or None, and the stop token. The first condition
    that holds ends the request: a stop token after at least `min_tokens` tokens, or `max_tokens`. Stop tokens before
    `min_tokens` are ordinary tokens.
    """
    output, stops = request.output_token_ids, request.stop_token_ids
    before = len(output) - count
    room = request.max_tokens - before
    for i, token in enumerate(output[before : before + room], start=1):
        if token in stops and before + i >= request.params.min_tokens:
            return i, FinishReason.STOP, token
    return (room, FinishReason.LENGTH, None) if count >= room else (count, None, None)


def overdue(request: Request, now: float, queue_timeout: float | None) -> str | None:
    """Return why a request has timed out; None if it has not. now: time.monotonic() seconds"""
    if request.deadline is not None and now >= request.deadline:
        return f"the deadline of {request.deadline - request.arrival:g} s has passed"
    is_new = request.admitted is None and not request.output_token_ids
    if queue_timeout is not None and is_new and now >= request.arrival + queue_timeout:
        return f"waited {queue_timeout:g} s in the queue"
    return None


class Timers:
    """Request ids by the time at which they must be checked, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str]] = []
        self._ties = itertools.count()

    def set(self, when: float, request_id: str) -> None:
        heapq.heappush(self._heap, (when, next(self._ties), request_id))

    def watch(self, request: Request, queue_timeout: float | None) -> None:
        """Set the times at which `overdue` may report the request."""
        if request.deadline is not None:
            self.set(request.deadline, request.request_id)
        if queue_timeout is not None:
            self.set(request.arrival + queue_timeout, request.request_id)

    def due(self, now: float) -> Iterator[str]:
        """Remove and return the ids whose time has come. Some of the requests may have ended before."""
        while self._heap and self._heap[0][0] <= now:
            yield heapq.heappop(self._heap)[2]


def check_allowed(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidValueError if the single-token bad_words_token_ids exclude every token that may be sampled."""
    banned = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
    if params.allowed_token_ids is not None:
        allowed = {token for token in params.allowed_token_ids if 0 <= token < vocab_size}
        if not allowed - banned:
            message = "allowed_token_ids leaves no token to sample" + (" beside bad_words" if allowed else "")
            raise InvalidValueError(message, param="allowed_token_ids")
    elif len(banned) >= vocab_size and banned.issuperset(range(vocab_size)):
        raise InvalidValueError("bad_words leaves no token to sample", param="bad_words")


def nothing_allowed(params: SamplingParams) -> str:
    """Return the error message for a request whose parameters exclude every token."""
    fields = {
        "response_format": params.grammar is not None,
        "allowed_token_ids": params.allowed_token_ids is not None,
        "bad_words": bool(params.bad_words_token_ids),
        "logit_bias": bool(params.logit_bias),
    }
    causes = [name for name, given in fields.items() if given] or ["the sampling parameters"]
    return f"no token is left to sample: {' and '.join(causes)} exclude every one"
