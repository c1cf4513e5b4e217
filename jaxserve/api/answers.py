"""Describe answers as models, for the OpenAPI document and for the tests that validate answers against it.

Here are the answers of chat, completions and embeddings, of errors and of probes. The other slices have their answers
in protocol.py. No request uses these models. Answers are built as plain dicts, because building a model for each
chunk would cost more than the rest of the chunk's work.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Answer):
    """The body of every 4xx and 5xx."""

    error: ErrorDetail


class PromptTokensDetails(Answer):
    cached_tokens: int


class CompletionTokensDetails(Answer):
    """Counts of completion tokens. The fields of predictions are absent if the engine made no drafts."""

    reasoning_tokens: int
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class UsageAnswer(Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails
    reasoning_tokens: int


class TopLogprob(Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    content: list[TokenLogprob] | None
    refusal: None


class FunctionAnswer(Answer):
    name: str
    arguments: str


class CustomAnswer(Answer):
    name: str
    input: str


class ToolCallAnswer(Answer):
    id: str
    type: str
    function: FunctionAnswer | None = None
    custom: CustomAnswer | None = None


class MessageAnswer(Answer):
    role: str
    content: str | None
    refusal: None
    annotations: list[Any]
    reasoning_content: str | None
    reasoning: str | None = None  # with server.reasoning_field: both
    tool_calls: list[ToolCallAnswer] | None = None
    function_call: FunctionAnswer | None = None


class Ending(Answer):
    finish_reason: str | None
    matched_stop: int | str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    meta_info: dict[str, Any] | None = None
    weight_versions: list[str] | None = None
    sglext: dict[str, Any] | None = None


class AboutPrompt(Answer):
    """vLLM's fields beside the choices of a chat; in a stream they are in the first chunk."""

    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[Any] | None = None
    prompt_text: str | None = None


class ChatChoice(Ending):
    index: int
    message: MessageAnswer
    logprobs: ChatLogprobs | None
    hidden_states: list[float] | None = None


class ChatCompletion(AboutPrompt):
    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageAnswer
    service_tier: str
    system_fingerprint: None


class FunctionDelta(Answer):
    name: str | None = None
    arguments: str | None = None


class CustomDelta(Answer):
    name: str | None = None
    input: str | None = None


class ToolCallChunk(Answer):
    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None
    custom: CustomDelta | None = None


class Delta(Answer):
    role: str | None = None
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCallChunk] | None = None
    function_call: FunctionDelta | None = None
    hidden_states: list[float] | None = None


class ChatChunkChoice(Ending):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(AboutPrompt):
    """The data of one event; the data of the last event is [DONE]."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageAnswer | None = None


class CompletionLogprobsAnswer(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Ending):
    index: int
    text: str
    logprobs: CompletionLogprobsAnswer | None
    prompt_logprobs: list[Any] | None = None
    prompt_text: str | None = None
    hidden_states: list[float] | None = None


class TextCompletion(Answer):
    """Also the data of one streamed event, where usage is present only on request."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageAnswer | None = None
    system_fingerprint: None = None


class EmbeddingAnswer(Answer):
    object: str
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class Embeddings(Answer):
    """One vector per input, in order; a string is base64 of little-endian float32."""

    object: str
    data: list[EmbeddingAnswer]
    model: str
    usage: EmbeddingUsage


class StoreHealth(Answer):
    status: str  # ok, full, failing, damaged
    detail: str | None


class EngineHealth(Answer):
    engine: int
    role: str  # both, prefill or decode
    status: str
    phase: str
    alive: bool


class Health(Answer):
    status: str
    phase: str
    progress: dict[str, int]
    programs: dict[str, int] | None = None
    engines: list[EngineHealth] | None = None
    store: StoreHealth | None = None
    error: ErrorDetail | None = None


class ServerInfo(BaseModel):
    """An object whose keys may grow in later versions."""

    model_config = ConfigDict(extra="allow")
