"""Run the server of one model: a child process that listens on a Unix socket in a private directory.

The child is `python -m jaxserve.cli.model_server`. It ends when its stdin closes, so no child is left if this process
is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families
from starlette.types import Message

from jaxserve.api.http.forward import PeerEndedError, forward
from jaxserve.config import Config
from jaxserve.config_types import reveal
from jaxserve.telemetry.metrics import Families
from jaxserve.transport.child import child_environment, python_command

CHILD_BACKLOG = 2048  # connections that the kernel queues while the child starts
LOAD_INTERVAL = 0.1  # seconds between two looks whether the model is loaded
ANSWER_SECONDS = 5.0  # the child must answer a request of this process within this time
_ENGINE_WORK = ("jaxserve:num_requests_running", "jaxserve:num_requests_waiting")
# Metrics of stored work, which may have no request in the engine now. A server without a store has neither.
_STORED_WORK = ("jaxserve:batches_running", "jaxserve:background_responses_running")

logger = logging.getLogger(__name__)


class ModelServerStart(msgspec.Struct, frozen=True):
    """The first line that the child reads. config: JSON with secrets. listener: the inherited descriptor"""

    config: str
    listener: int


class ProcessEndedError(Exception):
    """The child has ended. status: its exit status"""

    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class ModelProcess:
    """One run of the server of a model.

    config: has an admin key, which this process uses to ask the child for its metrics
    socket: path of a socket that does not exist yet
    """

    def __init__(self, config: Config, socket: Path) -> None:
        self._config = config
        self.socket = str(socket)
        self._process: asyncio.subprocess.Process | None = None
        self.since = time.monotonic()
        self.progress = ""
        key = reveal(config.server.admin_api_key)
        self._headers = [(b"host", b"front"), (b"authorization", f"Bearer {key}".encode())]

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Start the child. From then on connections are accepted."""
        with self._listen() as listener:
            self._process = await asyncio.create_subprocess_exec(
                *python_command("jaxserve.cli.model_server"),
                env=child_environment(),
                stdin=asyncio.subprocess.PIPE,
                start_new_session=True,  # Ctrl-C in a terminal ends this process alone, which then ends the child
                pass_fds=(listener.fileno(),),
            )
            start = ModelServerStart(self._config.with_secrets(), listener.fileno())
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(start) + b"\n")

    @contextlib.contextmanager
    def _listen(self) -> Iterator[socket.socket]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.socket)
            listener.listen(CHILD_BACKLOG)
            yield listener

    async def ended(self) -> int:
        """Wait until the child has ended; return its exit status."""
        assert self._process is not None
        status = await self._process.wait()
        Path(self.socket).unlink(missing_ok=True)
        return status

    async def loaded(self) -> list[dict[str, Any]]:
        """Wait until the model is loaded; return the objects of its /v1/models. Raises ProcessEndedError."""
        end = asyncio.ensure_future(self.ended())
        try:
            while not end.done():
                status, body = await self.ask("/health")
                if status == 200 and (objects := await self.models()) is not None:
                    return objects
                if status == 503:
                    self.progress = str(json.loads(body).get("phase", ""))
                await asyncio.wait((end,), timeout=LOAD_INTERVAL)
            raise ProcessEndedError(end.result())
        finally:
            end.cancel()

    async def models(self) -> list[dict[str, Any]] | None:
        """Return the objects of the child's /v1/models; None if it does not answer."""
        status, body = await self.ask("/v1/models")
        return json.loads(body)["data"] if status == 200 else None

    async def is_idle(self) -> bool:
        """Return whether no request runs or waits, batches and background responses included."""
        families = await self.metrics()
        values = {name: value for family in families for name, _, value in family["samples"]}
        is_known = all(name in values for name in _ENGINE_WORK)
        return is_known and not any(values.get(name) for name in (*_ENGINE_WORK, *_STORED_WORK))

    async def metrics(self) -> Families:
        """Return the child's metrics; [] if it does not answer."""
        status, text = await self.ask("/metrics")
        if status != 200:
            return []
        return [
            {
                "name": metric.name,
                "kind": metric.type,
                "text": metric.documentation,
                "samples": [(each.name, dict(each.labels), each.value) for each in metric.samples],
            }
            for metric in text_string_to_metric_families(text.decode())
        ]

    async def ask(self, path: str) -> tuple[int, bytes]:
        """Return (status, body) of a GET; status 0 if there is no answer in time."""
        scope = {"method": "GET", "raw_path": path.encode(), "query_string": b"", "headers": self._headers}
        status = 0
        body = bytearray()
        first = True

        async def receive() -> Message:
            nonlocal first
            if not first:
                await asyncio.Event().wait()  # never disconnects
            first = False
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            body.extend(message.get("body", b""))

        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await forward(self.socket, scope, receive, send)
        except (PeerEndedError, TimeoutError):
            return 0, b""
        return status, bytes(body)

    async def stop(self, seconds: float) -> None:
        """Let the child end its requests and exit, and kill it after `seconds`."""
        if self._process is None:
            return
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(seconds):
                await self.ended()
        except TimeoutError:
            logger.warning("process %d did not end within %g s: killing it", self._process.pid, seconds)
            self.kill()
            await self.ended()

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
