"""Threads for one kind of work of requests, with a bound on what waits for them.

Apart from asyncio's own pool, which files, batches and the store use: a flood of long texts delays none of those.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from jaxserve.errors import QueueFullError

T = TypeVar("T")


class Waiting:
    """How much work is in hand, waiting or running. Counts jobs and their sizes."""

    def __init__(self, what: str, max_jobs: int, max_size: int) -> None:
        self.jobs = 0
        self.size = 0
        self._what = what
        self._max_jobs = max_jobs
        self._max_size = max_size
        self._lock = threading.Lock()  # work ends in its own thread

    def enter(self, size: int) -> None:
        """Raises QueueFullError for work over a bound. One piece alone is taken, however large."""
        with self._lock:
            if self.jobs and (self.jobs >= self._max_jobs or self.size + size > self._max_size):
                raise QueueFullError(f"Too many {self._what} wait for a thread.")
            self.jobs += 1
            self.size += size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count work that another pool does. Raises QueueFullError for work over a bound."""
        self.enter(size)
        try:
            yield
        finally:
            self.leave(size)

    def leave(self, size: int) -> None:
        with self._lock:
            self.jobs -= 1
            self.size -= size


class WorkPool:
    """threads: their number; none is started before there is work. max_size: bound on the sum of sizes in hand."""

    def __init__(self, name: str, what: str, *, threads: int, max_jobs: int, max_size: int) -> None:
        self.waiting = Waiting(what, max_jobs, max_size)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """The result of `work`, done in a thread. Raises QueueFullError where too much waits.

        Work that has begun is counted to its end, also if nobody waits for it any more.
        """
        self.waiting.enter(size)
        try:
            future = self._executor.submit(work)
        except BaseException:
            self.waiting.leave(size)
            raise
        future.add_done_callback(lambda _: self.waiting.leave(size))
        return await asyncio.wrap_future(future)

    def stop(self) -> None:
        """Take no more work and forget what has not begun."""
        self._executor.shutdown(wait=False, cancel_futures=True)


class SizedPools:
    """Two pools for one kind of work: what is larger than `long` has a thread of its own and delays nothing smaller.

    threads: of the pool for smaller work. max_jobs, max_size: of each pool.
    """

    def __init__(self, name: str, what: str, *, long: int, threads: int, max_jobs: int, max_size: int) -> None:
        self.short = WorkPool(name, what, threads=threads, max_jobs=max_jobs, max_size=max_size)
        self.long = WorkPool(f"long-{name}", f"long {what}", threads=1, max_jobs=max_jobs, max_size=max_size)
        self._long = long

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Raises QueueFullError where too much waits."""
        return await (self.long if size > self._long else self.short).run(work, size)

    def stop(self) -> None:
        self.short.stop()
        self.long.stop()
