"""OpenAI's Conversation objects, the requests that change them, and the lists of items."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.answers import Answer
from jaxserve.api.protocol.common import Body
from jaxserve.api.responses.protocol import InputItem
from jaxserve.store.records import ConversationRecord, StoredItem

MAX_NEW_ITEMS = 20

NewItems = Annotated[list[InputItem], Field(max_length=MAX_NEW_ITEMS)]


class CreateConversationRequest(Body):
    items: NewItems | None = None
    metadata: limits.Metadata | None = None


class UpdateConversationRequest(Body):
    metadata: limits.Metadata | None = Field(description="Replaces the metadata.")


class AddItemsRequest(Body):
    items: Annotated[NewItems, Field(min_length=1)]


class ConversationAnswer(Answer):
    """OpenAI's Conversation object."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ObjectDeleted(Answer):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: bool


class ItemList(Answer):
    """A page of items; each has an id and a type."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def conversation_object(record: ConversationRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "conversation",
        "created_at": record.created_at,
        "metadata": record.metadata,
    }


def item_object(item: StoredItem) -> dict[str, Any]:
    """Return an item as clients read it: with a type and a status, and the text of a message in parts."""
    shown: dict[str, Any] = orjson.loads(item.body)
    if shown.setdefault("type", "message") != "message":
        return shown
    if isinstance(shown.get("content"), str):
        text = shown["content"]
        is_output = shown.get("role") == "assistant"
        part = {"type": "output_text", "text": text, "annotations": []} if is_output else {"type": "input_text"}
        shown["content"] = [part | {"text": text}]
    return {"status": "completed", **shown}
