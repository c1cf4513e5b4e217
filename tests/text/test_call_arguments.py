"""Arguments of calls are JSON in UTF-8, also where a model does not write them so."""

import json

import orjson
import pytest

from jaxserve.text.events import ToolCallDelta
from jaxserve.text.tools import ToolSet
from jaxserve.text.tools.registry import TOOL_FORMATS

TOOLS = ToolSet({"f": {"type": "object", "properties": {"x": {"type": "array"}}}}, custom=("note",))


@pytest.mark.parametrize(
    "family, text, arguments",
    [
        ("pythonic", r'[f(s="\ud83e\udd9c")]', '{"s": "🦜"}'),
        ("pythonic", r'[f(s="a\ud83eb")]', '{"s": "a\ufffdb"}'),
        ("hermes", r'<tool_call>{"name": "f", "arguments": "{\"s\": \"\udd9c\"}"}</tool_call>', '{"s": "\ufffd"}'),
        ("hermes", r'<tool_call>{"name": "note", "arguments": {"input": "a\ud83e b"}}</tool_call>', "a\ufffd b"),
        ("hermes", r'<tool_call>{"name": "note", "arguments": {"input": "\ud83e\udd9c"}}</tool_call>', "🦜"),
        ("glm45", r'<tool_call>f<arg_key>x</arg_key><arg_value>["\ud83e"]</arg_value>', '{"x": ["\ufffd"]'),
    ],
)
def test_a_call_with_half_a_character_can_be_written(family: str, text: str, arguments: str) -> None:
    for size in (1, 3, len(text)):
        joined = arguments_of(family, text, size)
        assert joined == arguments and orjson.dumps(joined), size


@pytest.mark.parametrize("family, call", [
    ("hermes", '<tool_call>{"name": "f", "arguments": ARGUMENTS}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": ARGUMENTS, "name": "f"}</tool_call>'),
    ("mistral", "[TOOL_CALLS]f[ARGS]ARGUMENTS"),
    ("llama3_json", '{"name": "f", "parameters": ARGUMENTS}'),
])  # fmt: skip
def test_line_breaks_in_strings_are_escaped(family: str, call: str) -> None:
    """A model writes code as it is, with line breaks and tabs."""
    text = call.replace("ARGUMENTS", '{\n  "code": "if x:\n\ty = \'\\\\n\'\r\n", "n": 1\n}')
    for size in (1, 3, len(text)):
        assert json.loads(arguments_of(family, text, size)) == {"code": "if x:\n\ty = '\\n'\r\n", "n": 1}


def test_of_arguments_that_are_there_twice_the_first_count() -> None:
    for second in ("arguments", "parameters"):
        call = f'<tool_call>{{"name": "f", "arguments": {{"x": [1]}}, "{second}": {{"x": [2]}}}}</tool_call>'
        assert arguments_of("hermes", call, 3) == '{"x": [1]}'


def arguments_of(family: str, text: str, size: int) -> str:
    """The arguments of all calls in a text that comes in pieces."""
    parser = TOOL_FORMATS[family].parser(TOOLS)
    events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
    return "".join(event.text for event in events + parser.finish() if isinstance(event, ToolCallDelta))
