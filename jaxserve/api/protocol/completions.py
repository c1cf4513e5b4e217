"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.common import SamplingFields
from jaxserve.api.protocol.known_fields import COMPLETIONS, EVERYWHERE

Prompt = (
    str
    | Annotated[list[str], Field(max_length=limits.MAX_PROMPTS)]
    | limits.TokenIds
    | Annotated[list[limits.TokenIds], Field(max_length=limits.MAX_PROMPTS)]
)


class CompletionRequest(SamplingFields):
    known = EVERYWHERE | COMPLETIONS

    model: str
    prompt: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    max_tokens: limits.TokenCountOrZero | None = Field(
        None, description="Default 16; limited to the rest of the context."
    )
    suffix: str | None = Field(None, description="Text after the gap, if the tokenizer has fill-in-the-middle tokens.")
    echo: bool | None = Field(None, description="Return the prompt before the output.")
    logprobs: limits.LogprobsCount | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Generate this many outputs and return the n best."
    )
    add_special_tokens: bool | None = Field(None, description="Begin a text prompt with BOS. Default true.")
