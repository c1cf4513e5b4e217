"""A device machine that is this machine: it runs a command as a lent one does, under the same limits.

    python -m benchmarks.device_suite.rehearsal --python PYTHON --back DIR [--seconds S] [--carry DIR]
        [--machine DIR] [--kill SECONDS] COMMAND

The command runs in a copy of the working tree, with PYTHON as its python3 and with none of the packages of the caller.
A machine that exists is warm: it keeps ignored files. The command is killed after S seconds, or after a random time of
at most SECONDS of --kill. Of the files in OUT so many come back, and not larger ones, as `Limits` says.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.device_suite.visit import ROOT, size, tree

_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True)
class Limits:
    """Bytes that travel to the machine; files that come back, each of so many bytes and so many folders down."""

    sent: int = 64 << 20
    files: int = 8
    bytes: int = 16 << 20
    folders: int = 2


LIMITS = Limits()


def send(machine: Path, carry: Path | None) -> Path:
    """Copy the working tree and an ignored folder to the machine; return its root. Raises SystemExit if too large."""
    root, paths = machine / "tree", tree()
    carried = [path for path in carry.rglob("*") if path.is_file()] if carry else []
    if (sent := size(paths) + size(carried)) > LIMITS.sent:
        raise SystemExit(f"the working tree is larger than {LIMITS.sent:,} bytes: {sent:,}")
    if carry:
        shutil.rmtree(root / carry.relative_to(ROOT), ignore_errors=True)
    for path in (*paths, *carried):
        target = root / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    return root


def bring_back(out: Path, back: Path) -> list[str]:
    """Copy the files that the machine gives back; return the others, each with the reason."""
    left_out, taken = [], 0
    for path in sorted(out.rglob("*")):
        inside = path.relative_to(out)
        if path.is_dir():
            continue
        if path.is_symlink() or not path.is_file() or not all(map(_NAME.fullmatch, inside.parts)):
            left_out.append(f"{inside} (no plain file, or an odd name)")
        elif len(inside.parts) > LIMITS.folders + 1 or path.stat().st_size > LIMITS.bytes or taken == LIMITS.files:
            left_out.append(f"{inside} ({path.stat().st_size:,} bytes, over a limit)")
        else:
            taken += 1
            (back / inside.parent).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, back / inside)
    return left_out


def run(command: str, root: Path, machine: Path, python: Path, seconds: float) -> tuple[int, bool]:
    """Run a command in the tree of the machine; return its exit code, and whether the time killed it."""
    out, programs = machine / "out", machine / "programs"
    for folder in (out, programs):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in (out, programs, machine / "tmp", machine / "home"):
        folder.mkdir(parents=True, exist_ok=True)
    (programs / "python3").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n')
    (programs / "python3").chmod(0o755)
    environ = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": str(machine / "home"), "TMPDIR": str(machine / "tmp")}
    environ |= {"OUT": str(out), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(["bash", "-c", command], cwd=root, env=environ, start_new_session=True) as process:
        try:
            return process.wait(seconds), False
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.wait(), True


def main() -> int:
    """Run the command line; return the exit code of the command, or 124 if it was killed."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_suite.rehearsal",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", type=Path, required=True, help="the machine's python3")
    parser.add_argument("--back", type=Path, required=True, help="folder for what comes back")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--carry", type=Path, help="ignored folder of the tree that travels too")
    parser.add_argument("--machine", type=Path, default=ROOT / "build" / "device" / "machine")
    parser.add_argument("--kill", type=float, help="seconds in which it is killed, at random")
    parser.add_argument("command")
    given = parser.parse_args()
    began = time.monotonic()
    root = send(given.machine, given.carry and ROOT / given.carry)
    sent = time.monotonic() - began
    limit = min(given.seconds, random.uniform(0.0, given.kill)) if given.kill else given.seconds
    code, killed = run(given.command, root, given.machine, given.python, limit)
    took = time.monotonic() - began - sent
    left_out = bring_back(given.machine / "out", given.back)
    end = "killed" if killed else f"exit code {code}"
    print(f"machine: tree sent in {sent:.0f} s; {end} after {took:.1f} s", flush=True)
    for name in left_out:
        print(f"machine: left out {name}")
    return 124 if killed else code


if __name__ == "__main__":
    sys.exit(main())
