"""The device suite: times of kernels, steps and the engine on this device, compared with the roofline.

    python -m jaxserve.bench.device [--tiny] [--seconds 540] [--out DIR] [--only SECTION,...]

Writes DIR/device.json after every row. With the same DIR it measures only the rows that are missing. Every section runs
in a new process, so that a crash ends one section only, memory is free for the next, and a start of the engine is real.
device_kernels.py and device_engine.py hold the measurements.

--tiny runs everything in tiny sizes, with kernels in Pallas' interpreter. It checks the suite and measures nothing.
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
from pathlib import Path

from jaxserve.bench.device_rows import Bench, Options, Results, Row, describe
from jaxserve.transport.child_process import child_environment, python_command

RESULTS = "device.json"
ROW_PREFIX = "ROW "  # of a child's lines that are rows
# the most valuable first, because the time may run out
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


def run_section(section: str, options: Options, results: Results, emit: Callable[[Row], None]) -> None:
    """Run all cells of a section in this process."""
    from jaxserve.bench import device_engine, device_kernels  # noqa: PLC0415  the parent never touches a device

    bench = Bench(section, options, results, emit)
    kind, _, model = section.partition("-")
    if kind in device_kernels.SECTIONS:
        device_kernels.SECTIONS[kind](bench)
    else:
        device_engine.SECTIONS[kind](bench, model)


def _run_child(section: str, options: Options, show: Callable[[str], None]) -> None:
    """Run a section in a new process, which writes its rows. End it when the time is over."""
    command = python_command("jaxserve.bench.device", "--section", section, "--out", str(options.out))
    command += ["--until", str(options.until), *(["--tiny"] if options.tiny else [])]
    with subprocess.Popen(
        command, env=child_environment(), stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        # The child checks the time between two cells. The timer ends a cell that hangs.
        end = threading.Timer(max(1.0, options.until - time.time() + 5), os.killpg, (child.pid, signal.SIGKILL))
        end.start()
        try:
            assert child.stdout is not None
            for line in child.stdout:
                show(
                    describe(json.loads(line.removeprefix(ROW_PREFIX)))
                    if line.startswith(ROW_PREFIX)
                    else line.rstrip()
                )
        finally:
            end.cancel()
    if child.returncode != 0:
        show(f"{section}: ended with code {child.returncode}")


def main(words: Sequence[str] | None = None) -> int:
    """Run the suite, or one section of it in a child process; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--out", type=Path, default=Path("device-suite"))
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, separated by commas")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)  # used by the child process
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    given.out.mkdir(parents=True, exist_ok=True)
    options = Options(given.out.resolve(), given.tiny, given.until or time.time() + given.seconds)
    if given.section is not None:
        results = Results(options.out / RESULTS, tiny=options.tiny)
        run_section(given.section, options, results, lambda row: print(ROW_PREFIX + json.dumps(row), flush=True))
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
