"""OpenAI's File object and the fields of an upload."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from jaxserve.api.errors.responses import from_validation
from jaxserve.api.protocol.answers import Answer
from jaxserve.errors import InvalidValueError
from jaxserve.store import MAX_EXPIRY_SECONDS, MIN_EXPIRY_SECONDS, FileRecord, Page

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
MAX_BATCH_FILE_BYTES = 200 * 2**20
MAX_FILE_BYTES = 512 * 2**20
MAX_FILENAME_CHARS = 512

# FastAPI has no model for multipart: the body is read as a stream and documented here.
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
    """Return the lifetime of a file: as requested, else 30 days for batch files and no end for others."""
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
