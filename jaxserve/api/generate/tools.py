"""Read the tools of a chat request, and put its messages into the order and form that chat templates expect.

`ToolUse` says which tools the model sees, and which it may or must call. Requests may use the older `functions` form.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxserve.api.openai.protocol import ChatCompletionRequest, NamedTool, Tool, ToolChoice
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import GrammarTool, is_raw_input
from jaxserve.text.tools import ToolSet

Mode = Literal["none", "auto", "required"]

# the parameters of a custom tool for a model that only knows functions; the parser reverses it
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class ToolUse:
    """The tool settings of a request.

    tools: the tools that the model may call; empty with mode "none"
    mode: "required" also for a named tool, which is then the only one in `tools`
    parallel: whether an output may have several calls; False for a named tool
    shown: all tools, as the chat template reads them. The prompt does not depend on the choice, so that requests with
      different choices share its prefix. The grammar limits the calls.
    """

    tools: tuple[GrammarTool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True
    shown: tuple[dict[str, Any], ...] = ()

    @property
    def forbids_calls(self) -> bool:
        """Whether the prompt shows tools but the model may call none of them."""
        return self.mode == "none" and bool(self.shown)

    @property
    def allows_some(self) -> bool:
        """Whether the model may, but need not, call some of the tools that the prompt shows."""
        names = {tool.name for tool in self.tools}
        return self.mode == "auto" and any(tool["function"]["name"] not in names for tool in self.shown)

    @property
    def outlined(self) -> ToolUse:
        """The same settings with outlines of the schemas of tools that are not strict."""
        return replace(self, tools=tuple(tool.outlined for tool in self.tools))

    @property
    def tool_set(self) -> ToolSet | None:
        """The tools for the output parser; None leaves calls in the text."""
        if self.mode == "none":
            return None
        functions = {tool.name: dict(tool.schema or {}) for tool in self.tools if not tool.custom}
        return ToolSet(functions, [tool.name for tool in self.tools if tool.custom])

    @property
    def raw_input(self) -> str | None:
        """The name of the custom tool whose input is the whole output, without call syntax; None without one."""
        if self.mode != "required" or not is_raw_input(self.tools, required=True):
            return None
        return self.tools[0].name if self.tools[0].custom else None


def tool_use(body: ChatCompletionRequest) -> ToolUse:
    """Read tools, tool_choice, parallel_tool_calls, functions and function_call. Raises a RequestError."""
    legacy = bool(body.functions)
    if legacy and body.tools:
        raise InvalidValueError("Give tools or functions, not both.", param="functions")
    _check_choice(body)
    tools = _legacy_tools(body) if legacy else body.tools or []
    choice = _legacy_choice(body) if legacy else body.tool_choice
    _check_tools(tools)
    param = "function_call" if legacy else "tool_choice"
    mode, allowed = _resolve(choice, tools, param)
    if mode == "required" and not tools:
        raise InvalidValueError(f"{param} asks for a call, but there are no tools.", param=param)
    named = isinstance(choice, ToolChoice) and choice.type != "allowed_tools"
    parallel = body.parallel_tool_calls is not False and not (legacy or named)
    shown = tuple(map(_shown, tools))
    if mode == "none":
        return ToolUse(shown=shown)
    return ToolUse(tuple(map(_grammar_tool, allowed)), mode, parallel, shown)


def _check_choice(body: ChatCompletionRequest) -> None:
    """Raise InvalidValueError for the choice of the other form, which would limit nothing."""
    harmless = (None, "auto") if body.tools or body.functions else (None, "auto", "none")
    param, form = ("tool_choice", "tools") if body.functions else ("function_call", "functions")
    if getattr(body, param) not in harmless:
        raise InvalidValueError(f"{param} goes with {form}.", param=param)


def offered_tools(tools: list[Tool]) -> ToolUse:
    """Read the tools of an API without tool_choice. Raises a RequestError."""
    _check_tools(tools)
    if not tools:
        return ToolUse()
    return ToolUse(tuple(map(_grammar_tool, tools)), "auto", shown=tuple(map(_shown, tools)))


def tool_name(tool: Tool) -> str:
    named = tool.function or tool.custom
    assert named is not None
    return named.name


def _check_tools(tools: list[Tool]) -> None:
    named: dict[str, Tool] = {}  # a call has only a name. Agents send the same tool twice, which does no harm
    for number, tool in enumerate(tools):
        param = f"tools.{number}"
        _check_tool(tool, param)
        if named.setdefault(name := tool_name(tool), tool) != tool:
            raise InvalidValueError(f"{param}: another tool is called {name!r}.", param=param)


def _check_tool(tool: Tool, param: str) -> None:
    if tool.type not in ("function", "custom"):
        message = f"{param}: tools of type {tool.type!r} are not offered; function and custom are."
        raise UnsupportedParameterError(message, param=f"{param}.type")
    if (tool.function if tool.type == "function" else tool.custom) is None:
        message = f"{param}.{tool.type} is missing."
        raise InvalidValueError(message, param=f"{param}.{tool.type}", code="missing_required_parameter")
    format_ = tool.custom.format if tool.custom is not None else None
    if format_ is not None and format_.type == "grammar" and format_.grammar is None:
        param = f"{param}.custom.format.grammar"
        raise InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")


def _resolve(choice: str | ToolChoice | None, tools: list[Tool], param: str) -> tuple[Mode, list[Tool]]:
    """Return (mode, tools that may be called)."""
    if choice is None or choice == "auto":
        return ("auto" if tools else "none"), tools
    if choice in ("none", "required"):
        return choice, tools  # type: ignore[return-value]
    assert isinstance(choice, ToolChoice)
    if choice.type == "allowed_tools":
        return _allowed(choice, tools, param)
    named = choice.function if choice.type == "function" else choice.custom
    if named is None:
        raise InvalidValueError(f"{param}.{choice.type} is missing.", param=param)
    return "required", [_find(choice.type, named.name, tools, param)]


def _allowed(choice: ToolChoice, tools: list[Tool], param: str) -> tuple[Mode, list[Tool]]:
    if choice.allowed_tools is None:
        raise InvalidValueError(f"{param}.allowed_tools is missing.", param=param)
    entries = [_named_by(entry) for entry in choice.allowed_tools.tools]
    found = [_find(kind, name, tools, param) for kind, name in entries if name is not None]
    if len(found) < len(entries) or not found:
        raise InvalidValueError(f"{param}.allowed_tools.tools names no tool.", param=param)
    return choice.allowed_tools.mode, found


def _named_by(entry: dict[str, Any]) -> tuple[Any, str | None]:
    """Return the type and the name of a tool that may be called."""
    kind = entry.get("type") or ("custom" if entry.get("custom") else "function")
    inner = entry.get("function") or entry.get("custom") or entry
    name = inner.get("name") if isinstance(inner, dict) else None
    return kind, name if isinstance(name, str) else None


def _find(kind: Any, name: str, tools: list[Tool], param: str) -> Tool:
    for tool in tools:
        if tool.type == kind and tool_name(tool) == name:
            return tool
    raise InvalidValueError(f"{param}: there is no {kind} tool {name!r}.", param=param)


def _legacy_tools(body: ChatCompletionRequest) -> list[Tool]:
    return [Tool(type="function", function=function) for function in body.functions or ()]


def _legacy_choice(body: ChatCompletionRequest) -> str | ToolChoice | None:
    if isinstance(body.function_call, NamedTool):
        return ToolChoice(type="function", function=body.function_call)
    return body.function_call


def shown_function(name: str | None, description: str | None, parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return a tool as chat templates expect it: as a function."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def shown_custom(name: str, description: str | None) -> dict[str, Any]:
    """Return a custom tool as a function, for a model that only knows functions."""
    return shown_function(name, description, _CUSTOM_INPUT)


def _shown(tool: Tool) -> dict[str, Any]:
    if tool.custom is None:
        return tool.model_dump(exclude_unset=True, exclude={"custom"})
    return shown_custom(tool.custom.name, tool.custom.description)


def _grammar_tool(tool: Tool) -> GrammarTool:
    if tool.function is not None:
        return GrammarTool(tool.function.name, tool.function.parameters, strict=bool(tool.function.strict))
    assert tool.custom is not None
    format_ = tool.custom.format
    grammar = format_.grammar if format_ is not None and format_.type == "grammar" else None
    syntax, text = (grammar.syntax, grammar.definition) if grammar is not None else ("", "")
    return GrammarTool(
        tool.custom.name,
        custom=True,
        regex=text if syntax == "regex" else None,
        lark=text if syntax == "lark" else None,
    )


NO_IMAGE = "[An image was here. This model reads text only.]"

Message = dict[str, Any]


# Claude Code begins its system prompt with this line. It differs in every conversation, so with it no two
# conversations would share the 20,000 tokens of the prompt that follow.
_CHANGING_HEADER = "x-anthropic-billing-header:"


def without_header(text: str) -> str:
    """Return the text of a system message without the line that differs in every conversation of Claude Code."""
    return text.partition("\n")[2] if text.startswith(_CHANGING_HEADER) else text


def ordered(messages: Sequence[Message], *, system_in_middle: bool) -> list[Message]:
    """Return the messages as chat templates read them.

    Neighbours of one role are joined. The results of calls follow the calls in the same order. Empty turns of the
    assistant at the end are left out.
    system_in_middle: whether the template takes system messages after the first one; if not, see `in_place`
    """
    messages = list(messages)
    while messages and messages[-1]["role"] == "assistant" and not _says_something(messages[-1]):
        messages.pop()  # an empty turn of the assistant is neither continued nor answered
    messages = in_call_order(messages)
    return joined(messages if system_in_middle else in_place(messages))


def in_place(messages: Sequence[Message]) -> list[Message]:
    """Put each late system message into the turn of the user or tool that it follows, for templates that take none.

    Agents send a reminder after every result of a tool. In its place it does not change the tokens before it, so that
    the next request finds them in the prefix cache. At the head it would change all of them. After an assistant's turn
    it becomes a turn of the user. The system messages at the start are joined into one.
    """
    leading = list(itertools.takewhile(_is_system, messages))
    out: list[Message] = [functools.reduce(_with_content, leading)] if leading else []
    has_reminder = False  # the last turn is a user's with a late system message, so the user's next message joins it
    for message in messages[len(leading) :]:
        follows_turn = out and out[-1]["role"] in ("user", "tool")
        if _is_system(message) and not follows_turn:
            out.append({"role": "user", "content": message["content"]})
        elif _is_system(message) or (has_reminder and message["role"] == "user"):
            out[-1] = _with_content(out[-1], message)
        else:
            out.append(message)
            has_reminder = False
            continue
        has_reminder = out[-1]["role"] == "user"
    return out


def _is_system(message: Message) -> bool:
    return message["role"] in ("system", "developer")


def _with_content(message: Message, later: Message) -> Message:
    """Return the message with the content of `later` after its own: texts, or lists of parts."""
    first, second = message.get("content") or "", later.get("content") or ""
    if isinstance(first, str) and isinstance(second, str):
        return message | {"content": "\n".join(filter(None, [first, second]))}
    return message | {"content": [*_parts(first), *_parts(second)]}


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _says_something(message: Message) -> bool:
    return bool(message["content"] or message.get("tool_calls"))


def joined(messages: Sequence[Message]) -> list[Message]:
    """Join neighbours of one role. Tool messages stay apart, because each answers one call."""
    runs: list[list[Message]] = []
    for message in messages:
        last = runs[-1][-1] if runs else None
        apart = message["role"] == "tool" or (last is not None and "tool_calls" in last)
        if last is None or last["role"] != message["role"] or apart:
            runs.append([message])
        else:
            runs[-1].append(message)
    return [as_one(run) for run in runs]


def as_one(run: Sequence[Message]) -> Message:
    """Return one message with the texts and calls of several messages of one role."""
    message = dict(run[0])
    texts = [each["reasoning_content"] for each in run if each.get("reasoning_content")]
    if texts:
        message["reasoning_content"] = "\n".join(texts)
    contents = [each["content"] for each in run if each.get("content")]
    if contents and all(isinstance(content, str) for content in contents):
        message["content"] = "\n".join(contents)
    elif contents:
        message["content"] = [part for content in contents for part in _parts(content)]
    calls = [call for each in run for call in each.get("tool_calls", ())]
    return message | {"tool_calls": calls} if calls else message


def in_call_order(messages: list[Message]) -> list[Message]:
    """Put the results of an assistant's calls directly after them, in the calls' order. Clients send them in any order.

    A result without a call stays in its place.
    """
    order: dict[str | None, int] | None = None
    out: list[Message] = []
    for is_assistant, group in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        found = list(group)
        if is_assistant:
            calls = [call for message in found for call in message.get("tool_calls") or ()]
            order = {call.get("id"): number for number, call in enumerate(calls)}
        elif order is not None:
            found.sort(key=functools.partial(_place, order))
        out += found
    return out


def _place(order: dict[str | None, int], message: Message) -> int:
    return order.get(message["tool_call_id"], len(order)) if message["role"] == "tool" else len(order)
