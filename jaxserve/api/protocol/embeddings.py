"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.common import Body
from jaxserve.api.protocol.completions import Prompt


class EmbeddingRequest(Body):
    model: str
    input: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default float.")
    dimensions: limits.TokenCount | None = Field(None, description="Keep so many numbers, scaled to length one again.")
    normalize: bool | None = Field(None, description="Length one or not: only as the model's own files say.")
    use_activation: bool | None = Field(None, description="The same as normalize.")
    user: str | None = Field(None, description="Not used.")
    add_special_tokens: bool | None = Field(None, description="Frame a text as the tokenizer does. Default true.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, le=2**31 - 1, description="Keep so many tokens; -1: what fits. Default: a longer input is a 400."
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="Where it is cut. Default right.")
    priority: limits.Priority | None = Field(None, description="Lower runs earlier (policy: priority). Default 0.")
    cache_salt: limits.CacheSalt | None = Field(None, description="Only requests with the same share a prefix.")
    request_id: limits.Identifier | None = Field(None, description="Of the request, for aborts and logs.")
    rid: limits.Identifier | None = Field(None, description="The same as request_id.")
