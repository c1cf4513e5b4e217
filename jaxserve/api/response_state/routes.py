"""OpenAI's POST /v1/responses and POST /v1/responses/input_tokens."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.batch.route_handler import batch_priority
from jaxserve.api.docs.openapi import documented
from jaxserve.api.errors.families import RESPONSES
from jaxserve.api.generate.planner import Planner
from jaxserve.api.generate.rendering import render
from jaxserve.api.generate.shortening import planned
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.respond.wire import json_response
from jaxserve.api.response_state.background import StartedResponse
from jaxserve.api.response_state.history import new_response, open_response, read_history
from jaxserve.api.response_state.items import loaded_items
from jaxserve.api.response_state.keeper import StoreKeeper, without_output
from jaxserve.api.response_state.service import StoredResponses, stored_responses
from jaxserve.api.response_state.stored_routes import followed
from jaxserve.api.responses.answer import Keeper, ResponsesAnswer
from jaxserve.api.responses.answer_schemas import InputTokens, ResponseAnswer, ResponseEvent
from jaxserve.api.responses.protocol import ResponsesRequest
from jaxserve.api.responses.task import EarlierItems, ResponseName, input_messages, responses_task
from jaxserve.api.shared.keys import Caller, caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.store.records import NewResponse

router = APIRouter()


@router.post("/v1/responses", **documented(ResponseAnswer, body=ResponsesRequest, events=ResponseEvent))
async def create_response(request: Request) -> Response:
    """Answer a conversation in the form of OpenAI's Responses."""
    state, caller, stored = server_state(request), caller_of(request), stored_responses(request.app)
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
    planner = Planner(state, caller, task.request)
    plan = await planned(planner, task.prompt, task.shortened, task.num_droppable)
    return ResponsesAnswer(plan, task.options, model, caller.owner, keeper)


async def _queue(
    body: ResponsesRequest, answer: ResponsesAnswer, new: NewResponse, stored: StoredResponses
) -> dict[str, Any]:
    """Store a response to run in the background, and return it as it is shown until then.

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
    """Plan a background response that is to run now. Raises a RequestError if it cannot be made any more."""
    record, size = started.record, len(started.request) + sum(item.size for item in started.input)

    def work() -> ResponsesRequest:
        body = ResponsesRequest.model_validate_json(started.request)
        if started.input:
            body = body.model_copy(update={"input": loaded_items(started.input)})
        body.note_size(size)
        return body

    body = await state.body_work.run(work, size)
    created_at = orjson.loads(record.body)["created_at"]
    name = ResponseName(record.id, created_at, store=True, background=True, conversation_id=record.conversation_id)
    _, earlier = await read_history(body, None, stored)  # which its key may see was checked when it was queued
    caller = Caller(record.owner, is_stored=True)
    return await answer_responses(body, state, caller, name, earlier, keeper)


@router.post("/v1/responses/input_tokens", **documented(InputTokens, body=ResponsesRequest))
async def count_input_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation, tools included."""
    state, caller = server_state(request), caller_of(request)
    body = await read_body(request, ResponsesRequest)
    _, earlier = await read_history(body, caller.sees, stored_responses(request.app))
    messages = await input_messages(body, state, caller.owner, earlier)
    ids = await state.encoder.encode(await render(messages, state), add_special_tokens=False, param="input")
    return json_response({"object": "response.input_tokens", "input_tokens": len(ids)})
