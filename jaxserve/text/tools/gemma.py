"""Gemma 4: calls in a notation of its own, whose texts stand between marks and have no escapes."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable
from typing import ClassVar

from jaxserve.text.reader import MAX_JSON_DEPTH, Reading, json_rest
from jaxserve.text.tools.base import ToolParser, as_json
from jaxserve.text.tools.format import CallFormat, CallOpening, NotedCall, ToolFormat

BEGIN, END, MARK = "<|tool_call>", "<tool_call|>", '<|"|>'
Types = Callable[[str], Collection[str]]  # from the name of a member to its JSON types; none: any


def _any_type(key: str) -> Collection[str]:
    return ()


class GemmaParser(ToolParser):
    """<|tool_call>call:f{x:1,y:<|"|>a<|"|>,z:[true,{k:<|"|>b<|"|>}]}<tool_call|>

    The notation is converted to JSON while it streams. A mark within a text is part of it, unless `,`, `}`, `]` or the
    end of the output follows.
    """

    markers: ClassVar[tuple[str, ...]] = (BEGIN, END, MARK)

    def _calls(self) -> Reading[None]:
        while (yield from self.content_until(BEGIN)):
            yield from self.reader.space()
            if not (yield from self._call()):
                self.give_up()

    def heads(self) -> Iterable[str]:
        return (f"{BEGIN}call:NAME{{",)

    def _call(self) -> Reading[bool]:
        if not (yield from self.reader.accept("call:", drop_partial=True)):
            return False
        name, end = yield from self.reader.until("{", END, take=False)
        name = name.strip()
        if end != "{" or not self.offered(name):
            return False
        self.start_call(name)
        self._written: list[str] = []
        whole = yield from self._members("", lambda key: self.tools.types(name, key), 0)
        rest = None if whole or not self.ended_itself else json_rest("".join(self._written))
        if rest is not None:
            self._write(rest)
        self.end_call(whole=whole or rest is not None)
        yield from self.reader.space()
        yield from self.reader.accept(END, drop_partial=True)
        return True

    def _write(self, text: str) -> None:
        self._written.append(text)
        self.arguments(text)

    def _members(self, before: str, types: Types, depth: int) -> Reading[bool]:
        """Write an object after `before`. Return False if it breaks off."""
        if depth >= MAX_JSON_DEPTH or not (yield from self.reader.accept("{")):
            return False
        self._write(before + "{")
        separator = ""
        while True:
            yield from self.reader.space()
            if (yield from self.reader.accept("}")):
                self._write("}")
                return True
            if separator and (yield from self.reader.accept(",")):
                yield from self.reader.space()
            marked = yield from self.reader.accept(MARK)
            key, end = yield from self.reader.until(MARK if marked else ":", END)
            if marked and end == MARK:
                yield from self.reader.space()
                end = yield from self.reader.accept(":")
            if end != ":":
                return False
            yield from self.reader.space()
            head = f"{separator}{json.dumps(key, ensure_ascii=False)}: "
            if not (yield from self._value(head, types(key), depth + 1)):
                return False
            separator = ", "

    def _value(self, before: str, types: Collection[str], depth: int) -> Reading[bool]:
        """Write a value after `before`. Return False if it breaks off."""
        first = yield from self.reader.peek()
        if first == "{":
            return (yield from self._members(before, _any_type, depth))
        if first == "[":
            return (yield from self._items(before, depth))
        if (yield from self.reader.accept(MARK)):
            return (yield from self._text(before))
        text, end = yield from self.reader.until(",", "}", "]", END, take=False)
        if end in ("", END):
            return False
        self._write(before + as_json(text.strip(), types))
        return True

    def _items(self, before: str, depth: int) -> Reading[bool]:
        if depth >= MAX_JSON_DEPTH:
            return False
        yield from self.reader.accept("[")
        self._write(before + "[")
        separator = ""
        while True:
            yield from self.reader.space()
            if (yield from self.reader.accept("]")):
                self._write("]")
                return True
            if separator and (yield from self.reader.accept(",")):
                yield from self.reader.space()
            if not (yield from self._value(separator, (), depth + 1)):
                return False
            separator = ", "

    def _text(self, before: str) -> Reading[bool]:
        """Write a text whose opening mark was read, while it comes."""
        self._write(before + '"')

        def send(piece: str) -> None:
            self._write(json.dumps(piece, ensure_ascii=False)[1:-1])

        while (yield from self.reader.copy_until((MARK,), send, take=False, drop_partial=True)):
            if (yield from self.reader.ahead(self._ends_text())):
                yield from self.reader.accept(MARK)
                self._write('"')
                return True
            send(self.reader.take_one())
        return False

    def _ends_text(self) -> Reading[bool]:
        yield from self.reader.accept(MARK)
        yield from self.reader.layout()
        return (yield from self.reader.peek()) in ("", ",", "}", "]")


FORMATS = (
    ToolFormat(
        "gemma4",
        GemmaParser,
        CallFormat(NotedCall(f"{BEGIN}call:NAME", END, MARK), separator="", trigger=BEGIN),
        signs=(f"{BEGIN}call:", BEGIN),
        openings=(CallOpening(BEGIN, ("call:",)),),
    ),
)
