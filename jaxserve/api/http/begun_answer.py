"""An answer of another process on its way to the client, and its end if that process ends before."""

from __future__ import annotations

from starlette.types import Message, Scope, Send

from jaxserve.api.errors.families import NDJSON, family_of
from jaxserve.errors import HTTPError


class BegunAnswer:
    """Passes on ASGI messages and keeps what the end of a stream needs. The scope's state may have a request_id."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope = scope
        self._send = send
        self._stream_end = b""  # the end of each event; empty: the answer is no stream
        self._last = b""
        self.has_begun = False

    async def send(self, message: Message) -> None:
        """Send one message."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"")
            self._stream_end = b"\n\n" if kind.startswith(b"text/event-stream") else b"\n" if kind == NDJSON else b""
            self._scope["state"].setdefault("request_id", headers.get(b"x-request-id", b"").decode("latin-1"))
        elif self._stream_end:
            self._last = (self._last + message.get("body", b""))[-2:]
        await self._send(message)

    async def end(self, error: HTTPError) -> bool:
        """Send the error as the last event of a stream. Returns whether this was possible.

        Nothing is sent in the middle of an event or of a whole body: the caller closes the connection then.
        """
        if not self._stream_end or (self._last and not self._last.endswith(self._stream_end)):
            return False
        family = family_of(self._scope["path"])
        event = family.error_event(error, self._scope["state"].get("request_id", ""))
        await self._send({"type": "http.response.body", "body": event + family.done, "more_body": False})
        return True
