"""Combine a request's tools and its response_format into one grammar."""

from __future__ import annotations

import json
from typing import Any

from jaxserve.api.generate.constraints import Constraint, special_tokens
from jaxserve.api.generate.tools import ToolUse
from jaxserve.api.protocol.chat import Tool
from jaxserve.api.shared.state import ServerState
from jaxserve.errors import InvalidValueError
from jaxserve.grammar.tools import GrammarTool, is_raw_input, tool_grammar
from jaxserve.types.sampling import GrammarSpec

_FORMATS = ("json_schema", "json_object")  # formats of a text answer; other constraints apply to the whole output


def with_tools(answer: Constraint | None, use: ToolUse, state: ServerState) -> Constraint | None:
    """Return the constraint on the whole output; `answer` is the constraint on its text.

    required: only calls are allowed; a JSON format for text then has no effect.
    auto: the answer or calls. A JSON answer still allows calls; any other constraint applies to the whole output.
    Raises InvalidValueError (tool_choice) if a call is required beside a constraint of another kind.
    """
    if use.mode == "none":
        return answer
    if use.mode == "required":
        if answer is not None and answer[0].kind not in _FORMATS:
            message = f"{answer[1]} cannot be kept where tool_choice requires a call."
            raise InvalidValueError(message, param="tool_choice")
        spec = _calls(use, state, required=True)
        assert spec is not None
        return spec, "tools"
    if answer is None:
        spec = _calls(use, state, required=False)
        return None if spec is None else (spec, "tools")
    return _either(answer, use, state)


def raw_input_of(use: ToolUse) -> str | None:
    """Return the name of the custom tool whose input is the whole output, with no call syntax around it."""
    if use.mode != "required" or not is_raw_input(_grammar_tools(use), required=True):
        return None
    custom = use.tools[0].custom
    return custom.name if custom is not None else None


def _calls(
    use: ToolUse, state: ServerState, *, required: bool, answer: dict[str, Any] | bool | None = None
) -> GrammarSpec | None:
    template = state.chat_template
    return tool_grammar(
        state.parsers.tool,
        _grammar_tools(use),
        required=required,
        parallel=use.parallel or (answer is None and not required),  # in auto mode the output ends after its first call
        answer=answer,
        template=template.source if template is not None else "",
        special_tokens=special_tokens(state.engine.tokenizer),
    )


def _either(answer: Constraint, use: ToolUse, state: ServerState) -> Constraint:
    spec, param = answer
    if spec.kind not in _FORMATS:
        return answer
    schema = {"type": "object"} if spec.kind == "json_object" else json.loads(spec.source)
    either = _calls(use, state, required=False, answer=schema)
    assert either is not None
    return either, param


def _grammar_tools(use: ToolUse) -> list[GrammarTool]:
    return [_grammar_tool(tool) for tool in use.tools]


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
