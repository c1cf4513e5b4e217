"""Conversations and their items."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.http.body import read_body
from jaxserve.api.respond.wire import json_response
from jaxserve.api.response_state.conversation_protocol import (
    AddItemsRequest,
    ConversationAnswer,
    CreateConversationRequest,
    ItemList,
    ObjectDeleted,
    UpdateConversationRequest,
    conversation_object,
    item_object,
)
from jaxserve.api.response_state.items import stored_items
from jaxserve.api.response_state.stored_routes import Limit, Order, item_list
from jaxserve.api.responses.input_items import ItemReader
from jaxserve.api.responses.protocol import InputItem
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state
from jaxserve.store.records import ListQuery, Page, StoredItem
from jaxserve.store.responses import ResponseStore

PATH = "/v1/conversations"

router = APIRouter()


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses.store


async def _new_items(request: Request, items: Sequence[InputItem], size: int) -> tuple[StoredItem, ...]:
    """Check items outside the event loop. Raises a RequestError that names the item. size: bytes of the body"""
    state = server_state(request)
    reader = ItemReader(False, lambda sealed: "", lambda kind: state.unknown_fields.note(PATH, [kind]))

    def work() -> tuple[StoredItem, ...]:
        reader.check(items, "items")
        return stored_items(items)

    return await state.body_work.run(work, size)


@router.post(PATH, **documented(ConversationAnswer, body=CreateConversationRequest))
async def create_conversation(request: Request) -> Response:
    """Create a conversation, with its first items if there are any."""
    body = await read_body(request, CreateConversationRequest)
    items = await _new_items(request, body.items or (), body.size)
    owner = caller_of(request).owner
    return json_response(
        conversation_object(await _store(request).create_conversation(body.metadata or {}, items, owner=owner))
    )


@router.get(PATH + "/{conversation_id}", **documented(ConversationAnswer))
async def retrieve_conversation(request: Request, conversation_id: str) -> Response:
    """Show a conversation."""
    owner = caller_of(request).sees
    return json_response(conversation_object(await _store(request).get_conversation(conversation_id, owner=owner)))


@router.post(PATH + "/{conversation_id}", **documented(ConversationAnswer, body=UpdateConversationRequest))
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace the metadata of a conversation."""
    body = await read_body(request, UpdateConversationRequest)
    owner = caller_of(request).sees
    record = await _store(request).set_metadata(conversation_id, body.metadata or {}, owner=owner)
    return json_response(conversation_object(record))


@router.delete(PATH + "/{conversation_id}", **documented(ObjectDeleted))
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Delete a conversation and its items. Responses that were made in it stay."""
    await _store(request).delete_conversation(conversation_id, owner=caller_of(request).sees)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.post(PATH + "/{conversation_id}/items", **documented(ItemList, body=AddItemsRequest))
async def add_items(request: Request, conversation_id: str) -> Response:
    """Append items to a conversation."""
    body = await read_body(request, AddItemsRequest)
    items = await _new_items(request, body.items, body.size)
    await _store(request).add_items(conversation_id, items, owner=caller_of(request).sees)
    return await item_list(request, Page(list(items), has_more=False))


@router.get(PATH + "/{conversation_id}/items", **documented(ItemList))
async def list_items(
    request: Request, conversation_id: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    """List the items of a conversation, the last one first by default."""
    query = ListQuery(limit, after, order == "asc", caller_of(request).sees)
    return await item_list(request, await _store(request).list_items(conversation_id, query))


@router.get(PATH + "/{conversation_id}/items/{item_id}", **documented())
async def retrieve_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Show an item of a conversation."""
    item = await _store(request).get_item(conversation_id, item_id, owner=caller_of(request).sees)
    return json_response(item_object(item))


@router.delete(PATH + "/{conversation_id}/items/{item_id}", **documented(ConversationAnswer))
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Remove an item of a conversation, and show the conversation."""
    owner = caller_of(request).sees
    return json_response(conversation_object(await _store(request).delete_item(conversation_id, item_id, owner=owner)))
