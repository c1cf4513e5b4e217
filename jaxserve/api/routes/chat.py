"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from jaxserve.api.docs.openapi import documented
from jaxserve.api.generate.constraints import after_reasoning, constraint
from jaxserve.api.generate.conversation import ChatPrompt, chat_prompt, check_messages, last_text, thinking_is_off
from jaxserve.api.generate.generation import Generation, Job, new_id, prefix_namespace
from jaxserve.api.generate.prompts import session_context
from jaxserve.api.generate.sampling import sampling_params
from jaxserve.api.generate.shapes import budgeted, marked, remembered, shaped
from jaxserve.api.generate.tool_constraints import raw_input_of, with_tools
from jaxserve.api.generate.tools import RawInputParser, ToolUse, tool_use
from jaxserve.api.http.body import read_body
from jaxserve.api.http.sse import EventStream, until_disconnect
from jaxserve.api.protocol.answers import ChatCompletion, ChatCompletionChunk
from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.respond.chat_output import ChatChoices, ChatOptions, Joined
from jaxserve.api.respond.extras import Extras
from jaxserve.api.respond.wire import ChunkWriter, Envelope, check_stream_options, json_answer
from jaxserve.api.shared.keys import Caller, caller_of
from jaxserve.api.shared.state import ServerState, server_state
from jaxserve.config import ServerSection
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.text.events import OutputParser
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import GrammarSpec, SamplingParams, ThinkingBudget

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
    answer = await prepare(body, state, caller_of(request))
    if body.stream:
        return EventStream(answer.events(), answer.held_bytes, state.unread)
    return await json_answer(await until_disconnect(request, answer.whole()))


def check_chat(body: ChatCompletionRequest) -> None:
    """Check combinations of fields. Raises InvalidValueError or UnsupportedParameterError."""
    check_stream_options(body)
    if not body.messages and body.input_ids is None:
        raise InvalidValueError("messages is empty.", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise InvalidValueError("top_logprobs needs logprobs: true.", param="top_logprobs")
    for modality in body.modalities or ():
        if modality != "text":
            raise UnsupportedParameterError(f"modalities: {modality!r} cannot be made.", param="modalities")


async def prepare(body: ChatCompletionRequest, state: ServerState, caller: Caller) -> ChatAnswer:
    """Check everything that can be wrong with the request and start its generation."""
    model = state.check_generates(body.model)
    check_messages(body.messages)
    tools = tool_use(body)
    prompt = await chat_prompt(body, state, tools.shown or None)
    if body.session_params is not None:
        prompt = replace(prompt, token_ids=session_context(body, state, prompt.token_ids, caller))
    job = Job(prompt.token_ids, _params(body, state, tools, prompt, await _grammar(body, state, tools, prompt)))
    job = marked(job, body, state)
    job = budgeted(job, _thinking_budget(body, state, tools, prompt, job.params.grammar))
    job = shaped(job, body, state.engine.tokenizer, state.engine.info.eos_token_ids)
    salt = prefix_namespace(body.cache_salt, body.extra_key)
    request_id = new_id("chatcmpl", body.request_id or body.rid)
    job = remembered(job, state, body.session_params, request_id, caller)
    generation = Generation(state, request_id, [job], body.priority or 0, salt, body.stream_interval or 1, caller)
    echo = last_text(body.messages) if body.echo else ""
    options = ChatOptions(tools.parallel, tools.legacy, echo, prompt.text, _reasoning_fields(state.config.server))
    extras = Extras(body, request_id)
    make_parser = _parser_factory(body, state, tools, prompt)
    choices = ChatChoices(body, job, state.token_texts, generation.usage, make_parser, options, extras)
    return ChatAnswer(body, model, generation, choices)


def _reasoning_fields(section: ServerSection) -> tuple[str, ...]:
    return ("reasoning_content", "reasoning") if section.reasoning_field == "both" else ("reasoning_content",)


async def _grammar(
    body: ChatCompletionRequest, state: ServerState, tools: ToolUse, prompt: ChatPrompt
) -> GrammarSpec | None:
    """Return the constraint on the output once the grammar compiler accepts it."""
    answer = constraint(body, state.engine.tokenizer)
    found = with_tools(answer, tools, state)
    if found is None:
        return None
    checked = await state.grammars.check(*found, state.engine)
    if state.parsers.harmony and found is not answer:
        return checked  # applies from the first token: the grammar covers all channels, also those of the reasoning
    off = await thinking_is_off(body, state, tools.shown or None, prompt)
    return after_reasoning(checked, state.parsers, state.engine.tokenizer, prompt.text, prompt.continued, off)


def _params(
    body: ChatCompletionRequest, state: ServerState, tools: ToolUse, prompt: ChatPrompt, grammar: GrammarSpec | None
) -> SamplingParams:
    params = sampling_params(
        body,
        state.engine.info,
        state.engine.tokenizer,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        num_prompt_tokens=len(prompt.token_ids),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=grammar,
    )
    visible = state.parsers.visible_token_ids(state.engine.tokenizer, tools=tools.mode != "none")
    return msgspec.structs.replace(params, visible_token_ids=visible)


def _thinking_budget(
    body: ChatCompletionRequest, state: ServerState, tools: ToolUse, prompt: ChatPrompt, grammar: GrammarSpec | None
) -> ThinkingBudget | None:
    tags = state.parsers.think_tags
    if body.thinking_token_budget is None:
        return None
    if tags is None:
        message = "thinking_token_budget: this model does not think between tags."
        raise InvalidValueError(message, param="thinking_token_budget")
    offered = tools.tool_set
    return ThinkingBudget(
        tokens=body.thinking_token_budget,
        family=state.parsers.reasoning or "",
        inside=tags.opened_by(prompt.text, prompt.continued),
        tools=() if offered is None else offered.names,
        end_token_ids=_end_of_thinking(tags.end, state.engine.tokenizer, grammar),
    )


def _end_of_thinking(end: str, tokenizer: Tokenizer, grammar: GrammarSpec | None) -> tuple[int, ...]:
    """Return the tokens that end the reasoning of a model that exceeds its budget.

    A grammar begins directly after the token ids of the closing tag, so nothing may follow them.
    """
    if grammar is None or not grammar.begin_after:
        return tuple(tokenizer.encode(f"\n{end}\n\n", add_special_tokens=False))
    ids = tuple(tokenizer.encode(f"\n{end}", add_special_tokens=False))
    return ids if ids[-len(grammar.begin_after) :] == grammar.begin_after else grammar.begin_after


def _parser_factory(
    body: ChatCompletionRequest, state: ServerState, tools: ToolUse, prompt: ChatPrompt
) -> Callable[[], OutputParser]:
    raw_input, offered = raw_input_of(tools), tools.tool_set
    if offered is not None:
        offered = replace(offered, on_unoffered=state.metrics.unoffered_calls.inc)

    def make() -> OutputParser:
        """Make a parser for one choice."""
        parser = state.parsers.make(
            tools=None if raw_input is not None else offered,
            prompt=prompt.text,
            continued=prompt.continued,
            separate_reasoning=body.separate_reasoning is not False,
            fallback_tool="json" if tools.mode == "required" else None,
        )
        return parser if raw_input is None else RawInputParser(raw_input, parser)

    return make


class ChatAnswer:
    """The answer to one conversation."""

    def __init__(self, body: ChatCompletionRequest, model: str, generation: Generation, choices: ChatChoices) -> None:
        self._body = body
        self._model = model
        self._generation = generation
        self.held_bytes = generation.held_bytes
        self._choices = choices

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield the server-sent events of the answer."""
        envelope = Envelope(self._generation.request_id, "chat.completion.chunk", self._model)
        writer = ChunkWriter(envelope, self._generation.usage, self._body)
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                chunks = self._choices.chunks(output)
                if writer.continuous:
                    for event in writer.counted(chunks, len(output.token_ids), self._choices.take_about_prompt()):
                        yield event
                    chunks = []
                for chunk in chunks:
                    if self._choices.about_prompt:
                        yield writer.chunk_beside(chunk, self._choices.take_about_prompt())
                    else:
                        yield writer.chunk(chunk)
                if self._choices.complete:
                    break
        if writer.include_usage:
            yield writer.usage_chunk()

    async def whole(self) -> dict[str, Any]:
        """Return the unstreamed answer."""
        found: dict[int, Joined] = {}
        async with aclosing(self._generation.outputs()) as outputs:
            async for _, output in outputs:
                for chunk in self._choices.chunks(output):
                    found.setdefault(chunk["index"], Joined(chunk["index"])).add(chunk)
                if self._choices.complete:
                    break
        envelope = Envelope(self._generation.request_id, "chat.completion", self._model)
        about_prompt = {"prompt_token_ids": None, "prompt_logprobs": None} | self._choices.about_prompt
        return (
            envelope.head()
            | about_prompt
            | {
                "choices": [found[index].result() for index in sorted(found)],
                "usage": self._generation.usage.as_dict(),
                "service_tier": "default",
                "system_fingerprint": None,
            }
        )
