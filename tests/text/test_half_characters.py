"""Halves of a character that a model escapes in a call: an answer is UTF-8, which cannot have them."""

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
        parser = TOOL_FORMATS[family].parser(TOOLS)
        events = [event for at in range(0, len(text), size) for event in parser.feed(text[at : at + size])]
        events += parser.finish()
        joined = "".join(event.text for event in events if isinstance(event, ToolCallDelta))
        assert joined == arguments and orjson.dumps(joined), size
