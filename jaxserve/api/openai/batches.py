"""Serve OpenAI's batches: create, list, retrieve, cancel. Declare the Batch object and build it from a record."""

from __future__ import annotations

from dataclasses import asdict
from hashlib import sha256
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.answers import Answer
from jaxserve.api.batch.runner import batch_runner
from jaxserve.api.fields import Body, NestedObject
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.errors import error_response
from jaxserve.api.keys import caller_of
from jaxserve.api.openai.files import list_object
from jaxserve.api.openapi import documented
from jaxserve.errors import ConflictError, InvalidValueError
from jaxserve.store import (
    MAX_EXPIRY_SECONDS,
    MIN_EXPIRY_SECONDS,
    BatchError,
    BatchRecord,
    BatchStatus,
    NewBatch,
    normalize_url,
)

WINDOW_SECONDS = {"24h": 24 * 3600}

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class OutputExpiresAfter(NestedObject):
    """The lifetime of the output file. It begins when the output file is created, not when the batch is."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)


class CreateBatchRequest(Body):
    input_file_id: str = Field(max_length=256, description="A file with purpose batch.")
    endpoint: str = Field(max_length=256, description="The route of all its requests.")
    completion_window: Literal["24h"]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: OutputExpiresAfter | None = Field(None, description="Default: 30 days.")


class BatchErrorAnswer(Answer):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchErrors(Answer):
    object: Literal["list"]
    data: list[BatchErrorAnswer]


class RequestCounts(Answer):
    total: int
    completed: int
    failed: int


class InputTokensDetails(Answer):
    cached_tokens: int


class OutputTokensDetails(Answer):
    reasoning_tokens: int


class BatchUsage(Answer):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class BatchAnswer(Answer):
    """OpenAI's Batch object."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None


class BatchList(Answer):
    object: Literal["list"]
    data: list[BatchAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


def new_batch(body: CreateBatchRequest, owner: str = "") -> NewBatch:
    """Convert a validated body to the store's form."""
    expiry = body.output_expires_after
    return NewBatch(
        normalize_url(body.endpoint),
        body.input_file_id,
        body.completion_window,
        WINDOW_SECONDS[body.completion_window],
        body.metadata,
        expiry and expiry.seconds,
        owner,
    )


def batch_object(batch: BatchRecord, pause: BatchError | None = None) -> dict[str, Any]:
    """Build the Batch object. pause: the error that delays the batch now, which `errors` then shows"""
    usage = batch.usage
    errors = [
        {"code": error.code, "message": error.message, "param": error.param, "line": error.line}
        for error in (*batch.errors, *([pause] if pause else []))
    ]
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": batch.model,
        "errors": {"object": "list", "data": errors} if errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id,
        "error_file_id": batch.error_file_id,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": batch.completed_at,
        "failed_at": batch.failed_at,
        "expired_at": batch.expired_at,
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": batch.cancelled_at,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": usage.input_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.input_tokens + usage.output_tokens,
        },
        "metadata": batch.metadata,
    }


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
    """Return the client's Idempotency-Key and a digest of its request. The keys of different owners are independent."""
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
        response.headers["x-should-retry"] = "false"  # clients would retry a 409, but this one is final
        return response
