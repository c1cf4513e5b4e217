"""The rows of the device suite, in a file that is rewritten after each row, and how a section adds one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.bench.load import environment

Row = dict[str, Any]
Cell = Callable[[], Row]

RESULTS, PROFILE = "device.json", "profile.json"
SHOWN = ("us", "ms", "tok_s", "seconds", "ttft_ms", "GBps", "TFLOPs", "of_roofline", "rel_err", "ok", "error")
CELL_SECONDS = 60.0  # seconds of a cell, unless it says otherwise
TINY_SECONDS = 10.0  # that a cell in tiny sizes is expected to take at most
ERROR_CHARS = 2000
UNFINISHED = "did not finish"  # the error of a cell from its start on


class Options(NamedTuple):
    """Options of a run, the same in the parent and its child processes.

    out: the results. work: caches and models, of no use afterwards. until: time.time() at which to stop
    kept: seconds that the parts after this one are expected to take; an optional cell leaves them
    attention: runtime.attention of whole models. family: "gpu" or "tpu", of the device, or that a CPU stands in for
    """

    out: Path
    work: Path
    tiny: bool
    until: float
    kept: float = 0.0
    attention: str = "auto"
    family: str = "gpu"


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

    def worked(self, section: str, name: str) -> bool:
        return "error" not in self.rows.get((section, name), {"error": ""})

    def get(self, section: str, name: str, key: str) -> Any:
        """Return a figure of an earlier row, or None."""
        return self.rows.get((section, name), {}).get(key)


class Planned(NamedTuple):
    """A cell before it runs. estimate: the seconds that it is expected to take. limit: those after which it is killed.

    optional: it runs only if all that comes after it still fits.
    """

    section: str
    name: str
    answers: str
    estimate: float
    limit: float
    optional: bool


@dataclass(frozen=True)
class Reporter:
    """Where a section tells its progress. begin: a cell that begins. end: a finished row."""

    begin: Callable[[Planned], None]
    end: Callable[[Row], None]


class Bench:
    """Runs the cells of a section: skips those that are done, stops in time, and records errors.

    platform: "gpu", "tpu" or "cpu". answers: the question of the section's cells that have none of their own
    """

    def __init__(
        self,
        section: str,
        options: Options,
        results: Results,
        reporter: Reporter,
        platform: str = "cpu",
        answers: str = "",
    ) -> None:
        self.section, self.options, self.results, self.platform = section, options, results, platform
        self._reporter, self._answers = reporter, answers

    @property
    def tiny(self) -> bool:
        return self.options.tiny

    @property
    def seconds_left(self) -> float:
        return self.options.until - time.time()

    def planned(self, name: str) -> bool:
        """Return whether a cell is there already, or is planned."""
        return self.results.done(self.section, name)

    def wants(self, name: str, estimate: float, *, optional: bool = False) -> bool:
        """Return whether a cell is missing and the time is there for it."""
        kept = self.options.kept if optional else 0.0
        return not self.results.done(self.section, name) and self.seconds_left - kept > estimate

    def cell(
        self,
        name: str,
        estimate: float,
        measure: Cell,
        *,
        limit: float = CELL_SECONDS,
        answers: str = "",
        optional: bool = False,
    ) -> bool:
        """Measure one row and record its result or error. Returns whether it is there without error.

        Does nothing if it exists or less than `estimate` seconds are left. The process is killed after `limit` seconds;
        the file says so from the start, so that not even a crash of the machine leaves a cell without a row.
        answers: the question that the figures answer. optional: leave the seconds of the parts that come after
        """
        planned = self._plan(name, estimate, limit, answers, optional)
        if self.wants(name, planned.estimate, optional=optional):
            self.results.add(self._measure(planned, measure))
        return self.results.worked(self.section, name)

    def again(
        self, name: str, estimate: float, measure: Cell, *, limit: float = CELL_SECONDS, answers: str = ""
    ) -> bool:
        """Do `cell` even if the row exists, because later cells need what it makes. The first figures stay.

        Does nothing if the cell ended its process or the time is short. Returns whether it worked now.
        """
        before = self.results.rows.get((self.section, name), {})
        planned = self._plan(name, estimate, limit, answers, False)
        if before.get("ended_process") or self.seconds_left <= planned.estimate:
            return False
        row = self._measure(planned, measure)
        worked = "error" not in row
        self.results.add(before if before and "error" not in before and worked else row)
        return worked

    def _plan(self, name: str, estimate: float, limit: float, answers: str, optional: bool) -> Planned:
        estimate = min(estimate, TINY_SECONDS) if self.tiny else estimate
        return Planned(self.section, name, answers or self._answers, estimate, limit, optional)

    def _measure(self, planned: Planned, measure: Cell) -> Row:
        row: Row = {"section": planned.section, "name": planned.name}
        row |= {"answers": planned.answers, "expected_s": planned.estimate}
        if not self.results.worked(planned.section, planned.name):
            self.results.add(row | {"error": UNFINISHED})
        self._reporter.begin(planned)
        began = time.perf_counter()
        try:
            row |= measure()
        except Exception as error:  # a kernel that does not compile must not stop the others
            row["error"] = f"{type(error).__name__}: {str(error)[:ERROR_CHARS]}"
        row["took_s"] = round(time.perf_counter() - began, 2)
        self._reporter.end(row)
        return row


class PlanningBench(Bench):
    """Takes down the cells that a section would measure, and measures nothing."""

    def __init__(self, section: str, family: str, answers: str, *, tiny: bool = False) -> None:
        nowhere = Path("nowhere")
        options = Options(nowhere, nowhere, tiny, float("inf"), family=family)
        super().__init__(section, options, Results(nowhere, tiny=tiny), _SILENT, "cpu" if tiny else family, answers)
        self.cells: list[Planned] = []

    def cell(
        self,
        name: str,
        estimate: float,
        measure: Cell,
        *,
        limit: float = CELL_SECONDS,
        answers: str = "",
        optional: bool = False,
    ) -> bool:
        self.cells.append(self._plan(name, estimate, limit, answers, optional))
        return True

    def planned(self, name: str) -> bool:
        return any(cell.name == name for cell in self.cells)

    def again(
        self, name: str, estimate: float, measure: Cell, *, limit: float = CELL_SECONDS, answers: str = ""
    ) -> bool:
        return self.cell(name, estimate, measure, limit=limit, answers=answers)


_SILENT = Reporter(begin=lambda planned: None, end=lambda row: None)


def describe(row: Row) -> str:
    """Return one line of the table."""
    figures = "  ".join(f"{key}={_short(row[key])}" for key in SHOWN if row.get(key) is not None)
    return f"{row['section']:18} {row['name']:44} {figures}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value).partition("\n")[0]
