"""One thread at a time uses an engine in its process, and Ctrl-C does not stop it in the middle of a step."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from types import FrameType

POLL = 0.001  # seconds between two tries of a coroutine, which must not block its event loop


class Turns:
    """What runs under `held` or `awaited` runs alone. A thread may nest them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._later: deque[Callable[[], None]] = deque()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait until no other thread is within. A KeyboardInterrupt of the body is raised at its end."""
        with self._lock, interrupts_wait(), self._then_later():
            yield

    @contextlib.asynccontextmanager
    async def awaited(self) -> AsyncIterator[None]:
        """As `held`, for a coroutine whose body awaits nothing."""
        while not self._lock.acquire(blocking=False):
            await asyncio.sleep(POLL)
        try:
            with self._then_later():
                yield
        finally:
            self._lock.release()

    def soon(self, work: Callable[[], None]) -> None:
        """Run `work` now, or at the end of what runs in another thread. Never waits for one.

        The garbage collector may call this while the other thread waits for this one.
        """
        self._later.append(work)
        if self._lock.acquire(blocking=False):
            try:
                self._run_later()
            finally:
                self._lock.release()

    @contextlib.contextmanager
    def _then_later(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._run_later()

    def _run_later(self) -> None:
        while self._later:
            self._later.popleft()()


@contextlib.contextmanager
def interrupts_wait() -> Iterator[None]:
    """Raise the KeyboardInterrupt of a Ctrl-C at the end of the body, but that of a second one at once.

    Does nothing outside of the main thread, and if the program handles SIGINT itself.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    caught: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        if len(caught) > 1:
            signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if len(caught) == 1:
            raise KeyboardInterrupt
