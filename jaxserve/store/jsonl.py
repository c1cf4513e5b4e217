"""Reads JSON lines from a file of any size: one line in memory at a time, each limited in size."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

READ_BYTES = 2**20
ANY_LENGTH = 2**62  # for a file that was accepted, perhaps when the limit on a line was higher


class Line(NamedTuple):
    """A non-blank line. `number` counts from 1 and includes blank lines; `data` is None if the line is too long."""

    number: int
    data: bytes | None


def read_lines(path: Path, max_line_bytes: int) -> Iterator[Line]:
    """Yield the lines of a file. Accepts a byte-order mark, CR before LF, blank lines, no newline at the end."""
    with open(path, "rb", buffering=READ_BYTES) as file:
        number = 0
        while data := file.readline(max_line_bytes + 1):
            number += 1
            if len(data) > max_line_bytes and not data.endswith(b"\n"):
                _skip_line(file)
                yield Line(number, None)
                continue
            if number == 1:
                data = data.removeprefix(codecs.BOM_UTF8)
            if stripped := data.strip():
                yield Line(number, stripped)


def _skip_line(file: BinaryIO) -> None:
    while (data := file.readline(READ_BYTES)) and not data.endswith(b"\n"):
        pass


def is_utf8(data: bytes) -> bool:
    """Return whether bytes are UTF-8. They are checked in pieces: decoding all could take four times their size."""
    if data.isascii():
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for start in range(0, len(data), READ_BYTES):
            decoder.decode(data[start : start + READ_BYTES])
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True
