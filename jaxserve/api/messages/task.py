"""Read a task from the body of Anthropic's /v1/messages."""

from __future__ import annotations

import functools
import itertools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.api.messages.blocks import check_blocks, system_text, template_messages
from jaxserve.api.messages.protocol import CountTokensRequest, MessagesRequest, MessageTool
from jaxserve.api.protocol.generate import NativeSampling
from jaxserve.api.protocol.limits import MAX_STOP_CHARS
from jaxserve.api.shared.state import ServerState
from jaxserve.api.tasks.chat import thinking
from jaxserve.api.tasks.constraints import Constraint
from jaxserve.api.tasks.extras import mark
from jaxserve.api.tasks.sampling import native_params
from jaxserve.api.tasks.task import ChatMessages, ChatPrompt, RequestOptions
from jaxserve.api.tasks.tools import Mode, ToolUse, shown_function
from jaxserve.config_types import reveal
from jaxserve.errors import InvalidSchemaError, InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import GrammarTool
from jaxserve.grammar.translate import schema_spec

MESSAGES_ROUTE = "/v1/messages"


@dataclass(frozen=True, kw_only=True)
class MessageOptions:
    """What the answer shows.

    max_tokens: as requested, to tell its end from the context's. hides_thinking: thinking blocks have no text
    """

    max_tokens: int
    hides_thinking: bool = False


@dataclass(frozen=True, kw_only=True)
class MessagesTask:
    """All that a body of /v1/messages asks for."""

    prompt: ChatPrompt
    request: RequestOptions
    options: MessageOptions


def messages_task(body: MessagesRequest, state: ServerState) -> MessagesTask:
    """Read and check a body. Raises a RequestError that names the field."""
    sampling = NativeSampling.model_construct(
        max_new_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        stop=body.stop_sequences,
    )
    if sum(map(len, body.stop_sequences or ())) > MAX_STOP_CHARS:
        message = f"stop_sequences has more than {MAX_STOP_CHARS} characters in all."
        raise InvalidValueError(message, param="stop_sequences")
    budget = body.thinking.budget_tokens if body.thinking is not None and body.thinking.type == "enabled" else None
    watermark_key = reveal(state.config.server.watermark_key)
    if budget is not None and state.parsers.think_tags is None:
        state.unknown_fields.note(MESSAGES_ROUTE, ["thinking.budget_tokens"])
    tools = _tool_use(body, state)
    messages = conversation(body, state, tools)
    prompt = ChatPrompt(
        messages=messages,
        continued=_prefill(body),
        sampling=mark(native_params(sampling, state.engine.info), None, watermark_key, "watermark"),
        constraint=_constraint(body),
        tools=tools,
        thinking_budget=None if state.parsers.think_tags is None else budget,
    )
    hides = body.thinking is not None and body.thinking.display == "omitted"
    options = MessageOptions(max_tokens=body.max_tokens, hides_thinking=hides)
    return MessagesTask(prompt=prompt, request=RequestOptions(request_id=f"msg_{uuid.uuid4().hex}"), options=options)


def count_prompt(body: CountTokensRequest, state: ServerState) -> ChatMessages:
    """Return the conversation whose tokens are counted. Raises a RequestError that names the field."""
    return conversation(body, state, _tool_use(body, state))


def conversation(body: CountTokensRequest, state: ServerState, tools: ToolUse) -> ChatMessages:
    """Return the conversation for the chat template. Raises a RequestError that names the block."""
    check_blocks(body.system, body.messages, lambda kind: state.unknown_fields.note(MESSAGES_ROUTE, [kind]))
    make = functools.partial(
        template_messages, system_text(body.system), body.messages, system_in_middle=state.takes_late_system
    )
    variables: dict[str, Any] = {}
    if body.thinking is not None and body.thinking.type != "adaptive":
        variables |= thinking(body.thinking.type == "enabled")
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None:
        variables |= thinking(False) if effort == "none" else {"reasoning_effort": effort}
    return ChatMessages(
        make=make,
        size=body.size,
        tools=tools.shown,
        variables=variables,
        continue_final_message=bool(_prefill(body)),
    )


def _prefill(body: CountTokensRequest) -> str:
    """Return the text of a final assistant message, which the output continues; "" if there is none."""
    run = itertools.takewhile(lambda message: message.role == "assistant", reversed(body.messages))
    found = template_messages("", list(run)[::-1], system_in_middle=True)
    return found[-1]["content"] if found and "tool_calls" not in found[-1] else ""


def _constraint(body: MessagesRequest) -> Constraint | None:
    config = body.output_config
    wanted, param = (config.format, "output_config.format") if config and config.format else (None, "output_format")
    wanted = wanted or body.output_format
    if wanted is None:
        return None
    try:
        return schema_spec(wanted.schema_, strict=True), param
    except InvalidSchemaError as error:
        raise InvalidSchemaError(error.message, param=f"{param}.schema") from None


def _tool_use(body: CountTokensRequest, state: ServerState) -> ToolUse:
    """Read tools and tool_choice. Tools that Anthropic hosts are dropped. Raises a RequestError if one is forced."""
    choice = body.tool_choice
    tools = [tool for tool in body.tools or () if tool.type in (None, "custom")]
    hosted = [tool for tool in body.tools or () if tool.type not in (None, "custom")]
    state.unknown_fields.note(MESSAGES_ROUTE, [str(tool.type) for tool in hosted])
    for number, tool in enumerate(body.tools or ()):
        if tool.name is None and tool.type in (None, "custom"):
            param = f"tools.{number}.name"
            raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
    if len({tool.name for tool in tools}) < len(tools):
        raise InvalidValueError("tools: Tool names must be unique.", param="tools")  # Anthropic's words
    kind = choice.type if choice is not None else "auto"
    shown = tuple(shown_function(tool.name, tool.description, tool.input_schema) for tool in tools)
    if kind == "none" or (kind == "auto" and not tools):
        return ToolUse(shown=shown)
    parallel = not (choice is not None and choice.disable_parallel_tool_use)
    if kind == "tool":
        allowed = [_named(choice.name if choice is not None else None, tools, hosted)]
        return ToolUse(tuple(map(_grammar_tool, allowed)), "required", False, shown)
    if not tools:
        raise InvalidValueError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
    mode: Mode = "required" if kind == "any" else "auto"
    return ToolUse(tuple(map(_grammar_tool, tools)), mode, parallel, shown)


def _named(name: str | None, tools: Sequence[MessageTool], hosted: Sequence[MessageTool]) -> MessageTool:
    for tool in tools:
        if tool.name == name:
            return tool
    if name is None:
        code = "missing_required_parameter"
        raise InvalidValueError("tool_choice.name is missing.", param="tool_choice.name", code=code)
    if any(tool.name == name for tool in hosted):
        raise UnsupportedParameterError(
            f"tool_choice.name: {name!r} is not run by this server.", param="tool_choice.name"
        )
    raise InvalidValueError(f"tool_choice.name: there is no tool {name!r}.", param="tool_choice.name")


def _grammar_tool(tool: MessageTool) -> GrammarTool:
    return GrammarTool(tool.name or "", tool.input_schema, strict=bool(tool.strict))
