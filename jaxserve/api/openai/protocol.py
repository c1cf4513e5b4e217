"""Declare the bodies of POST /v1/chat/completions and POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jaxserve.api import ranges
from jaxserve.api.fields import NestedObject, SamplingFields
from jaxserve.api.known_fields import CHAT, CHAT_MESSAGE, CHAT_PART, CHAT_REASONING, CHAT_TOOL, COMPLETIONS, EVERYWHERE

Role = Annotated[
    Literal["developer", "system", "user", "assistant", "tool", "function", "latest_reminder", "root"],
    BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
]


class ImageUrl(NestedObject):
    """A picture: a data: URL, or a URL of one of media.allowed_hosts."""

    url: str
    detail: str | None = Field(
        None, description="low: at most 512 x 512 pixels are read. Others: as many as the server reads."
    )


class ContentPart(NestedObject):
    """A part of a message. The model decides which types it accepts; it always accepts text."""

    known = CHAT_PART

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = Field(None, description="With type image_url or input_image: the picture.")
    detail: str | None = Field(None, description="With type input_image: as in image_url.")
    min_pixels: ranges.TokenCount | None = Field(None, description="Least area that the picture is resized to.")
    max_pixels: ranges.TokenCount | None = Field(None, description="Largest area that the picture is resized to.")
    file_id: str | None = Field(None, description="Refused: send the picture as a data: URL.")


class CalledFunction(NestedObject):
    name: str
    arguments: str | dict[str, Any] | None = None


class CustomCall(NestedObject):
    name: str
    input: str


class ToolCall(NestedObject):
    id: str | None = None
    index: int | None = Field(None, description="Ignored; clients that collect a stream send it back.")
    type: Literal["function", "custom"] | None = None
    function: CalledFunction | None = None
    custom: CustomCall | None = None


class ChatMessage(NestedObject):
    known = CHAT_MESSAGE

    role: Role
    content: str | Annotated[list[ContentPart], Field(max_length=ranges.MAX_MESSAGES)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=ranges.MAX_MESSAGES)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = Field(None, description="The reasoning of an assistant's message.")
    reasoning: str | None = Field(None, description="The same as reasoning_content.")
    function_call: CalledFunction | None = None


class FunctionDefinition(NestedObject):
    name: ranges.FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(
        None, description="Default false: what cannot be enforced of the schema is left out, instead of refused."
    )


class CustomGrammar(NestedObject):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(NestedObject):
    type: Literal["text", "grammar"]
    grammar: CustomGrammar | None = None


class CustomDefinition(NestedObject):
    name: ranges.FunctionName
    description: str | None = None
    format: CustomFormat | None = None


class Tool(NestedObject):
    known = CHAT_TOOL

    type: str
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None


class NamedTool(NestedObject):
    name: str


class AllowedTools(NestedObject):
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Field(max_length=ranges.MAX_TOOLS)]


class ToolChoice(NestedObject):
    type: Literal["function", "custom", "allowed_tools"]
    function: NamedTool | None = None
    custom: NamedTool | None = None
    allowed_tools: AllowedTools | None = None


class Reasoning(NestedObject):
    known = CHAT_REASONING

    effort: str | None = None
    enabled: bool | None = None


class Thinking(NestedObject):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: ranges.TokenCountOrZero | None = Field(None, description="The same as thinking_token_budget.")


class ChatCompletionRequest(SamplingFields):
    known = EVERYWHERE | CHAT

    model: str
    messages: Annotated[list[ChatMessage], Field(max_length=ranges.MAX_MESSAGES)] = Field(
        description="At least one, unless input_ids is given."
    )
    input_ids: ranges.TokenIds | None = Field(None, description="Token ids used instead of the rendered messages.")
    max_completion_tokens: ranges.TokenCount | None = Field(None, description="Default: the rest of the context.")
    max_tokens: ranges.TokenCount | None = Field(None, description="The older name of max_completion_tokens.")
    logprobs: bool | None = None
    top_logprobs: ranges.LogprobsCount | None = Field(None, description="Needs logprobs.")

    tools: Annotated[list[Tool], Field(max_length=ranges.MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = Field(None, description="Default true.")
    functions: Annotated[list[FunctionDefinition], Field(max_length=ranges.MAX_TOOLS)] | None = None
    function_call: Literal["none", "auto"] | NamedTool | None = None

    reasoning_effort: str | Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)] | None = None
    reasoning: Reasoning | None = None
    thinking: bool | Thinking | None = Field(
        None, description="Turn reasoning on or off; passed to the template as enable_thinking."
    )
    thinking_token_budget: ranges.TokenCountOrZero | None = Field(
        None, description="Reasoning is ended after this many output tokens."
    )
    enable_thinking: bool | None = Field(None, description="The same as thinking: true or false.")
    thinking_budget: ranges.TokenCountOrZero | None = Field(None, description="The same as thinking_token_budget.")
    separate_reasoning: bool | None = Field(None, description="Default true; false leaves reasoning in content.")
    include_reasoning: bool | None = Field(None, description="Default true; false omits reasoning from the answer.")
    stream_reasoning: bool | None = Field(None, description="Default true; false sends the reasoning in one piece.")

    add_generation_prompt: bool | None = Field(None, description="Default true.")
    continue_final_message: bool | None = Field(None, description="Continue the last message. Default false.")
    add_special_tokens: bool | None = Field(
        None, description="Default false, because templates write special tokens themselves."
    )
    echo: bool | None = Field(None, description="Return the last message before the output. Default false.")
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(max_length=ranges.MAX_DOCUMENTS)] | None = None

    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="Variables passed to the chat template."
    )
    task: Literal["action", "query", "authority", "domain", "title", "read_url"] | None = Field(
        None, description="Passed to the chat template: DeepSeek's one-word tasks."
    )
    modalities: Annotated[list[str], Field(max_length=8)] | None = Field(None, description="Only text.")
    metadata: ranges.Metadata | None = Field(None, description="Ignored.")
    store: bool | None = Field(None, description="Ignored: nothing is stored.")
    service_tier: str | None = Field(None, description="Ignored; the answer says default.")
    prediction: dict[str, Any] | None = Field(None, description="Ignored: a hint.")
    safety_identifier: Annotated[str, Field(max_length=128)] | None = Field(None, description="Ignored.")
    prompt_cache_key: str | None = Field(None, description="Ignored: shared prefixes are found by content.")
    prompt_cache_retention: str | None = Field(None, description="Ignored.")
    prompt_cache_options: dict[str, Any] | None = Field(None, description="Ignored.")
    moderation: Any = Field(None, description="Ignored.")


Prompt = (
    str
    | Annotated[list[str], Field(max_length=ranges.MAX_PROMPTS)]
    | ranges.TokenIds
    | Annotated[list[ranges.TokenIds], Field(max_length=ranges.MAX_PROMPTS)]
)


class CompletionRequest(SamplingFields):
    known = EVERYWHERE | COMPLETIONS

    model: str
    prompt: Prompt = Field(description="A text, texts, token ids, or lists of them.")
    max_tokens: ranges.TokenCountOrZero | None = Field(
        None, description="Default 16; limited to the rest of the context."
    )
    suffix: str | None = Field(None, description="Text after the gap, if the tokenizer has fill-in-the-middle tokens.")
    echo: bool | None = Field(None, description="Return the prompt before the output.")
    logprobs: ranges.LogprobsCount | None = None
    best_of: Annotated[int, Field(ge=0, le=20)] | None = Field(
        None, description="Generate this many outputs and return the n best."
    )
    add_special_tokens: bool | None = Field(None, description="Begin a text prompt with BOS. Default true.")
