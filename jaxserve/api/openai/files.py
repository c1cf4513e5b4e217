"""Serve OpenAI's files: upload, list, retrieve, content, delete. Declare the File object and build it from a record.

A server without a store has `no_store_router` instead: the routes of files, batches, stored responses and conversations
answer 503 with the reason.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, BinaryIO, Literal
from urllib.parse import quote

from fastapi import APIRouter, Query
from pydantic import BaseModel, Field, ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.api.answers import Answer
from jaxserve.api.batch.runner import batch_runner
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import UploadForm
from jaxserve.api.http.errors import ClientDisconnected, from_validation
from jaxserve.api.keys import caller_of
from jaxserve.api.openapi import documented
from jaxserve.api.state import server_state
from jaxserve.api.work_pool import Waiting
from jaxserve.errors import InvalidValueError, PayloadTooLargeError, StoreUnavailableError
from jaxserve.store import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, FileRecord, Page, Store, Upload

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_BATCH_FILE_BYTES = 200 * 2**20
MAX_FILE_BYTES = 512 * 2**20
MAX_FILENAME_CHARS = 512

# FastAPI has no model for multipart. The body is read as a stream and documented here.
UPLOAD_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {
                            "type": "integer",
                            "minimum": MIN_EXPIRY_SECONDS,
                            "maximum": MAX_EXPIRY_SECONDS,
                        },
                    },
                }
            }
        },
    }
}

CONTENT_ANSWER: dict[str, Any] = {
    "responses": {"200": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}
}


class FileAnswer(Answer):
    """OpenAI's File object."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Answer):
    object: Literal["list"]
    data: list[FileAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class UploadFields(BaseModel):
    """The form's fields other than the file, all as text."""

    purpose: str
    anchor: Literal["created_at"] | None = Field(None, alias="expires_after[anchor]")
    seconds: int | None = Field(None, alias="expires_after[seconds]", ge=MIN_EXPIRY_SECONDS, le=MAX_EXPIRY_SECONDS)


def upload_fields(form: dict[str, str]) -> UploadFields:
    """Validate the form's fields. Raises InvalidValueError naming the field."""
    try:
        fields = UploadFields.model_validate(form)
    except ValidationError as error:
        raise from_validation(error, form) from None
    if fields.purpose not in PURPOSES:
        raise InvalidValueError(f"purpose must be one of {', '.join(PURPOSES)}.", param="purpose")
    if (fields.anchor is None) != (fields.seconds is None):
        raise InvalidValueError("expires_after needs both anchor and seconds.", param="expires_after")
    return fields


def size_limit(purpose: str | None) -> int:
    """Return the maximum bytes of a file."""
    return MAX_BATCH_FILE_BYTES if purpose == "batch" else MAX_FILE_BYTES


def expiry_seconds(fields: UploadFields) -> int | None:
    """Return the lifetime of a file in seconds: as requested, else 30 days for batch files; None: no end."""
    return MAX_EXPIRY_SECONDS if fields.seconds is None and fields.purpose == "batch" else fields.seconds


def file_object(file: FileRecord) -> dict[str, Any]:
    """Build the File object."""
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def list_object(data: list[dict[str, Any]], page: Page[Any]) -> dict[str, Any]:
    """Build a page of objects in OpenAI's list form."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": page.has_more,
    }


CHUNK_BYTES = 2**20
# bytes of a too large body that are read and dropped, because a client that is still sending does not read the answer
MAX_DRAINED_BYTES = 2 * MAX_FILE_BYTES

KNOWN_FIELDS = {"purpose", "expires_after[anchor]", "expires_after[seconds]"}

_UPLOAD = documented(FileAnswer)
_UPLOAD["openapi_extra"] |= UPLOAD_BODY
_CONTENT: dict[str, Any] = documented() | {"openapi_extra": CONTENT_ANSWER}

router = APIRouter()


def store_of(request: Request) -> Store:
    return batch_runner(request).store


@router.post("/v1/files", **_UPLOAD)
async def upload_file(request: Request) -> Response:
    """Store a file. Raises a RequestError (413) if it is too large."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > MAX_DRAINED_BYTES:
        raise _too_large(MAX_FILE_BYTES)
    form = UploadForm(request.headers.get("content-type", ""))
    incoming = store_of(request).begin_upload()
    try:
        await _receive(request, form, incoming, server_state(request).file_work)
        record = await _finish(request, form, incoming)
    except BaseException:
        await asyncio.shield(incoming.discard())
        raise
    return json_response(file_object(record))


async def _receive(request: Request, form: UploadForm, incoming: Upload, work: Waiting) -> None:
    """Write the body into the upload. The rest of a too large body is dropped.

    Raises QueueFullError if too many pieces wait.
    """
    too_large = False
    received = 0
    try:
        async for data in request.stream():
            received += len(data)
            passed = form.feed(data)
            too_large = too_large or incoming.size + len(passed) > size_limit(form.fields.get("purpose"))
            if received > MAX_DRAINED_BYTES:
                break
            if passed and not too_large:
                with work.held(len(passed)):
                    await incoming.write(passed)
    except ClientDisconnect:
        raise ClientDisconnected from None
    if too_large:
        raise _too_large(size_limit(form.fields.get("purpose")))


async def _finish(request: Request, form: UploadForm, incoming: Upload) -> FileRecord:
    if not form.complete:
        raise InvalidValueError("The multipart body ends too early.")
    if form.filename is None:
        raise InvalidValueError("file is missing.", param="file", code="missing_required_parameter")
    fields = upload_fields(form.fields)
    if incoming.size > size_limit(fields.purpose):
        raise _too_large(size_limit(fields.purpose))
    if len(form.filename) > MAX_FILENAME_CHARS:
        raise InvalidValueError(f"The file's name is longer than {MAX_FILENAME_CHARS} characters.", param="file")
    if fields.purpose == "batch" and not form.filename.lower().endswith(".jsonl"):
        raise InvalidValueError("Invalid file format for Batch API. Must be .jsonl", param="file")
    server_state(request).unknown_fields.note("/v1/files", sorted(form.fields.keys() - KNOWN_FIELDS))
    return await incoming.finish(
        filename=form.filename,
        purpose=fields.purpose,
        expires_seconds=expiry_seconds(fields),
        owner=caller_of(request).owner,
    )


def _too_large(limit: int) -> PayloadTooLargeError:
    return PayloadTooLargeError(f"The file is larger than the limit of {limit} bytes.", param="file")


@router.get("/v1/files", **documented(FileList))
async def list_files(
    request: Request,
    purpose: str | None = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 10_000,
    order: Literal["asc", "desc"] = "desc",
    after: str | None = None,
) -> Response:
    """List files, newest first by default."""
    owner = caller_of(request).sees
    page = await store_of(request).list_files(
        purpose=purpose, limit=limit, after=after, ascending=order == "asc", owner=owner
    )
    return json_response(list_object([file_object(file) for file in page.items], page))


@router.get("/v1/files/{file_id}", **documented(FileAnswer))
async def retrieve_file(request: Request, file_id: str) -> Response:
    """Show the metadata of a file."""
    return json_response(file_object(await store_of(request).get_file(file_id, owner=caller_of(request).sees)))


@router.get("/v1/files/{file_id}/content", **_CONTENT)
async def file_content(request: Request, file_id: str) -> Response:
    """Return the bytes of a file."""
    record, file = await store_of(request).open_file(file_id, owner=caller_of(request).sees)
    return FileBytes(record, file, server_state(request).file_work)


@router.delete("/v1/files/{file_id}", **documented(FileDeleted))
async def delete_file(request: Request, file_id: str) -> Response:
    """Delete a file. A batch that is reading it continues."""
    await store_of(request).delete_file(file_id, owner=caller_of(request).sees)
    return json_response({"id": file_id, "object": "file", "deleted": True})


class FileBytes(Response):
    """Send a stored file from an open file handle, so that deleting the file during the answer does no harm."""

    def __init__(self, record: FileRecord, file: BinaryIO, work: Waiting) -> None:
        self._file = file
        self._work = work
        headers: dict[str, Any] = {
            "content-length": str(record.bytes),
            "content-disposition": f"attachment; filename*=UTF-8''{quote(record.filename, safe='')}",
        }
        super().__init__(None, headers=headers, media_type="application/octet-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._file:
            data = await self._read()  # before the headers, so that the answer is an error if too many pieces wait
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
                data = await asyncio.to_thread(self._file.read, CHUNK_BYTES)
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _read(self) -> bytes:
        with self._work.held(CHUNK_BYTES):
            return await asyncio.to_thread(self._file.read, CHUNK_BYTES)


_METHODS = ["GET", "POST", "DELETE"]
_PATHS = (
    *("/v1/files", "/v1/files/{rest:path}", "/v1/batches", "/v1/batches/{rest:path}"),
    *("/v1/responses/{rest:path}", "/v1/conversations", "/v1/conversations/{rest:path}"),
)


def no_store_router(reason: str) -> APIRouter:
    """Return the routes, each of which raises StoreUnavailableError. reason: a whole sentence for the client."""
    router = APIRouter()

    async def refuse() -> Response:
        """Raise StoreUnavailableError."""
        raise StoreUnavailableError(reason)

    for path in _PATHS:
        router.add_api_route(path, refuse, methods=_METHODS, include_in_schema=False)
    return router
