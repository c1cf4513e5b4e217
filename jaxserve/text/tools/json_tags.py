"""Calls as JSON objects between tags: Hermes and Qwen 2.5/3, Granite, InternLM, Phi-4-mini, Jamba, Nemotron Nano 2,
Apertus and similar models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, CallOpening, JsonCall, NamedCall, ToolFormat
from jaxserve.text.tools.xml import ToolCallParser


class HermesParser(ToolCallParser):
    """<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>, once a call."""


class JsonTagParser(ToolParser):
    """A tag, then a call or a list of calls, and perhaps a tag at the end."""

    begin: ClassVar[str]
    end: ClassVar[str] = ""

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until(self.begin)):
            yield from self.reader.space()
            is_list = yield from self.reader.accept("[")
            ends = (self.end,) if self.end else ()
            if not (yield from (self.json_call_list() if is_list else self.json_calls(*ends))):
                self.give_up()
            elif self.end:
                yield from self.reader.space()
                yield from self.reader.accept(self.end, drop_partial=True)

    def heads(self) -> Iterable[str]:
        return self.json_heads(self.begin)


class GraniteParser(JsonTagParser):
    """<|tool_call|>[{"name": "f", "arguments": {"x": 1}}, ...]"""

    markers = ("<|tool_call|>",)
    begin = "<|tool_call|>"


class InternLMParser(JsonTagParser):
    """<|action_start|><|plugin|>{"name": "f", "parameters": {"x": 1}}<|action_end|>"""

    markers = ("<|action_start|>", "<|plugin|>", "<|action_end|>")
    begin = "<|action_start|><|plugin|>"
    end = "<|action_end|>"
    call_ends = (end,)


class Phi4MiniParser(JsonTagParser):
    """functools[{"name": "f", "arguments": {"x": 1}}, ...]"""

    markers = ()
    begin = "functools"


class JambaParser(JsonTagParser):
    """<tool_calls>[{"name": "f", "arguments": {"x": 1}}, ...]</tool_calls>"""

    markers = ("<tool_calls>", "</tool_calls>")
    begin = "<tool_calls>"
    end = "</tool_calls>"
    call_ends = (end,)


class NemotronParser(JsonTagParser):
    """<TOOLCALL>[{"name": "f", "arguments": {"x": 1}}, ...]</TOOLCALL>"""

    markers = ("<TOOLCALL>", "</TOOLCALL>")
    begin = "<TOOLCALL>"
    end = "</TOOLCALL>"
    call_ends = (end,)


class ApertusParser(JsonTagParser):
    """<|tools_prefix|>[{"f": {"x": 1}}, ...]<|tools_suffix|>: the name is the key of the arguments."""

    markers = ("<|tools_prefix|>", "<|tools_suffix|>")
    begin = "<|tools_prefix|>"
    end = "<|tools_suffix|>"
    call_ends = (end,)

    def json_call(self) -> Reading[bool]:
        """Read {"f": {...}}. Return whether a call was started."""
        if not (yield from self.reader.accept("{")):
            return False
        yield from self.reader.space()
        name = yield from self.reader.json_string()
        yield from self.reader.space()
        if name is None or not self.offered(name) or not (yield from self.reader.accept(":")):
            return False
        yield from self.reader.space()
        if (yield from self.reader.peek()) != "{":
            return False
        self.start_call(name)
        whole = yield from self.json_arguments()
        self.end_call(whole=whole)
        yield from self.reader.space()
        yield from self.skip_braces()
        return True

    def heads(self) -> Iterable[str]:
        return [f'{each}{{"NAME":' for each in (self.begin, self.begin + "[", ",", "")]


FORMATS = (
    ToolFormat(
        "hermes",
        HermesParser,
        CallFormat(JsonCall("arguments", "<tool_call>\n", "\n</tool_call>"), trigger="<tool_call>"),
        signs=("<tool_call>",),
        aliases=("qwen", "qwen25", "qwen3", "ernie45", "granite4", "exaone4"),
        general=True,
        openings=(CallOpening("<tool_call>", ("{", "[{", "<function=")),),
    ),
    ToolFormat(
        "granite",
        GraniteParser,
        CallFormat(JsonCall("arguments"), "<|tool_call|>[", ", ", "]", "<|tool_call|>"),
        signs=("<|tool_call|>",),
        openings=(CallOpening("<|tool_call|>", ("{", "[{")),),
    ),
    ToolFormat(
        "internlm",
        InternLMParser,
        CallFormat(
            JsonCall("parameters", "<|action_start|><|plugin|>\n", "<|action_end|>"), trigger="<|action_start|>"
        ),
        signs=("<|action_start|>",),
        openings=(CallOpening("<|action_start|>", ("<|plugin|>",)),),
    ),
    ToolFormat(
        "phi4_mini_json",
        Phi4MiniParser,
        CallFormat(JsonCall("arguments"), "functools[", ", ", "]", "functools["),
        signs=("functools",),
        aliases=("phi4_mini",),
        openings=(CallOpening("functools", ("[{",)),),
    ),
    ToolFormat(
        "jamba",
        JambaParser,
        CallFormat(JsonCall("arguments"), "<tool_calls>[", ", ", "]</tool_calls>", "<tool_calls>"),
        signs=("<tool_calls>",),
        general=True,
        openings=(CallOpening("<tool_calls>", ("{", "[{")),),
    ),
    ToolFormat(
        "nemotron_json",
        NemotronParser,
        CallFormat(JsonCall("arguments"), "<TOOLCALL>[", ", ", "]</TOOLCALL>", "<TOOLCALL>"),
        signs=("<TOOLCALL>",),
        aliases=("nemotron_nano_v2",),
        openings=(CallOpening("<TOOLCALL>", ("{", "[{")),),
    ),
    ToolFormat(
        "apertus",
        ApertusParser,
        CallFormat(
            NamedCall('{"NAME": ', "}"), "<|tools_prefix|>[", ", ", "]<|tools_suffix|>", trigger="<|tools_prefix|>"
        ),
        signs=("<|tools_prefix|>",),
        aliases=("apertus2509",),
        openings=(CallOpening("<|tools_prefix|>", ("[{", "{")),),
    ),
)
