"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.planner import Planner
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.protocol.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.respond.chat_answer import ChatAnswer
from jaxserve.api.respond.wire import json_answer
from jaxserve.api.shared.keys import Caller, caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.api.tasks.chat import chat_task

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **documented(ChatCompletion, body=ChatCompletionRequest, events=ChatCompletionChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = server_state(request)
    body = await read_body(request, ChatCompletionRequest)
    answer = await answer_chat(body, state, caller_of(request))
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state)
    return await json_answer(await until_disconnect(request, answer.whole()))


async def answer_chat(body: ChatCompletionRequest, state: ServerState, caller: Caller) -> ChatAnswer:
    """Check everything that can be wrong with the request and plan its generation. Raises a RequestError."""
    model = state.check_generates(body.model)
    task = chat_task(body, state)
    plan = await Planner(state, caller, task.request).chat(task.prompt)
    return ChatAnswer(plan, task.options, model, state.token_texts)
