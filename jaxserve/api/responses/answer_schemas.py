"""The answers of /v1/responses, for the OpenAPI document."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from jaxserve.api.protocol.answers import Answer


class ResponseAnswer(Answer):
    """A response. Its items have only the keys that their type needs."""

    id: str
    object: str
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | list[Any] | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    presence_penalty: float
    frequency_penalty: float
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: dict[str, Any] | None
    user: str | None
    metadata: dict[str, str]


class ResponseEvent(BaseModel):
    """The data of a named event: response.created, response.output_item.added, response.output_text.delta, and so on.

    The data of the last event is [DONE].
    """

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int


class InputTokens(Answer):
    object: str
    input_tokens: int
