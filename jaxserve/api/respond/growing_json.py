"""JSON values that grow while an answer is streamed. Each part is encoded once.

An event that repeats all before it then costs the encoding of what is new and a copy of the bytes, and not the
encoding of everything again: at 2,000 tokens with 5 alternatives each that is 0.03 ms and not 20.
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
        """The string so far, to be put in what orjson encodes."""
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
        """The array so far, to be put in what orjson encodes."""
        return orjson.Fragment(b"[%b]" % self._data)
