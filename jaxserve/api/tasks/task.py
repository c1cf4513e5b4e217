"""What a generating route asks for, without any API's field names.

    body -> task (this folder) -> engine work (api/generate) -> outputs -> wire (api/respond)

A route turns its body into a task. Nothing after that sees the body, so another API needs only a folder with its own
reader of bodies and its own writer of answers, as api/messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.api.protocol.common import SessionParams
from jaxserve.api.tasks.constraints import Constraint
from jaxserve.api.tasks.extras import SamplingMode
from jaxserve.api.tasks.tools import ToolUse
from jaxserve.types.sampling import SamplingParams

Side = Literal["left", "right"]


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Cut a prompt to `keep` tokens at one end. keep -1: as many as leave room for the output; None: no cut."""

    keep: int | None = None
    side: Side = "left"


@dataclass(frozen=True, kw_only=True)
class RepetitionRule:
    """End an output if its last tokens are `min_count` repeats of a pattern of `smallest` to `largest` tokens."""

    smallest: int
    largest: int
    min_count: int


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a prompt is generated, if not by one plain engine request.

    beam_length_penalty: run a beam search whose scores are divided by length ** penalty. None: sample.
    keeps_output: add the output to the session, not only the prompt
    """

    beam_length_penalty: float | None = None
    repetition: RepetitionRule | None = None
    session: SessionParams | None = None
    keeps_output: bool = True


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """How to continue one prompt.

    sampling: max_tokens is as requested; None means the rest of the context
    constraint: the grammar of the output, with the field that it came from
    experts_from: first prompt position of the routed experts; None: no position was given
    """

    sampling: SamplingParams
    constraint: Constraint | None = None
    mode: Mode = Mode()
    truncation: Truncation = Truncation()
    experts_from: int | None = None


@dataclass(frozen=True, kw_only=True)
class TextPrompt(Continuation):
    """A text or token ids to continue.

    suffix: the text after the gap that the output fills
    param: the body's field, for errors. request_id: if the prompt has its own id
    """

    content: str | list[int]
    suffix: str = ""
    add_special_tokens: bool = True
    param: str = "prompt"
    request_id: str = ""


@dataclass(frozen=True, kw_only=True)
class ChatMessages:
    """Messages for the chat template.

    make: returns the messages as the template reads them. It is called in a thread if the body is large.
    size: bytes of the body that brings all this
    """

    make: Callable[[], list[dict[str, Any]]]
    size: int
    tools: Sequence[dict[str, Any]] = ()
    documents: Sequence[dict[str, Any]] | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatPrompt(Continuation):
    """A conversation to answer.

    token_ids: used instead of the rendered conversation
    continued: text of the last message if the output continues it
    thinking_budget: maximum number of reasoning tokens
    """

    messages: ChatMessages
    token_ids: list[int] | None = None
    continued: str = ""
    add_special_tokens: bool = False
    tools: ToolUse = field(default_factory=ToolUse)
    thinking_budget: int | None = None
    separate_reasoning: bool = True


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """The name of a request and how it is queued.

    interval: minimum tokens per output, except the first and the last
    replica: the engine that computes it; None: the router chooses
    """

    request_id: str
    priority: int = 0
    cache_salt: str = ""
    interval: int = 1
    replica: int | None = None


@dataclass(frozen=True, kw_only=True)
class ExtraFields:
    """Fields that SGLang and vLLM add to the last chunk of a choice.

    experts_from: first prompt position of the routed experts; None: not requested
    """

    meta_info: bool = False
    sampling_mask: bool = False
    sampling_mode: SamplingMode | None = None
    experts_from: int | None = None
    weight_versions: bool = False
    cached_tokens: bool = False
    spec_tokens: bool = False
    input_ids: bool = False
    output_ids: bool = False


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """What an answer in OpenAI's form shows beside its text.

    logprobs: number of most likely tokens to show; None: no log-probabilities
    """

    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    tokens_as_ids: bool = False
    token_ids: bool = False
    prompt_token_ids: bool = False
    prompt_text: bool = False
    hidden_state: bool = False
    extras: ExtraFields = ExtraFields()
