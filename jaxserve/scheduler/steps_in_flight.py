"""The steps that were dispatched and not read, and what a step that was read means for the pages of its requests."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence

import msgspec

from jaxserve.kv.kv_manager import KVManager
from jaxserve.scheduler.admission import PrefillsInProgress
from jaxserve.types.step import Request, RequestStatus, ScheduledRow, SchedulerOutput

logger = logging.getLogger(__name__)


class StepsInFlight:
    """The dispatched steps, oldest first, each with the requests of its rows."""

    def __init__(self) -> None:
        self._steps: deque[tuple[SchedulerOutput, list[Request]]] = deque()

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def newest(self) -> SchedulerOutput:
        return self._steps[-1][0]

    def request_ids(self) -> Collection[str]:
        """Return the ids of the requests in these steps, without repetition."""
        return dict.fromkeys(request.request_id for _, requests in self._steps for request in requests)

    def add(self, output: SchedulerOutput, requests: list[Request]) -> None:
        self._steps.append((output, requests))

    def take(self, output: SchedulerOutput) -> list[Request]:
        """Remove the oldest step and return its requests. Raises ValueError unless it is `output`."""
        if not self._steps or self._steps[0][0] is not output:
            raise ValueError(f"step {output.step} is not the oldest one in flight")
        return self._steps.popleft()[1]

    def clear(self) -> None:
        self._steps.clear()

    # --- rows of the newest step with a late token mask

    def take_back(self, rows: Sequence[int]) -> None:
        """Cancel rows: they yield no token, and their last tokens are computed again."""
        output, requests = self._steps[-1]
        for i in rows:
            output.rows[i] = msgspec.structs.replace(output.rows[i], samples=False)
            most = 1 + len(output.rows[i].drafts)
            requests[i].num_computed_tokens -= most
            requests[i].num_inflight_tokens -= most

    def pause(self, paused: Collection[str]) -> None:
        """Pause the masked requests of `paused` until `Scheduler.resume`. The other masked ones continue."""
        output, requests = self._steps[-1]
        for row, request in zip(output.rows, requests, strict=True):
            if row.masked:
                request.is_paused = row.request_id in paused
                if request.is_paused:
                    logger.debug("request %s waits: its token mask is being computed", request.request_id)


class PromptProgress:
    """Shares the pages of prompts that were read, and frees window pages that no later step sees."""

    def __init__(self, kv: KVManager, prefills: PrefillsInProgress) -> None:
        self._kv = kv
        self._prefills = prefills

    def share_chunk(self, request: Request, row: ScheduledRow) -> None:
        """Allow sharing of the full pages of a prompt chunk that was read and is finite.

        The request may have ended or been preempted: it holds its pages until its last step is read.
        """
        if row.start == request.num_read_tokens:  # otherwise a chunk before this one was not finite
            request.num_read_tokens += row.num_tokens
            self._kv.commit(request, request.num_read_tokens)
            self._prefills.advance(request)

    def complete_prompt(self, request: Request) -> None:
        """Note the first finite result since admission."""
        request.prompt_done = True
        self._prefills.remove(request)

    def advance_windows(self, rows: Sequence[ScheduledRow], requests: Sequence[Request]) -> None:
        """Free window pages that no later step of these rows can see, now that their steps have been read."""
        window = self._kv.window
        if window is None:
            return
        running = RequestStatus.RUNNING
        for row, request in zip(rows, requests, strict=True):
            if request.status is running:
                computed = request.num_computed_tokens - request.num_inflight_tokens
                read = computed if row.samples else min(computed, row.start + row.num_tokens)
                if read >= request.window.due:
                    window.advance(request, read)
