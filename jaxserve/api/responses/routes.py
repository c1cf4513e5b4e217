"""Serve OpenAI's POST /v1/responses and POST /v1/responses/input_tokens.

A request may continue a chain of stored responses, or a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.batch.request import batch_priority
from jaxserve.api.body_cost import LARGE_BYTES
from jaxserve.api.generate.planner import Planner, planned, prompt_tokens
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.errors import RESPONSES
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.keys import Caller, caller_of
from jaxserve.api.openapi import documented
from jaxserve.api.responses.answer import Keeper, ResponsesAnswer
from jaxserve.api.responses.background import (
    StartedResponse,
    StoredResponses,
    StoreKeeper,
    stored_responses,
    without_output,
)
from jaxserve.api.responses.items import from_text, loaded_items, stored_items
from jaxserve.api.responses.protocol import (
    ConversationName,
    InputItem,
    InputTokens,
    ResponseAnswer,
    ResponseEvent,
    ResponsesRequest,
)
from jaxserve.api.responses.stored_routes import followed
from jaxserve.api.responses.task import EarlierItems, ResponseName, input_messages, responses_task
from jaxserve.api.state import ServerState, server_state
from jaxserve.errors import InvalidValueError, NotFoundError
from jaxserve.store.records import History, NewResponse, ResponseStatus, StoredItem


@dataclass(frozen=True)
class OpenedResponse:
    """A request with the history that it continues. Its conversation is locked until `release` is called."""

    name: ResponseName
    history: History
    earlier: EarlierItems
    release: Callable[[], None]


async def open_response(body: ResponsesRequest, caller: Caller, stored: StoredResponses | None) -> OpenedResponse:
    """Name a response, lock its conversation and read its history. Raises a RequestError."""
    keeps = stored is not None and body.store is not False
    if body.background and not keeps:
        raise InvalidValueError("background can only be used when `store` is true", param="background")
    conversation_id = _conversation_id(body)
    if conversation_id is not None and stored is not None and not keeps:
        raise InvalidValueError("conversation can only be used when `store` is true", param="conversation")
    if conversation_id is not None and stored is not None:  # before the lock: another key's is unknown, not locked
        await stored.store.get_conversation(conversation_id, owner=caller.sees)
    name = ResponseName(store=keeps, background=bool(body.background), conversation_id=conversation_id)
    release = (lambda: None) if stored is None else stored.locks.lock(conversation_id, name.id)
    try:
        history, earlier = await read_history(body, caller.sees, stored)
    except BaseException:
        release()
        raise
    return OpenedResponse(name, history, earlier, release)


def _conversation_id(body: ResponsesRequest) -> str | None:
    """Return the id of the body's conversation. Raises InvalidValueError if the body continues a response as well."""
    named = body.conversation
    if named is not None and body.previous_response_id is not None:
        message = "previous_response_id and conversation cannot be used together."
        raise InvalidValueError(message, param="previous_response_id")
    return named.id if isinstance(named, ConversationName) else named


async def read_history(
    body: ResponsesRequest, sees: str | None, stored: StoredResponses | None
) -> tuple[History, EarlierItems]:
    """Return the history before a body's input, and the items that the input refers to.

    sees: as Caller.sees
    Raises InvalidValueError for an unknown response or item, and NotFoundError for an unknown conversation.
    """
    history = await _history(body, sees, stored)
    references = _references(body)
    referred = await _referred(references, sees, stored)
    size = history.bytes + sum(len(referred[item_id]) for _, item_id in references)
    return history, EarlierItems([item.body for item in history.items], referred, size)


async def _history(body: ResponsesRequest, sees: str | None, stored: StoredResponses | None) -> History:
    previous_id = body.previous_response_id
    conversation_id = _conversation_id(body)
    if previous_id is not None:
        if stored is not None:
            return await stored.store.chain(previous_id, owner=sees)
        message = f"Previous response with id '{previous_id}' not found."
        raise InvalidValueError(message, param="previous_response_id", code="previous_response_not_found")
    if conversation_id is not None:
        if stored is not None:
            return await stored.store.conversation_history(conversation_id, owner=sees)
        raise NotFoundError(f"Conversation with id '{conversation_id}' not found.", param="conversation")
    return History()


def _references(body: ResponsesRequest) -> list[tuple[str, str]]:
    """List (field, id of an item) of the references in a body."""
    items = body.input if isinstance(body.input, list) else []
    return [
        (f"input.{place}", item.id) for place, item in enumerate(items) if item.type == "item_reference" and item.id
    ]


async def _referred(
    references: Sequence[tuple[str, str]], sees: str | None, stored: StoredResponses | None
) -> Mapping[str, bytes]:
    if not references:
        return {}
    found = {} if stored is None else await stored.store.find_items([name for _, name in references], owner=sees)
    for param, item_id in references:
        if item_id not in found:
            raise InvalidValueError(f"Item with id '{item_id}' not found.", param=param)
    return found


async def new_response(
    body: ResponsesRequest, opened: OpenedResponse, state: ServerState, caller: Caller
) -> NewResponse:
    """Return the response that is stored before it runs: its own input, with references replaced by their items."""

    def work() -> tuple[StoredItem, ...]:
        items = [from_text(body.input)] if isinstance(body.input, str) else body.input or []
        return stored_items(_resolved(item, opened.earlier.referred) for item in items)

    return NewResponse(
        id=opened.name.id,
        status=ResponseStatus.QUEUED,
        body=b"{}",
        input=await state.body_work.run(work, body.size) if body.size > LARGE_BYTES else work(),
        owner=caller.owner,
        previous_id=body.previous_response_id,
        conversation_id=opened.name.conversation_id,
        history=History((), opened.history.turns, opened.history.bytes),
    )


def _resolved(item: InputItem, referred: Mapping[str, bytes]) -> InputItem:
    found = referred.get(item.id or "") if item.type == "item_reference" else None
    return item if found is None else InputItem.model_validate_json(found)


router = APIRouter()


@router.post("/v1/responses", **documented(ResponseAnswer, body=ResponsesRequest, events=ResponseEvent))
async def create_response(request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses."""
    state = server_state(request)
    caller = caller_of(request)
    stored = stored_responses(request.app)
    body = await read_body(request, ResponsesRequest)
    opened = await open_response(body, caller, stored)
    with ExitStack() as stack:
        stack.callback(opened.release)
        keeper = None
        if stored is not None and opened.name.store:
            keeper = StoreKeeper(stored.store, await new_response(body, opened, state, caller), opened.release)
        answer = await answer_responses(body, state, caller, opened.name, opened.earlier, keeper)
        if body.background and stored is not None and keeper is not None:
            response = await _queue(body, answer, keeper.new, stored)
            stack.pop_all()  # the runner releases it
        elif body.stream:
            return EventStream(answer.stream(), answer.held_bytes, state, RESPONSES, stack.pop_all())
        else:
            return json_response(await until_disconnect(request, answer.whole()))
    return followed(request, stored, opened.name.id, -1) if body.stream else json_response(response)


async def answer_responses(
    body: ResponsesRequest,
    state: ServerState,
    caller: Caller,
    name: ResponseName,
    earlier: EarlierItems,
    keeper: Keeper | None,
) -> ResponsesAnswer:
    """Check everything that can be wrong with the request and plan its generation. Raises a RequestError."""
    model = state.check_generates(body.model)
    task = await responses_task(body, state, caller.owner, name, earlier)
    planner = Planner(state, caller, task.request.for_adapter(state.adapter_digest(model)))
    plan = await planned(planner, task.prompt, task.shortened, task.num_droppable)
    return ResponsesAnswer(plan, task.options, model, caller.owner, keeper)


async def _queue(
    body: ResponsesRequest, answer: ResponsesAnswer, new: NewResponse, stored: StoredResponses
) -> dict[str, Any]:
    """Store a response that will run in the background, and return the queued response.

    Its request is kept without the input, which is stored as items.
    """
    response = answer.queued()
    moved = body.model_copy(update={"priority": batch_priority(body.priority or 0)})
    kept = moved.model_dump_json(exclude_unset=True, by_alias=True, exclude={"input"} if new.input else None)
    new = replace(new, body=without_output(response), request=kept.encode(), logged=bool(body.stream))
    await stored.background.submit(new, response)
    return response


async def answer_started(
    started: StartedResponse, keeper: Keeper, state: ServerState, stored: StoredResponses
) -> ResponsesAnswer:
    """Plan a background response that runs next. Raises a RequestError if it cannot be made any more."""
    record = started.record
    size = len(started.request) + sum(item.size for item in started.input)

    def work() -> ResponsesRequest:
        body = ResponsesRequest.model_validate_json(started.request)
        if started.input:
            body = body.model_copy(update={"input": loaded_items(started.input)})
        body.note_size(size)
        return body

    body = await state.body_work.run(work, size)
    created_at = orjson.loads(record.body)["created_at"]
    name = ResponseName(record.id, created_at, store=True, background=True, conversation_id=record.conversation_id)
    _, earlier = await read_history(body, None, stored)  # the rights of its key were checked when it was queued
    caller = Caller(record.owner, is_stored=True)
    return await answer_responses(body, state, caller, name, earlier, keeper)


@router.post("/v1/responses/input_tokens", **documented(InputTokens, body=ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation, tools included."""
    state = server_state(request)
    caller = caller_of(request)
    body = await read_body(request, ResponsesRequest)
    _, earlier = await read_history(body, caller.sees, stored_responses(request.app))
    messages = await input_messages(body, state, caller.owner, earlier)
    found = await prompt_tokens(messages, state, special=False, limit=None, param="input")
    return json_response({"object": "response.input_tokens", "input_tokens": len(found.token_ids)})
