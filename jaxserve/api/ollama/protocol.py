"""Declare the bodies of Ollama's routes below /api, and their error.

An unknown option is ignored and logged once, as in Ollama. If a body requires a feature that this server lacks, it gets
an error that names the field (task.py).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.api import ranges
from jaxserve.api.answers import Answer
from jaxserve.api.fields import Body, NestedObject
from jaxserve.api.known_fields import EVERYWHERE, OLLAMA, OLLAMA_CHAT, OLLAMA_OPTIONS
from jaxserve.api.openai.protocol import Tool

# The version of Ollama that has these routes. Clients compare three plain numbers. Codex asks for 0.13.4, which is the
# first with Responses; 0.14.0 is the first with Messages.
API_VERSION = "0.14.0"

KeepAlive = str | Annotated[float, Field(allow_inf_nan=False)]
Images = Annotated[list[str], Field(max_length=ranges.MAX_MESSAGES)]


class OllamaOptions(NestedObject):
    """Sampling. Absent fields take the model's defaults, as on the other routes."""

    known = EVERYWHERE | OLLAMA_OPTIONS

    num_predict: Annotated[int, Field(ge=-2, le=2**31 - 1)] | None = Field(
        None, description="Maximum of output tokens. Default, and below 1: the rest of the context."
    )
    temperature: ranges.Temperature | None = None
    top_k: ranges.TopK | None = None
    top_p: ranges.TopP | None = None
    min_p: ranges.MinP | None = None
    seed: ranges.Seed | None = None
    stop: ranges.StopText | ranges.Stops | None = None
    repeat_penalty: ranges.RepetitionPenalty | None = None
    presence_penalty: ranges.AdditivePenalty | None = None
    frequency_penalty: ranges.AdditivePenalty | None = None
    num_ctx: int | None = Field(None, description="Ignored: the context length is the server's.")


class OllamaFunction(NestedObject):
    name: ranges.FunctionName
    arguments: dict[str, Any] | None = None


class OllamaCall(NestedObject):
    id: str | None = None
    function: OllamaFunction


class OllamaMessage(NestedObject):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = Field(None, description="The reasoning of an assistant's message.")
    tool_calls: Annotated[list[OllamaCall], Field(max_length=ranges.MAX_TOOLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Images | None = Field(None, description="Pictures as base64. Refused for a model that takes text only.")


class _Generating(Body):
    """The fields that chat and generate share."""

    known = EVERYWHERE | OLLAMA

    model: str = Field(description="A served name; `:latest` behind it is allowed.")
    format: Literal["", "json"] | dict[str, Any] | None = Field(
        None, description="json, or the JSON schema of the answer."
    )
    think: bool | Literal["low", "medium", "high", "max"] | None = Field(
        None, description="Reasoning on or off, or its effort. Default: the template's."
    )
    stream: bool | None = Field(None, description="Default true.")
    options: OllamaOptions | None = None
    keep_alive: KeepAlive | None = Field(None, description="Ignored: the model stays loaded.")
    logprobs: bool | None = None
    top_logprobs: ranges.LogprobsCount | None = Field(None, description="Needs logprobs.")
    truncate: bool | None = Field(None, description="Ignored: a prompt over the context length is an error.")
    shift: bool | None = Field(None, description="Ignored: an output ends at the context length.")


class OllamaChatRequest(_Generating):
    known = EVERYWHERE | OLLAMA | OLLAMA_CHAT

    messages: Annotated[list[OllamaMessage], Field(max_length=ranges.MAX_MESSAGES)] | None = Field(
        None, description="None: answer that the model is loaded."
    )
    tools: Annotated[list[Tool], Field(max_length=ranges.MAX_TOOLS)] | None = None


class OllamaGenerateRequest(_Generating):
    prompt: str | None = Field(None, description="Empty: answer that the model is loaded.")
    suffix: str | None = Field(None, description="The text behind the gap that the output fills.")
    system: str | None = None
    raw: bool | None = Field(None, description="Use the prompt without the chat template.")
    template: str | None = Field(None, description="Refused: a template of a request is not rendered.")
    context: ranges.TokenIds | None = Field(None, description="Refused: send the conversation to /api/chat.")
    images: Images | None = Field(None, description="Pictures as base64. Refused for a model that takes text only.")


class ShowRequest(Body):
    model: str | None = None
    name: str | None = Field(None, description="The older name of model.")
    verbose: bool | None = Field(None, description="Ignored.")


class OllamaEmbedRequest(Body):
    model: str
    input: str | Annotated[list[str], Field(max_length=ranges.MAX_PROMPTS)]
    truncate: bool | None = Field(None, description="Cut a text that is too long at its end. Default true.")
    dimensions: ranges.TokenCount | None = None
    options: OllamaOptions | None = Field(None, description="Ignored.")
    keep_alive: KeepAlive | None = Field(None, description="Ignored.")


class OllamaEmbeddingsRequest(Body):
    """The older form of an embedding request, with one text."""

    model: str
    prompt: str
    options: OllamaOptions | None = Field(None, description="Ignored.")
    keep_alive: KeepAlive | None = Field(None, description="Ignored.")


class OllamaError(Answer):
    """The body of every 4xx and 5xx below /api."""

    error: str
