"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.body import read_body
from jaxserve.api.chat_output import ChatChoices, ChatOptions, Joined
from jaxserve.api.constraints import after_reasoning, constraint
from jaxserve.api.conversation import chat_prompt, check_messages, last_text, template_kwargs
from jaxserve.api.generation import Generation, Job, new_id
from jaxserve.api.openapi import documented
from jaxserve.api.prompts import check_length, truncate
from jaxserve.api.protocol.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.sampling import sampling_params
from jaxserve.api.sse import EventStream, until_disconnect
from jaxserve.api.state import ServerState, server_state
from jaxserve.api.tool_constraints import raw_input_of, with_tools
from jaxserve.api.tools import RawInputParser, tool_use
from jaxserve.api.wire import ChunkWriter, Envelope, check_stream_options, json_response
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.text.events import OutputParser

router = APIRouter()


@router.post(
    "/v1/chat/completions",
    **documented(ChatCompletion, body=ChatCompletionRequest, events=ChatCompletionChunk),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = server_state(request)
    body = await read_body(request, ChatCompletionRequest)
    check_chat(body)
    answer = await prepare(body, state)
    if body.stream:
        return EventStream(answer.events())
    return json_response(await until_disconnect(request, answer.whole()))


def check_chat(body: ChatCompletionRequest) -> None:
    check_stream_options(body)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidValueError("top_logprobs needs logprobs: true.", param="top_logprobs")
    for modality in body.modalities or ():
        if modality != "text":
            raise UnsupportedParameterError(f"modalities: {modality!r} cannot be made.", param="modalities")


async def prepare(body: ChatCompletionRequest, state: ServerState) -> ChatAnswer:
    """Everything that can be wrong with the request is found here."""
    model = state.check_model(body.model)
    check_messages(body.messages)
    info, tokenizer = state.engine.info, state.engine.tokenizer
    tools = tool_use(body)
    asked = body.max_completion_tokens or body.max_tokens
    token_ids, prompt = await chat_prompt(body, state, tools.shown or None)
    token_ids = truncate(
        token_ids, body.truncate_prompt_tokens, body.truncation_side or "left", asked, info.max_model_len
    )
    check_length(token_ids, info, "messages" if body.input_ids is None else "input_ids")
    continued = last_text(body.messages) if body.continue_final_message else ""
    found = with_tools(constraint(body, tokenizer), tools, state)
    grammar = None
    if found is not None:
        await state.grammars.check(*found, state.engine)
        grammar = found[0]
        off = template_kwargs(body).get("enable_thinking") is False
        grammar = after_reasoning(grammar, state.parsers, tokenizer, prompt, continued, off)
    params = sampling_params(
        body,
        info,
        tokenizer,
        max_tokens=asked,
        num_prompt_tokens=len(token_ids),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    visible = state.parsers.visible_token_ids(tokenizer, tools=tools.mode != "none")
    job = Job(token_ids, msgspec.structs.replace(params, visible_token_ids=visible))
    salt = (body.cache_salt or "") + (body.extra_key or "")
    request_id = new_id("chatcmpl", body.request_id or body.rid)
    generation = Generation(state, request_id, [job], body.priority or 0, salt, body.stream_interval or 1)

    raw_input = raw_input_of(tools)

    def make_parser() -> OutputParser:
        if raw_input is not None:
            return RawInputParser(raw_input)
        return state.parsers.make(
            tools=tools.tool_set,
            prompt=prompt,
            continued=continued,
            separate_reasoning=body.separate_reasoning is not False,
            fallback_tool="json" if tools.mode == "required" else None,
        )

    options = ChatOptions(tools.parallel, tools.legacy, last_text(body.messages) if body.echo else "")
    choices = ChatChoices(body, job, state.token_texts, generation.usage, make_parser, options)
    return ChatAnswer(body, model, generation, choices)


class ChatAnswer:
    """One conversation on its way to one answer."""

    def __init__(self, body: ChatCompletionRequest, model: str, generation: Generation, choices: ChatChoices) -> None:
        self._body = body
        self._model = model
        self._generation = generation
        self._choices = choices

    async def events(self) -> AsyncGenerator[bytes, None]:
        envelope = Envelope(self._generation.request_id, "chat.completion.chunk", self._model)
        writer = ChunkWriter(envelope, self._generation.usage, self._body)
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for chunk in self._choices.chunks(output):
                    yield writer.chunk(chunk)
                if self._choices.complete:
                    break
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        found: dict[int, Joined] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for chunk in self._choices.chunks(output):
                    found.setdefault(chunk["index"], Joined(chunk["index"])).add(chunk)
                if self._choices.complete:
                    break
        envelope = Envelope(self._generation.request_id, "chat.completion", self._model)
        return envelope.head() | {
            "choices": [found[index].result() for index in sorted(found)],
            "usage": self._generation.usage.as_dict(),
            "service_tier": "default",
            "system_fingerprint": None,
        }
