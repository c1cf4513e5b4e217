"""Serve stored responses (show, replay, delete, cancel, list the input), and conversations with their items."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.body_cost import LARGE_BYTES
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.errors import RESPONSES
from jaxserve.api.http.sse import EventStream, named_event
from jaxserve.api.keys import caller_of
from jaxserve.api.openai.files import list_object
from jaxserve.api.openapi import documented
from jaxserve.api.responses.background import StoredResponses, event_type, response_object
from jaxserve.api.responses.items import stored_items
from jaxserve.api.responses.protocol import (
    SHOWS_ENCRYPTED,
    AddItemsRequest,
    ConversationAnswer,
    CreateConversationRequest,
    Include,
    InputItem,
    ItemList,
    ObjectDeleted,
    ResponseAnswer,
    ResponseEvent,
    UpdateConversationRequest,
    conversation_object,
    item_object,
)
from jaxserve.api.responses.task import ItemReader
from jaxserve.api.state import ServerState, server_state
from jaxserve.errors import InvalidValueError
from jaxserve.store.records import ListQuery, Page, ResponseRecord, StoredItem
from jaxserve.store.responses import ResponseStore

Limit = Annotated[int, Query(ge=1, le=100)]
Order = Literal["asc", "desc"]

router = APIRouter()


def _stored(request: Request) -> StoredResponses:
    return request.app.state.responses


@router.get("/v1/responses/{response_id}", **documented(ResponseAnswer, events=ResponseEvent))
async def retrieve_response(
    request: Request,
    response_id: str,
    stream: bool = False,
    starting_after: Annotated[int, Query(ge=0, le=2**31 - 1)] | None = None,
    include: Annotated[list[Include] | None, Query()] = None,
    more: Annotated[list[Include] | None, Query(alias="include[]", include_in_schema=False)] = None,
) -> Response:
    """Show a response. With `stream`, replay its events after a number and follow it to its end.

    `include` adds encrypted reasoning. Its other parts are shown if the request for the response named them.
    Raises InvalidValueError if its events were never kept, or are not any more.
    """
    stored = _stored(request)
    wanted = [*(include or ()), *(more or ())]  # OpenAI's client writes include[]
    record, output = await stored.store.get(response_id, owner=caller_of(request).sees)
    if not stream:
        if starting_after is not None:
            raise InvalidValueError("starting_after is only allowed with stream=true.", param="starting_after")
        items = [item.body for item in output]
        if SHOWS_ENCRYPTED in wanted:
            items = [_encrypted(item, record, server_state(request)) for item in items]
        return json_response(response_object(record, items))
    if wanted:
        raise InvalidValueError(
            "include is not allowed with stream=true: events are replayed as sent.", param="include"
        )
    if not record.logged:
        message = "Only a response made with background and stream can be streamed, until an hour after its end."
        raise InvalidValueError(message, param="stream")
    return followed(request, stored, response_id, -1 if starting_after is None else starting_after)


def _encrypted(body: bytes, record: ResponseRecord, state: ServerState) -> bytes:
    """Return an item of the output. If it is a reasoning, add its text in encrypted form."""
    item = orjson.loads(body)
    if item["type"] != "reasoning" or "encrypted_content" in item:
        return body
    text = "".join(part["text"] for part in item["content"])
    encrypted = state.encryption.encrypt(text, orjson.loads(record.body)["model"], record.owner)
    return orjson.dumps(item | {"encrypted_content": encrypted}) if encrypted else body


def followed(request: Request, stored: StoredResponses, response_id: str, after: int) -> EventStream:
    """Return the stream of a background response's events that follow the one with the number `after`."""

    async def events() -> AsyncGenerator[bytes, None]:
        yield RESPONSES.ping  # sends the headers before the next event, which may take long
        async with aclosing(stored.background.events(response_id, after)) as found:
            async for body in found:
                yield named_event(event_type(body).type, body)

    return EventStream(events(), lambda: 0, server_state(request), RESPONSES)


@router.delete("/v1/responses/{response_id}", **documented(ObjectDeleted))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response. A response that runs in the background is stopped."""
    await _stored(request).background.delete(response_id, caller_of(request).sees)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", **documented(ResponseAnswer))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response. A response that has ended stays as it is."""
    record, output = await _stored(request).background.cancel(response_id, caller_of(request).sees)
    return json_response(response_object(record, [item.body for item in output]))


@router.get("/v1/responses/{response_id}/input_items", **documented(ItemList))
async def list_input_items(
    request: Request, response_id: str, limit: Limit = 20, order: Order = "desc", after: str | None = None
) -> Response:
    """List the items of a response's own input, the last one first by default."""
    query = ListQuery(limit, after, order == "asc", caller_of(request).sees)
    return await item_list(request, await _stored(request).store.input_items(response_id, query))


async def item_list(request: Request, page: Page[StoredItem]) -> Response:
    """Return a page of items, made outside the event loop if they are large."""

    def work() -> Response:
        shown = [item_object(item) for item in page.items]
        written = [orjson.Fragment(orjson.dumps(each)) for each in shown]  # one call for all would hold the GIL
        return json_response(list_object(shown, page) | {"data": written})

    size = sum(item.size for item in page.items)
    return await server_state(request).body_work.run(work, size) if size > LARGE_BYTES else work()


PATH = "/v1/conversations"


def _store(request: Request) -> ResponseStore:
    return request.app.state.responses.store


async def _new_items(request: Request, items: Sequence[InputItem], size: int) -> tuple[StoredItem, ...]:
    """Check items outside the event loop. Raises a RequestError that names the item. size: bytes of the body"""
    state = server_state(request)

    def note(kind: str) -> None:
        state.unknown_fields.note(PATH, [kind])

    reader = ItemReader(False, lambda encrypted: "", note, state.takes_pictures)

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
