"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.generation import PromptTask
from jaxserve.api.generate.planner import Planner
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.protocol.answers import TextCompletion
from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.respond.completion_answer import CompletionAnswer
from jaxserve.api.respond.completion_choices import CompletionChoices
from jaxserve.api.respond.wire import json_answer
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.api.tasks.completion import CompletionTask, completion_task
from jaxserve.api.tasks.task import TextPrompt

router = APIRouter()


@router.post("/v1/completions", **documented(TextCompletion, body=CompletionRequest, events=TextCompletion))
async def create_completion(request: Request) -> Response:
    """Continue one or more prompts."""
    state = server_state(request)
    body = await read_body(request, CompletionRequest)
    model = state.check_generates(body.model)
    task = completion_task(body, state)
    generation = await Planner(state, caller_of(request), task.request).texts(task.prompts)
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
    """Return the text as it was sent, or decoded from ids."""
    if isinstance(asked.content, str) and asked.truncation.keep is None and asked.mode.session is None:
        return asked.content
    skip = asked.sampling.skip_special_tokens
    return state.engine.tokenizer.decode(planned.prompt_token_ids, skip_special_tokens=skip)
