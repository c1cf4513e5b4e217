"""Count which files of the package a request goes through, without a model's device: a reader's way through the code.

    python -m benchmarks.walk [--write]

A walk is measured as the files that are entered, the calls, the moves (a call in another file than the call before it),
and how many of the moves go back to a file that was entered before. The API's walks run over the tests' fake engine,
the decode step over the tests' fake device, and `load_model` reads the demo model. benchmarks/walk.json has the table;
`--write` writes it. The calls of a batch vary by a tenth, because it waits for a store.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import httpx2
import jax.numpy as jnp
import orjson

import jaxserve
from jaxserve.api.app import create_app
from jaxserve.config import Config
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.runtime.mesh import make_mesh
from jaxserve.store import Store
from jaxserve.types.messages import Add, ToEngine
from tests.api.fakes import DEMO, fake_engine
from tests.engine.test_server import ListChannel, serve
from tests.fakes import make_core, make_request, small_config

PACKAGE = str(Path(jaxserve.__file__).parent) + "/"
TABLE = Path(__file__).with_name("walk.json")
# What every walk but the last takes; a longer answer has the same steps.
MESSAGES = [{"role": "user", "content": "Hello"}]
ANSWER = "one two three four five six seven eight nine ten"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome, the old one, near the river"}}\n</tool_call>'
TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
_WAIT = 0.01  # seconds between two looks at a batch
_unseen = contextvars.ContextVar("unseen", default=False)


Call = tuple[int, str]  # the thread, and the file in which the call begins


@dataclass(frozen=True)
class Walk:
    """How far a reader goes: files entered, calls, moves between files, and moves back to a file entered before."""

    files: int
    calls: int
    moves: int
    back: int


class Recorder:
    """Notes in which file each call of the package begins, in every thread."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._on = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Record this thread and those that it starts."""
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def begin(self) -> None:
        self._calls, self._on = [], True

    def end(self) -> list[Call]:
        self._on = False
        return self._calls

    def _profile(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        # comprehensions are functions of their own until Python 3.12
        named = code.co_name == "<lambda>" or not code.co_name.startswith("<")
        if self._on and event == "call" and named and code.co_filename.startswith(PACKAGE) and not _unseen.get():
            self._calls.append((threading.get_ident(), code.co_filename.removeprefix(PACKAGE)))


def walk_of(calls: list[Call]) -> Walk:
    """Return the size of a walk. Moves are counted within a thread."""
    last: dict[int, str] = {}
    seen: set[tuple[int, str]] = set()
    moves = back = 0
    for thread, file in calls:
        if last.get(thread) != file:
            moves += 1
            back += (thread, file) in seen
        last[thread] = file
        seen.add((thread, file))
    return Walk(len({file for _, file in calls}), len(calls), moves, back)


def usual(found: list[list[Call]]) -> Walk:
    """Return the walk that is met most often; of several the shortest."""
    walks = [walk_of(calls) for calls in found]
    return max(sorted(Counter(walks).items(), key=lambda item: item[0].calls), key=lambda item: item[1])[0]


async def measure_api(recorder: Recorder) -> dict[str, Walk]:
    """Measure a chat to its first token, a token, a token of a tool call, and a batch of one line."""
    engine, link = fake_engine(Config())
    await engine.start()
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        app = create_app(engine, Config(), store=store)
        async with app.router.lifespan_context(app):
            body = {"model": "demo", "messages": MESSAGES, "stream": True}
            link.script = lambda prompt, params: ANSWER
            await _events(app, body, recorder)  # what happens once a server
            answer = await _events(app, body, recorder)
            link.script = lambda prompt, params: CALL
            tools = [{"type": "function", "function": TOOL}]
            call = await _events(app, body | {"tools": tools}, recorder)
            link.script = lambda prompt, params: ANSWER
            transport = httpx2.ASGITransport(app=app)
            async with httpx2.AsyncClient(transport=transport, base_url="http://walk") as client:
                await _batch(client)
                recorder.begin()
                await _batch(client)
                batch = walk_of(recorder.end())
        await store.close()
    await engine.stop()
    first = next(number for number, (event, _) in enumerate(answer) if _delta(event).get("content"))
    texts = [calls for event, calls in answer if _delta(event).get("content")]
    arguments = [calls for event, calls in call if _delta(event).get("tool_calls")]
    return {
        "a chat to its first token": walk_of([each for _, calls in answer[: first + 1] for each in calls]),
        "a token": usual(texts[2:]),
        "a token of a tool call": usual(arguments[2:]),
        "a batch of one line": batch,
    }


async def _events(app: Any, body: dict[str, Any], recorder: Recorder) -> list[tuple[Any, list[Call]]]:
    """Post a chat to the application itself; return each event, with the calls since the event before."""
    events: list[tuple[Any, list[Call]]] = []
    request = [{"type": "http.request", "body": orjson.dumps(body), "more_body": False}]
    forever = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not request:
            await forever.wait()
        return request.pop()

    async def send(message: dict[str, Any]) -> None:
        text = message.get("body", b"")
        if text.startswith(b"data: {"):
            events.append((orjson.loads(text.removeprefix(b"data: ")), recorder.end()))
            recorder.begin()

    headers = [(b"content-type", b"application/json"), (b"host", b"walk")]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http"}
    path = {"path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": ""}
    recorder.begin()
    await app({**scope, **path, "headers": headers, "client": ("127.0.0.1", 1), "server": ("walk", 80)}, receive, send)
    recorder.end()
    return events


def _delta(event: dict[str, Any]) -> dict[str, Any]:
    return event["choices"][0]["delta"] if event.get("choices") else {}


async def _batch(client: httpx2.AsyncClient) -> None:
    """Upload a file of one line, run it as a batch, and read its result."""
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions"}
    text = orjson.dumps(line | {"body": {"model": "demo", "messages": MESSAGES}})
    sent = await client.post("/v1/files", data={"purpose": "batch"}, files={"file": ("lines.jsonl", text)})
    fields = {"input_file_id": sent.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = (await client.post("/v1/batches", json=fields)).json()
    token = _unseen.set(True)
    while batch["status"] not in ("completed", "failed"):
        await asyncio.sleep(_WAIT)
        batch = (await client.get(f"/v1/batches/{batch['id']}")).json()
    _unseen.reset(token)
    assert batch["status"] == "completed", batch
    await client.get(f"/v1/files/{batch['output_file_id']}/content")


class StepChannel(ListChannel):
    """Records what the engine's loop does between two looks at its messages."""

    def __init__(self, recorder: Recorder, *turns: list[ToEngine]) -> None:
        super().__init__(*turns)
        self.walks: list[list[Call]] = []
        self._recorder = recorder

    def receive(self, timeout: float) -> list[ToEngine]:
        self.walks.append(self._recorder.end())
        messages = super().receive(timeout)
        self._recorder.begin()
        return messages


def measure_step(recorder: Recorder) -> Walk:
    """Measure one turn of the engine's loop with a row that decodes."""
    core = make_core(small_config())
    channel = StepChannel(recorder, [Add.of(make_request("walk", range(8), max_tokens=32))])
    serve(channel, core)
    recorder.end()
    return usual(channel.walks[4:-4])


def measure_loading(recorder: Recorder) -> Walk:
    """Measure the reading of the demo model."""
    mesh = make_mesh("cpu")
    load_model(DEMO, dtype=jnp.dtype("float32"), mesh=mesh.mesh)
    recorder.begin()
    load_model(DEMO, dtype=jnp.dtype("float32"), mesh=mesh.mesh)
    return walk_of(recorder.end())


def measure() -> dict[str, Walk]:
    """Measure every walk, by its name."""
    recorder = Recorder()
    with recorder.installed():
        walks = asyncio.run(measure_api(recorder))
        return walks | {"a decode step": measure_step(recorder), "load_model": measure_loading(recorder)}


def load() -> dict[str, Walk]:
    """Read the committed table."""
    return {name: Walk(**row) for name, row in json.loads(TABLE.read_text()).items()}


def difference(before: dict[str, Walk], after: dict[str, Walk]) -> list[str]:
    """Return a line for each walk: its numbers, and what they were if they differ."""
    lines = [f"{'':28}{'files':>16}{'calls':>16}{'moves':>16}{'back':>16}"]
    for name, walk in after.items():
        old = asdict(before[name]) if name in before else {}
        pairs = ((old.get(key, value), value) for key, value in asdict(walk).items())
        lines.append(f"{name:28}" + "".join(f"{b if a == b else f'{a} -> {b}':>16}" for a, b in pairs))
    return lines


def main() -> None:
    cli = argparse.ArgumentParser(description="count which files of the package a request goes through")
    cli.add_argument("--write", action="store_true", help="write the table")
    options = cli.parse_args()
    walks = measure()
    print("\n".join(difference(load() if TABLE.exists() else {}, walks)))
    if options.write:
        TABLE.write_text(json.dumps({name: asdict(walk) for name, walk in walks.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
