"""Read the tools and the tool choice of a Responses body."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxserve.api.protocol.limits import MAX_TOOLS
from jaxserve.api.responses.input_items import flat_name
from jaxserve.api.responses.protocol import ResponsesRequest, ResponseTool, ResponseToolChoice, ToolInputFormat
from jaxserve.api.tasks.tools import Mode, ToolUse, shown_custom, shown_function
from jaxserve.errors import InvalidValueError, UnsupportedParameterError
from jaxserve.grammar.tools import GrammarTool

OWN_TOOLS = ("function", "custom")
MAX_SHOWN_CHARS = 256


@dataclass(frozen=True)
class OwnTool:
    """A tool of the client. name: as the client knows it. namespace: "" if it is in none"""

    tool: ResponseTool
    name: str
    namespace: str = ""

    @property
    def known_as(self) -> str:
        """The name under which the model knows the tool."""
        return flat_name(self.namespace, self.name)

    @property
    def shown(self) -> dict[str, Any]:
        """The tool as chat templates expect it: as a function."""
        if self.tool.type == "custom":
            return shown_custom(self.known_as, self.tool.description)
        return shown_function(self.known_as, self.tool.description, self.tool.parameters)

    @property
    def for_grammar(self) -> GrammarTool:
        """The tool as its calls are constrained."""
        if self.tool.type == "function":
            return GrammarTool(self.known_as, self.tool.parameters, strict=bool(self.tool.strict))
        form = self.tool.format
        syntax, text = (form.syntax, form.definition) if isinstance(form, ToolInputFormat) else (None, None)
        return GrammarTool(
            self.known_as,
            custom=True,
            regex=text if syntax == "regex" else None,
            lark=text if syntax == "lark" else None,
        )


@dataclass(frozen=True)
class ResponseTools:
    """The tools of a body. by_name: those of the client, by the name that the model knows"""

    use: ToolUse = field(default_factory=ToolUse)
    by_name: Mapping[str, OwnTool] = field(default_factory=dict)

    def call_names(self, known_as: str) -> dict[str, str]:
        """Return the name of a called tool, and its namespace if it is in one."""
        tool = self.by_name.get(known_as)
        if tool is None or not tool.namespace:
            return {"name": known_as}
        return {"name": tool.name, "namespace": tool.namespace}


def response_tools(body: ResponsesRequest, note: Callable[[str], None]) -> ResponseTools:
    """Read tools, tool_choice and parallel_tool_calls. Raises a RequestError that names the field.

    note: called with the type of each tool that is dropped, because this server does not run it
    """
    by_name: dict[str, OwnTool] = {}
    for param, named in _named_tools(body.tools or [], "tools", note):
        if by_name.setdefault(named.known_as, named) != named:
            raise InvalidValueError(f"{param}: another tool is called {named.known_as!r}.", param=param)
    if len(by_name) > MAX_TOOLS:
        raise InvalidValueError(f"tools: there are more than {MAX_TOOLS}, those in namespaces counted.", param="tools")
    mode, allowed = _resolved(body, by_name, note)
    shown = tuple(tool.shown for tool in by_name.values())
    if mode == "none":
        return ResponseTools(ToolUse(shown=shown), by_name)
    is_named = isinstance(body.tool_choice, ResponseToolChoice) and body.tool_choice.type in OWN_TOOLS
    parallel = body.parallel_tool_calls is not False and not is_named
    return ResponseTools(ToolUse(tuple(tool.for_grammar for tool in allowed), mode, parallel, shown), by_name)


def _named_tools(
    tools: list[ResponseTool], param: str, note: Callable[[str], None], namespace: str = ""
) -> Iterator[tuple[str, OwnTool]]:
    """Yield (field, tool) of the client's tools, also of those in namespaces."""
    for number, tool in enumerate(tools):
        where = f"{param}.{number}"
        if tool.type not in (*OWN_TOOLS, "namespace"):
            note(tool.type)
            continue
        if tool.name is None:
            raise _missing(f"{where}.name")
        if tool.type != "namespace":
            _check_format(tool, f"{where}.format")
            yield where, OwnTool(tool, tool.name, namespace)
        elif namespace:
            raise InvalidValueError(f"{where}: a namespace cannot be in a namespace.", param=where)
        elif tool.tools is None:
            raise _missing(f"{where}.tools")
        else:
            yield from _named_tools(tool.tools, f"{where}.tools", note, tool.name)


def _check_format(tool: ResponseTool, param: str) -> None:
    form = tool.format
    if tool.type == "function" or form is None:
        return
    if not isinstance(form, ToolInputFormat):
        raise InvalidValueError(f"{param} must be an object of type text or grammar.", param=param)
    for name in ("syntax", "definition") if form.type == "grammar" else ():
        if getattr(form, name) is None:
            raise _missing(f"{param}.{name}")


def _resolved(
    body: ResponsesRequest, by_name: Mapping[str, OwnTool], note: Callable[[str], None]
) -> tuple[Mode, list[OwnTool]]:
    """Return (mode, tools that may be called). Raises a RequestError."""
    choice, every = body.tool_choice, list(by_name.values())
    if choice is None or choice == "auto":
        return ("auto" if every else "none"), every
    if choice == "none":
        return "none", []
    if choice == "required":
        if not every:
            raise InvalidValueError("tool_choice asks for a call, but there are no tools.", param="tool_choice")
        return "required", every
    assert isinstance(choice, ResponseToolChoice)
    if choice.type == "allowed_tools":
        return _allowed(choice, every, note)
    if choice.type not in OWN_TOOLS:
        message = f"tool_choice: tools of type {choice.type!r} are not run by this server."
        raise UnsupportedParameterError(message, param="tool_choice.type")
    if choice.name is None:
        raise _missing("tool_choice.name")
    found = _Index(every).find(choice.type, choice.name, choice.namespace, "tool_choice.name")
    return "required", list(found.values())


def _allowed(
    choice: ResponseToolChoice, every: list[OwnTool], note: Callable[[str], None]
) -> tuple[Mode, list[OwnTool]]:
    if choice.tools is None:
        raise _missing("tool_choice.tools")
    index, found = _Index(every), dict[str, OwnTool]()
    for number, entry in enumerate(choice.tools):
        param, kind, name = f"tool_choice.tools.{number}", entry.get("type"), entry.get("name")
        space = entry.get("namespace")
        if not isinstance(kind, str) or not isinstance(space, str | None):
            raise InvalidValueError(f"{param} must have a type and a name.", param=param)
        if kind not in (*OWN_TOOLS, "namespace"):
            note(kind)
            continue
        if not isinstance(name, str):
            raise _missing(f"{param}.name")
        found |= index.take_namespace(name, param) if kind == "namespace" else index.find(kind, name, space, param)
    if not found:
        message = "tool_choice.tools names no tool that could be called."
        raise InvalidValueError(message, param="tool_choice.tools")
    return choice.mode or "auto", list(found.values())


class _Index:
    """Finds tools by their own name and namespace, by the name that the model knows, or by their own name alone."""

    def __init__(self, every: list[OwnTool]) -> None:
        self._tools: dict[tuple[str, str, str], OwnTool] = {}
        self._spaces: dict[str, dict[str, OwnTool]] = {}
        for tool in every:
            self._tools[tool.tool.type, tool.namespace, tool.name] = tool
            self._spaces.setdefault(tool.namespace, {})[tool.known_as] = tool
        for tool in every:
            for name in (tool.known_as, tool.name):
                self._tools.setdefault((tool.tool.type, "", name), tool)

    def find(self, kind: str, name: str, namespace: str | None, param: str) -> dict[str, OwnTool]:
        """Return the tool by the name that the model knows. Raises InvalidValueError if there is none."""
        tool = self._tools.get((kind, namespace or "", name))
        if tool is None:
            raise InvalidValueError(f"{param}: there is no {kind} tool {name!r}.", param=param)
        return {tool.known_as: tool}

    def take_namespace(self, name: str, param: str) -> dict[str, OwnTool]:
        """Return the tools of a namespace by the names that the model knows; nothing if it is asked for again.

        Raises InvalidValueError if there is no such namespace.
        """
        found = self._spaces.get(name)
        if found is None:
            raise InvalidValueError(f"{param}: there is no namespace {name!r}.", param=param)
        self._spaces[name] = {}
        return found


def shown_tools(tools: list[ResponseTool]) -> list[dict[str, Any]]:
    """Return tools as the answer repeats them. A function has all its keys, which some clients need."""
    return [_shown_tool(tool) for tool in tools]


def _shown_tool(tool: ResponseTool) -> dict[str, Any]:
    if tool.type not in (*OWN_TOOLS, "namespace"):
        return {"type": tool.type} | _short(tool.model_extra or {})
    given = {name: getattr(tool, name) for name in tool.model_fields_set}
    if isinstance(tool.format, ToolInputFormat):
        given["format"] = tool.format.model_dump(include=set(ToolInputFormat.model_fields), exclude_unset=True)
    if tool.tools is not None:
        given["tools"] = shown_tools(tool.tools)
    defaults = {"name": None, "description": None, "parameters": None, "strict": False}
    return defaults | given if tool.type == "function" else given


def shown_choice(choice: str | ResponseToolChoice | None) -> str | dict[str, Any]:
    """Return a tool choice as the answer repeats it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    given = choice.model_dump(include={"type", "name", "namespace", "mode"}, exclude_unset=True)
    return given if choice.tools is None else given | {"tools": [_short(entry) for entry in choice.tools]}


def _short(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return those fields that are numbers, truth values and short texts: the answer repeats them in three events."""
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, bool | int) or (isinstance(value, str) and len(value) <= MAX_SHOWN_CHARS)
    }


def _missing(param: str) -> InvalidValueError:
    return InvalidValueError(f"{param} is missing.", param=param, code="missing_required_parameter")
