"""Serve Anthropic's POST /v1/messages and POST /v1/messages/count_tokens."""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.anthropic.answer import Keep, MessagesAnswer
from jaxserve.api.anthropic.protocol import (
    AnthropicError,
    AnthropicMessage,
    AnthropicMessageEvent,
    CountTokensRequest,
    MessagesRequest,
    TokenCount,
)
from jaxserve.api.anthropic.task import count_prompt, messages_task
from jaxserve.api.anthropic.threads import KeptTurn, read_history, whole_conversation
from jaxserve.api.generate.planner import Planner, prompt_tokens
from jaxserve.api.generate.wire import json_response
from jaxserve.api.http.body import read_body
from jaxserve.api.http.errors import ANTHROPIC
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.keys import Caller, caller_of
from jaxserve.api.openapi import documented
from jaxserve.api.state import ServerState, server_state

router = APIRouter()

_MESSAGES = documented(AnthropicMessage, body=MessagesRequest, events=AnthropicMessageEvent, error=AnthropicError)
_COUNT = documented(TokenCount, body=CountTokensRequest, error=AnthropicError)


@router.post("/v1/messages", **_MESSAGES)
async def create_message(request: Request) -> Response:
    """Answer a conversation in Anthropic's form."""
    state = server_state(request)
    caller = caller_of(request)
    body = await read_body(request, MessagesRequest)
    with ExitStack() as stack:
        history = await read_history(body, state, caller)
        if (turn := KeptTurn.of(body, state, caller)) is not None:
            stack.callback(turn.release)
        whole = await whole_conversation(body, history, state)
        answer = await answer_messages(whole, state, caller, None if turn is None else turn.keep)
        if body.stream:
            return EventStream(answer.events(), answer.held_bytes, state, ANTHROPIC, stack.pop_all())
        return json_response(await until_disconnect(request, answer.whole()))


async def answer_messages(
    body: MessagesRequest, state: ServerState, caller: Caller, keep: Keep | None
) -> MessagesAnswer:
    """Check everything that can be wrong with the request and plan its generation. Raises a RequestError."""
    model = state.check_messages(body.model)
    task = messages_task(body, state)
    plan = await Planner(state, caller, task.request.for_adapter(state.adapter_digest(model))).chat(task.prompt)
    return MessagesAnswer(plan, task.options, model, keep)


@router.post("/v1/messages/count_tokens", **_COUNT)
async def count_tokens(request: Request) -> Response:
    """Count the prompt tokens of a conversation, tools included."""
    state = server_state(request)
    body = await read_body(request, CountTokensRequest)
    state.check_messages(body.model)
    body = await whole_conversation(body, await read_history(body, state, caller_of(request)), state)
    found = await prompt_tokens(count_prompt(body, state), state, special=False, limit=None)
    return json_response({"input_tokens": len(found.token_ids)})
