"""Declare the bodies and answers of Anthropic's POST /v1/messages and /v1/messages/count_tokens.

Agents add fields with every release. A field or block of a feature that this server lacks is therefore ignored and
logged once. If the request requires the feature, it gets an error that names the field (task.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from jaxserve.api import ranges
from jaxserve.api.answers import Answer
from jaxserve.api.fields import Body, NestedObject
from jaxserve.api.known_fields import COUNT_TOKENS, EVERYWHERE, MESSAGES, MESSAGES_OUTPUT, MESSAGES_THINKING

MAX_CONTENT_BLOCKS = 4096

ToolName = Annotated[str, Field(min_length=1, max_length=128)]


class Source(NestedObject):
    """Where an image or a document comes from."""

    type: str
    media_type: str | None = None
    data: str | None = None
    content: Any = None
    url: str | None = Field(None, description="With type url: the picture, from one of media.allowed_hosts.")


class MessageTool(NestedObject):
    """A tool of the client. Tools that Anthropic hosts have another `type` and are not offered."""

    name: ToolName | None = Field(None, description="Required of a tool of the client.")
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Default false: what cannot be enforced of the schema is left out, instead of refused."
    )

    defer_loading: bool | None = Field(
        None, description="Leave it out of the prompt until a tool_reference or a tool_addition brings it."
    )

    @property
    def is_own(self) -> bool:
        """Whether the client runs the tool. Anthropic runs the other tools, which are not offered."""
        return self.type in (None, "custom")

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """Return no field: hosted tools have fields of their own."""
        return {}


class ChangedTool(NestedObject):
    """A tool that a message adds or removes. `name` names an earlier tool; `definition` is a new tool."""

    type: str
    name: str | None = None
    definition: MessageTool | None = None

    @property
    def is_own(self) -> bool:
        """Whether the client runs the tool."""
        return self.name is not None if self.definition is None else self.definition.is_own

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """Return no field: hosted tools have fields of their own."""
        return {}


class Block(NestedObject):
    """A part of a message. `type` decides which fields are read."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    # an object: what a tool that Anthropic runs has found
    content: str | Annotated[list[Block], Field(max_length=MAX_CONTENT_BLOCKS)] | dict[str, Any] | None = None
    is_error: bool | None = None
    source: Source | str | None = None
    title: str | None = None
    context: str | None = None
    tool_name: str | None = None
    tool: ChangedTool | None = None

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """Return no field: blocks carry marks such as cache_control and citations, which have no effect."""
        return {}


Blocks = Annotated[list[Block], Field(max_length=MAX_CONTENT_BLOCKS)]


class InputMessage(NestedObject):
    role: Literal["user", "assistant", "system"]
    content: str | Blocks


class MessageToolChoice(NestedObject):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(NestedObject):
    known = MESSAGES_THINKING

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ranges.TokenCount | None = Field(None, description="Reasoning is ended after this many tokens.")
    display: str | None = Field(None, description="omitted: the thinking blocks have no text.")


class OutputFormat(NestedObject):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(NestedObject):
    known = MESSAGES_OUTPUT

    effort: str | None = Field(
        None, description="Passed to the chat template as reasoning_effort and reasoning_strength."
    )
    format: OutputFormat | None = Field(None, description="The answer must match the schema.")


class NewThread(NestedObject):
    """Keep the conversation, so that the next request can continue it."""

    type: Literal["create"]
    previous_message_id: None = Field(None, description="Not with this type.")


class EarlierThread(NestedObject):
    """The conversation up to the reply of that id comes before the messages."""

    type: Literal["continue"]
    previous_message_id: str = Field(description="Id of the latest reply.")


class CountTokensRequest(Body):
    known = EVERYWHERE | COUNT_TOKENS

    model: str
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=ranges.MAX_MESSAGES)]
    system: str | Blocks | None = None
    tools: Annotated[list[MessageTool], Field(max_length=ranges.MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older name of output_config.format.")
    thread: Annotated[NewThread | EarlierThread, Field(discriminator="type")] | None = Field(
        None, description="Keep the conversation on the server, or continue it with the new messages only."
    )


class MessagesRequest(CountTokensRequest):
    known = EVERYWHERE | MESSAGES

    max_tokens: ranges.TokenCountOrZero = Field(
        description="Limited to the rest of the context. 0: only put the prompt into the prefix cache."
    )
    stop_sequences: ranges.Stops | None = None
    stream: bool | None = None
    temperature: ranges.Temperature | None = None
    top_p: ranges.TopP | None = None
    top_k: ranges.TopK | None = None


class AnthropicErrorDetail(Answer):
    """What went wrong. `details` is absent if the SDKs have nothing to act on."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(Answer):
    """The body of every 4xx and 5xx below /v1/messages."""

    type: str
    error: AnthropicErrorDetail
    request_id: str


class AnthropicUsage(Answer):
    """The three input counts add up to the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: dict[str, int]


class AnthropicMessage(Answer):
    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class AnthropicMessageEvent(BaseModel):
    """The data of a named event: message_start, content_block_start, content_block_delta, and so on."""

    model_config = ConfigDict(extra="allow")

    type: str


class TokenCount(Answer):
    input_tokens: int
