"""The rows of the device suite, in a file that is rewritten after each row, and how a section adds one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.bench.report import environment

Row = dict[str, Any]
Cell = Callable[[], Row]

SHOWN = ("us", "ms", "tok_s", "seconds", "GBps", "TFLOPs", "of_roofline", "rel_err", "ok", "error")
CELL_SECONDS = 60.0  # seconds of a cell, unless it says otherwise
ERROR_CHARS = 2000


class Options(NamedTuple):
    """Options of a run, the same in the parent and its child processes.

    out: the results. work: caches and models, of no use afterwards. until: time.time() at which to stop
    """

    out: Path
    work: Path
    tiny: bool
    until: float


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
        """Return whether a row is there. A cell that ended its process is not run again; one that raised is."""
        row = self.rows.get((section, name), {"error": ""})
        return "error" not in row or bool(row.get("ended_process"))

    def get(self, section: str, name: str, key: str) -> Any:
        """Return a figure of an earlier row, or None."""
        return self.rows.get((section, name), {}).get(key)


@dataclass(frozen=True)
class Reporter:
    """Where a section tells its progress. begin: a cell's name and its seconds at most. end: a finished row."""

    begin: Callable[[str, float], None]
    end: Callable[[Row], None]


class Bench:
    """Runs the cells of a section: skips those that are done, stops in time, and records errors."""

    def __init__(self, section: str, options: Options, results: Results, reporter: Reporter) -> None:
        self.section, self.options, self.results = section, options, results
        self._reporter = reporter

    @property
    def tiny(self) -> bool:
        return self.options.tiny

    @property
    def seconds_left(self) -> float:
        return self.options.until - time.time()

    def wants(self, name: str, estimate: float) -> bool:
        """Return whether a cell is missing and `estimate` seconds are left for it."""
        return not self.results.done(self.section, name) and self.seconds_left > estimate

    def cell(self, name: str, estimate: float, measure: Cell, *, limit: float = CELL_SECONDS) -> bool:
        """Measure one row and record its result or error. Returns whether it is there without error.

        Does nothing if it exists or less than `estimate` seconds are left. The process is killed after `limit` seconds;
        the file says so from the start, so that not even a crash of the machine leaves a cell without a row.
        """
        if self.wants(name, estimate):
            self._measure(name, measure, limit)
        return self._worked(name)

    def again(self, name: str, estimate: float, measure: Cell, *, limit: float = CELL_SECONDS) -> bool:
        """Do `cell` even if the row exists, because later cells need what it makes. Not if it ended its process."""
        row = self.results.rows.get((self.section, name), {})
        if row.get("ended_process") or self.seconds_left <= estimate:
            return False
        self._measure(name, measure, limit)
        return self._worked(name)

    def _worked(self, name: str) -> bool:
        return "error" not in self.results.rows.get((self.section, name), {"error": ""})

    def _measure(self, name: str, measure: Cell, limit: float) -> None:
        row: Row = {"section": self.section, "name": name}
        self.results.add(row | {"error": "did not finish"})
        self._reporter.begin(name, limit)
        try:
            row |= measure()
        except Exception as error:  # a kernel that does not compile must not stop the others
            row["error"] = f"{type(error).__name__}: {str(error)[:ERROR_CHARS]}"
        self.results.add(row)
        self._reporter.end(row)


def describe(row: Row) -> str:
    """Return one line of the table."""
    figures = "  ".join(f"{key}={_short(row[key])}" for key in SHOWN if row.get(key) is not None)
    return f"{row['section']:18} {row['name']:44} {figures}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).partition("\n")[0]
