"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.chat import ChatMessage, Tool
from jaxserve.api.protocol.common import Body

Texts = Annotated[list[str], Field(min_length=1, max_length=limits.MAX_PROMPTS)]


class TokenizeRequest(Body):
    model: str | None = None
    prompt: str | Texts | None = Field(None, description="A text or texts; or give messages.")
    text: str | None = Field(None, description="The same as prompt.")
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=limits.MAX_MESSAGES)] | None = None
    tools: Annotated[list[Tool], Field(max_length=limits.MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = Field(None, description="Default true for texts, false for messages.")
    add_generation_prompt: bool | None = Field(None, description="Default true.")
    continue_final_message: bool | None = Field(None, description="Default false.")
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = Field(
        None, description="Also return each token's text in the vocabulary's own spelling."
    )


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: limits.TokenIds | Annotated[list[limits.TokenIds], Field(max_length=limits.MAX_PROMPTS)] | None = None
    ids: limits.TokenIds | None = Field(None, description="The same as tokens.")
    skip_special_tokens: bool | None = Field(None, description="Default false.")
