"""Calls as JSON objects between tags: Hermes and Qwen 2.5/3, Granite, InternLM, Phi-4-mini, Jamba and similar
models.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, JsonCall, ToolFormat
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


class Phi4MiniParser(JsonTagParser):
    """functools[{"name": "f", "arguments": {"x": 1}}, ...]"""

    markers = ()
    begin = "functools"


class JambaParser(JsonTagParser):
    """<tool_calls>[{"name": "f", "arguments": {"x": 1}}, ...]</tool_calls>"""

    markers = ("<tool_calls>", "</tool_calls>")
    begin = "<tool_calls>"
    end = "</tool_calls>"


FORMATS = (
    ToolFormat(
        "hermes",
        HermesParser,
        CallFormat(JsonCall("arguments", "<tool_call>\n", "\n</tool_call>"), trigger="<tool_call>"),
        signs=("<tool_call>",),
        aliases=("qwen", "qwen25", "qwen3"),
        general=True,
    ),
    ToolFormat(
        "granite",
        GraniteParser,
        CallFormat(JsonCall("arguments"), "<|tool_call|>[", ", ", "]", "<|tool_call|>"),
        signs=("<|tool_call|>",),
    ),
    ToolFormat(
        "internlm",
        InternLMParser,
        CallFormat(
            JsonCall("parameters", "<|action_start|><|plugin|>\n", "<|action_end|>"), trigger="<|action_start|>"
        ),
        signs=("<|action_start|>",),
    ),
    ToolFormat(
        "phi4_mini_json",
        Phi4MiniParser,
        CallFormat(JsonCall("arguments"), "functools[", ", ", "]", "functools["),
        signs=("functools",),
        aliases=("phi4_mini",),
    ),
    ToolFormat(
        "jamba",
        JambaParser,
        CallFormat(JsonCall("arguments"), "<tool_calls>[", ", ", "]</tool_calls>", "<tool_calls>"),
        signs=("<tool_calls>",),
    ),
)
