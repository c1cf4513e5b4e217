"""Turn a chat body into token ids: check its messages, render the chat template, tokenize."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.generate.prompts import check_ids, check_length, truncate
from jaxserve.api.protocol.chat import ChatCompletionRequest, Message, Thinking
from jaxserve.api.shared.encoding import INLINE_CHARS
from jaxserve.api.shared.state import ServerState
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.text.shield import SHIELD
from jaxserve.text.template.template_worker import Conversation

_TAIL_TOKENS = 64  # enough characters to see whether a prompt ends inside the reasoning
_TEXT_PARTS = frozenset({"text", "refusal", "input_text", "output_text"})
_MEDIA_PARTS = frozenset(
    {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file", "audio"}
)


def check_messages(messages: Sequence[Message]) -> None:
    """Check what the types cannot express. Raises a RequestError that names the message."""
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


async def render_messages(
    messages: Sequence[Message],
    state: ServerState,
    size: int,
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool | None = None,
    continue_final_message: bool = False,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """Render the prompt's text. Raises InvalidValueError if the template refuses the messages.

    size: of the body that brings all this; a large one is rendered by a worker
    """
    template = state.chat_template
    if template is None:
        message = "This model has no chat template; use /v1/completions, or set model.chat_template on the server."
        raise InvalidValueError(message, param="messages")
    generation = not continue_final_message if add_generation_prompt is None else add_generation_prompt

    def conversation() -> Conversation:
        given = [message.model_dump(exclude_unset=True) for message in messages]
        return Conversation(given, tools, documents, generation, continue_final_message, kwargs)

    if size <= INLINE_CHARS and (text := template.render_here(conversation())) is not None:
        return text
    return await state.template_work.run(lambda: template.render(conversation(), size), size)


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as the model sees it.

    text: as rendered; for a body with its own ids, the text of the last of them
    continued: the assistant's text that the output continues, if any
    """

    token_ids: list[int]
    text: str
    continued: str = ""


async def chat_prompt(
    body: ChatCompletionRequest, state: ServerState, tools: list[dict[str, Any]] | None
) -> ChatPrompt:
    """Render and tokenize. Raises a RequestError, also for a prompt that leaves no room for output."""
    info, tokenizer = state.engine.info, state.engine.tokenizer
    if body.input_ids is not None:
        check_ids(body.input_ids, info, "input_ids")
        ids, text = body.input_ids, tokenizer.decode(body.input_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    else:
        shielded = await _render(body, state, tools, template_kwargs(body))
        limit = info.max_model_len if body.truncate_prompt_tokens is None else None
        special = bool(body.add_special_tokens)
        ids = await state.encoder.encode(shielded, add_special_tokens=special, limit=limit, param="messages")
        text = shielded.replace(SHIELD, "")
    asked, side = body.max_completion_tokens or body.max_tokens, body.truncation_side or "left"
    ids = truncate(ids, body.truncate_prompt_tokens, side, asked, info.max_model_len)
    check_length(ids, info, "messages" if body.input_ids is None else "input_ids")
    return ChatPrompt(ids, text, last_text(body.messages) if body.continue_final_message else "")


async def thinking_is_off(
    body: ChatCompletionRequest, state: ServerState, tools: list[dict[str, Any]] | None, prompt: ChatPrompt
) -> bool:
    """Return whether reasoning is turned off, by the request or by the template's own default.

    The default is off if the prompt equals the one rendered with reasoning turned off.
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
        body.size,
        tools=tools,
        documents=body.documents,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
        kwargs=kwargs,
    )


def last_text(messages: Sequence[Message]) -> str:
    """Return the text of the last message; empty if there is none."""
    if not messages:
        return ""
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the template variables of the body other than messages and tools."""
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
