"""Batch routes: create, list, retrieve, cancel."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from typing import Annotated

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.batch.service import batch_runner
from jaxserve.api.docs.openapi import documented
from jaxserve.api.errors.responses import error_response
from jaxserve.api.http.body import read_body
from jaxserve.api.protocol.batches import BatchAnswer, BatchList, CreateBatchRequest, batch_object, new_batch
from jaxserve.api.protocol.files import list_object
from jaxserve.api.respond.wire import json_response
from jaxserve.api.shared.keys import caller_of
from jaxserve.errors import ConflictError, InvalidValueError
from jaxserve.store import NewBatch

MAX_KEY_CHARS = 255

router = APIRouter()


@router.post("/v1/batches", **documented(BatchAnswer, body=CreateBatchRequest))
async def create_batch(request: Request) -> Response:
    """Run the requests of a file. Repeating a call with the same Idempotency-Key creates no second batch.

    Raises InvalidValueError for an endpoint that batches cannot use.
    """
    runner = batch_runner(request)
    new = new_batch(await read_body(request, CreateBatchRequest), caller_of(request).owner)
    if new.endpoint not in runner.handlers:
        offered = ", ".join(runner.handlers)
        raise InvalidValueError(f"endpoint must be one of {offered}.", param="endpoint")
    answer = await runner.create(new, _idempotency(request, new), lambda record: orjson.dumps(batch_object(record)))
    return Response(answer, media_type="application/json")


def _idempotency(request: Request, new: NewBatch) -> tuple[str, bytes] | None:
    """Return the client's key and a digest of its request. (Keys of different owners are independent.)"""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= MAX_KEY_CHARS:
        raise InvalidValueError(f"Idempotency-Key must have 1 to {MAX_KEY_CHARS} characters.", param="Idempotency-Key")
    asked = {name: value for name, value in asdict(new).items() if name != "owner"}
    return key, sha256(orjson.dumps(asked, option=orjson.OPT_SORT_KEYS)).digest()


@router.get("/v1/batches", **documented(BatchList))
async def list_batches(
    request: Request, limit: Annotated[int, Query(ge=1, le=100)] = 20, after: str | None = None
) -> Response:
    """List batches, newest first."""
    runner = batch_runner(request)
    page = await runner.store.list_batches(limit=limit, after=after, owner=caller_of(request).sees)
    return json_response(list_object([batch_object(each, runner.pause_of(each.id)) for each in page.items], page))


@router.get("/v1/batches/{batch_id}", **documented(BatchAnswer))
async def retrieve_batch(request: Request, batch_id: str) -> Response:
    """Show a batch and its progress."""
    runner = batch_runner(request)
    batch = await runner.store.get_batch(batch_id, owner=caller_of(request).sees)
    return json_response(batch_object(batch, runner.pause_of(batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", **documented(BatchAnswer))
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancel a batch. Results that have finished are delivered."""
    try:
        return json_response(batch_object(await batch_runner(request).cancel(batch_id, caller_of(request).sees)))
    except ConflictError as error:
        response = error_response(error, request.scope)
        response.headers["x-should-retry"] = "false"  # clients would retry a 409, and this one is final
        return response
