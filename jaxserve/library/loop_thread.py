"""Run an event loop in a thread, for callers without a running loop or inside one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """Run coroutines while the caller waits. The thread is a daemon: it does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result. If the caller is interrupted, `work` is cancelled before this raises."""
        tasks: list[asyncio.Task[T]] = []
        ended = threading.Event()

        def start() -> None:
            tasks.append(self._loop.create_task(work))
            tasks[0].add_done_callback(lambda _: ended.set())

        self._loop.call_soon_threadsafe(start)
        try:
            ended.wait()
        except BaseException:
            self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
            ended.wait()
            raise
        return tasks[0].result()

    def settle(self, work: Coroutine[Any, Any, None]) -> None:
        """`run` of what releases something. From the thread itself, where the garbage collector may call it, it is
        only begun."""
        if threading.current_thread() is self._thread:
            self._pending = self._loop.create_task(work)
        elif self._thread.is_alive():
            self.run(work)
        else:
            work.close()

    def close(self) -> None:
        """Stop the thread. Running work is dropped and open generators are closed."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()
