"""JSON values that grow while an answer is streamed. Each part is encoded once.

An event that repeats everything before it then costs the encoding of the new part and a copy of the bytes: 0.03 ms
instead of 20 ms at 2,000 tokens with 5 alternatives each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson


class GrowingText:
    """A JSON string."""

    def __init__(self) -> None:
        self._data = bytearray()

    def append(self, text: str) -> None:
        self._data += orjson.dumps(text)[1:-1]

    def clear(self) -> None:
        self._data.clear()

    @property
    def fragment(self) -> orjson.Fragment:
        """Return the string so far as a fragment for orjson."""
        return orjson.Fragment(b'"%b"' % self._data)


class GrowingArray:
    """A JSON array."""

    def __init__(self) -> None:
        self._data = bytearray()

    def extend(self, items: Sequence[Any]) -> None:
        if not items:
            return
        if self._data:
            self._data += b","
        self._data += orjson.dumps(items)[1:-1]

    def clear(self) -> None:
        self._data.clear()

    @property
    def fragment(self) -> orjson.Fragment:
        """Return the array so far as a fragment for orjson."""
        return orjson.Fragment(b"[%b]" % self._data)
