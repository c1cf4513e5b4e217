"""The rows of the device suite, in a file that is rewritten after each row, and how a section adds one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.bench.report import environment

Row = dict[str, Any]
Cell = Callable[[], Row]

SHOWN = ("us", "ms", "tok_s", "seconds", "GBps", "TFLOPs", "of_roofline", "rel_err", "ok", "error")


@dataclass(frozen=True)
class Options:
    """Options of a run, the same in the parent and its child processes."""

    out: Path
    tiny: bool
    until: float  # time.time() at which to stop


class Results:
    """The rows so far by section and name. A new row replaces one that failed."""

    def __init__(self, path: Path, *, tiny: bool) -> None:
        self._path = path
        self._head: Row = {"environment": environment(), "tiny": tiny}
        self.rows: dict[tuple[str, str], Row] = {}
        if path.exists():
            saved = json.loads(path.read_text())
            if saved["tiny"] != tiny:
                raise SystemExit(f"{path} is of {'a tiny' if saved['tiny'] else 'a full'} run; choose another --out")
            self.rows = {(row["section"], row["name"]): row for row in saved["rows"]}

    def add(self, row: Row) -> None:
        self.rows[row["section"], row["name"]] = row
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(self._head | {"rows": list(self.rows.values())}, indent=1))
        temporary.replace(self._path)

    def done(self, section: str, name: str) -> bool:
        return "error" not in self.rows.get((section, name), {"error": ""})

    def get(self, section: str, name: str, key: str) -> Any:
        """Return a figure of an earlier row, or None."""
        return self.rows.get((section, name), {}).get(key)


class Bench:
    """Runs the cells of a section: skips those that are done, stops in time, records an error and goes on."""

    def __init__(self, section: str, options: Options, results: Results, emit: Callable[[Row], None]) -> None:
        self.section, self.options, self.results = section, options, results
        self._emit = emit

    @property
    def tiny(self) -> bool:
        return self.options.tiny

    @property
    def seconds_left(self) -> float:
        return self.options.until - time.time()

    def wants(self, name: str, estimate: float) -> bool:
        """Whether a cell is missing and `estimate` seconds are left for it."""
        return not self.results.done(self.section, name) and self.seconds_left > estimate

    def cell(self, name: str, estimate: float, measure: Cell) -> None:
        """Measure one row and record its result or error, unless it exists or less than `estimate` seconds are left."""
        if not self.wants(name, estimate):
            return
        row: Row = {"section": self.section, "name": name}
        try:
            row |= measure()
        except Exception as error:  # a kernel that does not compile must not stop the others
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        self.results.add(row)
        self._emit(row)


def describe(row: Row) -> str:
    """Return one line of the table."""
    figures = "  ".join(f"{key}={_short(row[key])}" for key in SHOWN if row.get(key) is not None)
    return f"{row['section']:18} {row['name']:44} {figures}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
