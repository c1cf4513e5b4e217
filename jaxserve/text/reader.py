"""A reader for text that is still arriving. Parsers are written as straight-line generators over a TextReader.

A generator asks for text with `yield from reader.until(...)` and is resumed when more text has come, so there are no
hand-made states. Every character is looked at a bounded number of times: the time is linear in the text however it is
cut. At the end of the text (`closed`) every request returns the text that is left.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Generator, Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Sink = Callable[[str], None]

MAX_HEAD_CHARS = 4096  # characters of a name, key or id; a longer one is not part of a call
MAX_JSON_DEPTH = 256
_SPACE = re.compile(r"\s*")
_IN_STRING = re.compile(r'[^"\\]*')
_JSON_OUTSIDE = re.compile(r"[\s\w.+\-:,]*")  # characters between strings and brackets
_LAST_WORD = re.compile(r"[-\w]+\Z")
_PYTHON_WORD = re.compile(
    r"(?<![\w.])(True|False|None|NaN|nan|-?Infinity|-?inf|0[xX][0-9a-fA-F]+|[1-9]\d*(_\d+)+)(?![\w.])"
)
_JSON_WORDS = {"True": "true", "False": "false", "None": "null", "NaN": "null", "nan": "null"} | dict.fromkeys(
    ("Infinity", "-Infinity", "inf", "-inf"), "null"
)
_STRING_PREFIX = re.compile(r"(?<!\w)[bBrRuU]\Z")
_BRACKETS = {"{": ("}", "}"), "[": ("]", "]"), "(": (")", "]")}  # what closes each, in Python and in JSON
_BEFORE_VALUES = ("{", "[", "(", ":", ",")
_IN_PYTHON_STRING = re.compile(r"[^'\\]*")
_PYTHON_PART = re.compile(r"\\.|\"", re.DOTALL)
_PYTHON_ESCAPES = {'"': r"\"", r"\'": "'", r"\x": r"\u00", r"\0": r"\u0000"}
_JSON_ESCAPES = frozenset('"\\/bfnrtu')
_MARKS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*("?)|[{}\[\]]', re.DOTALL)
_MAX_WORD = 32  # characters; a longer word is not one of Python's that are read
MAX_LAYOUT_CHARS = 64  # characters of white space between two tags of a call
_CONTROL = re.compile(r"[\x00-\x1f]")
_SCALAR = re.compile(r"[\w.+\-]*")


class TextReader:
    """The text not read yet, with a memory of the text read since `mark()`."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._read: list[str] | None = None
        self._holds: list[int] = []  # places to which `ahead` goes back
        self.closed = False

    def push(self, delta: str) -> None:
        start = self._holds[0] if self._holds else self._at
        self._text = self._text[start:] + delta
        self._at -= start
        self._holds = [place - start for place in self._holds]

    def ahead(self, look: Reading[T]) -> Reading[T]:
        """Return the result of `look` and take nothing. It reads a bounded text, which stays in memory meanwhile."""
        read, self._read = self._read, None
        self._holds.append(self._at)
        found = yield from look
        self._at = self._holds.pop()
        self._read = read
        return found

    def put_back(self, text: str) -> None:
        """Make `text`, which was taken, come next again."""
        self._text = text + self._text[self._at :]
        self._at = 0

    def mark(self, first: str = "") -> None:
        """Begin to remember the text read, as if `first` had been read."""
        self._read = [first]

    def unmark(self) -> str:
        """Stop remembering and return the text read since `mark`."""
        read = "".join(self._read or ())
        self._read = None
        return read

    def take_rest(self) -> str:
        return self._take(len(self._text))

    def take_one(self) -> str:
        """Take the next character. Call it only after `more` returned True."""
        return self._take(self._at + 1)

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        if self._read is not None and piece:
            self._read.append(piece)
        return piece

    @property
    def is_empty(self) -> bool:
        """Whether all text that has come was read."""
        return self._exhausted

    @property
    def ended(self) -> bool:
        """Whether the text is over and all of it was read."""
        return self.closed and self._exhausted

    @property
    def _exhausted(self) -> bool:
        return self._at >= len(self._text)

    def more(self) -> Reading[bool]:
        """Wait for a character. Return False at the end of the text."""
        while self._exhausted:
            if self.closed:
                return False
            yield
        return True

    def peek(self) -> Reading[str]:
        """Return the next character without taking it; "" at the end."""
        found = yield from self.more()
        return self._text[self._at] if found else ""

    def space(self) -> Reading[str]:
        """Take white space and return it."""
        taken = ""
        while (yield from self.more()):
            match = _SPACE.match(self._text, self._at)
            taken += self._take(match.end() if match else self._at)
            if not self._exhausted:
                break
        return taken

    def layout(self) -> Reading[None]:
        """Take at most MAX_LAYOUT_CHARS blanks and line breaks."""
        for _ in range(MAX_LAYOUT_CHARS):
            if not (yield from self.accept(" ", "\n", "\t", "\r")):
                return

    def accept(self, *options: str, drop_partial: bool = False) -> Reading[str]:
        """Take the longest of `options` that comes next and return it; "" if none does.

        drop_partial: an option that the end of the text cuts off is taken too
        """
        while True:
            rest = self._text[self._at : self._at + max(map(len, options))]
            open_ends = [option for option in options if len(option) > len(rest) and option.startswith(rest)]
            if open_ends and not self.closed:
                yield
                continue
            found = max((option for option in options if rest.startswith(option)), key=len, default="")
            self._take(len(self._text) if drop_partial and open_ends and not found else self._at + len(found))
            return found

    def copy_until(
        self, markers: Sequence[str], sink: Sink, *, take: bool = True, drop_partial: bool = False
    ) -> Reading[str]:
        """Pass text to `sink` as it comes, up to the first of `markers`. Return the marker; "" at the end.

        take: take the marker too
        drop_partial: drop a marker that the end of the text cuts off
        """
        while True:
            at, marker = self._find(markers)
            if marker:
                if at > self._at:
                    sink(self._take(at))
                self._take(at + len(marker) * take)
                return marker
            keep = 0 if self.closed and not drop_partial else _open_suffix(self._text, self._at, markers)
            if len(self._text) - keep > self._at:
                sink(self._take(len(self._text) - keep))
            if self.closed:
                self._at = len(self._text)
                return ""
            yield

    def until(self, *markers: str, limit: int = MAX_HEAD_CHARS, take: bool = True) -> Reading[tuple[str, str]]:
        """Return (text, marker) with the text before the first of `markers`.

        The marker is "" at the end of the text, or if `limit` characters come before it, which are taken.
        """
        pieces: list[str] = []
        longest = max(map(len, markers))
        while True:
            last = self._at + limit
            at, marker = self._find(markers, last + longest)
            if marker and at <= last:
                pieces.append(self._take(at))
                self._take(at + len(marker) * take)
                return "".join(pieces), marker
            held = 0 if self.closed else _open_suffix(self._text, self._at, markers)
            piece = self._take(min(len(self._text) - held, last))
            pieces.append(piece)
            limit -= len(piece)
            if self.closed or self._at + held < len(self._text):
                return "".join(pieces), ""
            yield

    def _find(self, markers: Sequence[str], end: int = sys.maxsize) -> tuple[int, str]:
        """Return the place and text of the first marker, the longest one there, that ends before place `end`."""
        match = _any_of(tuple(markers)).search(self._text, self._at, end)
        return (match.start(), match[0]) if match else (len(self._text), "")

    def json_string(self) -> Reading[str | None]:
        """Take a JSON string and return its value; None, with text taken, if there is none."""
        pieces: list[str] = []
        whole = yield from self.copy_json(pieces.append, limit=MAX_HEAD_CHARS, kinds="\"'")
        return decode_json_string("".join(pieces)) if whole else None

    def json_text(self) -> Reading[str | None]:
        """Take any JSON value and return its text; None if it breaks off."""
        pieces: list[str] = []
        whole = yield from self.copy_json(pieces.append)
        return "".join(pieces) if whole else None

    def copy_json(self, sink: Sink, *, limit: int | None = None, kinds: str = "") -> Reading[bool]:
        """Pass the text of one JSON value to `sink` as it arrives. Return False if it breaks off.

        Brackets and strings are followed; names and numbers are not checked. The value breaks off if the text ends, or
        at a character that is not JSON, which is not taken. Models write line breaks into strings as they are, and
        values as in Python: `sink` gets JSON for them.

        kinds: first characters that are allowed ("": any)
        """
        first = yield from self.peek()
        if not first or (kinds and first not in kinds):
            return False
        if first in "\"'":
            return (yield from self._copy_string(sink, limit))
        if first in "{[":
            return (yield from self._copy_nested(sink))
        return (yield from self._copy_scalar(sink))

    def _copy_scalar(self, sink: Sink) -> Reading[bool]:
        size, pieces = 0, list[str]()
        while (yield from self.more()):
            match = _SCALAR.match(self._text, self._at)
            piece = self._take(match.end() if match else self._at)
            size += len(piece)
            pieces.append(piece)
            if not self._exhausted:
                break
        text = "".join(pieces)
        if text:
            sink(_JSON_WORDS.get(text, text))
        return size > 0 and not self._exhausted

    def _copy_string(self, sink: Sink, limit: int | None = None, *, raw: bool = False) -> Reading[bool]:
        """Copy a string in JSON or Python as a JSON string. raw: it has no escapes"""
        if quotes := (yield from self.accept("'''", '"""')):
            pieces: list[str] = []
            found = yield from self.copy_until((quotes,), pieces.append)
            text = "".join(pieces)
            sink('"' + (_raw_escaped(text) if raw else _python_escaped(text)) + '"' * bool(found))
            return bool(found)
        quote = self._text[self._at]
        inside, convert = (_IN_STRING, _escaped) if quote == '"' else (_IN_PYTHON_STRING, _python_escaped)
        convert = _raw_escaped if raw else convert
        self._take(self._at + 1)
        sink('"')
        size = 0
        while (yield from self.more()):
            match = inside.match(self._text, self._at)
            end = match.end() if match else self._at
            size += end - self._at
            if limit is not None and size > limit:
                return False
            char = self._text[end : end + 1]
            if char == "\\" and end + 1 >= len(self._text) and not self.closed:
                if end > self._at:
                    sink(convert(self._take(end)))
                yield  # the character after the backslash decides
                continue
            if char == quote:
                sink(convert(self._take(end)) + '"')
                self._take(end + 1)
                return True
            sink(convert(self._take(min(end + (2 if char == "\\" else 0), len(self._text)))))
        return False

    def _copy_nested(self, sink: Sink) -> Reading[bool]:  # noqa: C901  a walk over one text, character by character
        """Copy an object or an array. Tuples and sets in it become arrays. A comma before a bracket is dropped."""
        stack: list[tuple[str, str]] = []
        comma = last = prefix = ""  # a comma and the blanks behind it, which wait; the last sign; of a Python string

        def send(text: str) -> None:
            nonlocal comma
            text, comma = comma + text, ""
            if text:
                sink(text)

        def outside(end: int) -> None:
            """Send the text up to `end`, which has no strings and brackets, but for a comma at its end."""
            nonlocal comma, last
            text, comma = comma + _json_words(self._take(end)), ""
            signs = text.rstrip()
            held = text[len(signs) - 1 :] if signs.endswith(",") else ""
            send(text[: len(text) - len(held)])
            comma, last = held, signs[-1:] or last

        while (yield from self.more()):
            char = self._text[self._at]
            if char in "\"'":
                send("")
                if not (yield from self._copy_string(sink, raw=prefix in ("r", "R"))):
                    return False
                last, prefix = char, ""
            elif char in "{[" or (char == "(" and last in _BEFORE_VALUES):
                if len(stack) >= MAX_JSON_DEPTH:
                    return False
                closing, written = _BRACKETS[char]
                if char == "{" and stack and (yield from self.ahead(self._is_set())):
                    written = "]"
                stack.append((closing, written))
                self._take(self._at + 1)
                send("{" if written == "}" else "[")
                last = char
            elif char in "}]" or (char == ")" and stack[-1][0] == char):
                closing, written = stack.pop()
                if closing != char:
                    send("")
                    return False
                self._take(self._at + 1)
                comma = comma[1:]
                send(written)
                last = char
                if not stack:
                    return True
            else:
                match = _JSON_OUTSIDE.match(self._text, self._at)
                if match is None or match.end() == self._at:
                    send("")
                    return False
                end = match.end()
                if end == len(self._text) and (word := _LAST_WORD.search(self._text, max(self._at, end - _MAX_WORD))):
                    if not self.closed and word.end() - word.start() < _MAX_WORD:
                        if word.start() > self._at:
                            outside(word.start())
                        yield  # the word may go on
                        continue
                if end < len(self._text) and self._text[end] in "\"'":
                    found = _STRING_PREFIX.search(self._text, max(self._at, end - 2), end)
                    prefix = found[0] if found else ""
                outside(end - len(prefix))
                self._take(end)
        send("")
        return False

    def _is_set(self) -> Reading[bool]:
        """Return whether a bracket that comes next begins a set of Python."""
        yield from self.accept("{")
        yield from self.layout()
        first = yield from self.peek()
        if first in ("", "}", "{", "[", "("):
            return False
        copy = self._copy_string(_ignore, MAX_HEAD_CHARS) if first in "\"'" else self._copy_scalar(_ignore)
        if not (yield from copy):
            return False
        yield from self.layout()
        return (yield from self.peek()) in (",", "}")


@lru_cache(maxsize=256)
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True)))


def _open_suffix(text: str, start: int, markers: Sequence[str]) -> int:
    """Return the length of the longest end of text[start:] that begins one of `markers`."""
    longest = min(max(map(len, markers)) - 1, len(text) - start)
    for size in range(longest, 0, -1):
        suffix = text[len(text) - size :]
        if any(marker.startswith(suffix) for marker in markers):
            return size
    return 0


def _escaped(text: str) -> str:
    return _CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)


def _raw_escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ignore(text: str) -> None:
    """Take a text of which only the end matters."""


def _json_words(text: str) -> str:
    return _PYTHON_WORD.sub(_json_word, text)


def _json_word(match: re.Match[str]) -> str:
    text = match[0]
    return _JSON_WORDS.get(text) or (str(int(text, 16)) if text[1] in "xX" else text.replace("_", ""))


def _python_escaped(text: str) -> str:
    """Return a part of a Python string in single quotes as a part of a JSON string. No escape may be cut."""
    return _escaped(_PYTHON_PART.sub(_json_escape, text))


def _json_escape(match: re.Match[str]) -> str:
    text = match[0]
    if text in _PYTHON_ESCAPES:
        return _PYTHON_ESCAPES[text]
    return text if text[1:] in _JSON_ESCAPES else "\\" + text


def json_rest(text: str) -> str | None:
    """Return the quote and brackets that complete a JSON value; None if more is missing."""
    stack: list[str] = []
    quote = ""
    for match in _MARKS.finditer(text):
        if match[0][0] == '"':
            quote = "" if match[1] else '"'
        elif match[0] in "{[":
            stack.append("}" if match[0] == "{" else "]")
        elif stack:
            stack.pop()
    rest = quote + "".join(reversed(stack))
    try:
        json.loads(text + rest)
    except (ValueError, RecursionError):
        return None
    return rest


def decode_json_string(text: str) -> str | None:
    """Return the value of a JSON string literal; control characters are let through."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def whole_characters(text: str) -> str:
    """Return the text with the two halves of a character (surrogates) joined, and U+FFFD for a single half.

    A model can write half a character as \\uXXXX. UTF-8, and so an answer, cannot have one.
    """
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
