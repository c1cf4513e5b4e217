"""Routes for the operator. They need the admin key and are off without one (see middleware.Authentication).

With `server.keys`, each key may abort its own requests.
"""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.http.body import read_body
from jaxserve.api.protocol.admin import AbortRequest
from jaxserve.api.protocol.answers import Aborted, Success
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state
from jaxserve.errors import InvalidValueError

router = APIRouter()


@router.post("/flush_cache", **documented(Success))
@router.get("/flush_cache", include_in_schema=False)
async def flush_cache(request: Request) -> Response:
    """Drop the prefix cache. Running requests keep their pages."""
    await server_state(request).engine.call("flush_cache")
    return json_response({"success": True})


@router.get("/key_usage", **documented())
async def key_usage(request: Request) -> Response:
    """Show what each API key of `server.keys` has used since the start, and what it has in hand."""
    usages = server_state(request).key_usages.all()
    return json_response({"object": "list", "data": [usage.as_dict() for usage in usages]})


@router.post("/abort_request", **documented(Aborted, body=AbortRequest))
async def abort_request(request: Request) -> Response:
    """Abort the key's requests whose id begins with `rid`, or all of them. Each ends with finish_reason abort.

    Raises InvalidValueError if neither is given.
    """
    state = server_state(request)
    body = await read_body(request, AbortRequest)
    if not body.abort_all and not body.rid:
        raise InvalidValueError("Give rid or abort_all.", param="rid")
    prefix, sees = "" if body.abort_all else body.rid or "", caller_of(request).sees
    aborted = state.live.abort(prefix, sees)
    if state.peers is not None:
        aborted = sorted({*aborted, *await state.peers.abort(prefix, sees)})
    return json_response({"success": True, "aborted": aborted})
