"""The tools of a chat request: which ones the model sees, which it may or must call, and the older `functions` form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from jaxserve.api.protocol.chat import ChatCompletionRequest, NamedTool, Tool, ToolChoice
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import GrammarTool, is_raw_input
from jaxserve.text.tools import ToolSet

Mode = Literal["none", "auto", "required"]

# how a custom tool is described to a model that only knows functions; the parser reverses it
_CUSTOM_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}


@dataclass(frozen=True)
class ToolUse:
    """The tool settings of a request.

    tools: those that the model may call; empty with mode "none"
    mode: also "required" for a named tool, which is then the only one here
    parallel: whether an output may have several calls; False for a named tool
    shown: all tools, as the chat template reads them. The prompt does not depend on the choice, so that requests with
    different choices share its prefix; the grammar limits the calls.
    """

    tools: tuple[GrammarTool, ...] = ()
    mode: Mode = "none"
    parallel: bool = True
    shown: tuple[dict[str, Any], ...] = ()

    @property
    def forbids_calls(self) -> bool:
        """Whether the prompt shows tools of which the model may call none."""
        return self.mode == "none" and bool(self.shown)

    @property
    def allows_some(self) -> bool:
        """Whether the model may, but need not, call some of the tools that the prompt shows."""
        return self.mode == "auto" and len(self.tools) < len(self.shown)

    @property
    def outlined(self) -> ToolUse:
        """The same with outlines of the schemas of tools that are not strict."""
        return replace(self, tools=tuple(tool.outlined for tool in self.tools))

    @property
    def tool_set(self) -> ToolSet | None:
        """Return the tools for the output parser; None leaves calls in the text."""
        if self.mode == "none":
            return None
        functions = {tool.name: dict(tool.schema or {}) for tool in self.tools if not tool.custom}
        return ToolSet(functions, [tool.name for tool in self.tools if tool.custom])

    @property
    def raw_input(self) -> str | None:
        """Return the name of the custom tool whose input is the whole output, with no call syntax around it."""
        if self.mode != "required" or not is_raw_input(self.tools, required=True):
            return None
        return self.tools[0].name if self.tools[0].custom else None


def tool_use(body: ChatCompletionRequest) -> ToolUse:
    """Read tools, tool_choice, parallel_tool_calls, functions and function_call. Raises a RequestError."""
    legacy = bool(body.functions)
    if legacy and body.tools:
        raise InvalidValueError("Give tools or functions, not both.", param="functions")
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


def offered_tools(tools: list[Tool]) -> ToolUse:
    """Read tools that the model may call, of an API without tool_choice. Raises a RequestError."""
    _check_tools(tools)
    if not tools:
        return ToolUse()
    return ToolUse(tuple(map(_grammar_tool, tools)), "auto", shown=tuple(map(_shown, tools)))


def tool_name(tool: Tool) -> str:
    named = tool.function or tool.custom
    assert named is not None
    return named.name


def _check_tools(tools: list[Tool]) -> None:
    named: dict[str, Tool] = {}  # a call has a name only; agents bring the same tool twice, which does no harm
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
    """Describe a tool as chat templates expect it: as a function."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def shown_custom(name: str, description: str | None) -> dict[str, Any]:
    """Describe a custom tool to a model that only knows functions."""
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
