"""SGLang's /open_session and /close_session."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.http.body import read_body
from jaxserve.api.protocol.answers import SessionId, Success
from jaxserve.api.protocol.sessions import CloseSessionRequest, OpenSessionRequest
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state

router = APIRouter()


@router.post("/open_session", **documented(SessionId, body=OpenSessionRequest))
async def open_session(request: Request) -> Response:
    """Open a session; requests continue it with `session_params`."""
    body = await read_body(request, OpenSessionRequest)
    return json_response(server_state(request).sessions.open(body, caller_of(request).owner))


@router.post("/close_session", **documented(Success, body=CloseSessionRequest))
async def close_session(request: Request) -> Response:
    """Close a session and drop its tokens."""
    body = await read_body(request, CloseSessionRequest)
    server_state(request).sessions.close(body.session_id, caller_of(request).owner)
    return json_response({"success": True})
