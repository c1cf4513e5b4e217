"""Calls written as in Python: Llama 3.2 and 4, ToolACE, LFM2, OLMo 3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import ClassVar

from jaxserve.text.reader import Reading, json_rest
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, CallOpening, PythonCall, ToolFormat
from jaxserve.text.tools.literals import arguments_so_far, parse_arguments

_CALL_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]{0,127})\s*")
MAX_CALL_CHARS = 1 << 20


class PythonicParser(ToolParser):
    """[f(x=1, y="a"), g()], perhaps between <|python_start|> and <|python_end|>; only at the output's start.

    An answer may begin with a bracket too, so a call's name must be a tool's. A call is sent when it is complete, or
    when the end of the text cuts it off.
    """

    markers: ClassVar[tuple[str, ...]] = ("<|python_start|>", "<|python_end|>")
    closing: ClassVar[str] = "]"  # behind the last call
    end: ClassVar[str] = "<|python_end|>"

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

    def _list(self) -> Reading[None]:
        while (yield from self._call()):
            self.reader.mark()
            yield from self.reader.space()
            if (yield from self.reader.accept(self.closing, drop_partial=True)) or self.reader.ended:
                yield from self.reader.space()
                yield from self.reader.accept(self.end, drop_partial=True)
                self.reader.mark()
                return
            yield from self.reader.accept(",")

    def _call(self) -> Reading[bool]:
        head, end = yield from self.reader.until("(", limit=256)
        match = _CALL_HEAD.fullmatch(head)
        if not end or match is None or not self.offered(match["name"]):
            return False
        text, whole = yield from self._until_closed()
        arguments = parse_arguments(text) if whole else None
        written = arguments_so_far(text) if self.reader.ended and not whole else None
        if written is not None and self.is_whole:
            rest = json_rest(written)
            whole, written = rest is not None, written + (rest or "")
        elif arguments is not None:
            written = json.dumps(arguments, ensure_ascii=False)
        if written is None:
            return False
        self.start_call(match["name"])
        if written != "{":
            self.arguments(written)
        self.end_call(whole=whole)
        return True

    def _until_closed(self) -> Reading[tuple[str, bool]]:
        """Return the text up to the parenthesis that closes the call, and whether it came."""
        pieces: list[str] = []
        depth, size = 1, 0
        while True:
            piece, mark = yield from self.reader.until("(", ")", '"', "'", "#", limit=MAX_CALL_CHARS)
            pieces += [piece, mark]
            size += len(piece) + 1
            if not mark or mark == "#" or size > MAX_CALL_CHARS:
                return "".join(pieces), False
            if mark in "\"'":
                text, closed = yield from self._string_rest(mark)
                pieces.append(text)
                if not closed:
                    return "".join(pieces), False
            depth += {"(": 1, ")": -1}.get(mark, 0)
            if depth == 0:
                return "".join(pieces[:-1]), True

    def _string_rest(self, quote: str) -> Reading[tuple[str, bool]]:
        """Return the text after an opening quote up to the closing one, included, and whether that came."""
        pieces: list[str] = []
        close = quote
        if (yield from self.reader.accept(quote * 2)):
            pieces, close = [quote * 2], quote * 3
        elif (yield from self.reader.accept(quote)):
            return quote, True
        while True:
            piece, mark = yield from self.reader.until("\\", close, limit=MAX_CALL_CHARS)
            pieces += [piece, mark]
            if not mark:
                return "".join(pieces), False
            if mark == close:
                return "".join(pieces), True
            if not (yield from self.reader.more()):
                return "".join(pieces), False
            pieces.append(self.reader.take_one())


class TaggedPythonicParser(PythonicParser):
    """Calls as PythonicParser reads them, behind a tag. Text may stand before it.

    begin: the tag. opening: the text between the tag and the first call
    """

    begin: ClassVar[str]
    opening: ClassVar[str] = ""

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until(self.begin)):
            yield from self.reader.space()
            if self.opening and not (yield from self.reader.accept(self.opening)):
                self.give_up()
                continue
            yield from self.reader.space()
            yield from self._list()
            self.give_up()

    def heads(self) -> Iterable[str]:
        return f"{self.begin}{self.opening}NAME(", ",NAME(", "NAME("


class Lfm2Parser(TaggedPythonicParser):
    """<|tool_call_start|>[f(x=1, y="a"), g()]<|tool_call_end|>"""

    markers = ("<|tool_call_start|>", "<|tool_call_end|>")
    begin, opening, end = "<|tool_call_start|>", "[", "<|tool_call_end|>"


class Olmo3Parser(TaggedPythonicParser):
    """<function_calls>
    f(x=1, y="a")
    g()
    </function_calls>
    """

    markers = ("<function_calls>", "</function_calls>")
    begin, closing, end = "<function_calls>", "</function_calls>", ""


FORMATS = (
    ToolFormat(
        "lfm2",
        Lfm2Parser,
        CallFormat(PythonCall(), "<|tool_call_start|>[", ", ", "]<|tool_call_end|>", trigger="<|tool_call_start|>"),
        signs=("<|tool_call_start|>[", "<|tool_list_start|>"),
        openings=(CallOpening("<|tool_call_start|>", ("[",)),),
    ),
    ToolFormat(
        "olmo3",
        Olmo3Parser,
        CallFormat(PythonCall(), "<function_calls>\n", "\n", "\n</function_calls>", trigger="<function_calls>"),
        signs=("<function_calls>",),
        openings=(CallOpening("<function_calls>", ("(",), named=True),),
    ),
    ToolFormat(
        "pythonic",
        PythonicParser,
        CallFormat(PythonCall(), "[", ", ", "]"),
        signs=("<|python_start|>", "[func_name1("),
        aliases=("llama4_pythonic", "toolace"),
        openings=(CallOpening("<|python_start|>", ("[",)),),
    ),
)
