"""Forwards requests to the processes of their models, and answers in their place if a process ends."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive, Scope, Send

from jaxserve.api.body_cost import BodyLimits
from jaxserve.api.http.errors import ClientDisconnected
from jaxserve.api.http.forward import PeerEndedError, forward
from jaxserve.api.http.middleware import ADMIN_PATHS, GENERATING_PATHS, UPLOAD_PATHS
from jaxserve.api.http.sse import BegunAnswer, until_disconnect
from jaxserve.errors import ModelEndedError
from jaxserve.front.choice import choose
from jaxserve.front.resident import Resident
from jaxserve.front.residents import Residents

# an object that one of the models has; its id does not say which
_OBJECT = re.compile(r"(/v1)?/(files|batches|responses|conversations)/(?!input_tokens$)[^/]+(/.*)?")
_BELOW = ("/v1/", "/v2/", "/api/")
_OTHER_PATHS = frozenset(
    {
        *("/tokenize", "/detokenize", "/tokenizer_info", "/open_session", "/close_session", "/health_generate"),
        *("/model_info", "/get_model_info", "/server_info", "/get_server_info", "/version"),
        *("/docs", "/redoc", "/openapi.json"),
    }
)
_PATHS = GENERATING_PATHS | ADMIN_PATHS | _OTHER_PATHS
_WRITTEN_HERE = frozenset({b"x-request-id", b"openai-processing-ms", b"request-id"})  # by RequestContext


class ForwardToModels:
    """ASGI application: every route that the front does not answer itself.

    A GET of a path that no model's server has is a 404 here: a probe or a browser that asks for one must not load a
    model, for which another one may be unloaded.
    """

    def __init__(self, residents: Residents, limits: BodyLimits) -> None:
        self._residents = residents
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD") and not may_be_route(scope["path"]):
            raise HTTPException(404)
        request = Request(scope, receive)
        body = None if _is_upload(scope) else await _read(request)
        named = await choose(self._residents.catalog, request, body or b"", self._limits)
        wanted = [self._residents.of(named or self._residents.catalog.default)]
        if named is None and body is not None and _OBJECT.fullmatch(scope["path"]):
            wanted = self._places(wanted[0])
        for resident in wanted:
            answer = ForwardedAnswer(scope, send, hold_missing=resident is not wanted[-1])
            await self._forward(resident, request, answer, body)
            if not answer.is_missing:
                return

    def _places(self, default: Resident) -> list[Resident]:
        """Return the models that may have an object: those that are loaded, and the default model."""
        loaded = [each for each in self._residents.all if each.state == "loaded"]
        return loaded if default in loaded else [*loaded, default]

    async def _forward(self, resident: Resident, request: Request, answer: ForwardedAnswer, body: bytes | None) -> None:
        """Raises ModelEndedError, NotReadyError and ClientDisconnected if nothing has been answered."""
        loaded = self._residents.acquire(resident)
        # to wait for a disconnect would lose a body that was not read
        is_quick = body is None or resident.state == "loaded"
        process = await (loaded if is_quick else until_disconnect(request, loaded))
        try:
            await forward(process.socket, _with_id(request.scope), request.receive, answer.send, body)
        except PeerEndedError as error:
            await answer.end(ModelEndedError(f"The process of the model {resident.plan.name!r} ended."), error)
        finally:
            self._residents.release(resident)


def may_be_route(path: str) -> bool:
    """Return whether a model's server may have a route of this path."""
    return path in _PATHS or path.startswith(_BELOW)


def _is_upload(scope: Scope) -> bool:
    return scope["method"] in ("POST", "PUT") and scope["path"].startswith(UPLOAD_PATHS)


async def _read(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise ClientDisconnected from None


def _with_id(scope: Scope) -> Scope:
    """Return the scope with the request's id in its headers, so that both processes log the same one."""
    headers = [each for each in scope["headers"] if each[0] != b"x-request-id"]
    return {**scope, "headers": [*headers, (b"x-request-id", scope["state"]["request_id"].encode("latin-1"))]}


class ForwardedAnswer:
    """The answer of a model's process on its way to the client.

    hold_missing: do not send a 404, because another model may have the object
    """

    def __init__(self, scope: Scope, send: Send, *, hold_missing: bool) -> None:
        self._begun = BegunAnswer(scope, send)
        self._hold_missing = hold_missing
        self.is_missing = False

    async def send(self, message: Message) -> None:
        """Send one ASGI message without the headers that this process writes itself, or hold it."""
        if message["type"] == "http.response.start":
            self.is_missing = self._hold_missing and message["status"] == 404
            message["headers"] = [each for each in message["headers"] if each[0].lower() not in _WRITTEN_HERE]
        if not self.is_missing:
            await self._begun.send(message)

    async def end(self, error: ModelEndedError, cause: PeerEndedError) -> None:
        """Send the error as an event of the stream. Raises it if the answer has not begun."""
        if not cause.has_headers or self.is_missing:
            self.is_missing = False
            raise error
        await self._begun.end(error)
