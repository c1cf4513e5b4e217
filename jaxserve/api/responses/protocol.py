"""Declare the bodies and the answers of OpenAI's /v1/responses and /v1/conversations.

A field or tool of a feature that this server lacks, for example a hosted tool, is ignored and logged once. If the
request requires the feature, it gets an error that names the field (task.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from jaxserve.api import ranges
from jaxserve.api.answers import Answer
from jaxserve.api.fields import Body, CommonFields, NestedObject, StructuredOutputs
from jaxserve.api.known_fields import EVERYWHERE, RESPONSES, RESPONSES_REASONING
from jaxserve.store.records import ConversationRecord, StoredItem

MAX_INPUT_ITEMS = 8192  # a turn of an agent is a call, its output and reasoning
MAX_ITEM_PARTS = 4096
MAX_INSTRUCTION_ITEMS = 256  # items; the answer repeats them
MAX_LOGPROB_CHOICES = 20

SHOWS_LOGPROBS = "message.output_text.logprobs"
SHOWS_ENCRYPTED = "reasoning.encrypted_content"

ItemId = Annotated[str, Field(max_length=128)]
CallId = Annotated[str, Field(min_length=1, max_length=128)]
ToolText = Annotated[str, Field(min_length=1, max_length=128)]


class ItemPart(NestedObject):
    """A part of a message, of a reasoning or of a call's output. `type` decides which fields are read."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = Field(
        None, description="With type input_image: a data: URL, or a URL of one of media.allowed_hosts."
    )
    file_id: str | None = Field(None, description="Refused with type input_image: send a data: URL.")
    detail: str | None = Field(None, description="low: at most 512 x 512 pixels of the picture are read.")

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """Return no field: parts carry annotations, images and log-probabilities."""
        return {}


ItemParts = Annotated[list[ItemPart], Field(max_length=MAX_ITEM_PARTS)]


class InputItem(NestedObject):
    """An item of a conversation. `type` decides which fields are read; an item with a role is a message."""

    type: str | None = None
    role: Literal["user", "developer", "system", "assistant"] | None = None
    content: str | ItemParts | None = None
    id: ItemId | None = None
    call_id: CallId | None = None
    name: ToolText | None = None
    namespace: ToolText | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | ItemParts | None = None
    summary: ItemParts | None = None
    encrypted_content: str | None = None

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """Return no field: items carry a status, a phase, and fields of hosted tools."""
        return {}


class ToolInputFormat(NestedObject):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponseTool(NestedObject):
    """A function, a custom tool or a namespace of both. Tools of other types are not offered."""

    type: str
    name: ToolText | None = Field(None, description="Required of a function, a custom tool and a namespace.")
    description: str | None = Field(None, description="Of a namespace: ignored.")
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Default false: what cannot be enforced of the schema is left out, instead of refused."
    )
    format: ToolInputFormat | str | dict[str, Any] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=ranges.MAX_TOOLS)] | None = None

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """None: hosted tools have fields of their own."""
        return {}


class ResponseToolChoice(NestedObject):
    """A named tool, or the tools that may be called. A hosted tool here is refused."""

    type: str
    name: str | None = None
    namespace: str | None = None
    mode: Literal["auto", "required"] | None = Field(None, description="Of allowed_tools.")
    tools: Annotated[list[dict[str, Any]], Field(max_length=ranges.MAX_TOOLS)] | None = None

    @property
    def unknown_fields(self) -> dict[str, Any]:
        """None: hosted tools have fields of their own."""
        return {}


class TextFormat(NestedObject):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=64)
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextConfig(NestedObject):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = Field(None, description="Passed to the chat template.")


class ReasoningConfig(NestedObject):
    known = RESPONSES_REASONING

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None,
        description="none turns reasoning off; others are passed to the chat template as reasoning_effort and "
        "reasoning_strength.",
    )
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Ignored: reasoning is shown.")
    generate_summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="Ignored.")
    context: Literal["auto", "current_turn", "all_turns"] | None = Field(None, description="Ignored.")


class ConversationName(NestedObject):
    id: str


class ResponseCacheOptions(NestedObject):
    """Prefixes are cached by content, so only prewarm has an effect."""

    prewarm: bool | None = Field(None, description="true: only put the prompt into the prefix cache; no output.")
    mode: Any = Field(None, description="Ignored.")
    ttl: Any = Field(None, description="Ignored.")
    comparison_response_id: Any = Field(None, description="Ignored.")


class ResponseStreamOptions(NestedObject):
    include_obfuscation: bool | None = Field(None, description="Ignored: no padding is sent.")


Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class ResponsesRequest(CommonFields):
    known = EVERYWHERE | RESPONSES

    model: str | None = Field(None, description="Default: the first model served.")
    input: str | Annotated[list[InputItem], Field(max_length=MAX_INPUT_ITEMS)] | None = None
    instructions: str | Annotated[list[InputItem], Field(max_length=MAX_INSTRUCTION_ITEMS)] | None = Field(
        None, description="A system message before everything. Not inherited from a previous response."
    )
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = Field(None, description="Only with stream.")
    max_output_tokens: ranges.TokenCount | None = Field(
        None, description="Of reasoning and answer. Default: the rest of the context."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROB_CHOICES)] | None = Field(
        None, description="Shown if `include` has message.output_text.logprobs."
    )
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=ranges.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Default true.")
    max_tool_calls: ranges.TokenCount | None = Field(None, description="Ignored: of hosted tools.")
    include: Annotated[list[Include], Field(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = Field(
        None, description="auto: the oldest turns are left out if the conversation is too long."
    )
    metadata: ranges.Metadata | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Ignored.")
    safety_identifier: Annotated[str, Field(max_length=128)] | None = Field(None, description="Ignored.")
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Ignored: shared prefixes are found by content."
    )
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    prompt_cache_options: ResponseCacheOptions | None = None
    generate: bool | None = Field(None, description="false: the same as prompt_cache_options.prewarm.")
    service_tier: str | None = Field(None, description="Ignored; the answer says default.")
    prompt: dict[str, Any] | None = Field(None, description="Refused: there are no stored templates.")
    client_metadata: dict[str, Any] | None = Field(None, description="Ignored.")
    background_options: dict[str, Any] | None = Field(None, description="Ignored: each runs as soon as there is room.")
    image: dict[str, Any] | None = Field(None, description="Ignored: the model reads text only.")
    context_management: Any = Field(None, description="Ignored.")
    moderation: Any = Field(None, description="Ignored.")
    access_programs: Any = Field(None, description="Ignored.")

    stop: ranges.StopText | ranges.Stops | None = Field(None, description="Texts that end the output.")
    structured_outputs: StructuredOutputs | None = Field(None, description="text.format in vLLM's form.")
    chat_template_kwargs: dict[str, Any] | None = None
    request_id: ranges.Identifier | None = Field(None, description="For aborts and logs. Default: the response's id.")

    @property
    def only_warms(self) -> bool:
        """Whether the prompt is put into the prefix cache, and no output is made."""
        return self.generate is False or bool(self.prompt_cache_options and self.prompt_cache_options.prewarm)


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


MAX_NEW_ITEMS = 20

NewItems = Annotated[list[InputItem], Field(max_length=MAX_NEW_ITEMS)]


class CreateConversationRequest(Body):
    items: NewItems | None = None
    metadata: ranges.Metadata | None = None


class UpdateConversationRequest(Body):
    metadata: ranges.Metadata | None = Field(description="Replaces the metadata.")


class AddItemsRequest(Body):
    items: Annotated[NewItems, Field(min_length=1)]


class ConversationAnswer(Answer):
    """OpenAI's Conversation object."""

    id: str
    object: Literal["conversation"]
    created_at: int
    metadata: dict[str, str]


class ObjectDeleted(Answer):
    id: str
    object: Literal["response", "conversation.deleted"]
    deleted: bool


class ItemList(Answer):
    """A page of items; each has an id and a type."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


def conversation_object(record: ConversationRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        "object": "conversation",
        "created_at": record.created_at,
        "metadata": record.metadata,
    }


def item_object(item: StoredItem) -> dict[str, Any]:
    """Return an item as clients read it: with a type and a status, and the text of a message in parts."""
    shown: dict[str, Any] = orjson.loads(item.body)
    if shown.setdefault("type", "message") != "message":
        return shown
    if isinstance(shown.get("content"), str):
        text = shown["content"]
        is_output = shown.get("role") == "assistant"
        part = {"type": "output_text", "text": text, "annotations": []} if is_output else {"type": "input_text"}
        shown["content"] = [part | {"text": text}]
    return {"status": "completed", **shown}
