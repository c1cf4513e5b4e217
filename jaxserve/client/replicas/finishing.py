"""A pause that waits for requests: those that have come so far end, in whichever engine, and no other starts.

It is decided here and not in the engines, because a request may leave its engine before it ends: one whose prompt goes
on in another engine, one whose engine died, one whose thinking was too long. A beam search is many requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from jaxserve.client.replicas.control_record import ControlRecord
from jaxserve.client.replicas.replica import Replica
from jaxserve.client.sequences.sequence_sender import has_come
from jaxserve.client.sequences.sequence_table import SequenceTable

FINISH_POLL = 0.05  # seconds between two looks at the live sequences
LOOKS = 2  # that find none: a worker whose sequence thinks too long sends it anew
LOOKS_AFTER_STEPS = 20  # once a beam search was seen: a busy worker sends its next step later


async def finish(
    live: SequenceTable, replicas: Sequence[Replica], record: ControlRecord, pause: Callable[[], Awaitable[None]]
) -> bool:
    """Call `pause` when the sequences of now have ended, at once if all engines are paused or asleep.

    Returns False, and does not call it, if the engines are resumed before.
    """
    only, num_resumed = frozenset(each.key for each in live), record.num_resumed
    _start_only(replicas, only)
    try:
        num_looks, enough = 0, LOOKS
        while num_looks < enough and _is_awake(replicas):
            left = [each for each in live if has_come(each, only)]
            num_looks = 0 if left else num_looks + 1
            if any(each.request.continues for each in left):
                enough = LOOKS_AFTER_STEPS
            await asyncio.sleep(FINISH_POLL)
            if record.num_resumed > num_resumed:
                return False
        await pause()
        return True
    finally:
        _start_only(replicas, None)


def _is_awake(replicas: Sequence[Replica]) -> bool:
    return any(not each.asleep for each in replicas if not each.is_dead)


def _start_only(replicas: Sequence[Replica], keys: frozenset[str] | None) -> None:
    for replica in replicas:
        replica.sender.only = keys
        replica.sender.send_held()
