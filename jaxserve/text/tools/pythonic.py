"""Calls as a Python list of calls: Llama 3.2 and 4, ToolACE, OLMo 3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, PythonCall, ToolFormat
from jaxserve.text.tools.literals import parse_arguments

_CALL_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]{0,127})\s*")
MAX_CALL_CHARS = 1 << 20


class PythonicParser(ToolParser):
    """[f(x=1, y="a"), g()], perhaps between <|python_start|> and <|python_end|>; only at the output's start.

    An answer may begin with a bracket too, so a call's name must be a tool's. A call is sent when it is complete.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")

    def _calls(self) -> Reading[None]:
        self.reader.mark()
        yield from self.reader.space()
        self._marked = bool((yield from self.reader.accept("<|python_start|>")))
        yield from self.reader.space()
        if (yield from self.reader.accept("[")):
            yield from self._list()
        self.give_up()

    def heads(self) -> Iterable[str]:
        return "<|python_start|>[NAME(", ",NAME("

    def _begins_call(self, text: str) -> bool:
        """As in ToolParser, also for a text that ends in the arguments: a call is sent when it is complete."""
        head, bracket, _ = text.partition("(")
        return super()._begins_call(head + bracket)

    def _list(self) -> Reading[None]:
        while (yield from self._call()):
            self.reader.mark()
            yield from self.reader.space()
            if (yield from self.reader.accept("]")):
                yield from self.reader.space()
                yield from self.reader.accept("<|python_end|>", drop_partial=True)
                self.reader.mark()
                return
            yield from self.reader.accept(",")

    def _call(self) -> Reading[bool]:
        head, end = yield from self.reader.until("(", limit=256)
        match = _CALL_HEAD.fullmatch(head)
        if not end or match is None or not self.offered(match["name"]):
            return False
        text = yield from self._until_closed()
        arguments = None if text is None else parse_arguments(text)
        if arguments is None:
            return False
        self.start_call(match["name"])
        self.arguments(json.dumps(arguments, ensure_ascii=False))
        self.end_call()
        return True

    def _until_closed(self) -> Reading[str | None]:
        """The text up to the parenthesis that closes the call."""
        pieces: list[str] = []
        depth, size = 1, 0
        while True:
            piece, mark = yield from self.reader.until("(", ")", '"', "'", "#", limit=MAX_CALL_CHARS)
            pieces += [piece, mark]
            size += len(piece) + 1
            if not mark and self.ended_itself:
                return "".join(pieces)
            if not mark or mark == "#" or size > MAX_CALL_CHARS:
                return None
            if mark in "\"'":
                text = yield from self._string_rest(mark)
                if text is None:
                    return None
                pieces.append(text)
            depth += {"(": 1, ")": -1}.get(mark, 0)
            if depth == 0:
                return "".join(pieces[:-1])

    def _string_rest(self, quote: str) -> Reading[str | None]:
        """What follows an opening quote, with the closing one."""
        pieces: list[str] = []
        close = quote
        if (yield from self.reader.accept(quote * 2)):
            pieces, close = [quote * 2], quote * 3
        elif (yield from self.reader.accept(quote)):
            return quote
        while True:
            piece, mark = yield from self.reader.until("\\", close, limit=MAX_CALL_CHARS)
            pieces += [piece, mark]
            if not mark:
                return None
            if mark == close:
                return "".join(pieces)
            if not (yield from self.reader.more()):
                return None
            pieces.append(self.reader.take_one())


FORMATS = (
    ToolFormat(
        "pythonic",
        PythonicParser,
        CallFormat(PythonCall(), "[", ", ", "]"),
        signs=("<|python_start|>", "[func_name1("),
        aliases=("llama4_pythonic", "toolace", "olmo3"),
    ),
)
