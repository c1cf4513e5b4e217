"""The bodies and answers of all routes, for the OpenAPI document."""

from __future__ import annotations

from pydantic import BaseModel

from jaxserve.api.decisions.protocol import Decided, DecisionRequest
from jaxserve.api.messages.protocol import CountTokensRequest, MessagesRequest
from jaxserve.api.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from jaxserve.api.protocol import answers, models
from jaxserve.api.protocol.admin import AbortRequest
from jaxserve.api.protocol.batches import BatchAnswer, BatchList, CreateBatchRequest
from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.protocol.embeddings import EmbeddingRequest
from jaxserve.api.protocol.files import FileAnswer, FileDeleted, FileList
from jaxserve.api.protocol.generate import GenerateRequest
from jaxserve.api.protocol.sessions import CloseSessionRequest, OpenSessionRequest
from jaxserve.api.protocol.tokens import DetokenizeRequest, TokenizeRequest
from jaxserve.api.protocol.weights import (
    ContinueRequest,
    MemoryRequest,
    PauseRequest,
    ReadWeightsRequest,
    UpdateVersionRequest,
    UpdateWeightsRequest,
)
from jaxserve.api.response_state.conversation_protocol import (
    AddItemsRequest,
    ConversationAnswer,
    CreateConversationRequest,
    ItemList,
    ObjectDeleted,
    UpdateConversationRequest,
)
from jaxserve.api.responses.answer_schemas import InputTokens, ResponseAnswer, ResponseEvent
from jaxserve.api.responses.protocol import ResponsesRequest
from jaxserve.api.scoring.protocol import Classified, ClassifyRequest, Reranked, RerankRequest, Scored, ScoreRequest

BODIES: tuple[type[BaseModel], ...] = (
    *(ChatCompletionRequest, CompletionRequest, GenerateRequest, EmbeddingRequest),
    *(TokenizeRequest, DetokenizeRequest, AbortRequest, CreateBatchRequest),
    *(OpenSessionRequest, CloseSessionRequest, MessagesRequest, CountTokensRequest),
    *(RerankRequest, ScoreRequest, ClassifyRequest, DecisionRequest, ResponsesRequest),
    *(OllamaChatRequest, OllamaGenerateRequest, ShowRequest, OllamaEmbedRequest, OllamaEmbeddingsRequest),
    *(CreateConversationRequest, UpdateConversationRequest, AddItemsRequest),
    *(UpdateWeightsRequest, UpdateVersionRequest, PauseRequest, ContinueRequest, MemoryRequest),
    ReadWeightsRequest,
)
ANSWERS: tuple[type[BaseModel], ...] = (
    *(answers.Error, answers.ChatCompletion, answers.ChatCompletionChunk, answers.TextCompletion, models.ModelList),
    *(models.ModelAnswer, answers.Health, answers.Generated, answers.Tokenized, answers.Detokenized),
    *(
        answers.Embeddings,
        answers.Aborted,
        answers.Success,
        answers.GenerationState,
        answers.MemoryState,
        answers.WeightRows,
        answers.WeightsUpdated,
        answers.Facts,
        answers.SessionId,
    ),
    *(answers.AnthropicError, answers.AnthropicMessage, answers.AnthropicMessageEvent, answers.TokenCount),
    *(Reranked, Scored, Classified, Decided),
    *(answers.OllamaError, ResponseAnswer, ResponseEvent, InputTokens),
    *(FileAnswer, FileList, FileDeleted, BatchAnswer, BatchList),
    *(ConversationAnswer, ItemList, ObjectDeleted),
)
