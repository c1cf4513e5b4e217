"""What a streamed chunk costs the API process: `pytest -m slow tests/api/test_speed.py`, on an idle machine."""

import asyncio
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import uvicorn
import uvloop

from jaxserve.api.app import create_app
from jaxserve.cli.http_server import Server
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.types.messages import Add, Outputs, ToEngine
from jaxserve.types.sampling import EngineRequest
from jaxserve.types.step import FinishReason, TokenOutput

from .fakes import FakeLink

STREAMS, TOKENS, RUNS = 32, 400, 7
LIMIT_US = 20.0  # CPU of a chunk in the API process: issue's bound
REFERENCE_US = 12.5  # what uvicorn alone took where the bound was set

CLIENT = """
import json, selectors, socket, sys
port, streams, tokens = map(int, sys.argv[1:])
body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x"}], "stream": True,
                   "ignore_eos": True, "max_tokens": tokens}).encode()
head = b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: localhost\\r\\ncontent-type: application/json\\r\\n"
selector, left = selectors.DefaultSelector(), streams
for _ in range(streams):
    s = socket.create_connection(("127.0.0.1", port))
    s.sendall(head + b"content-length: %d\\r\\n\\r\\n" % len(body) + body)
    selector.register(s, selectors.EVENT_READ, [b""])
while left:
    for key, _ in selector.select():
        data = key.fileobj.recv(1 << 16)
        key.data[0] = (key.data[0] + data)[-40:]
        if b"[DONE]" in key.data[0] or not data:
            selector.unregister(key.fileobj)
            key.fileobj.close()
            left -= 1
"""


class BurstLink(FakeLink):
    """Waits for all streams, then sends one message a step to all of them; made before the clock starts."""

    def __init__(self) -> None:
        super().__init__()
        self.info = msgspec.structs.replace(self.info, max_model_len=1 << 20, max_num_seqs=STREAMS)
        self.requests: list[EngineRequest] = []
        self.started = 0.0

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Add):
            self.requests += message.requests()
            if len(self.requests) == STREAMS:
                self._task = asyncio.create_task(self._burst([r.request_id for r in self.requests]))
                self.requests = []

    async def _burst(self, ids: list[str]) -> None:
        last = TOKENS - 1
        messages = [
            Outputs(
                outputs=[
                    TokenOutput(
                        request_id=i, token_ids=[300 + n], finish_reason=FinishReason.LENGTH if n == last else None
                    )
                    for i in ids
                ]
            )
            for n in range(TOKENS)
        ]
        self.started = time.process_time()
        for message in messages:
            self._messages.put_nowait(message)
            await asyncio.sleep(0.004)


class Bare:
    """uvicorn alone: the same streams of the same bytes, from a queue."""

    CHUNK = b"data: " + b"x" * 180 + b"\n\n"

    def __init__(self) -> None:
        self.queues: list[asyncio.Queue[bytes | None]] = []
        self.started = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.queues.append(queue)
        if len(self.queues) == STREAMS:
            self._task = asyncio.create_task(self._burst(self.queues))
            self.queues = []
        while (data := await queue.get()) is not None:
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    async def _burst(self, queues: list[asyncio.Queue[bytes | None]]) -> None:
        self.started = time.process_time()
        for _ in range(TOKENS):
            for queue in queues:
                queue.put_nowait(self.CHUNK)
            await asyncio.sleep(0.004)
        for queue in queues:
            queue.put_nowait(None)


@asynccontextmanager
async def serving(app: Any, lifespan: Any) -> AsyncIterator[int]:
    """The port of a server of `app`."""
    config = uvicorn.Config(app, port=0, http="httptools", log_config=None, access_log=False, lifespan=lifespan)
    server = Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def cost(port: int, clock: Any) -> float:
    """Microseconds of CPU a chunk."""
    words = [sys.executable, "-c", CLIENT, *map(str, (port, STREAMS, TOKENS))]
    process = await asyncio.create_subprocess_exec(*words, stdout=subprocess.DEVNULL)
    assert await process.wait() == 0
    return (time.process_time() - clock.started) / (STREAMS * TOKENS) * 1e6


async def measure() -> tuple[float, float]:
    """(ours, uvicorn alone), medians of runs in turns, so that a drift of the machine hits both."""
    link, bare = BurstLink(), Bare()
    engine = AsyncEngine(Config(), link)
    await engine.start()
    async with serving(bare, "off") as theirs, serving(create_app(engine, Config()), "on") as ours:
        pairs = [(await cost(ours, link), await cost(theirs, bare)) for _ in range(RUNS)]
    await engine.stop()
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


@pytest.mark.slow
def test_the_cost_of_a_chunk(capsys: pytest.CaptureFixture[str]) -> None:
    """uvicorn alone is measured beside it, so that a slower or busier machine moves the bound with it."""
    ours, alone = uvloop.run(measure())
    with capsys.disabled():
        print(f"\na streamed chunk: {ours:.1f} us of CPU; uvicorn alone: {alone:.1f} us")
    assert ours <= LIMIT_US * max(1.0, alone / REFERENCE_US)
