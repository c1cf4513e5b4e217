"""The limits of the queue: scheduler.max_queued_requests and scheduler.max_queued_tokens."""

from __future__ import annotations

from typing import NamedTuple

from jaxserve.config import SchedulerSection
from jaxserve.errors import InvalidValueError, QueueFullError


class Load(NamedTuple):
    """Sequences that run or wait, and the prompt tokens of those that wait."""

    num_live: int
    waiting_tokens: int


def check_queue(section: SchedulerSection, max_num_seqs: int, load: Load, more: Load) -> None:
    """Raise QueueFullError unless `more` may wait, InvalidValueError if it never can."""
    limit, n = max_num_seqs + section.max_queued_requests, more.num_live
    if n > limit:
        raise InvalidValueError(f"{n} sequences are more than the {limit} that the queue holds", param="n")
    if n > limit - load.num_live:
        message = f"the queue is full ({section.max_queued_requests} requests wait)"
        raise QueueFullError(message, limit="max_queued_requests")
    waiting, most = load.waiting_tokens, section.max_queued_tokens
    if most is not None and waiting and waiting + more.waiting_tokens > most:
        raise QueueFullError(f"the queue is full ({waiting} prompt tokens wait)", limit="max_queued_tokens")
