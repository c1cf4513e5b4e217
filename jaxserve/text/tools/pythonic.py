"""Calls as a Python list of calls: Llama 3.2 and 4, ToolACE, OLMo 3. The text is read as literals, never evaluated."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, ClassVar

from jaxserve.text.reader import Reading
from jaxserve.text.tools.base import ToolParser
from jaxserve.text.tools.format import CallFormat, PythonCall, ToolFormat

_CALL_HEAD = re.compile(r"\s*(?P<name>[A-Za-z_][\w.]{0,127})\s*")
_NAME = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]{1,16}|(?:\d{1,300}\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?)")
_STRING = re.compile(r"""(?P<q>'''|\"\"\"|'|")(?P<text>(?:\\.|(?!(?P=q))[^\\])*)(?P=q)""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
MAX_NESTED_VALUES = 64
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


def parse_arguments(text: str) -> dict[str, Any] | None:
    """`x=1, y="a"` as a dict; None if it is anything but keyword arguments with literal values."""
    try:
        return _Literals(text).keywords()
    except (ValueError, RecursionError, OverflowError):
        return None


class _Literals:
    """Recursive descent over Python's literals (and JSON's words)."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def keywords(self) -> dict[str, Any]:
        """Parse keyword arguments. Raises ValueError if the text is anything else."""
        found: dict[str, Any] = {}
        while not self._end():
            name = self._match(_NAME)
            self._expect("=")
            found[name] = self.value(0)
            if not self._take(",") and not self._end():
                raise ValueError("no comma")
        return found

    def value(self, depth: int) -> Any:
        """Parse one literal. Raises ValueError if the text is none, or nested too deep."""
        if depth > MAX_NESTED_VALUES:
            raise ValueError("nested too deep")
        self._space()
        char = self.text[self.at : self.at + 1]
        if char == "{":
            return self._dict(depth)
        if char in ("[", "("):
            return self._sequence(depth, "]" if char == "[" else ")")
        if char in ("'", '"'):
            return self._strings()
        if char.isalpha():
            word = self._match(_NAME)
            if word not in _WORDS:
                raise ValueError(f"{word} is no literal")
            return _WORDS[word]
        return self._number()

    def _number(self) -> int | float:
        text = self._match(_NUMBER)
        if "x" in text.lower():
            return int(text, 16)
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError("number too large")
        return value if any(char in ".eE" for char in text) else int(text)

    def _strings(self) -> str:
        """One string or several written side by side."""
        out = ""
        while self.text[self.at : self.at + 1] in ("'", '"'):
            match = _STRING.match(self.text, self.at)
            if match is None:
                raise ValueError("unfinished string")
            self.at = match.end()
            out += _ESCAPE.sub(_unescape, match["text"])
            self._space()
        return out

    def _sequence(self, depth: int, close: str) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        while not self._take(close):
            items.append(self.value(depth + 1))
            if not self._take(","):
                self._expect(close)
                break
        return items

    def _dict(self, depth: int) -> dict[str, Any]:
        self.at += 1
        items: dict[str, Any] = {}
        while not self._take("}"):
            key = self.value(depth + 1)
            self._expect(":")
            items[key if isinstance(key, str) else json.dumps(key)] = self.value(depth + 1)
            if not self._take(","):
                self._expect("}")
                break
        return items

    def _space(self) -> None:
        while self.text[self.at : self.at + 1].isspace():
            self.at += 1

    def _end(self) -> bool:
        self._space()
        return self.at >= len(self.text)

    def _take(self, token: str) -> bool:
        self._space()
        found = self.text.startswith(token, self.at)
        self.at += len(token) * found
        return found

    def _expect(self, token: str) -> None:
        if not self._take(token):
            raise ValueError(f"expected {token}")

    def _match(self, pattern: re.Pattern[str]) -> str:
        self._space()
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"unexpected text at {self.at}")
        self.at = match.end()
        return match[0]


def _unescape(match: re.Match[str]) -> str:
    code = match[1]
    if code[0] in "xuU" and len(code) > 1:
        return chr(int(code[1:], 16))
    return _SIMPLE_ESCAPES.get(code, code if code in "\\'\"" else "\\" + code)


FORMATS = (
    ToolFormat(
        "pythonic",
        PythonicParser,
        CallFormat(PythonCall(), "[", ", ", "]"),
        signs=("<|python_start|>", "[func_name1("),
        aliases=("llama4_pythonic", "toolace", "olmo3"),
    ),
)
