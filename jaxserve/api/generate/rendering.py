"""Turn a conversation into token ids: render the chat template, tokenize, cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.api.generate.prompts import check_ids, check_length, longest_prompt, truncate
from jaxserve.api.shared.encoding import INLINE_CHARS
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.chat import thinking
from jaxserve.api.tasks.task import ChatMessages, ChatPrompt
from jaxserve.errors import InvalidValueError
from jaxserve.text.template_worker import TemplateInput
from jaxserve.text.tokenizer import SHIELD

_TAIL_TOKENS = 64  # enough characters to see whether a prompt ends inside the reasoning


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as the model sees it.

    text: as rendered; for a request with its own ids, the text of the last of them
    """

    token_ids: list[int]
    text: str


async def render(messages: ChatMessages, state: ServerState, changed: Mapping[str, Any] | None = None) -> str:
    """Render the prompt's text. Raises InvalidValueError if the template refuses the messages.

    changed: template variables that replace those of the messages
    """
    template = state.chat_template
    if template is None:
        message = "This model has no chat template; use /v1/completions, or set model.chat_template on the server."
        raise InvalidValueError(message, param="messages")
    generation, continues = messages.add_generation_prompt, messages.continue_final_message
    generation = not continues if generation is None else generation

    def conversation() -> TemplateInput:
        tools = list(messages.tools) or None
        documents = list(messages.documents) if messages.documents is not None else None
        variables = {**messages.variables, **(changed or {})}
        return TemplateInput(messages.make(), tools, documents, generation, continues, variables)

    size = messages.size
    if size <= INLINE_CHARS and (text := template.render_here(conversation())) is not None:
        return text
    return await state.template_work.run(lambda: template.render(conversation(), size), size)


async def rendered_chat(prompt: ChatPrompt, state: ServerState) -> RenderedChat:
    """Render and tokenize. Raises a RequestError, also for a prompt that leaves no room for output."""
    info, tokenizer = state.engine.info, state.engine.tokenizer
    longest = longest_prompt(prompt, info)
    if prompt.token_ids is not None:
        check_ids(prompt.token_ids, info, "input_ids")
        ids, text = prompt.token_ids, tokenizer.decode(prompt.token_ids[-_TAIL_TOKENS:], skip_special_tokens=False)
    else:
        shielded = await render(prompt.messages, state)
        limit = longest if prompt.truncation.keep is None else None
        special = prompt.add_special_tokens
        ids = await state.encoder.encode(shielded, add_special_tokens=special, limit=limit, param="messages")
        text = shielded.replace(SHIELD, "")
    ids = truncate(ids, prompt.truncation, prompt.sampling.max_tokens, info.max_model_len)
    check_length(ids, longest, info, "messages" if prompt.token_ids is None else "input_ids")
    return RenderedChat(ids, text)


async def thinking_is_off(prompt: ChatPrompt, rendered: RenderedChat, state: ServerState) -> bool:
    """Return whether reasoning is turned off, by the request or by the template's own default.

    The default is off if the prompt equals the one rendered with reasoning turned off.
    """
    variables = prompt.messages.variables
    wish = variables.get("enable_thinking", variables.get("thinking"))
    if wish is not None or prompt.token_ids is not None:
        return wish is False
    without = await render(prompt.messages, state, thinking(False))
    return rendered.text == without.replace(SHIELD, "")
