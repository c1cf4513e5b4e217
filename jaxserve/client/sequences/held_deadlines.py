"""Ends requests whose deadline passes while no engine has them.

An engine ends its own. It has none of those that wait until it is started again, that are held back while a culprit is
looked for, or whose pages are on their way to another engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from jaxserve.client.sequences.sequence_table import LiveSequence, SequenceTable
from jaxserve.errors import HTTPError, RequestTimeoutError

DEADLINE_INTERVAL = 0.5  # seconds


class HeldDeadlines:
    """Looks for sequences that are overdue and in no engine.

    end: ends a sequence with an error. on_ended: called after some have ended
    """

    def __init__(
        self, live: SequenceTable, end: Callable[[LiveSequence, HTTPError], None], on_ended: Callable[[], None]
    ) -> None:
        self._live = live
        self._end = end
        self._on_ended = on_ended

    async def run(self) -> None:
        """Look for overdue requests until cancelled."""
        while True:
            await asyncio.sleep(DEADLINE_INTERVAL)
            ended = [self._end_if_overdue(sequence) for sequence in self._live if not sequence.is_sent]
            if any(ended):
                self._on_ended()

    def _end_if_overdue(self, sequence: LiveSequence) -> bool:
        deadline = sequence.request.deadline
        if deadline is None or time.monotonic() - sequence.accepted_at < deadline:
            return False
        self._end(sequence, RequestTimeoutError(f"the deadline of {deadline:g} s has passed"))
        return True
