"""Llama 3: an answer that is only a JSON object with the name of a known tool, perhaps after <|python_tag|>."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, CallOpening, JsonCall, ToolFormat


class LlamaJsonParser(ToolParser):
    """{"name": "f", "parameters": {"x": 1}}; more calls follow after ";" or ",", or in a list.

    An ordinary JSON answer looks the same, so only names of the request's tools count.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    def _calls(self) -> Reading[None]:
        self.reader.mark()
        yield from self.reader.space()
        self._marked = bool((yield from self.reader.accept("<|python_tag|>")))
        yield from self.reader.space()
        if (yield from self.reader.accept("[")):
            started = yield from self.json_call_list()
        else:
            started = yield from self.json_calls()
        if not started:
            self.give_up()
        while (yield from self.content_until("<|python_tag|>")):
            yield from self.reader.space()
            if not (yield from self.json_calls()):
                self.give_up()

    def heads(self) -> Iterable[str]:
        return self.json_heads("<|python_tag|>")


FORMATS = (
    ToolFormat(
        "llama3_json",
        LlamaJsonParser,
        CallFormat(JsonCall("parameters"), separator="; "),
        signs=("<|python_tag|>", '{"name": function name, "parameters"'),
        aliases=("llama3", "llama4", "llama4_json"),
        general=True,
        openings=(CallOpening("<|python_tag|>", ("{", "[{")),),
    ),
    # for models without a format: calls as plain JSON, which the grammar enforces
    ToolFormat("json", LlamaJsonParser, CallFormat(JsonCall("parameters"), "[", ", ", "]")),
)
