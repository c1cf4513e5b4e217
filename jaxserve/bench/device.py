"""The device suite: what the kernels, the steps and the engine reach on this machine, beside the roofline.

    python -m jaxserve.bench.device [--tiny] [--seconds 540] [--out DIR] [--only SECTION,...]

Owns the order of the sections, the time, and the results: DIR/device.json is written after every row. Started again
with the same DIR it goes on with the rows that are missing. Every section runs in a process of its own, so that a
crash costs one section, the memory is free for the next, and a start of the engine is a real start.
What is measured, and how, is device_kernels.py's and device_engine.py's.

--tiny runs everything in toy sizes, kernels in Pallas' interpreter: a check of the suite, not a measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.bench.report import environment

Row = dict[str, Any]
Cell = Callable[[], Row]

RESULTS = "device.json"
PREFIX = "ROW "  # of a child's lines that are rows
# In the order of what is worth most if the time runs out.
SECTIONS = (
    "ceilings",
    "numerics",
    "attention",
    "engine-llama-8b",
    "write",
    "restart-llama-8b",
    "linear",
    "engine-qwen3-0.6b",
    "pool-llama-8b",
    "tune",
)
SHOWN = ("us", "ms", "tok_s", "seconds", "GBps", "TFLOPs", "of_roofline", "rel_err", "ok", "error")


@dataclass(frozen=True)
class Options:
    """Of a run, in the parent and in its children."""

    out: Path
    tiny: bool
    until: float  # time.time() at which to stop


class Results:
    """The rows so far, by section and name; a row replaces an earlier one that failed."""

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
        """A figure of an earlier row; None where there is none."""
        return self.rows.get((section, name), {}).get(key)


class Bench:
    """A section's way to run its cells: skips what is done, stops in time, records what fails and goes on."""

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
        if not self.wants(name, estimate):
            return
        row: Row = {"section": self.section, "name": name}
        try:
            row |= measure()
        except Exception as error:  # one kernel that does not compile must not cost the others
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        self.results.add(row)
        self._emit(row)


def run_section(section: str, options: Options, results: Results, emit: Callable[[Row], None]) -> None:
    """All cells of a section, in this process, on its devices."""
    from jaxserve.bench import device_engine, device_kernels  # noqa: PLC0415  the parent never touches a device

    bench = Bench(section, options, results, emit)
    kind, _, model = section.partition("-")
    if kind in device_kernels.SECTIONS:
        device_kernels.SECTIONS[kind](bench)
    else:
        device_engine.SECTIONS[kind](bench, model)


def describe(row: Row) -> str:
    """One line of the table."""
    figures = "  ".join(f"{key}={_short(row[key])}" for key in SHOWN if row.get(key) is not None)
    return f"{row['section']:18} {row['name']:44} {figures}"


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _run_child(section: str, options: Options, show: Callable[[str], None]) -> None:
    """A section in a process of its own; it writes its rows itself. Ended when the time is over."""
    command = [sys.executable, "-m", "jaxserve.bench.device", "--section", section, "--out", str(options.out)]
    command += ["--until", str(options.until), *(["--tiny"] if options.tiny else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as child:
        # The child stops by itself between two cells; a cell that hangs is ended from here.
        end = threading.Timer(max(1.0, options.until - time.time() + 5), os.killpg, (child.pid, signal.SIGKILL))
        end.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                show(describe(json.loads(line.removeprefix(PREFIX))) if line.startswith(PREFIX) else line.rstrip())
        finally:
            end.cancel()
    if child.returncode != 0:
        show(f"{section}: ended with code {child.returncode}")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("device-suite"))
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, with commas")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)  # a child
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    options = Options(given.out.resolve(), given.tiny, given.until or time.time() + given.seconds)
    if given.section is not None:
        results = Results(options.out / RESULTS, tiny=options.tiny)
        run_section(given.section, options, results, lambda row: print(PREFIX + json.dumps(row), flush=True))
        return 0
    wanted = given.only.split(",")
    if unknown := set(wanted) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    for section in (section for section in SECTIONS if section in wanted):
        if options.until - time.time() > 5:
            _run_child(section, options, lambda line: print(line, flush=True))
    print(f"{options.out / RESULTS}: {len(Results(options.out / RESULTS, tiny=options.tiny).rows)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
