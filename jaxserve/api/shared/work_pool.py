"""Threads for one kind of work, with a limit on what waits for them.

Separate from asyncio's own pool, which files, batches and the store use, so that long texts do not delay those.
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
    """Count the jobs in progress, waiting or running, and their sizes."""

    def __init__(self, what: str, max_jobs: int, max_size: int) -> None:
        self.jobs = 0
        self.size = 0
        self._what = what
        self._max_jobs = max_jobs
        self._max_size = max_size
        self._lock = threading.Lock()  # a job leaves in the thread that ran it

    def enter(self, size: int) -> None:
        """Count a job. Raises QueueFullError if it exceeds a limit. A single job is accepted whatever its size."""
        with self._lock:
            if self.jobs and (self.jobs >= self._max_jobs or self.size + size > self._max_size):
                raise QueueFullError(f"Too many {self._what} wait for a thread.")
            self.jobs += 1
            self.size += size

    @contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Count work that another pool runs. Raises QueueFullError if it exceeds a limit."""
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
    """A lazily started thread pool.

    threads: number of threads, started at the first job
    max_size: limit on the sum of sizes in progress
    """

    def __init__(self, name: str, what: str, *, threads: int, max_jobs: int, max_size: int) -> None:
        self.waiting = Waiting(what, max_jobs, max_size)
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], size: int) -> T:
        """Run `work` in a thread and return its result. Raises QueueFullError if too much waits.

        Work that has begun counts until its end, even if its caller no longer waits.
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
        """Accept no more work and drop what has not begun."""
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
