"""Waiting for a state. LAST_RESORT ends what hangs; it is no claim: the machine may be busy with other things."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

LAST_RESORT = 120.0  # seconds
POLL = 0.01


def wait_until(condition: Callable[[], T], what: str) -> T:
    """What the condition returns once that is true. `what` is the state that is waited for."""
    deadline = time.monotonic() + LAST_RESORT
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(POLL)
    return found


async def until(condition: Callable[[], T], what: str) -> T:
    """As wait_until, for code on an event loop."""
    deadline = time.monotonic() + LAST_RESORT
    while not (found := condition()):
        assert time.monotonic() < deadline, f"never: {what}"
        await asyncio.sleep(POLL)
    return found


@contextlib.contextmanager
def with_quick_collections() -> Iterator[None]:
    """What is there now is left out of garbage collections, as in the engine's process and the server's.

    A full one takes 0.14 s of CPU where jax was imported.
    """
    frozen = gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not frozen:  # otherwise the collected tests would be looked at too
            gc.unfreeze()
