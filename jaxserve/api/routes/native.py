"""POST /generate: SGLang's native form, with one prompt or many, streamed or not."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.generation import Generation
from jaxserve.api.generate.planner import Planner
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.protocol.answers import Generated
from jaxserve.api.protocol.generate import GenerateRequest
from jaxserve.api.respond.native_answer import NativeAnswer
from jaxserve.api.respond.wire import json_answer
from jaxserve.api.shared.keys import caller_of
from jaxserve.api.shared.state import server_state
from jaxserve.api.tasks.native import NativeOptions, native_task
from jaxserve.errors import InvalidValueError

router = APIRouter()


@router.post("/generate", **documented(Generated, body=GenerateRequest, events=Generated, many=True))
@router.put("/generate", include_in_schema=False)
async def generate(request: Request) -> Response:
    """Continue a text or token ids; `meta_info` describes the generation."""
    state = server_state(request)
    body = await read_body(request, GenerateRequest)
    state.check_generates(None)
    task = await native_task(body, state)
    generation = await Planner(state, caller_of(request), task.request).texts(task.prompts)
    _check_starts(generation, task.options)
    answer = NativeAnswer(generation, task.options, state.token_texts, single=task.single)
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state)
    return await json_answer(await until_disconnect(request, answer.whole()))


def _check_starts(generation: Generation, options: list[NativeOptions]) -> None:
    """Raises InvalidValueError if log-probabilities would begin after the end of a prompt."""
    for prompt, shown in zip(generation.prompts, options, strict=True):
        count = len(prompt.prompt_token_ids)
        if shown.start > count:
            message = f"logprob_start_len is {shown.start}, and the prompt has {count} tokens."
            raise InvalidValueError(message, param="logprob_start_len")
