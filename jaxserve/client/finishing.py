"""A pause that waits for requests: those that have come so far end, in whichever engine, and no other starts.

It is decided here and not in the engines, because a request may leave its engine before it ends: one whose prompt goes
on in another engine, one whose engine died, one whose thinking was too long. A beam search is many requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.client.control import ControlRecord
from jaxserve.client.replicas import Replica
from jaxserve.client.sequence_sender import has_come
from jaxserve.client.sequences import SequenceTable

FINISH_POLL = 0.05  # seconds between two looks at the live sequences
LOOKS = 2  # that find none: a worker whose sequence thinks too long sends it anew
LOOKS_AFTER_STEPS = 20  # once a beam search was seen: a busy worker sends its next step later


class FinishingPause:
    """The calls that wait now. They wait for the sequences that had come at the last one of them."""

    def __init__(self, live: SequenceTable, replicas: Sequence[Replica], record: ControlRecord) -> None:
        self._live = live
        self._replicas = replicas
        self._record = record
        self._only = frozenset[str]()  # their keys
        self._num_calls = 0

    async def finish(self, pause: Callable[[], Awaitable[None]]) -> bool:
        """Call `pause` when the sequences of now have ended, at once if all engines are paused or asleep.

        Returns False, and does not call it, if the engines are resumed before.
        """
        self._num_calls += 1
        self._only = frozenset(each.key for each in self._live)
        self._start_only(self._only)
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
            left = [each for each in self._live if has_come(each, self._only)]
            num_looks = 0 if left else num_looks + 1
            if any(each.request.follows for each in left):
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
            replica.sender.only = keys
            replica.sender.send_held()
