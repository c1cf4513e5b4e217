"""OpenAI's Batch object and the request that creates one."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.api.protocol.answers import Answer
from jaxserve.api.protocol.common import Body, NestedObject
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
    """Counted from the creation of the output file, not of the batch."""

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
    """Build the Batch object. pause: the error that delays the batch now; shown in `errors` meanwhile."""
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
