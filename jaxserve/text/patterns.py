"""Stop patterns: regular expressions that RE2 searches for in a text that grows.

RE2 takes time linear in the text and bounded memory whatever the pattern, so a request cannot hold up the others. The
syntax is RE2's (https://github.com/google/re2/wiki/Syntax): that of Python's `re` without look-around and
back-references. `^` matches at the beginning of the output and `$` at the end of the output so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import re2

from jaxserve.errors import InvalidValueError

MAX_PATTERNS = 32
MAX_PATTERN_CHARS = 256
LOOK_BACK = 256  # bytes before the newest text in which a match may begin; it bounds the cost of a search
# Instructions of RE2's program for all patterns, times the choices of the request. An expression for which RE2 cannot
# reuse its states takes up to 6 ns per instruction and byte: with this limit and LOOK_BACK bytes 13 ms a step for the
# whole request. Most expressions take 4 us a token.
MAX_INSTRUCTIONS = 8192
# Bytes that RE2 may hold for one expression: its program and its cache of automaton states. Without room for the
# states it is slower, still in linear time. A program of 1,000 character classes takes about 100 kB.
PATTERN_MEMORY = 2**20


class StopPatterns:
    """The patterns of one request, compiled. Any number of searches may share them.

    num_choices: outputs that are searched.
    Raises InvalidValueError naming `param`: a mistake in the syntax, a feature that RE2 lacks, a pattern that matches
    the empty text, more than MAX_PATTERNS, MAX_PATTERN_CHARS or MAX_INSTRUCTIONS.
    """

    def __init__(self, sources: Sequence[str], *, num_choices: int = 1, param: str = "stop_regex") -> None:
        if len(sources) > MAX_PATTERNS:
            raise InvalidValueError(f"at most {MAX_PATTERNS} patterns", param=param)
        self._single = [(source, _compile(source, param)) for source in sources]
        # One search answers for all patterns whether there is a match.
        alternatives = "|".join(f"(?:{source})" for source in sources)
        self._any = _expression(alternatives, PATTERN_MEMORY * (1 + len(sources))) if sources else None
        if self._any is not None and self._any.programsize * num_choices > MAX_INSTRUCTIONS:
            raise InvalidValueError(
                f"the patterns are {self._any.programsize} instructions long; with {num_choices} choices they may be "
                f"{MAX_INSTRUCTIONS // num_choices}",
                param=param,
            )

    def __bool__(self) -> bool:
        return self._any is not None

    def first_end(self, text: bytes, least: int, *, cut: bool) -> tuple[int, str] | None:
        """Return the earliest place where a match ends, not before `least`, and the pattern that matches there.

        text: UTF-8. cut: the first byte of the text is context only, since the output began before it.
        """
        start = int(cut)
        if self._any is None or self._any.search(text, start) is None:
            return None
        for end in range(least, len(text) + 1):
            if self._any.search(text, start, end) is not None:
                return end, next(source for source, one in self._single if one.search(text, start, end) is not None)
        return None


class PatternSearch:
    """Looks for a request's patterns in one output."""

    def __init__(self, patterns: StopPatterns) -> None:
        self._patterns = patterns
        self._tail = b""  # the newest text that was searched without a match
        self._cut = False  # the output began before the tail

    def push(self, delta: str) -> tuple[int, str] | None:
        """Take new text; the number of its characters up to the end of the first match, and the matching pattern."""
        if not self._patterns:
            return None
        text = self._tail + delta.encode("utf-8", "replace")
        found = self._patterns.first_end(text, len(self._tail), cut=self._cut)
        if found is not None:
            end, source = found
            return len(text[len(self._tail) : end].decode("utf-8", "ignore")), source
        self._keep(text)
        return None

    def skip(self, delta: str) -> None:
        """Take new text in which no match may begin."""
        self._tail, self._cut = delta.encode("utf-8", "replace")[-1:], True

    def _keep(self, text: bytes) -> None:
        """Remember the end of the text, and one byte before it as the context of its beginning."""
        self._cut = self._cut or len(text) > LOOK_BACK
        self._tail = text[-LOOK_BACK - 1 :] if self._cut else text


def _compile(source: str, param: str) -> Any:
    if not source or len(source) > MAX_PATTERN_CHARS:
        raise InvalidValueError(f"a pattern has 1 to {MAX_PATTERN_CHARS} characters", param=param)
    try:
        pattern = _expression(source, PATTERN_MEMORY)
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise InvalidValueError(f"pattern {source!r}: {reason}", param=param) from None
    if pattern.search(b"") is not None:
        raise InvalidValueError(f"pattern {source!r} matches the empty text", param=param)
    return pattern


def _expression(source: str, memory: int) -> Any:
    options = re2.Options()
    options.max_mem = memory
    options.log_errors = False
    options.never_capture = True
    return re2.compile(source, options)
