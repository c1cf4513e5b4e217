"""Check that a tokenizer's regular expression is fast on every text, as far as its form shows.

The tokenizers library backtracks: a repeat inside a repeat takes time that doubles with each character, and blocks the
event loop. Published patterns have at most two repeats in a row and none inside another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_REPEATS = 2  # in a row: the time then grows as the square of a text's length at most
MANY = 64  # a repeat of up to so many times counts as one without end
MAX_PATTERN = 4096  # characters; the longest published one has 300
MAX_NESTED_GROUPS = 20

_PREFIX = re.compile(r"\?(?:[:=!>|]|<[=!]|<\w+>|P<\w+>|[a-z-]*:)?")
_ESCAPE = re.compile(r"\\(?:[pPxu]\{[^}]*\}|u[0-9a-fA-F]{4}|x[0-9a-fA-F]{2}|.)", re.DOTALL)
_QUANTIFIER = re.compile(r"(?:([*+?])|\{(\d*)(,?)(\d*)\})[?+]?")
_COMMENT = re.compile(r"\?[a-z-]+\)")  # (?i): switches for what follows


@dataclass
class _Branches:
    """An alternation: the number of its branches, and the largest number of repeats in one of them."""

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
    """Read up to the closing parenthesis or the end. Returns the position there and what was read."""
    if depth > MAX_NESTED_GROUPS:
        raise ValueError("it is nested too deep")
    whole, branch = _Branches(), _Branches()
    while position < len(pattern) and pattern[position] != ")":
        if pattern[position] == "|":
            whole.repeats, branch = max(whole.repeats, branch.repeats), _Branches()
            whole.branches += 1
            position += 1
            continue
        # nothing behind a look-ahead goes back into it, so one at the beginning is as a pattern of its own
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
    """Read one character, class, escape or group. Returns the position behind it and its repeats."""
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
            prefix = _PREFIX.match(pattern, position + 1)
            position, inner = _alternation(pattern, prefix.end() if prefix else position + 1, depth + 1)
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
