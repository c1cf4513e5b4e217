"""What a process forwards to another process of its server over a Unix socket."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import uvloop

from jaxserve.api.http.forward import forward
from tests.waiting import LAST_RESORT

SCOPE: dict[str, Any] = {
    "type": "http",
    "method": "POST",
    "raw_path": b"/v1/files",
    "query_string": b"",
    "headers": [(b"content-length", b"2000")],
}
REFUSAL = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 2\r\n\r\nno"


async def passed_on(path: str, closed: threading.Event) -> list[Any]:
    """What is sent to a client whose body comes just after the other process has closed the connection."""
    sent: list[Any] = []
    bodies = iter([b"x" * 1000, b"x" * 1000])

    async def receive() -> dict[str, Any]:
        if body := next(bodies, None):
            await asyncio.sleep(0.01)
            closed.wait(LAST_RESORT)  # blocks the loop: it has not read the answer yet
            return {"type": "http.request", "body": body, "more_body": True}
        return await asyncio.Future()

    async def send(message: Any) -> None:
        sent.append(message)

    await forward(path, SCOPE, receive, send)
    return sent


def test_an_answer_that_came_before_the_body_was_sent_is_passed_on(tmp_path: Path) -> None:
    path, closed = str(tmp_path / "http"), threading.Event()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                threading.Event().wait(0.1)  # until the loop is blocked
                connection.sendall(REFUSAL)
            closed.set()

        other = threading.Thread(target=refuse)
        other.start()
        start, *parts = uvloop.run(passed_on(path, closed))
        other.join(LAST_RESORT)
    assert start["status"] == 401
    assert b"".join(part["body"] for part in parts) == b"no"
