"""Plan every configuration of a folder as `jaxserve plan` does, and print a table of the seconds, the slowest first.

    python -m benchmarks.plan_configurations FOLDER

FOLDER has files NAME_config.json, and NAME_hf_quant_config.json where a model is published with one. Seconds are the
processor's, without the 2 of the start of Python and the imports. Ends with 1 if a configuration is neither planned nor
refused by a line that names the cause.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxserve.cli.main import main as jaxserve

_CONFIG = "_config.json"
_QUANTIZATION = "_hf_quant_config.json"


@dataclass(frozen=True)
class Outcome:
    """What became of a configuration. text: the first line of the plan, or the line that refuses it."""

    name: str
    planned: bool
    seconds: float
    text: str


def configurations(folder: Path) -> list[str]:
    """Return the names of the models, sorted."""
    files = (path.name for path in folder.glob(f"*{_CONFIG}"))
    return sorted(name.removesuffix(_CONFIG) for name in files if not name.endswith(_QUANTIZATION))


@contextlib.contextmanager
def laid_out(folder: Path, name: str) -> Iterator[Path]:
    """Make a model directory with the configuration, as it is published."""
    with tempfile.TemporaryDirectory() as made:
        shutil.copy(folder / f"{name}{_CONFIG}", Path(made, "config.json"))
        beside = folder / f"{name}{_QUANTIZATION}"
        if beside.is_file():
            shutil.copy(beside, Path(made, "hf_quant_config.json"))
        yield Path(made)


def plan(folder: Path, name: str, *words: str) -> Outcome:
    """Plan one configuration. words: further ones of the command."""
    out, errors = io.StringIO(), io.StringIO()
    began = time.process_time()
    with laid_out(folder, name) as made, contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = jaxserve(["plan", str(made), *words])
        seconds = time.process_time() - began
        shown = (out if code == 0 else errors).getvalue().replace(str(made), name).strip()
    return Outcome(name, code == 0, seconds, shown.splitlines()[0 if code == 0 else -1])


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    outcomes = [plan(folder, name) for name in configurations(folder)]
    planned = sum(outcome.planned for outcome in outcomes)
    print(f"{len(outcomes)} configurations: {planned} planned, {len(outcomes) - planned} refused\n")
    print("| configuration | seconds | planned as, or refused because |\n|---|---|---|")
    for outcome in sorted(outcomes, key=lambda outcome: (not outcome.planned, -outcome.seconds)):
        print(f"| {outcome.name} | {outcome.seconds:.2f} | {outcome.text.replace('|', '/')} |")
    return int(any("a bug: report it" in outcome.text for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
