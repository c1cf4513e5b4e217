"""Serve POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.answers import ChatCompletion, ChatCompletionChunk, TextCompletion
from jaxserve.api.generate.generation import PromptTask
from jaxserve.api.generate.planner import Planner
from jaxserve.api.generate.task import TextPrompt
from jaxserve.api.generate.wire import json_answer
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.keys import Caller, caller_of
from jaxserve.api.openai.answer import ChatAnswer, CompletionAnswer, CompletionChoices
from jaxserve.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.api.openai.task import CompletionTask, chat_task, completion_task
from jaxserve.api.openapi import documented
from jaxserve.api.state import ServerState, server_state

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
    plan = await Planner(state, caller, task.request.for_adapter(state.adapter_digest(model))).chat(task.prompt)
    return ChatAnswer(plan, task.options, model, state.token_texts)


@router.post("/v1/completions", **documented(TextCompletion, body=CompletionRequest, events=TextCompletion))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    state = server_state(request)
    body = await read_body(request, CompletionRequest)
    model = state.check_generates(body.model)
    task = completion_task(body, state)
    options = task.request.for_adapter(state.adapter_digest(model))
    generation = await Planner(state, caller_of(request), options).texts(task.prompts)
    choices = CompletionChoices(generation, task.options, _prompt_texts(task, generation.prompts, state), state)
    answer = CompletionAnswer(generation, task.options, model, choices)
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state)
    return await json_answer(await until_disconnect(request, answer.whole()))


def _prompt_texts(task: CompletionTask, planned: list[PromptTask], state: ServerState) -> list[str]:
    """Return the prompts as texts if the answer shows them."""
    if not (task.options.echo or task.options.output.prompt_text):
        return [""] * len(planned)
    return [_prompt_text(asked, each, state) for asked, each in zip(task.prompts, planned, strict=True)]


def _prompt_text(asked: TextPrompt, planned: PromptTask, state: ServerState) -> str:
    """Return the prompt's text: as it was sent, or decoded from its token ids."""
    if isinstance(asked.content, str) and asked.truncation.keep is None and asked.mode.session is None:
        return asked.content
    skip = asked.sampling.skip_special_tokens
    return state.engine.tokenizer.decode(planned.prompt_token_ids, skip_special_tokens=skip)
