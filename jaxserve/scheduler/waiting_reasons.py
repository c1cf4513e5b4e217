"""Why each waiting request waits: for operators, in /server_info and in the log."""

from __future__ import annotations

import enum
import logging

from jaxserve.types.request import Request

logger = logging.getLogger(__name__)


class WaitReason(enum.StrEnum):
    """What a request that has no slot waits for. The value is what operators read."""

    GRAMMAR = "its grammar is being compiled"
    ISOLATION = "requests are tried one by one to find the one that makes the device fail"
    ONLINE_FIRST = "it is a batch request, and online requests run first"
    SHARED_PREFIX = "another request computes the prefix that it shares"
    LAST_STEP = "the step that it ran in before it was preempted is not read yet"
    SLOT = "a free slot (scheduler.max_num_seqs)"
    PAGES = "free KV pages (cache.num_pages)"
    ROOM_BEFORE = "its turn: a request before it in the queue waits for room"
    TOKENS = "its turn: prompts before it take the tokens of a step (scheduler.max_num_batched_tokens)"


class Refusals:
    """Why requests were refused a slot in the last step.

    Costs one dictionary entry for each request that was tried and refused. A debug line is written if a request's
    reason changes.
    """

    def __init__(self) -> None:
        self._now: dict[str, WaitReason] = {}
        self._before: dict[str, WaitReason] = {}

    def open(self) -> None:
        """A new step begins."""
        self._before, self._now = self._now, {}

    def note(self, request: Request, reason: WaitReason) -> None:
        """The request could not start in this step."""
        self._now[request.request_id] = reason
        if self._before.get(request.request_id) is not reason:
            logger.debug("request %s waits: %s", request.request_id, reason.value)

    def of(self, request: Request) -> WaitReason | None:
        """The reason of the last step; None if the request was not tried in it."""
        return self._now.get(request.request_id)
