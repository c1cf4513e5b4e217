"""Declare the bodies and answers of the scoring routes: /v1/rerank, /score, /v1/classify and OpenAI's /v1/decisions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.api import ranges
from jaxserve.api.answers import Answer, EmbeddingUsage
from jaxserve.api.fields import Body, NestedObject
from jaxserve.api.known_fields import EVERYWHERE, SCORING
from jaxserve.api.openai.protocol import Prompt

Texts = Annotated[list[str], Field(max_length=ranges.MAX_PROMPTS)]
KeptTokens = Annotated[int, Field(ge=-1, le=2**31 - 1)]


class ScoringFields(Body):
    """The fields that rerank, score and classify share."""

    known = EVERYWHERE | SCORING

    model: str | None = Field(None, description="Default: the first served name.")
    use_activation: bool | None = Field(
        None, description="false: the model's own numbers instead of probabilities. Default true."
    )
    user: str | None = Field(None, description="Ignored.")
    truncate_prompt_tokens: KeptTokens | None = Field(
        None, description="Cut the document so that this many tokens remain; -1: as many as fit. Default: a 400."
    )
    priority: ranges.Priority | None = Field(
        None, description="Lower values run earlier (policy: priority). Default 0."
    )
    cache_salt: ranges.CacheSalt | None = Field(
        None, description="Only requests with the same value share cached prefixes."
    )
    request_id: ranges.Identifier | None = Field(None, description="Id of the request, for aborts and logs.")
    rid: ranges.Identifier | None = Field(None, description="The same as request_id.")


class PairFields(ScoringFields):
    instruction: str | None = Field(None, description="What relevant means; read by rerankers with a prompt.")
    max_tokens_per_doc: ranges.TokenCount | None = Field(None, description="Cut each document to this many tokens.")


class RerankDocument(NestedObject):
    text: str


class RerankRequest(PairFields):
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[str | RerankDocument], Field(min_length=1, max_length=ranges.MAX_PROMPTS)]
    top_n: ranges.TokenCountOrZero | None = Field(None, description="Return this many results. Default and 0: all.")
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
    """The documents, the most relevant first. `index` is the place in the request."""

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
    """One score for each pair, in order."""

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


MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_LEVELS_OF_JSON = 32
MAX_VALUES_OF_JSON = 10_000
MAX_BYTES_OF_JSON = 256 * 1024


class DecisionPart(NestedObject):
    """A part of a message, an output or a question. `type` decides which field is read."""

    type: Literal["input_text", "input_image", "input_json", "output_text", "refusal"]
    text: str | None = Field(None, description="Of input_text and output_text.")
    refusal: str | None = Field(None, description="Of refusal.")
    data: dict[str, Any] | list[dict[str, Any]] | None = Field(
        None, description="Of input_json: at most 32 levels, 10,000 values and 256 KiB."
    )
    image_url: str | None = Field(None, description="Refused: the model reads text.")
    detail: str | None = Field(None, description="Ignored.")
    prompt_cache_breakpoint: dict[str, Any] | None = Field(None, description="Ignored: prefixes are always cached.")


DecisionParts = Annotated[list[DecisionPart], Field(max_length=ranges.MAX_MESSAGES)]


class DecisionItem(NestedObject):
    """A message, a call, or the output of a call. `type` decides which fields are read."""

    type: Literal["message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"] = (
        Field("message", description="Default message.")
    )
    role: Literal["user", "developer", "system", "assistant"] | None = Field(None, description="Of a message.")
    content: str | DecisionParts | None = Field(None, description="Of a message.")
    call_id: str | None = Field(None, description="Of a call and of its output.")
    name: str | None = Field(None, description="Of a call.")
    arguments: str | None = Field(None, description="Of function_call.")
    input: str | None = Field(None, description="Of custom_tool_call.")
    output: str | DecisionParts | None = Field(None, description="Of the output of a call.")
    id: str | None = Field(None, description="Ignored.")
    namespace: str | None = Field(None, description="Of a call.")
    status: str | None = Field(None, description="Ignored.")
    phase: str | None = Field(None, description="Ignored.")


class DecisionChoice(NestedObject):
    value: str | bool
    description: str | None = None


class DecisionLevel(NestedObject):
    label: str
    description: str | None = None


class DecisionQuestion(NestedObject):
    """A question about the input. `type` decides which fields are read."""

    type: Literal["predicate", "choice", "score"]
    instructions: str | DecisionParts
    name: str | None = Field(None, description="Returned with the answer.")
    choices: Annotated[list[DecisionChoice], Field(min_length=2, max_length=MAX_OPTIONS)] | None = Field(
        None, description="Of choice: unique values."
    )
    levels: Annotated[list[DecisionLevel], Field(min_length=2, max_length=MAX_OPTIONS)] | None = Field(
        None, description="Of score: unique labels in order."
    )


class PromptCacheOptions(NestedObject):
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m"] | None = None


class DecisionRequest(Body):
    model: str
    input: str | Annotated[list[DecisionItem], Field(min_length=1, max_length=ranges.MAX_MESSAGES)] = Field(
        description="A text, or messages, calls and their outputs."
    )
    questions: Annotated[list[DecisionQuestion], Field(min_length=1, max_length=MAX_QUESTIONS)]
    prompt_cache_key: Annotated[str, Field(max_length=1024)] | None = Field(
        None, description="Only requests with the same value share cached prefixes."
    )
    prompt_cache_options: PromptCacheOptions | None = Field(None, description="Ignored: prefixes are always cached.")
    safety_identifier: str | None = Field(None, description="Ignored.")


class DecisionUsage(Answer):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class Decided(Answer):
    """One answer for each question, in order, with its probabilities."""

    answers: list[dict[str, Any]]
    model: str
    usage: DecisionUsage
