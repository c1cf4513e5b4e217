"""From a chat body to token ids: which parts a message may have, the template, the encoding."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.prompts import INLINE_CHARS, check_ids, check_length, encode, truncate
from jaxserve.api.protocol.chat import ChatCompletionRequest, Message, Thinking
from jaxserve.api.state import ServerState
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.text.tokenizer import SHIELD

_TAIL_TOKENS = 64  # enough to see whether a prompt ends inside the thinking
_TEXT_PARTS = frozenset({"text", "refusal", "input_text", "output_text"})
_MEDIA_PARTS = frozenset(
    {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file", "audio"}
)


def check_messages(messages: Sequence[Message]) -> None:
    """What the types cannot say. Raises a RequestError that names the message."""
    for number, message in enumerate(messages):
        param = f"messages.{number}.content"
        if isinstance(message.content, list):
            _check_parts(message, param)
        elif message.content is None and message.role in ("system", "developer", "user", "tool"):
            raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages.{number}.tool_call_id"
            raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")


def _check_parts(message: Message, param: str) -> None:
    assert isinstance(message.content, list)
    for place, part in enumerate(message.content):
        where = f"{param}.{place}"
        if part.type in _MEDIA_PARTS:
            message_text = f"{where}: a part of type {part.type!r} cannot be given to this model, it takes text only."
            raise UnsupportedParameterError(message_text, param=where)
        if part.type not in _TEXT_PARTS:
            raise InvalidValueError(f"{where}.type: {part.type!r} is no type of part.", param=f"{where}.type")
        if part.text is None and part.refusal is None:
            raise InvalidValueError(f"{where}.text is missing.", param=f"{where}.text")


def _shielded(value: Any, shield: Callable[[str], str]) -> Any:
    """A JSON value from a client in which texts of special tokens will stay text."""
    if isinstance(value, str):
        return shield(value)
    if isinstance(value, list):
        return [_shielded(item, shield) for item in value]
    if isinstance(value, dict):
        return {key: item if key in ("role", "type") else _shielded(item, shield) for key, item in value.items()}
    return value


async def render_messages(
    messages: Sequence[Message],
    state: ServerState,
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """The prompt's text. Raises InvalidValueError for messages that the template refuses."""
    template = state.chat_template
    if template is None:
        message = "This model has no chat template; use /v1/completions, or set model.chat_template on the server."
        raise InvalidValueError(message, param="messages")
    shield = state.engine.tokenizer.shield
    plain = [_shielded(message.model_dump(exclude_unset=True), shield) for message in messages]
    generation = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    def work() -> str:
        return template.render(
            plain,
            tools=_shielded(tools, shield),
            documents=_shielded(documents, shield),
            add_generation_prompt=generation,
            continue_final_message=continue_final_message,
            kwargs=kwargs,
        )

    return work() if _is_small(messages, tools, documents) else await asyncio.to_thread(work)


def _is_small(messages: Sequence[Message], *others: list[dict[str, Any]] | None) -> bool:
    """Whether rendering takes too little time to be worth a thread."""
    size = sum(len(str(other)) for other in others if other)
    return size + sum(len(last_text([message])) for message in messages) <= INLINE_CHARS


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model sees it.

    text: as rendered; of a body that brought its own ids, the text of the last of them
    continued: the assistant's text that the output continues, if any
    """

    token_ids: list[int]
    text: str
    continued: str = ""


async def chat_prompt(
    body: ChatCompletionRequest, state: ServerState, tools: list[dict[str, Any]] | None
) -> ChatPrompt:
    """Render and encode. Raises a RequestError, also for a prompt that leaves no room."""
    info, tokenizer = state.engine.info, state.engine.tokenizer
    if body.input_ids is not None:
        check_ids(body.input_ids, info, "input_ids")
        ids, text = body.input_ids, tokenizer.decode(body.input_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    else:
        shielded = await _render(body, state, tools, template_kwargs(body))
        ids = await encode(tokenizer, shielded, add_special_tokens=bool(body.add_special_tokens))
        text = shielded.replace(SHIELD, "")
    asked, side = body.max_completion_tokens or body.max_tokens, body.truncation_side or "left"
    ids = truncate(ids, body.truncate_prompt_tokens, side, asked, info.max_model_len)
    check_length(ids, info, "messages" if body.input_ids is None else "input_ids")
    return ChatPrompt(ids, text, last_text(body.messages) if body.continue_final_message else "")


async def thinking_is_off(
    body: ChatCompletionRequest, state: ServerState, tools: list[dict[str, Any]] | None, prompt: ChatPrompt
) -> bool:
    """Whether the model is asked not to think: by the request, or by the template's own default.

    The default is off if the prompt is the same as one that switches thinking off.
    """
    kwargs = template_kwargs(body)
    wish = kwargs.get("enable_thinking", kwargs.get("thinking"))
    if wish is not None or body.input_ids is not None:
        return wish is False
    without = await _render(body, state, tools, kwargs | {"enable_thinking": False, "thinking": False})
    return prompt.text == without.replace(SHIELD, "")


async def _render(
    body: ChatCompletionRequest, state: ServerState, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any]
) -> str:
    return await render_messages(
        body.messages,
        state,
        tools=tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        kwargs=kwargs,
    )


def last_text(messages: Sequence[Message]) -> str:
    """The text of the last message."""
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    """What the body says to the template besides messages and tools."""
    kwargs: dict[str, Any] = {}
    effort = body.reasoning_effort
    if body.reasoning is not None:
        effort = body.reasoning.effort if effort is None else effort
        if body.reasoning.enabled is not None:
            kwargs |= {"enable_thinking": body.reasoning.enabled, "thinking": body.reasoning.enabled}
    wish = body.thinking.type if isinstance(body.thinking, Thinking) else body.thinking
    if wish not in (None, "adaptive"):
        kwargs |= dict.fromkeys(("enable_thinking", "thinking"), wish in (True, "enabled"))
    if effort == "none":
        kwargs |= {"enable_thinking": False, "thinking": False}
    elif effort is not None:
        kwargs["reasoning_effort"] = effort
    given = {"verbosity": body.verbosity, "task": body.task}
    kwargs |= {name: value for name, value in given.items() if value is not None}
    return kwargs | (body.chat_template_kwargs or {})
