"""A pause that waits for requests: requests that came before it end, in whichever engine, and no other starts.

It is decided here and not in the engines, because a request may leave its engine before it ends: its prompt may go on
in another engine, its engine may die, or its thinking may be cut. A beam search is many requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.client.control import ControlRecord
from jaxserve.client.replicas import Replica
from jaxserve.client.sequence_sender import came_before
from jaxserve.client.sequences import SequenceTable

FINISH_POLL = 0.05  # seconds between two looks at the live sequences
LOOKS = 2  # looks in a row that find none, because a worker sends a sequence anew when its thinking is cut
LOOKS_AFTER_STEPS = 20  # the same once a beam search was seen, because a busy worker sends its next step later


class FinishingPause:
    """The pauses that wait now. All wait for the sequences that came before the last of them."""

    def __init__(self, live: SequenceTable, replicas: Sequence[Replica], record: ControlRecord) -> None:
        self._live = live
        self._replicas = replicas
        self._record = record
        self._keys = frozenset[str]()  # keys of these sequences
        self._num_calls = 0

    async def finish(self, pause: Callable[[], Awaitable[None]]) -> bool:
        """Call `pause` when the present sequences have ended, or at once if all engines are paused or asleep.

        Returns False, and does not call it, if the engines are resumed before.
        """
        self._num_calls += 1
        self._keys = frozenset(each.key for each in self._live)
        self._start_only(self._keys)
        try:
            if not await self._have_ended():
                return False
            await pause()
            return True
        finally:
            self._num_calls -= 1
            if not self._num_calls:
                self._start_only(None)

    async def _have_ended(self) -> bool:
        """Wait until the sequences have ended. Returns False if the engines are resumed before."""
        num_resumed, num_looks, enough = self._record.num_resumed, 0, LOOKS
        while num_looks < enough and self._is_awake:
            left = [each for each in self._live if came_before(each, self._keys)]
            num_looks = 0 if left else num_looks + 1
            if any(each.request.partly_answered for each in left):
                enough = LOOKS_AFTER_STEPS
            await asyncio.sleep(FINISH_POLL)
            if self._record.num_resumed > num_resumed:
                return False
        return True

    @property
    def _is_awake(self) -> bool:
        return any(not each.asleep for each in self._replicas if not each.is_dead)

    def _start_only(self, keys: frozenset[str] | None) -> None:
        for replica in self._replicas:
            replica.sender.allowed_keys = keys
            replica.sender.send_held()
