"""Forward what only the main process can answer, from a worker to the main process's Unix socket.

Most requests are known by their path. A request that continues a session, or has a thread of Messages, is known after
its body has been read; it is forwarded with that body.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.api.errors.responses import send_error
from jaxserve.api.http.forward import PeerEndedError, forward
from jaxserve.api.http.middleware import GENERATING_PATHS
from jaxserve.api.shared.process_group import Elsewhere
from jaxserve.errors import NotReadyError

# What a worker answers. /v1/responses reads and writes the store.
WORKER_PATHS = (GENERATING_PATHS - {"/v1/responses"}) | {
    *("/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/messages/count_tokens")
}


class ForwardToMain:
    """ASGI middleware of a worker, the outermost. main_socket: path of the main process's socket"""

    def __init__(self, app: ASGIApp, main_socket: str) -> None:
        self.app = app
        self._main_socket = main_socket

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if scope["path"] not in WORKER_PATHS:
            return await self._forward(scope, receive, send, None)
        try:
            await self.app(scope, receive, send)
        except Elsewhere:
            await self._forward(scope, receive, send, scope["state"]["body"])

    async def _forward(self, scope: Scope, receive: Receive, send: Send, body: bytes | None) -> None:
        """body: if it has been read"""
        try:
            await forward(self._main_socket, scope, receive, send, body)
        except PeerEndedError as error:
            if error.has_headers:
                raise  # which closes the client's connection
            await send_error(NotReadyError("The server starts or ends."), scope, receive, send)
