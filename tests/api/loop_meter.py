"""How long the event loop of a LiveServer is held at most: CPU time of its thread, whatever else the machine does."""

import asyncio
import time

from tests.waiting import with_quick_collections

from .conftest import LiveServer


class LoopMeter:
    """The longest CPU time between two turns, a millisecond apart at least, of a task on the server's loop.

    What lives is frozen meanwhile, as the server does at its start: a full collection takes 0.2 s in a test's process.
    """

    def __init__(self, server: LiveServer) -> None:
        self._server = server
        self.longest = 0.0
        self._collections = with_quick_collections()

    def __enter__(self) -> "LoopMeter":
        self._collections.__enter__()
        self._task = self._server.call(lambda: asyncio.ensure_future(self._run()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.call(self._task.cancel)
        self._collections.__exit__(None, None, None)

    async def _run(self) -> None:
        last = time.thread_time()
        while True:
            await asyncio.sleep(0.001)  # without a pause it would keep the interpreter's lock from other threads
            now = time.thread_time()
            self.longest = max(self.longest, now - last)
            last = now
