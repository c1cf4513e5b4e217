"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.common import Body
from jaxserve.api.protocol.completions import Prompt
from jaxserve.api.protocol.known_fields import EMBEDDINGS, EVERYWHERE


class EmbeddingRequest(Body):
    known = EVERYWHERE | EMBEDDINGS

    model: str
    input: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    encoding_format: Literal["float", "base64"] | None = Field(None, description="Default float.")
    dimensions: limits.TokenCount | None = Field(
        None, description="Keep this many dimensions, normalized to length 1 again."
    )
    normalize: bool | None = Field(
        None, description="Normalize to length 1; only the value in the model's own files is accepted."
    )
    use_activation: bool | None = Field(None, description="The same as normalize.")
    user: str | None = Field(None, description="Ignored.")
    add_special_tokens: bool | None = Field(
        None, description="Add the tokenizer's special tokens to texts. Default true."
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=2**31 - 1,
        description="Keep this many tokens; -1: as many as fit. Default: a longer input is a 400.",
    )
    truncation_side: Literal["left", "right"] | None = Field(None, description="The end that is cut. Default right.")
    priority: limits.Priority | None = Field(
        None, description="Lower values run earlier (policy: priority). Default 0."
    )
    cache_salt: limits.CacheSalt | None = Field(
        None, description="Only requests with the same value share cached prefixes."
    )
    request_id: limits.Identifier | None = Field(None, description="Id of the request, for aborts and logs.")
    rid: limits.Identifier | None = Field(None, description="The same as request_id.")
