"""The bodies and answers of /v1/rerank, /score and /v1/classify."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jaxserve.api.protocol import limits
from jaxserve.api.protocol.answers import Answer, EmbeddingUsage
from jaxserve.api.protocol.common import Body, NestedObject
from jaxserve.api.protocol.completions import Prompt
from jaxserve.api.protocol.known_fields import EVERYWHERE, SCORING

Texts = Annotated[list[str], Field(max_length=limits.MAX_PROMPTS)]
KeptTokens = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class ScoringFields(Body):
    """What the three routes share."""

    known = EVERYWHERE | SCORING

    model: str | None = Field(None, description="Default: the first served name.")
    use_activation: bool | None = Field(
        None, description="false: the model's own numbers instead of probabilities. Default true."
    )
    user: str | None = Field(None, description="Ignored.")
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="Cut the document so that this many tokens remain; -1: as many as fit. Default: a 400."
    )
    priority: limits.Priority | None = Field(
        None, description="Lower values run earlier (policy: priority). Default 0."
    )
    cache_salt: limits.CacheSalt | None = Field(
        None, description="Only requests with the same value share cached prefixes."
    )
    request_id: limits.Identifier | None = Field(None, description="Id of the request, for aborts and logs.")
    rid: limits.Identifier | None = Field(None, description="The same as request_id.")


class PairFields(ScoringFields):
    instruction: str | None = Field(None, description="What relevant means; read by rerankers with a prompt.")
    max_tokens_per_doc: limits.TokenCount | None = Field(None, description="Cut each document to this many tokens.")


class RerankDocument(NestedObject):
    text: str


class RerankRequest(PairFields):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=limits.MAX_PROMPTS)]
    top_n: limits.TokenCountOrZero | None = Field(None, description="Return this many results. Default and 0: all.")
    return_documents: bool | None = Field(None, description="Return the texts too. Default true.")


class ScoreRequest(PairFields):
    queries: str | Texts | None = Field(None, description="One text for all documents, or one for each.")
    documents: str | Texts | None = Field(None, description="What the queries are compared with.")
    text_1: str | Texts | None = Field(None, description="The same as queries.")
    text_2: str | Texts | None = Field(None, description="The same as documents.")
    data_1: str | Texts | None = Field(None, description="The same as queries.")
    data_2: str | Texts | None = Field(None, description="The same as documents.")


class ClassifyRequest(ScoringFields):
    input: Prompt = Field(description="A text, texts, token ids, or lists of them.")


class RerankResult(Answer):
    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class Reranked(Answer):
    """The most relevant first; `index` is the place in the request."""

    id: str
    model: str
    results: list[RerankResult]
    usage: EmbeddingUsage
    meta: dict[str, Any]


class ScoreAnswer(Answer):
    index: int
    object: str
    score: float


class Scored(Answer):
    """One score per pair, in order."""

    id: str
    object: str
    created: int
    model: str
    data: list[ScoreAnswer]
    usage: EmbeddingUsage


class ClassAnswer(Answer):
    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classified(Answer):
    """The most likely label of each text, in order."""

    id: str
    object: str
    created: int
    model: str
    data: list[ClassAnswer]
    usage: EmbeddingUsage
