"""Reads values written as Python's literals (and JSON's words). Nothing is evaluated."""

from __future__ import annotations

import json
import re
from typing import Any

_NAME = re.compile(r"[A-Za-z_]\w*")
_NUMBER = re.compile(r"[+-]?(?:0[xX][0-9a-fA-F]{1,16}|(?:\d{1,300}(?:_\d+)*\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?)")
_STRING = re.compile(r"""(?P<q>'''|\"\"\"|'|")(?P<text>(?:\\.|(?!(?P=q))[^\\])*)(?P=q)""", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|.)", re.DOTALL)
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v", "\n": ""}
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_QUOTES = ("'''", '"""', "'", '"')
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MARK = re.compile(r"'''|\"{3}|['\"()\[\]{},]")
_OPEN_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7})?\Z")
_OPEN_NUMBER = re.compile(r"(?<=\d)(?:\.|[eE][+-]?)\Z")
_NO_VALUE_YET = re.compile(r"[\s,]*(?:[A-Za-z_]\w*\s*(?:=\s*[-+.\w]*)?)?\Z")
MAX_NESTED_VALUES = 64


def parse_arguments(text: str) -> dict[str, Any] | None:
    """Return `x=1, y="a"` as a dict; None for anything but keyword arguments with literal values."""
    try:
        return _Literals(text).keywords()
    except (ValueError, RecursionError, OverflowError):
        return None


def arguments_so_far(text: str) -> str | None:
    """Return the beginning of the JSON of keyword arguments that break off; None if the text is something else.

    A keyword at the end without a value is left out.
    """
    text = _OPEN_NUMBER.sub("", text)
    at, ends = 0, list[str]()
    end, open_there = 0, ends  # the last place where a value may be left out, and what is open there
    while match := _MARK.search(text, at):
        at, mark = match.end(), match[0]
        if mark in _QUOTES:
            string = _STRING.match(text, match.start())
            if string is None or string["q"] != mark:
                inside = text[at:].rstrip(mark[0]) if len(mark) == 3 else text[at:]  # a part of the closing quotes
                text, ends = text[:at] + _OPEN_ESCAPE.sub(r"\1", inside), [*ends, mark]
                break
            at = string.end()
            continue
        if mark in _CLOSING:
            ends = [*ends, _CLOSING[mark]]
        elif ends and mark == ends[-1]:
            ends = ends[:-1]
        end, open_there = match.start() if mark == "," else at, ends
    for beginning, closed in ((text, ends), (text[:end], open_there)):
        found = parse_arguments(beginning + "".join(reversed(closed)))
        if found is not None and (closed or _NO_VALUE_YET.match(text, len(beginning))):
            return json.dumps(found, ensure_ascii=False)[: -1 - len(closed)]
    return None


def parse_literal(text: str) -> Any:
    """Return the value of one literal. Raises ValueError if the text is anything else."""
    try:
        return _Literals(text, sets=True).only_value()
    except (RecursionError, OverflowError) as error:
        raise ValueError(str(error)) from error


class _Literals:
    """Recursive descent over Python's literals (and JSON's words). sets: read sets too, as lists"""

    def __init__(self, text: str, *, sets: bool = False) -> None:
        self.text, self.at, self._sets = text, 0, sets

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

    def only_value(self) -> Any:
        """Parse a literal and nothing else. Raises ValueError."""
        found = self.value(0)
        if not self._end():
            raise ValueError(f"unexpected text at {self.at}")
        return found

    def value(self, depth: int) -> Any:
        """Parse one literal. Raises ValueError if the text is not one, or is nested too deep."""
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
        if char in "uUrR" and self.text[self.at + 1 : self.at + 2] in ("'", '"'):
            self.at += 1
            return self._raw_string() if char in "rR" else self._strings()
        if char.isalpha():
            word = self._match(_NAME)
            if word not in _WORDS:
                raise ValueError(f"{word} is no literal")
            return _WORDS[word]
        return self._number()

    def _number(self) -> int | float:
        text = self._match(_NUMBER).replace("_", "")
        if "x" in text.lower():
            return int(text, 16)
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError("number too large")
        return value if any(char in ".eE" for char in text) else int(text)

    def _raw_string(self) -> str:
        match = _STRING.match(self.text, self.at)
        if match is None:
            raise ValueError("unfinished string")
        self.at = match.end()
        return match["text"]

    def _strings(self) -> str:
        """Parse one string, or several written side by side."""
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

    def _dict(self, depth: int) -> dict[str, Any] | list[Any]:
        """Parse a dict, or a set, which becomes a list."""
        start = self.at
        self.at += 1
        items: dict[str, Any] = {}
        while not self._take("}"):
            key = self.value(depth + 1)
            self._space()
            if self._sets and not items and not self.text.startswith(":", self.at):
                self.at = start
                return self._sequence(depth, "}")
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
