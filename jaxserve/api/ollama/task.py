"""Read a task from the bodies of Ollama's /api/chat and /api/generate."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.generate.pictures import joined_content, picture_of_base64
from jaxserve.api.generate.task import (
    ChatMessages,
    ChatPrompt,
    Constraint,
    TextPrompt,
    native_params,
    thinking,
    thinking_effort,
    with_watermark,
)
from jaxserve.api.generate.tools import ToolUse, in_place, offered_tools, without_header
from jaxserve.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest, OllamaMessage, OllamaOptions
from jaxserve.api.sglang.protocol import NativeSampling
from jaxserve.api.state import ServerState
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.translate import schema_spec
from jaxserve.types.sampling import GrammarSpec, SamplingParams

_NATIVE_NAMES = {"seed": "sampling_seed", "repeat_penalty": "repetition_penalty"}


@dataclass(frozen=True, kw_only=True)
class OllamaOutput:
    """The options of an answer. logprobs: number of most likely tokens to show; None: no log-probabilities"""

    logprobs: int | None = None


def chat_prompt(body: OllamaChatRequest, state: ServerState) -> ChatPrompt:
    """Read and check a body of /api/chat. Raises a RequestError that names the field."""
    messages = body.messages or []
    for number, message in enumerate(messages):
        _check_images(message.images, f"messages.{number}.images", state)
        if message.images and message.role not in ("user", "tool"):
            param = f"messages.{number}.images"
            raise InvalidValueError(f"{param}: images are taken in user messages and tool results.", param=param)
    tools = offered_tools(body.tools or [])
    make = functools.partial(template_messages, messages, system_in_middle=state.takes_late_system)
    last = messages[-1]
    continued = last.content or "" if last.role == "assistant" and not last.tool_calls else ""
    return _conversation(body, state, make=make, tools=tools, continued=continued)


def instruction_prompt(body: OllamaGenerateRequest, state: ServerState) -> ChatPrompt | TextPrompt:
    """Read and check a body of /api/generate: a conversation of one message, or a text if it is raw or has a suffix.

    Raises a RequestError that names the field.
    """
    _check_images(body.images, "images", state)
    _refuse(body.template, "template", "a template in a request is not accepted")
    _refuse(body.context, "context", "send the conversation to /api/chat")
    if body.raw or body.suffix:
        _refuse(body.system, "system", "raw prompts and prompts with a suffix have no system message")
        _refuse(body.images, "images", "raw prompts and prompts with a suffix have no images")
        return TextPrompt(
            content=body.prompt or "",
            suffix=body.suffix or "",
            sampling=_sampling(body, state),
            constraint=_constraint(body),
        )
    roles = (("system", body.system), ("user", body.prompt))
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in roles if text]
    if body.images and messages and messages[-1]["role"] == "user":
        messages[-1]["content"] = _content(body.prompt or "", body.images, "images")
    elif body.images:
        messages.append({"role": "user", "content": _content("", body.images, "images")})
    return _conversation(body, state, make=lambda: messages)


def output_options(body: OllamaChatRequest | OllamaGenerateRequest) -> OllamaOutput:
    """Return the options of the answer. Raises InvalidValueError if top_logprobs is given without logprobs."""
    if body.top_logprobs and not body.logprobs:
        raise InvalidValueError("top_logprobs needs logprobs: true.", param="top_logprobs")
    return OllamaOutput(logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def _conversation(
    body: OllamaChatRequest | OllamaGenerateRequest,
    state: ServerState,
    *,
    make: Any,
    tools: ToolUse | None = None,
    continued: str = "",
) -> ChatPrompt:
    tools = tools or ToolUse()
    messages = ChatMessages(
        make=make,
        size=body.size,
        tools=tools.shown,
        variables=_thinking(body.think),
        continue_final_message=bool(continued),
    )
    return ChatPrompt(
        messages=messages,
        continued=continued,
        sampling=_sampling(body, state),
        constraint=_constraint(body),
        tools=tools,
    )


def _thinking(wish: bool | str | None) -> dict[str, Any]:
    if wish is None or isinstance(wish, bool):
        return {} if wish is None else dict(thinking(wish))
    return thinking(True) | thinking_effort(wish)


def _sampling(body: OllamaChatRequest | OllamaGenerateRequest, state: ServerState) -> SamplingParams:
    info = state.engine.info
    given = dict(body.options or OllamaOptions.model_construct())
    limit = given["num_predict"] or 0
    renamed = {_NATIVE_NAMES.get(name, name): value for name, value in given.items()}
    wanted = {name: value for name, value in renamed.items() if name in NativeSampling.model_fields}
    wanted["max_new_tokens"] = limit if limit > 0 else info.max_model_len
    sampling = NativeSampling.model_construct(**wanted)
    params = native_params(sampling, info, logprobs=output_options(body).logprobs)
    return with_watermark(params, None, reveal(state.config.server.watermark_key), "watermark")


def _constraint(body: OllamaChatRequest | OllamaGenerateRequest) -> Constraint | None:
    if not body.format:
        return None
    if body.format == "json":
        return GrammarSpec(kind="json_object", source=""), "format"
    assert not isinstance(body.format, str)
    try:
        return schema_spec(body.format, strict=True), "format"  # llama.cpp closes what names its properties
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param="format") from None


def _check_images(images: Sequence[str] | None, param: str, state: ServerState) -> None:
    if not state.takes_pictures:
        _refuse(images, param, "the model is served as text here")


def _content(text: str, images: Sequence[str] | None, param: str) -> str | list[Any]:
    """Return the content of a message. The pictures stand before the text, as in Ollama."""
    if not images:
        return text
    return joined_content([*(picture_of_base64(each, f"{param}.{n}") for n, each in enumerate(images)), text])


def _refuse(value: object, param: str, reason: str) -> None:
    if value:
        raise UnsupportedParameterError(f"{param} is not supported: {reason}.", param=param)


def template_messages(messages: Sequence[OllamaMessage], *, system_in_middle: bool) -> list[dict[str, Any]]:
    """Return the messages as chat templates read them. A call or result without an id gets the next id in order."""
    found = [_template_message(message, number) for number, message in enumerate(messages)]
    return found if system_in_middle else in_place(found)


def _template_message(message: OllamaMessage, number: int) -> dict[str, Any]:
    content = message.content or ""
    found: dict[str, Any] = {
        "role": message.role,
        "content": without_header(content) if message.role == "system" else _shown(message, number),
    }
    optional = {"reasoning_content": message.thinking, "name": message.tool_name, "tool_call_id": message.tool_call_id}
    found |= {name: value for name, value in optional.items() if value}
    if message.tool_calls:
        found["tool_calls"] = [
            {
                "id": call.id or f"call_{number}_{place}",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _text(call.function.arguments or {})},
            }
            for place, call in enumerate(message.tool_calls)
        ]
    return found


def _shown(message: OllamaMessage, number: int) -> str | list[Any]:
    return _content(message.content or "", message.images, f"messages.{number}.images")


def _text(arguments: dict[str, Any]) -> str:
    return json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
