"""Stop strings and stop patterns over text deltas: found across any border of the deltas.

The output ends at the first character that completes a stop, however the text is cut. A stop string is held back until
it is decided and is cut off the output; if several end at one character, the longest counts. The text that a pattern
matches stays in the output, as in SGLang. One automaton finds all strings (Aho and Corasick, "Efficient string
matching", 1975), in about 0.2 us a character however many there are.

Patterns are regular expressions of RE2, which takes time linear in the text and bounded memory whatever the pattern, so
a request cannot hold up the others. The syntax (https://github.com/google/re2/wiki/Syntax) is the syntax of Python's
`re` without look-around and back-references. `^` matches at the beginning of the output and `$` at its end so far.

`check_pattern` is for the regular expression of a tokenizer, which the tokenizers library runs with backtracking: a
repeat inside a repeat takes time that doubles with each character, and blocks the event loop. It checks that the
expression is fast on every text, as far as its form shows. Published tokenizers have at most two repeats in a row and
none inside another.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import re2

from jaxserve.errors import InvalidValueError

MAX_PATTERNS = 32
MAX_PATTERN_CHARS = 256
LOOK_BACK = 256  # bytes before the newest text in which a match may begin; it bounds the cost of a search
# Instructions of RE2's program for all patterns, times the choices of the request. An expression for which RE2 cannot
# reuse its states takes up to 6 ns per instruction and byte. With this limit and LOOK_BACK bytes that is 13 ms a step
# for the whole request. Most expressions take 4 us a token.
MAX_INSTRUCTIONS = 8192
# Bytes that RE2 may hold for one expression: its program and its cache of automaton states. Without room for the
# states it is slower, still in linear time. A program of 1,000 character classes takes about 100 kB.
PATTERN_MEMORY = 2**20


class StopPatterns:
    """The patterns of one request, compiled. Any number of searches may share them.

    num_choices: number of outputs that are searched

    Raises InvalidValueError naming `param` for a mistake in the syntax, a feature that RE2 lacks, a pattern that
    matches the empty text, or more than MAX_PATTERNS, MAX_PATTERN_CHARS or MAX_INSTRUCTIONS.
    """

    def __init__(self, sources: Sequence[str], *, num_choices: int = 1, param: str = "stop_regex") -> None:
        if len(sources) > MAX_PATTERNS:
            raise InvalidValueError(f"at most {MAX_PATTERNS} patterns", param=param)
        self._single = [(source, _compile(source, param)) for source in sources]
        # One search tells for all patterns together whether there is a match.
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

        text: UTF-8. cut: the first byte of the text is only context, because the output began before it
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
        """Search new text. Return its characters up to the end of the first match, and the matching pattern."""
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
        """Add new text in which no match may begin."""
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


class Stops:
    """The stops of one request, prepared once for all of its choices."""

    def __init__(self, strings: Sequence[str], patterns: StopPatterns | None = None) -> None:
        self.automaton = _Automaton([string for string in strings if string])
        self.patterns = patterns or StopPatterns(())


class StopChecker:
    """The search for stops in one output.

        checker = StopChecker(Stops(["\\n\\n", "END"], StopPatterns(["Q\\\\d+:"])))
        text, matched = checker.push(delta)     # `text` may go out; `matched` is the stop string or pattern, or None
        text = checker.flush()                  # at the end of an output that no stop ended

    include: a stop string stays in the output
    """

    def __init__(self, stops: Stops, *, include: bool = False) -> None:
        self._automaton = stops.automaton
        self._state = 0
        self._search = PatternSearch(stops.patterns)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, *, ignore: bool = False) -> tuple[str, str | None]:
        """Add new text. Return (text that may be sent, matched stop or None). After a match nothing is sent.

        ignore: no stop counts within this delta (before min_tokens); the search begins anew after it
        """
        if self.matched is not None:
            return "", self.matched
        if ignore:
            return self._skip(delta), None
        end, string = self._find_string(delta)
        pattern = self._search.push(delta)
        text = self._held + delta
        if pattern is not None and (string is None or pattern[0] < end):
            return self._end(text[: len(self._held) + pattern[0]], pattern[1])
        if string is not None:
            cut = len(self._held) + end - (0 if self._include else len(string))
            return self._end(text[:cut], string)
        cut = len(text) - self._automaton.depth[self._state]
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """Return the text held back for a stop that did not come."""
        held, self._held = self._held, ""
        return held

    def _find_string(self, delta: str) -> tuple[int, str | None]:
        """Return where in the delta a stop string ends first, and the longest one that ends there."""
        for end, char in enumerate(delta, 1):
            self._state = self._automaton.next(self._state, char)
            if (found := self._automaton.output[self._state]) is not None:
                return end, found
        return len(delta), None

    def _end(self, text: str, matched: str) -> tuple[str, str]:
        self.matched, self._held = matched, ""
        return text, matched

    def _skip(self, delta: str) -> str:
        self._state = 0
        self._search.skip(delta)
        return self.flush() + delta


class _Automaton:
    """Aho-Corasick: a state is the longest suffix of the text that begins some stop. 0 is the empty suffix.

    depth     characters of a state's suffix
    output    the longest stop that ends in a state
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self.depth = [0]
        self.output: list[str | None] = [None]
        self._fail = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def _add(self, stop: str) -> None:
        state = 0
        for depth, char in enumerate(stop, 1):
            if char not in self._goto[state]:
                self._goto[state][char] = len(self._goto)
                self._goto.append({})
                self.depth.append(depth)
                self.output.append(None)
                self._fail.append(0)
            state = self._goto[state][char]
        self.output[state] = stop

    def _link(self) -> None:
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            for char, target in self._goto[state].items():
                self._fail[target] = self.next(self._fail[state], char)
                self.output[target] = self.output[target] or self.output[self._fail[target]]
                queue.append(target)

    def next(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while state and char not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(char, 0)


MAX_REPEATS = 2  # in a row: the time then grows as the square of a text's length at most
MANY = 64  # a repeat of up to so many times counts as one without end
MAX_PATTERN = 4096  # characters; the longest published one has 300
MAX_NESTED_GROUPS = 20

_ESCAPE = re.compile(r"\\(?:[pPxu]\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[?+]?")
_COMMENT = re.compile(r"\?[a-z-]+\)")  # (?i): switches for what follows


@dataclass
class _Branches:
    """An alternation: the number of its branches, and the most repeats in one of them."""

    repeats: int = 0
    branches: int = 1
    required_behind: bool = False  # something that must match follows the last repeat


def check_pattern(pattern: str) -> None:
    """Raise ValueError with the reason if a pattern may take very long."""
    if len(pattern) > MAX_PATTERN:
        raise ValueError(f"it has more than {MAX_PATTERN} characters")
    position, _ = _alternation(pattern, 0, 0)
    if position < len(pattern):
        raise ValueError("its parentheses do not match")


def _alternation(pattern: str, position: int, depth: int) -> tuple[int, _Branches]:
    """Read up to the closing parenthesis or the end. Return the position there and the alternation that was read."""
    if depth > MAX_NESTED_GROUPS:
        raise ValueError("it is nested too deep")
    whole, branch = _Branches(), _Branches()
    while position < len(pattern) and pattern[position] != ")":
        if pattern[position] == "|":
            whole.repeats = max(whole.repeats, branch.repeats)
            whole.branches += 1
            branch = _Branches()
            position += 1
            continue
        # matching never goes back into a look-ahead, so one at the beginning is like a pattern of its own
        alone = depth == 0 and not branch.repeats and pattern.startswith(("(?!", "(?="), position)
        position, inner = _atom(pattern, position, depth)
        inner = _Branches() if alone else inner
        match = _QUANTIFIER.match(pattern, position)
        least, endless = _bounds(match) if match else (1, False)
        position = match.end() if match else position
        _add(branch, inner, least, endless)
    whole.repeats = max(whole.repeats, branch.repeats)
    return position, whole


def _add(branch: _Branches, inner: _Branches, least: int, endless: bool) -> None:
    if endless and (inner.repeats or inner.branches > 1):
        raise ValueError("it repeats a group that has a repeat or a choice in it")
    if inner.repeats or endless:
        branch.repeats += inner.repeats + endless
        branch.required_behind = False
    elif least and branch.repeats and not branch.required_behind:
        branch.required_behind = True
        branch.repeats += 1  # what follows may fail after each length of the repeat before
    if branch.repeats > MAX_REPEATS:
        raise ValueError(f"more than {MAX_REPEATS} repeats stand in a row, or text that must match behind them")


def _atom(pattern: str, position: int, depth: int) -> tuple[int, _Branches]:
    """Read one character, class, escape or group. Return the position behind it and its repeats."""
    match pattern[position]:
        case "\\":
            found = _ESCAPE.match(pattern, position)
            if found is None or found[0][1] in "123456789kg":
                raise ValueError("it refers back to a group")
            return found.end(), _Branches()
        case "[":
            return _class_end(pattern, position), _Branches()
        case "(":
            switches = _COMMENT.match(pattern, position + 1)
            if switches is not None:
                return switches.end(), _Branches()
            position, inner = _alternation(pattern, position + 1, depth + 1)  # "?:" and such are read as text
            if position >= len(pattern):
                raise ValueError("its parentheses do not match")
            return position + 1, inner
    return position + 1, _Branches()


def _class_end(pattern: str, position: int) -> int:
    """Return the position behind the class that begins here. Classes may contain classes."""
    depth, start = 0, position
    while position < len(pattern):
        char = pattern[position]
        if char == "\\":
            position += 1
        elif char == "[":
            depth += 1
        elif char == "]" and position > start + 1:
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    raise ValueError("a class in it has no end")


def _bounds(match: re.Match[str]) -> tuple[int, bool]:
    """Return the least count of a quantifier, and whether it repeats more than MANY times or without end."""
    sign, low, comma, high = match.groups()
    if sign:
        return (1 if sign == "+" else 0), sign != "?"
    least = int(low or 0)
    most = int(high) if high else (least if not comma else MANY + 1)
    return least, most > MANY
