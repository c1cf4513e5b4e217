"""Writing a finished batch's output and error files from the stored results.

Lines stand in the order of the input. A line without a result (the batch expired or was cancelled) goes to the error
file, in the words of `missing_line`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxserve.store import batches
from jaxserve.store.jsonl import read_lines
from jaxserve.store.sqlite.disk import PendingFile
from jaxserve.store.validation import BATCH_LINE

MissingLine = Callable[[str], bytes]  # custom_id -> the line of the error file, without the newline

PAGE_LINES = 256


class OutputFiles:
    """The two files of one batch while they are written; each exists only if it has a line."""

    def __init__(self, output: Callable[[], PendingFile], errors: Callable[[], PendingFile]) -> None:
        self._open = {True: output, False: errors}
        self._files: dict[bool, PendingFile] = {}

    @property
    def output(self) -> PendingFile | None:
        return self._files.get(True)

    @property
    def errors(self) -> PendingFile | None:
        return self._files.get(False)

    def write(self, succeeded: bool, payload: bytes) -> None:
        if succeeded not in self._files:
            self._files[succeeded] = self._open[succeeded]()
        self._files[succeeded].write(payload + b"\n")

    def publish(self) -> None:
        for file in self._files.values():
            file.publish()

    def discard(self) -> None:
        """Forget what is not published. A published file stays: if the commit that was to name it failed, only the
        next start knows whether it counts, and until then a new attempt puts the same file in its place."""
        for file in self._files.values():
            file.discard(published=False)


def write_results(
    files: OutputFiles,
    connection: sqlite3.Connection,
    batch_id: str,
    input_path: Path,
    max_line_bytes: int,
    missing_line: MissingLine | None,
) -> None:
    """Copy every result and, with `missing_line`, every line that has none."""
    results = stored_results(connection, batch_id)
    if missing_line is None:
        for _, succeeded, payload in results:
            files.write(succeeded, payload)
        return
    result = next(results, None)
    for line in read_lines(input_path, max_line_bytes):
        if result is not None and result[0] == line.number:
            files.write(result[1], result[2])
            result = next(results, None)
        elif line.data is not None:
            files.write(False, missing_line(BATCH_LINE.decode(line.data).custom_id))


def stored_results(connection: sqlite3.Connection, batch_id: str) -> Iterator[tuple[int, bool, bytes]]:
    """(line, succeeded, payload) in order of lines, a page in memory at a time."""
    last = 0
    while page := batches.results_after(connection, batch_id, last, PAGE_LINES):
        yield from page
        last = page[-1][0]
