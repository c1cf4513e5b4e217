"""A batch runner over a real store, with a handler whose answers are known."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from jaxserve.api.batch.job import BatchSettings
from jaxserve.api.batch.request import Answered
from jaxserve.api.batch.runner import BatchRunner
from jaxserve.store import BatchRecord, Disk, NewBatch, Store

ENDPOINT = "/v1/chat/completions"
DAY = 24 * 3600


def input_line(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": f"Question {number}"}]} | body
    return {"custom_id": f"c{number}", "method": "POST", "url": "/chat/completions", "body": body}


def input_file(count: int, **body: Any) -> bytes:
    return b"".join(json.dumps(input_line(number, **body)).encode() + b"\n" for number in range(1, count + 1))


@dataclass
class FakeHandler:
    """Answers with the question. `behave` may raise, wait or answer otherwise for one call.

    Calls after the first `allowed` wait: so a batch stops where a test wants it, however fast it is.
    """

    behave: Callable[[dict[str, Any]], Any] = lambda body: None
    delay: float = 0.0
    allowed: float = float("inf")
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    calls: Counter[str] = field(default_factory=Counter)
    running: int = 0
    peak: int = 0
    cancelled: int = 0

    def allow(self, more: float = float("inf")) -> None:
        """Let so many further calls end."""
        self.allowed = self.calls.total() + more
        self._more.set()
        self._more = asyncio.Event()

    async def __call__(self, body: bytes, request_id: str, owner: str) -> Answered:
        fields = orjson.loads(body)
        question = fields["messages"][0]["content"]
        self.calls[question] += 1
        number = self.calls.total()
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            while number > self.allowed:
                await self._more.wait()
            await asyncio.sleep(self.delay)
            special = self.behave(fields)
            if asyncio.iscoroutine(special):
                special = await special
            return special or Answered(200, answer(question))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


def answer(question: str) -> bytes:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
    return orjson.dumps({"choices": [{"message": {"content": question[::-1]}}], "usage": usage})


@dataclass
class Bench:
    """A store, a handler and, while `running`, a runner."""

    path: Path
    handler: FakeHandler = field(default_factory=FakeHandler)
    disk: Disk = field(default_factory=Disk)
    now: float = 1_700_000_000
    places: int = 8
    ready: bool = True
    max_running: int = 8
    max_line_bytes: int = 2**20

    def open(self) -> Store:
        return Store(self.path / "store", disk=self.disk, clock=lambda: self.now)

    def settings(self) -> BatchSettings:
        return BatchSettings(
            known_model=lambda name: name == "demo",
            ready=lambda: self.ready,
            max_line_bytes=self.max_line_bytes,
            max_running=self.max_running,
            tick=0.01,
            retry_delay=0.01,
        )

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[BatchRunner]:
        """One life of a server. Leaving it stops the runner in whatever it is doing."""
        store = self.open()
        runner = BatchRunner(store, {ENDPOINT: self.handler}, self.settings(), lambda lines: self.places)
        await runner.start()
        try:
            yield runner
        finally:
            await runner.stop()
            await store.close()


async def submit(runner: BatchRunner, data: bytes) -> str:
    """Upload and create; the batch's id."""
    incoming = runner.store.begin_upload()
    await incoming.write(data)
    file = await incoming.finish(filename="in.jsonl", purpose="batch", expires_seconds=None)
    return (await runner.create(NewBatch(ENDPOINT, file.id, "24h", DAY), None, lambda r: r.id.encode())).decode()


async def until(runner: BatchRunner, batch_id: str, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
    deadline = time.monotonic() + 120
    while not condition(batch := await runner.store.get_batch(batch_id)):
        assert time.monotonic() < deadline, f"it never came: {batch}"
        await asyncio.sleep(0.005)
    return batch


async def holds(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        await asyncio.sleep(0.005)


async def ended(runner: BatchRunner, batch_id: str) -> BatchRecord:
    return await until(runner, batch_id, lambda batch: batch.status.terminal)


async def read_lines(runner: BatchRunner, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    _, file = await runner.store.open_file(file_id)
    with file:
        return [json.loads(line) for line in file.read().splitlines()]
