"""Run the requests of one batch: read from the input file, limited by the window, committed as they finish."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.api.batch.batch_request import RequestRunner
from jaxserve.api.batch.committer import Committer
from jaxserve.api.batch.request_window import RequestWindow
from jaxserve.store import BATCH_LINE
from jaxserve.store.jsonl import Line, read_lines

READ_LINES = 32  # batch requests read from the file at a time, in a thread


@dataclass(frozen=True, slots=True)
class Input:
    """The batch requests that are still to run."""

    path: Path
    max_line_bytes: int
    finished: set[int]

    async def requests(self) -> AsyncIterator[Line]:
        lines = (line for line in read_lines(self.path, self.max_line_bytes) if line.number not in self.finished)
        while group := await asyncio.to_thread(_take, lines):
            for line in group:
                yield line


def _take(lines: Iterator[Line]) -> list[Line]:
    return list(itertools.islice(lines, READ_LINES))


class Execution:
    """Run every request of an input, each once the window has room for it."""

    def __init__(self, left: Input, runner: RequestRunner, window: RequestWindow, committer: Committer) -> None:
        self._left = left
        self._runner = runner
        self._window = window
        self._committer = committer

    async def run(self) -> None:
        """Return once every request has finished and is durable. If cancelled, cancel the requests in flight.

        Raises the first error of a request, or of saving its result.
        """
        try:
            async with asyncio.TaskGroup() as group:
                async for line in self._left.requests():
                    await self._start(line, group)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors

    async def _start(self, line: Line, group: asyncio.TaskGroup) -> None:
        assert line.data is not None, "validation refuses lines that are too long"
        size = len(line.data)
        await self._window.enter(size)
        task = group.create_task(self._run_request(line.number, line.data))
        # Done outside the task: a task cancelled before its first step runs none of its code.
        task.add_done_callback(lambda _: self._window.leave(size))

    async def _run_request(self, number: int, data: bytes) -> None:
        result = await self._runner.run(number, BATCH_LINE.decode(data))
        await self._committer.commit(result)
