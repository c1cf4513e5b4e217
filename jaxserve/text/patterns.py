"""Stop patterns: a regular-expression search over a stream whose time is linear in the text, whatever the pattern.

The syntax is Python's without what a stream or linear time cannot have: no anchors, look-around, back-references or
possessive groups; greedy and lazy repeats mean the same, because the first match to end wins. Matching is Thompson's
simulation of a nondeterministic automaton (Russ Cox, "Regular Expression Matching Can Be Simple And Fast", 2007):
the set of live states, each with the earliest place at which its match began.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jaxserve.errors import InvalidValueError

MAX_PATTERNS = 32
MAX_PATTERN_CHARS = 256
MAX_STATES = 512  # of all patterns of a request; a live state costs about 0.2 us a character
MAX_DEPTH = 32
MAX_MATCH_CHARS = 1024  # longer matches are not found, so that held-back text is bounded

Matcher = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A compiled pattern. State s consumes a character that `matchers[s]` accepts and goes on to `follow[s]`.

    follow[s] holds consuming states; ACCEPT among them means that the match is complete.
    """

    source: str
    matchers: tuple[Matcher, ...]
    follow: tuple[tuple[int, ...], ...]
    initial: tuple[int, ...]


ACCEPT = -1


def compile_patterns(sources: Sequence[str], *, param: str = "stop_regex") -> list[Pattern]:
    """Compile a request's patterns. Raises InvalidValueError naming `param`: syntax, a feature that is not served,
    a pattern that matches the empty text, more than the limits of this module."""
    if len(sources) > MAX_PATTERNS:
        raise InvalidValueError(f"at most {MAX_PATTERNS} patterns", param=param)
    patterns = [_compile(source, param) for source in sources]
    if sum(len(pattern.matchers) for pattern in patterns) > MAX_STATES:
        raise InvalidValueError(f"the patterns need more than {MAX_STATES} states", param=param)
    return patterns


class PatternSearch:
    """Unanchored search for one pattern, a character at a time."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self._live: dict[int, int] = {}  # state -> characters since its match began, at most

    def reset(self) -> None:
        self._live = {}

    @property
    def pending(self) -> int:
        """Characters at the end of the text that a match in progress may need."""
        return max(self._live.values(), default=0)

    def step(self, char: str) -> int | None:
        """Take a character; returns the length of the longest match that ends with it, if any."""
        matchers, follow = self.pattern.matchers, self.pattern.follow
        live, accepted = {}, 0
        for state, length in (*self._live.items(), *((state, 0) for state in self.pattern.initial)):
            if length >= MAX_MATCH_CHARS or not matchers[state](char):
                continue
            for target in follow[state]:
                if target == ACCEPT:
                    accepted = max(accepted, length + 1)
                elif live.get(target, -1) <= length:
                    live[target] = length + 1
        self._live = live
        return accepted or None


# The syntax tree: a Matcher, _Cat, _Alt or _Repeat.


@dataclass(frozen=True, slots=True)
class _Cat:
    parts: list[_Node]


@dataclass(frozen=True, slots=True)
class _Alt:
    parts: list[_Node]


@dataclass(frozen=True, slots=True)
class _Repeat:
    part: _Node
    least: int
    most: int | None


_Node = Matcher | _Cat | _Alt | _Repeat


class _SyntaxError(ValueError):
    pass


_REFUSED = {"^": "an anchor", "$": "an anchor"}
_REFUSED |= {"\\" + char: "an anchor" for char in "AZzbBG"}
_REFUSED |= {"\\" + char: "a back-reference" for char in "123456789gk"}
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|[0dDsSwWnrtfva]|[^A-Za-z0-9])", re.DOTALL)
_COUNT = re.compile(r"\{(\d{1,4})?(,)?(\d{1,4})?\}")
_FLAGS = re.compile(r"\(\?([is]+)\)")


class _Parser:
    """Recursive descent over the pattern's text."""

    def __init__(self, source: str) -> None:
        flags = _FLAGS.match(source)
        self.flags = sum({"i": re.IGNORECASE, "s": re.DOTALL}[char] for char in set(flags[1])) if flags else 0
        self.text, self.at = source, flags.end() if flags else 0

    def parse(self) -> _Node:
        tree = self._alternatives(0)
        if self.at < len(self.text):
            raise _SyntaxError(f"unmatched ) at {self.at}")
        return tree

    def _alternatives(self, depth: int) -> _Node:
        if depth > MAX_DEPTH:
            raise _SyntaxError(f"groups nested deeper than {MAX_DEPTH}")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return _Alt(parts)

    def _sequence(self, depth: int) -> _Node:
        parts: list[_Node] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return _Cat(parts)

    def _take(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) * found
        return found

    def _atom(self, depth: int) -> _Node:
        for token, what in _REFUSED.items():
            if self.text.startswith(token, self.at):
                raise _SyntaxError(f"{token} is {what}, which is not served")
        char = self.text[self.at]
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._single(self._class())
        if char in "*+?":
            raise _SyntaxError(f"nothing to repeat at {self.at}")
        if char == "\\":
            return self._single(self._escape())
        self.at += 1
        return self._single("." if char == "." else re.escape(char))

    def _group(self, depth: int) -> _Node:
        self.at += 1
        if self.text.startswith("?", self.at) and not self._take("?:"):
            raise _SyntaxError("only (...) and (?:...) groups and leading (?i), (?s) are served")
        inner = self._alternatives(depth + 1)
        if not self._take(")"):
            raise _SyntaxError("missing )")
        return inner

    def _single(self, expression: str) -> Matcher:
        try:
            return re.compile(expression, self.flags).fullmatch
        except re.error as error:
            raise _SyntaxError(str(error)) from error

    def _escape(self) -> str:
        match = _ESCAPE.match(self.text, self.at)
        if match is None:
            raise _SyntaxError(f"unknown escape {self.text[self.at : self.at + 2]}")
        self.at = match.end()
        return match[0]

    def _class(self) -> str:
        """The text of [...] with what newer versions of `re` may read otherwise escaped."""
        start = self.at
        self.at += 1
        out = "[^" if self._take("^") else "["
        first = True
        while first or not self._take("]"):
            if self.at >= len(self.text):
                raise _SyntaxError(f"missing ] for [ at {start}")
            char = self.text[self.at]
            if char == "\\":
                out += self._escape()
            else:
                self.at += 1
                lone = char == "-" and not out.endswith("-")
                out += char if lone else re.escape(char)
            first = False
        return out + "]"

    def _repeated(self, node: _Node) -> _Node:
        least, most = 1, 1
        if self._take("*"):
            least, most = 0, None
        elif self._take("+"):
            least, most = 1, None
        elif self._take("?"):
            least, most = 0, 1
        elif (count := _COUNT.match(self.text, self.at)) and (count[1] or count[3]):
            self.at = count.end()
            least = int(count[1] or 0)
            most = (int(count[3]) if count[3] else None) if count[2] else least
            if most is not None and most < least:
                raise _SyntaxError(f"{count[0]} counts backwards")
        else:
            return node
        if self.text.startswith("+", self.at):
            raise _SyntaxError("possessive repeats are not served")
        self._take("?")
        if self.at < len(self.text) and (self.text[self.at] in "*+?" or _COUNT.match(self.text, self.at)):
            raise _SyntaxError(f"multiple repeat at {self.at}")
        return _Repeat(node, least, most)


@dataclass(slots=True)
class _Builder:
    """Thompson's construction from the end backwards. A state is either a matcher with one successor, or a fork."""

    matchers: list[Matcher | None] = field(default_factory=list)
    targets: list[list[int]] = field(default_factory=list)

    def state(self, matcher: Matcher | None, targets: list[int]) -> int:
        if len(self.matchers) >= 4 * MAX_STATES:
            raise _SyntaxError(f"the pattern needs more than {MAX_STATES} states")
        self.matchers.append(matcher)
        self.targets.append(targets)
        return len(self.matchers) - 1

    def build(self, node: _Node, after: int) -> int:
        """The state from which `node` is matched before going on to `after`."""
        if isinstance(node, _Cat):
            for part in reversed(node.parts):
                after = self.build(part, after)
            return after
        if isinstance(node, _Alt):
            return self.state(None, [self.build(part, after) for part in node.parts])
        if isinstance(node, _Repeat):
            return self._repeat(node, after)
        return self.state(node, [after])

    def _repeat(self, node: _Repeat, after: int) -> int:
        if node.most is None:
            fork = self.state(None, [after])
            self.targets[fork].append(self.build(node.part, fork))
            after = fork
        else:
            end = after
            for _ in range(node.most - node.least):
                after = self.state(None, [end, self.build(node.part, after)])
        for _ in range(node.least):
            after = self.build(node.part, after)
        return after

    def closure(self, state: int) -> tuple[int, ...]:
        """The consuming states (and ACCEPT) reached from `state` without a character."""
        seen, stack, found = {state}, [state], []
        while stack:
            at = stack.pop()
            if at == ACCEPT or self.matchers[at] is not None:
                found.append(at)
                continue
            fresh = [target for target in self.targets[at] if target not in seen]
            seen.update(fresh)
            stack += fresh
        return tuple(found)


def _compile(source: str, param: str) -> Pattern:
    if not source or len(source) > MAX_PATTERN_CHARS:
        raise InvalidValueError(f"a pattern has 1 to {MAX_PATTERN_CHARS} characters", param=param)
    builder = _Builder()
    try:
        first = builder.build(_Parser(source).parse(), ACCEPT)
    except (_SyntaxError, RecursionError) as error:
        raise InvalidValueError(f"pattern {source!r}: {error}", param=param) from error
    initial = builder.closure(first)
    if ACCEPT in initial:
        raise InvalidValueError(f"pattern {source!r} matches the empty text", param=param)
    return _numbered(source, builder, initial)


def _numbered(source: str, builder: _Builder, initial: tuple[int, ...]) -> Pattern:
    """Only consuming states, numbered from 0."""
    consuming = [(state, matcher) for state, matcher in enumerate(builder.matchers) if matcher is not None]
    number = {state: index for index, (state, _) in enumerate(consuming)} | {ACCEPT: ACCEPT}
    follow = [tuple(number[t] for t in builder.closure(builder.targets[state][0])) for state, _ in consuming]
    start = tuple(number[state] for state in initial)
    return Pattern(source, tuple(matcher for _, matcher in consuming), tuple(follow), start)
