"""Writes pieces of Lark text (llguidance's variant), from which structural tags and tool calls are built."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from jaxserve.errors import InvalidSchemaError
from jaxserve.grammar.schema.char_classes import ascii_classes, quoted
from jaxserve.grammar.translate import MAX_SOURCE_BYTES, json_schema_part

ANY_TEXT = r"/(.|\n)*/"


@dataclass
class LarkWriter:
    """Collects rules and returns expressions.

    special_tokens: text -> id of the tokenizer's special tokens. In a literal they are written as tokens, because
    llguidance does not treat their characters as text.
    """

    special_tokens: Mapping[str, int] = field(default_factory=dict)
    rules: list[str] = field(default_factory=list)
    _count: int = 0
    _size: int = 0  # characters of the rules

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        names = sorted(self.special_tokens, key=len, reverse=True)
        return re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    def literal(self, text: str) -> str:
        """Return an expression for exactly this text; "" for the empty text."""
        parts = self._special.split(text) if self._special else [text]
        return " ".join(self._literal_part(part) for part in parts if part)

    def _literal_part(self, part: str) -> str:
        if part in self.special_tokens:
            return f"<[{self.special_tokens[part]}]>"
        return quoted(part)

    def is_special(self, text: str) -> bool:
        return text in self.special_tokens

    def rule(self, expression: str, *, lazy: bool = False, terminal: bool = False) -> str:
        """Add a rule and return its name. lazy: the shortest match counts.

        Raises InvalidSchemaError if the grammar becomes too large: a small request can describe an enormous one.
        """
        self._count += 1
        self._size += len(expression)
        if self._size > MAX_SOURCE_BYTES:
            raise InvalidSchemaError(f"the grammar is larger than {MAX_SOURCE_BYTES} bytes", param="tools")
        name = f"R{self._count}" if terminal else f"r{self._count}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name

    def schema(self, schema: Mapping[str, Any] | bool, *, exact: bool = True) -> str:
        """Match a JSON value. exact: as in `json_schema_part`"""
        return self.rule(json_schema_part(schema, exact=exact))

    def text_until(self, end: str, *, without: str = "") -> str:
        """Match any text up to and including the first `end`. without: a regex that matches nowhere in the text"""
        if self.is_special(end):
            return f"{self.text()} {self.literal(end)}"
        text = ANY_TEXT
        if without:
            pattern = without.replace("/", r"\/")
            text = self.rule(f"{ANY_TEXT} & ~/(.|\\n)*({pattern})(.|\\n)*/", terminal=True)
        return self.rule(f"{text} {self.literal(end)}", lazy=True)

    def matching_until(self, regex: str, end: str, without: Sequence[str]) -> str:
        """Match a text that matches `regex` and contains none of `without`, and then `end`."""
        banned = "|".join(map(_regex_escape, without))
        allowed = self.rule(f"{between_slashes(f'({regex})')} & ~/(.|\\n)*({banned})(.|\\n)*/", terminal=True)
        return self.rule(f"{allowed} {quoted(end)}", lazy=True)

    def text(self) -> str:
        """Match any text without special tokens, also the empty text."""
        return self.rule(ANY_TEXT, terminal=True)

    def text_without(self, stops: Sequence[str]) -> str:
        """Match any text that contains none of `stops`."""
        plain = [stop for stop in stops if not self.is_special(stop)]
        if not plain:
            return self.text()
        pattern = "|".join(_regex_escape(stop) for stop in plain)
        return self.rule(f"{ANY_TEXT} & ~/(.|\\n)*({pattern})(.|\\n)*/", terminal=True)

    def finish(self, start: str) -> str:
        return "\n".join(["%llguidance {}", f"start: {start}", *self.rules])


def between_slashes(regex: str) -> str:
    """Return a client's regex as a terminal of a Lark grammar."""
    lark = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    return "/" + re.sub(r"\\.|/|\n", lambda piece: lark.get(piece[0], piece[0]), ascii_classes(regex), flags=re.S) + "/"


def _regex_escape(text: str) -> str:
    """Escape a text for a regex between slashes."""
    return re.sub(r"([\\.+*?()|\[\]{}^$/])", r"\\\1", text).replace("\n", "\\n")


def one_of(options: Sequence[str]) -> str:
    return "(" + " | ".join(options) + ")" if len(options) > 1 else options[0]
