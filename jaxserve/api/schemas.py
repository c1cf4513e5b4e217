"""List the bodies and answers of all routes, for the OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel

from jaxserve.api import answers
from jaxserve.api.anthropic import protocol as anthropic
from jaxserve.api.anthropic.protocol import CountTokensRequest, MessagesRequest
from jaxserve.api.ollama import protocol as ollama
from jaxserve.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from jaxserve.api.openai import models
from jaxserve.api.openai.batches import BatchAnswer, BatchList, CreateBatchRequest
from jaxserve.api.openai.embeddings import EmbeddingRequest
from jaxserve.api.openai.files import FileAnswer, FileDeleted, FileList
from jaxserve.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.api.responses.protocol import (
    AddItemsRequest,
    ConversationAnswer,
    CreateConversationRequest,
    InputTokens,
    ItemList,
    ObjectDeleted,
    ResponseAnswer,
    ResponseEvent,
    ResponsesRequest,
    UpdateConversationRequest,
)
from jaxserve.api.scoring.protocol import (
    Classified,
    ClassifyRequest,
    Decided,
    DecisionRequest,
    Reranked,
    RerankRequest,
    Scored,
    ScoreRequest,
)
from jaxserve.api.sessions import CloseSessionRequest, OpenSessionRequest
from jaxserve.api.sglang import adapters
from jaxserve.api.sglang import protocol as sglang
from jaxserve.api.sglang.protocol import (
    AbortRequest,
    ContinueRequest,
    DetokenizeRequest,
    GenerateRequest,
    MemoryRequest,
    PauseRequest,
    ReadWeightsRequest,
    TokenizeRequest,
    UpdateVersionRequest,
    UpdateWeightsRequest,
)

BODIES: tuple[type[BaseModel], ...] = (
    *(ChatCompletionRequest, CompletionRequest, GenerateRequest, EmbeddingRequest),
    *(TokenizeRequest, DetokenizeRequest, AbortRequest, CreateBatchRequest),
    *(OpenSessionRequest, CloseSessionRequest, MessagesRequest, CountTokensRequest),
    *(RerankRequest, ScoreRequest, ClassifyRequest, DecisionRequest, ResponsesRequest),
    *(OllamaChatRequest, OllamaGenerateRequest, ShowRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest),
    *(CreateConversationRequest, UpdateConversationRequest, AddItemsRequest),
    *(UpdateWeightsRequest, UpdateVersionRequest, PauseRequest, ContinueRequest, MemoryRequest),
    ReadWeightsRequest,
    *(adapters.LoadLoraRequest, adapters.UnloadLoraRequest),
    *(adapters.LoadAdapterRequest, adapters.UnloadAdapterRequest),
)
ANSWERS: tuple[type[BaseModel], ...] = (
    *(answers.Error, answers.ChatCompletion, answers.ChatCompletionChunk, answers.TextCompletion, models.ModelList),
    *(models.ModelAnswer, answers.Health, sglang.Generated, sglang.Tokenized, sglang.Detokenized),
    *(
        answers.Embeddings,
        sglang.Aborted,
        sglang.Success,
        sglang.GenerationState,
        sglang.MemoryState,
        sglang.WeightRows,
        sglang.WeightsUpdated,
        adapters.AdaptersLoaded,
        answers.ServerInfo,
        sglang.SessionId,
    ),
    *(anthropic.AnthropicError, anthropic.AnthropicMessage, anthropic.AnthropicMessageEvent, anthropic.TokenCount),
    *(Reranked, Scored, Classified, Decided),
    *(ollama.OllamaError, ResponseAnswer, ResponseEvent, InputTokens),
    *(FileAnswer, FileList, FileDeleted, BatchAnswer, BatchList),
    *(ConversationAnswer, ItemList, ObjectDeleted),
)
