"""A custom tool's input, out of the JSON arguments {"input": "..."} that the model writes for it."""

from __future__ import annotations

import json
import re

_START = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_MAX_START = 64
# an unfinished escape at the end: a backslash, part of \uXXXX, or a high surrogate that waits for its other half
_OPEN_ESCAPE = re.compile(r"\\(u[0-9A-Fa-f]{0,3}|u[dD][89abAB][0-9A-Fa-f]{2}(\\(u[0-9A-Fa-f]{0,3})?)?)?$")


class InputDecoder:
    """Streams the decoded text of "input". Arguments of another form are passed on as they are."""

    def __init__(self) -> None:
        self._held = ""
        self._inside = False
        self._raw = False
        self._done = False

    def feed(self, text: str) -> str:
        """Return the decoded text that these characters complete."""
        if self._raw or self._done:
            return text if self._raw else ""
        self._held += text
        if not self._inside:
            match = _START.match(self._held)
            if match is None or match.end() > _MAX_START:
                return self._pass_on() if len(self._held) > _MAX_START else ""
            self._inside, self._held = True, self._held[match.end() :]
        return self._decode()

    def finish(self) -> str:
        """Return the rest of the text, if the arguments ended early or have another form."""
        if self._done or self._raw:
            return ""
        if not self._inside:
            return self._other_form()
        return _unescape(_OPEN_ESCAPE.sub("", self._held))

    def _decode(self) -> str:
        end = _END.match(self._held)
        if end is not None:
            self._done = True
            return _unescape(end[0][:-1])
        tail = _OPEN_ESCAPE.search(self._held[-12:])
        cut = len(self._held) - (len(tail[0]) if tail and not _escaped(self._held, len(tail[0])) else 0)
        ready, self._held = self._held[:cut], self._held[cut:]
        return _unescape(ready)

    def _pass_on(self) -> str:
        self._raw = True
        return self._held

    def _other_form(self) -> str:
        try:
            value = json.loads(self._held)
        except (ValueError, RecursionError):
            return self._held
        text = value.get("input") if isinstance(value, dict) else None
        return text if isinstance(text, str) else "" if value == {} else self._held


def _escaped(text: str, tail: int) -> bool:
    """Return whether the backslash that begins the last `tail` characters is itself escaped."""
    head = text[: len(text) - tail]
    return (len(head) - len(head.rstrip("\\"))) % 2 == 1


def _unescape(text: str) -> str:
    try:
        return json.loads(f'"{text}"', strict=False)
    except ValueError:
        return text
