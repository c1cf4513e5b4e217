"""Read a task from the body of /v1/chat/completions or of /v1/completions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.api.generate.pictures import PicturePart
from jaxserve.api.generate.task import (
    ChatMessages,
    ChatPrompt,
    OutputOptions,
    RequestOptions,
    TextPrompt,
    as_prompts,
    constraint,
    generation_mode,
    output_options,
    request_options,
    sampling_params,
    thinking,
    thinking_effort,
    truncation,
)
from jaxserve.api.generate.tools import in_call_order, in_place, tool_use, without_header
from jaxserve.api.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    ImageUrl,
    Thinking,
    ToolCall,
)
from jaxserve.api.ranges import DEFAULT_COMPLETION_TOKENS, MAX_CHOICES
from jaxserve.api.state import ServerState
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.types.sampling import SamplingParams

_TEXT_PARTS = frozenset({"text", "refusal", "input_text", "output_text"})
_PICTURE_PARTS = ("image_url", "input_image")
_PICTURE_ROLES = ("user", "tool", "function")
_MEDIA_PARTS = frozenset(
    {"image_url", "input_image", "input_audio", "audio_url", "video_url", "file", "input_file", "audio"}
)


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """The options of the answer to a conversation.

    legacy_calls: whether the answer has function_call instead of tool_calls, because the request used functions
    echo: text of the last message, which the answer returns before the output
    reasoning_fields: names of the reasoning in every message and delta
    """

    output: OutputOptions
    legacy_calls: bool = False
    echo: str = ""
    include_reasoning: bool = True
    stream_reasoning: bool = True
    reasoning_fields: tuple[str, ...] = ("reasoning_content",)


@dataclass(frozen=True, kw_only=True)
class ChatTask:
    """The conversation to answer, the name and queueing of the request, and the options of the answer."""

    prompt: ChatPrompt
    request: RequestOptions
    options: ChatOptions


def chat_task(body: ChatCompletionRequest, state: ServerState) -> ChatTask:
    """Read and check a body. Raises a RequestError that names the field."""
    check_messages(body.messages, takes_pictures=state.takes_pictures)
    _check(body)
    options = ChatOptions(
        output=output_options(body, logprobs=(body.top_logprobs or 0) if body.logprobs else None),
        legacy_calls=bool(body.functions),
        echo=last_text(body.messages) if body.echo else "",
        include_reasoning=body.include_reasoning is not False,
        stream_reasoning=body.stream_reasoning is not False,
        reasoning_fields=state.reasoning_fields,
    )
    return ChatTask(prompt=_prompt(body, state), request=request_options(body, "chatcmpl"), options=options)


def _prompt(body: ChatCompletionRequest, state: ServerState) -> ChatPrompt:
    tools = tool_use(body)
    messages = ChatMessages(
        make=template_messages(body.messages, system_in_middle=state.takes_late_system),
        size=max(0, body.size - _picture_bytes(body.messages)),
        tools=tools.shown,
        documents=body.documents,
        variables=_template_variables(body),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=bool(body.continue_final_message),
    )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_completion_tokens or body.max_tokens
    if body.input_ids is not None and any(_has_picture(message) for message in body.messages):
        raise UnsupportedParameterError("input_ids does not go with images.", param="input_ids")
    return ChatPrompt(
        messages=messages,
        token_ids=body.input_ids,
        continued=last_text(body.messages) if body.continue_final_message else "",
        add_special_tokens=bool(body.add_special_tokens),
        sampling=sampling_params(body, state, max_tokens=max_tokens, logprobs=logprobs),
        constraint=constraint(body, state.engine.tokenizer),
        mode=generation_mode(body),
        truncation=truncation(body),
        experts_from=body.routed_experts_start_len,
        tools=tools,
        thinking_budget=_thinking_budget(body),
        separate_reasoning=body.separate_reasoning is not False,
    )


def _check(body: ChatCompletionRequest) -> None:
    if not body.messages and body.input_ids is None:
        raise InvalidValueError("messages is empty.", param="messages")
    if body.top_logprobs and not body.logprobs:
        raise InvalidValueError("top_logprobs needs logprobs: true.", param="top_logprobs")
    for modality in body.modalities or ():
        if modality != "text":
            raise UnsupportedParameterError(f"modalities: {modality!r} cannot be made.", param="modalities")


def check_messages(messages: Sequence[ChatMessage], *, takes_pictures: bool) -> None:
    """Check rules that the types cannot express. Raises a RequestError that names the message.

    takes_pictures: whether the model reads pictures
    """
    for number, message in enumerate(messages):
        param = f"messages.{number}.content"
        if isinstance(message.content, list):
            _check_parts(message, param, takes_pictures)
        elif message.content is None and message.role in ("system", "developer", "user", "tool"):
            raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
        if message.role == "tool" and message.tool_call_id is None:
            param = f"messages.{number}.tool_call_id"
            raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
        for place, call in enumerate(message.tool_calls or ()):
            if call.function is None and call.custom is None:
                param = f"messages.{number}.tool_calls.{place}.function"
                raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")


def _check_parts(message: ChatMessage, param: str, takes_pictures: bool) -> None:
    assert isinstance(message.content, list)
    for number, part in enumerate(message.content):
        where = f"{param}.{number}"
        if part.type in _PICTURE_PARTS and takes_pictures:
            _check_picture(part, message.role, where)
            continue
        if part.type in _MEDIA_PARTS:
            reason = "the model takes text and images" if takes_pictures else "the model is served as text here"
            message_text = f"{where}: a part of type {part.type!r} cannot be given: {reason}."
            raise UnsupportedParameterError(message_text, param=where)
        if part.type not in _TEXT_PARTS:
            raise InvalidValueError(f"{where}.type: {part.type!r} is no type of part.", param=f"{where}.type")
        if part.text is None and part.refusal is None:
            raise InvalidValueError(f"{where}.text is missing.", param=f"{where}.text")


def _check_picture(part: ContentPart, role: str, where: str) -> None:
    if role not in _PICTURE_ROLES:
        message = f"{where}: images are taken in user messages and tool results, not in those of the {role}."
        raise InvalidValueError(message, param=where)
    if part.file_id is not None:
        message = f"{where}.file_id: send the image as a data: URL."
        raise UnsupportedParameterError(message, param=f"{where}.file_id")
    if part.image_url is None:
        raise InvalidValueError(f"{where}.image_url is missing.", param=f"{where}.image_url")


def _has_picture(message: ChatMessage) -> bool:
    return isinstance(message.content, list) and any(part.type in _PICTURE_PARTS for part in message.content)


def _picture_bytes(messages: Sequence[ChatMessage]) -> int:
    """Return the bytes of the pictures, which no template reads."""
    parts = [part for message in messages if isinstance(message.content, list) for part in message.content]
    return sum(len(_picture(part, "").text) for part in parts if part.type in _PICTURE_PARTS)


def _picture(part: ContentPart, where: str) -> PicturePart:
    found = part.image_url
    url, detail = (found.url, found.detail) if isinstance(found, ImageUrl) else (found or "", part.detail)
    return PicturePart(url, f"{where}.image_url", detail, part.min_pixels, part.max_pixels)


def template_messages(messages: Sequence[ChatMessage], *, system_in_middle: bool) -> Callable[[], list[dict[str, Any]]]:
    """Return a function that converts the messages for the chat template.

    The results of calls follow in the calls' order.
    system_in_middle: whether the template takes system messages after the first one; if not, see `in_place`
    """

    def make() -> list[dict[str, Any]]:
        found = in_call_order([_template_message(message, number) for number, message in enumerate(messages)])
        return found if system_in_middle else in_place(found)

    return make


def _template_message(message: ChatMessage, number: int) -> dict[str, Any]:
    """Return a message in which every call is of a function, and every result of a call has the role of a tool."""
    found = message.model_dump(exclude_unset=True)
    if isinstance(message.content, list):
        found["content"] = [
            _picture(part, f"messages.{number}.content.{place}") if part.type in _PICTURE_PARTS else dumped
            for place, (part, dumped) in enumerate(zip(message.content, found["content"], strict=True))
        ]
    if message.role == "system":
        _drop_header(found)
    calls = message.tool_calls
    older = found.pop("function_call", None)
    if not calls and message.function_call is not None:  # the older form, without ids
        calls = [ToolCall.model_validate({"id": older["name"], "type": "function", "function": older})]
    if calls:
        found["tool_calls"] = [_template_call(call) for call in calls]
    if message.role == "function":
        found |= {"role": "tool", "tool_call_id": message.name}
    return found


def _drop_header(system: dict[str, Any]) -> None:
    content = system["content"]
    if isinstance(content, str):
        system["content"] = without_header(content)
    elif content and isinstance(content[0].get("text"), str):
        content[0]["text"] = without_header(content[0]["text"])


def _template_call(call: ToolCall) -> dict[str, Any]:
    found = call.model_dump(exclude_unset=True)
    if call.custom is not None:
        arguments = json.dumps({"input": found.pop("custom")["input"]}, ensure_ascii=False)
        found |= {"type": "function", "function": {"name": call.custom.name, "arguments": arguments}}
    elif call.function is not None and call.function.arguments is None:
        found["function"]["arguments"] = {}
    return found


def last_text(messages: Sequence[ChatMessage]) -> str:
    """Return the text of the last message; empty if there is none."""
    if not messages:
        return ""
    content = messages[-1].content
    return content if isinstance(content, str) else "".join(part.text or "" for part in content or ())


def _template_variables(body: ChatCompletionRequest) -> dict[str, Any]:
    """Return the template variables of the body other than messages and tools."""
    variables: dict[str, Any] = {}
    effort = body.reasoning_effort
    if body.reasoning is not None:
        effort = body.reasoning.effort if effort is None else effort
        if body.reasoning.enabled is not None:
            variables |= thinking(body.reasoning.enabled)
    wish = body.thinking.type if isinstance(body.thinking, Thinking) else body.thinking
    if body.enable_thinking is not None:
        if wish is not None and body.enable_thinking != (wish in (True, "enabled", "adaptive")):
            raise InvalidValueError("enable_thinking and thinking contradict each other.", param="enable_thinking")
        wish = body.enable_thinking
    if wish not in (None, "adaptive"):
        variables |= thinking(wish in (True, "enabled"))
    if effort == "none":
        variables |= thinking(False)
    elif effort is not None:
        variables |= thinking_effort(effort)
    given = {"verbosity": body.verbosity, "task": body.task}
    variables |= {name: value for name, value in given.items() if value is not None}
    return variables | (body.chat_template_kwargs or {})


def _thinking_budget(body: ChatCompletionRequest) -> int | None:
    """Return the one budget of a body in tokens; None if it has none.

    Without reasoning, the budgets of other servers have no effect. Raises InvalidValueError if two budgets differ.
    """
    given = {"thinking_token_budget": body.thinking_token_budget}
    if body.enable_thinking is not False:
        given["thinking_budget"] = body.thinking_budget
    if isinstance(body.thinking, Thinking) and body.thinking.type != "disabled":
        given["thinking.budget_tokens"] = body.thinking.budget_tokens
    found = {name: budget for name, budget in given.items() if budget is not None}
    if len(set(found.values())) > 1:
        raise InvalidValueError(f"{' and '.join(found)} differ.", param=list(found)[1])
    return next(iter(found.values()), None)


@dataclass(frozen=True, kw_only=True)
class CompletionOptions:
    """The options of the answer.

    scoring: whether max_tokens is 0. The engine always samples one token, which is dropped.
    num_choices: choices of each prompt in the answer. made: choices of each prompt in the engine
    best_first: whether the engine's choices are ordered, best first
    hides_special: whether the offsets of log-probabilities leave out special tokens
    """

    output: OutputOptions
    echo: bool = False
    scoring: bool = False
    num_choices: int = 1
    made: int = 1
    best_first: bool = False
    hides_special: bool = True


@dataclass(frozen=True, kw_only=True)
class CompletionTask:
    """The prompts to continue, the name and queueing of the request, and the options of the answer."""

    prompts: list[TextPrompt]
    request: RequestOptions
    options: CompletionOptions


def completion_task(body: CompletionRequest, state: ServerState) -> CompletionTask:
    """Read and check a body. Raises a RequestError that names the field."""
    prompts = as_prompts(body.prompt, "prompt")
    _check_completion(body, len(prompts))
    continuation = TextPrompt(
        content="",
        suffix=body.suffix or "",
        add_special_tokens=body.add_special_tokens is not False,
        sampling=_sampling(body, state),
        constraint=constraint(body, state.engine.tokenizer),
        mode=generation_mode(body, keeps_output=body.max_tokens != 0),
        truncation=truncation(body),
        experts_from=body.routed_experts_start_len,
    )
    options = CompletionOptions(
        output=output_options(body, logprobs=body.logprobs),
        echo=bool(body.echo),
        scoring=body.max_tokens == 0,
        num_choices=body.n or 1,
        made=max(body.n or 1, body.best_of or 0),
        best_first=bool(body.use_beam_search),
        hides_special=body.skip_special_tokens is not False,
    )
    return CompletionTask(
        prompts=[replace(continuation, content=prompt) for prompt in prompts],
        request=request_options(body, "cmpl"),
        options=options,
    )


def _check_completion(body: CompletionRequest, num_prompts: int) -> None:
    if body.best_of and body.stream:
        raise InvalidValueError("best_of cannot be streamed.", param="best_of")
    if body.best_of and body.best_of < (body.n or 1):
        raise InvalidValueError(f"best_of ({body.best_of}) is less than n ({body.n}).", param="best_of")
    if body.logprob_token_ids and body.max_tokens == 0:
        message = "logprob_token_ids are given of output tokens, and max_tokens is 0."
        raise InvalidValueError(message, param="logprob_token_ids")
    if body.suffix and body.echo:
        raise InvalidValueError("suffix and echo exclude each other.", param="suffix")
    if num_prompts > 1 and body.session_params is not None:
        raise InvalidValueError("A request of a session has one prompt.", param="prompt")
    if num_prompts * (body.n or 1) > MAX_CHOICES * 16:
        raise InvalidValueError("prompts times n are more than 2048 choices.", param="n")


def _sampling(body: CompletionRequest, state: ServerState) -> SamplingParams:
    wanted = [value for value in (body.prompt_logprobs, body.logprobs if body.echo else None) if value is not None]
    made = max(body.n or 1, body.best_of or 0)
    return sampling_params(
        body,
        state,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=0 if body.logprobs is None and made > (body.n or 1) else body.logprobs,
        prompt_logprobs=max(wanted) if wanted else None,
        n=made,
    )
