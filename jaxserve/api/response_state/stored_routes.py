"""Stored responses: show, replay, delete, cancel, list the input."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.errors.families import RESPONSES
from jaxserve.api.http.sse import EventStream, named_event
from jaxserve.api.protocol.files import list_object
from jaxserve.api.respond.wire import json_response
from jaxserve.api.response_state.conversation_protocol import ItemList, ObjectDeleted, item_object
from jaxserve.api.response_state.event_log import event_type, response_object
from jaxserve.api.response_state.service import StoredResponses
from jaxserve.api.responses.answer_schemas import ResponseAnswer, ResponseEvent
from jaxserve.api.responses.protocol import SHOWS_SEALED, Include
from jaxserve.api.shared.body_cost import LARGE_BYTES
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.errors import InvalidValueError
from jaxserve.store.records import ListQuery, Page, ResponseRecord, StoredItem

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

    `include` adds sealed reasoning. What else it names is shown if the request for the response named it.
    Raises InvalidValueError if its events were never kept, or are not any more.
    """
    stored, wanted = _stored(request), [*(include or ()), *(more or ())]  # OpenAI's client writes include[]
    record, output = await stored.store.get(response_id, owner=caller_of(request).sees)
    if not stream:
        if starting_after is not None:
            raise InvalidValueError("starting_after is only allowed with stream=true.", param="starting_after")
        items = [item.body for item in output]
        if SHOWS_SEALED in wanted:
            items = [_sealed(item, record, server_state(request)) for item in items]
        return json_response(response_object(record, items))
    if wanted:
        raise InvalidValueError(
            "include is not allowed with stream=true: events are replayed as sent.", param="include"
        )
    if not record.logged:
        message = "Only a response made with background and stream can be streamed, until an hour after its end."
        raise InvalidValueError(message, param="stream")
    return followed(request, stored, response_id, -1 if starting_after is None else starting_after)


def _sealed(body: bytes, record: ResponseRecord, state: ServerState) -> bytes:
    """Return an item of the output, with its reasoning sealed as well if it is one."""
    item = orjson.loads(body)
    if item["type"] != "reasoning" or "encrypted_content" in item:
        return body
    text = "".join(part["text"] for part in item["content"])
    sealed = state.seal.seal(text, orjson.loads(record.body)["model"], record.owner)
    return orjson.dumps(item | {"encrypted_content": sealed}) if sealed else body


def followed(request: Request, stored: StoredResponses, response_id: str, after: int) -> EventStream:
    """Return the stream of a background response's events that follow the one with the number `after`."""

    async def events() -> AsyncGenerator[bytes, None]:
        yield RESPONSES.ping  # sends the headers before the next event, which may be far
        async with aclosing(stored.background.events(response_id, after)) as found:
            async for body in found:
                yield named_event(event_type(body).type, body)

    return EventStream(events(), lambda: 0, server_state(request), RESPONSES)


@router.delete("/v1/responses/{response_id}", **documented(ObjectDeleted))
async def delete_response(request: Request, response_id: str) -> Response:
    """Delete a response. One that runs in the background is stopped."""
    await _stored(request).background.delete(response_id, caller_of(request).sees)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel", **documented(ResponseAnswer))
async def cancel_response(request: Request, response_id: str) -> Response:
    """Cancel a background response. One that has ended stays as it is."""
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
        written = [orjson.Fragment(orjson.dumps(each)) for each in shown]  # one call for all would hold the lock
        return json_response(list_object(shown, page) | {"data": written})

    size = sum(item.size for item in page.items)
    return await server_state(request).body_work.run(work, size) if size > LARGE_BYTES else work()
