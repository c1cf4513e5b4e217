"""Check the model's files at start for mistakes that only the first requests would show."""

from __future__ import annotations

import logging
from typing import Any

from jaxserve.api.shared.state import ServerState
from jaxserve.errors import ConfigError, InvalidValueError
from jaxserve.text.renderer import Renderer
from jaxserve.text.template_worker import TemplateInput
from jaxserve.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
NO_TEMPLATE = "set model.chat_template to a template of this model that can"


def check_template(state: ServerState) -> None:
    """Load, compile and render the chat template. The tokenizer must be loaded.

    Raises ConfigError if the template is absent, does not parse or cannot render a plain conversation. If it cannot
    render tools, that is an error if model.tool_parser is set, else a warning.
    """
    template = state.chat_template
    if template is None:
        return
    _render(template, None)
    if state.parsers.tool is None:
        return
    try:
        _render(template, TOOLS)
    except ConfigError as error:
        if state.config.model.tool_parser != "auto":
            raise
        logger.warning("%s; requests with tools will be refused", error)


def _render(template: Renderer, tools: list[dict[str, Any]] | None) -> str:
    try:
        conversation = TemplateInput(MESSAGES, tools)
        return template.render_here(conversation) or template.render(conversation)
    except InvalidValueError as error:
        what = "a conversation with tools" if tools else "a plain conversation"
        raise ConfigError(f"model.chat_template: {error.message}, trying {what}", fix=NO_TEMPLATE) from error


def check_vocabulary(state: ServerState) -> None:
    """Compare the tokenizer with the model's vocabulary, which may be padded. The engine must be ready.

    Raises ConfigError if a text could produce token ids that the model lacks. Unknown special tokens are only a
    warning: fine-tuned models are published with an added padding token that they never use.
    """
    tokenizer, known = state.engine.tokenizer, state.engine.info.vocab_size
    unknown = [i for i in range(known, tokenizer.vocab_size) if tokenizer.id_to_token(i) is not None]
    framed = tokenizer.encode("Hello") + _template_ids(state, tokenizer)
    wrong = [i for i in unknown if i not in tokenizer.special_ids or i in framed]
    if wrong:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, and the model's vocabulary has {known}: "
            f"{len(wrong)} tokens that texts use are unknown to the model, the first is {wrong[0]}",
            fix="use the tokenizer that the model was trained with (model.tokenizer)",
        )
    if unknown:
        logger.warning(
            "%d special tokens of the tokenizer are unknown to the model (ids %d to %d, its vocabulary has %d); "
            "a prompt with one of them is refused",
            *(len(unknown), unknown[0], unknown[-1], known),
        )


def _template_ids(state: ServerState, tokenizer: Tokenizer) -> list[int]:
    template = state.chat_template
    return [] if template is None else tokenizer.encode(_render(template, None), add_special_tokens=False)
