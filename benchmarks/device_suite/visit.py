"""Spend the minutes of a device machine: gather what travels, run the suite there twice, and write the table.

    python -m benchmarks.device_suite.visit --run TEMPLATE [--tiny] [--minutes 15] [--into BENCHMARKS.md]
    python -m benchmarks.device_suite.visit                 # gathers, and prints what to run there by other means
    python -m benchmarks.device_suite.visit --collect DIR   # takes over what such a run brought back

TEMPLATE is the command that runs a command on the machine, over a copy of this working tree. Its words may contain
{command}, {seconds} (its limit), {carry} (an ignored folder that has to travel too) and {back} (the folder for what
comes back). The machine sets OUT to the folder whose files it brings back. docs/device_minutes.md has examples.

Everything is in build/device: carry/wheels has the packages that the machine's image lacks, and carry/results what came
back so far. Each run goes on from there, also on a new machine. A run that brings back less changes nothing there.
"""

from __future__ import annotations

import argparse
import email
import json
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.device_suite import table
from benchmarks.device_suite.rows import PROFILE, RESULTS
from benchmarks.device_suite.suite import AUTOTUNE, ROOT, SECONDS

FOLDER = ROOT / "build" / "device"
CARRY, WHEELS, KEPT = FOLDER / "carry", FOLDER / "carry" / "wheels", FOLDER / "carry" / "results"
IMAGE = Path(__file__).with_name("image.txt")
MOST_SENT = 60 << 20  # bytes of the tree and what is carried; the machine takes 64 MiB
RUN_LIMIT = 600.0  # seconds of one command on the machine
_AROUND = 45.0  # seconds of a run beside the suite's own: wheels, and the last cell's end
_LEAST = 60.0  # seconds of a second run that is worth its start
_PYTHON = "3.12"
_GLIBC = ("2_34", "2_31", "2_28", "2_27", "2_26", "2_24", "2_17")
# Of the machine, for the markers of requirements.
_MARKERS = {
    "python_version": _PYTHON,
    "python_full_version": f"{_PYTHON}.3",
    "sys_platform": "linux",
    "platform_system": "Linux",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "implementation_name": "cpython",
    "os_name": "posix",
    "extra": "",
}


# --- what travels


def gather(image: Path) -> list[str]:
    """Download the wheels that the image lacks and the server needs. Returns what the image has in another version."""
    have = _packages_of(image)
    other: list[str] = []
    WHEELS.mkdir(parents=True, exist_ok=True)
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    waiting, seen = [Requirement(text) for text in declared], set[str]()
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        if need.marker is not None and not need.marker.evaluate(_MARKERS):
            continue
        if name in have:
            if have[name] and not need.specifier.contains(have[name], prereleases=True):
                other.append(f"{need} (the image has {have[name]})")
            continue
        if name not in seen:
            seen.add(name)
            waiting += _requirements(_wheel(need))
    for path in WHEELS.glob("*.whl"):
        if canonicalize_name(path.name.partition("-")[0]) not in seen:
            path.unlink()
    return other


def _packages_of(image: Path) -> dict[str, str]:
    """Return the packages of an image by name, with the version or ""."""
    lines = (line.partition("#")[0].strip() for line in image.read_text().splitlines())
    pairs = (line.partition("==") for line in lines if line)
    return {canonicalize_name(name): version for name, _, version in pairs}


def _wheel(need: Requirement) -> Path:
    """Return the wheel of a package for the machine; download it unless it is there."""
    name = canonicalize_name(need.name)
    if found := _found(need):
        return found
    platforms = [word for glibc in _GLIBC for word in ("--platform", f"manylinux_{glibc}_x86_64")]
    platforms += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--implementation", "cp", "--python-version", _PYTHON, *platforms]
    subprocess.run([*command, "-d", str(WHEELS), f"{need.name}{need.specifier}"], check=True)
    found = _found(need)
    if found is None:
        raise SystemExit(f"no wheel of {name}{need.specifier} for Python {_PYTHON}")
    return found


def _found(need: Requirement) -> Path | None:
    for path in WHEELS.glob("*.whl"):
        name, version = path.name.split("-")[:2]
        if canonicalize_name(name) == canonicalize_name(need.name) and need.specifier.contains(
            version, prereleases=True
        ):
            return path
    return None


def _requirements(wheel: Path) -> Iterator[Requirement]:
    with zipfile.ZipFile(wheel) as files:
        [metadata] = [name for name in files.namelist() if name.endswith(".dist-info/METADATA")]
        message = email.message_from_bytes(files.read(metadata))
    return (Requirement(text) for text in message.get_all("Requires-Dist", []))


def tree() -> list[Path]:
    """Return the files of the working tree that travel: tracked ones, and others that are not ignored."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def size(paths: Sequence[Path]) -> int:
    """Return the bytes of files."""
    return sum(path.stat().st_size for path in paths)


# --- what comes back


def take_back(back: Path) -> list[str]:
    """Keep what a run brought back if it is whole and has no fewer rows than before. Returns what is wrong with it."""
    KEPT.mkdir(parents=True, exist_ok=True)
    wrong = []
    for name, check in {RESULTS: _check_rows, PROFILE: _check_json, f"{AUTOTUNE}.tgz": _check_archive}.items():
        if not (back / name).exists():
            wrong.append(f"{name} did not come back")
            continue
        try:
            check(back / name)
        except (OSError, ValueError, tarfile.TarError, EOFError) as error:
            wrong.append(f"{name}: {error}")
            continue
        shutil.copyfile(back / name, KEPT / f"{name}.part")
        (KEPT / f"{name}.part").replace(KEPT / name)
    for log in back.glob("*.log"):
        shutil.copyfile(log, FOLDER / log.name)
    return wrong


def _check_rows(path: Path) -> None:
    rows = {(row["section"], row["name"]) for row in json.loads(path.read_text())["rows"]}
    if (KEPT / RESULTS).exists():
        before = {(row["section"], row["name"]) for row in json.loads((KEPT / RESULTS).read_text())["rows"]}
        if before - rows:
            raise ValueError(f"{len(before - rows)} rows of before are missing")


def _check_json(path: Path) -> None:
    json.loads(path.read_text())


def _check_archive(path: Path) -> None:
    with tarfile.open(path) as archive:
        for member in archive:
            if member.isfile() and (file := archive.extractfile(member)):
                file.read()


# --- the visit


@dataclass(frozen=True)
class Visit:
    """How runs are started on the machine. minutes: of it, starts and transfers counted. flags: the suite's"""

    template: str
    minutes: float
    flags: tuple[str, ...]

    def run(self) -> None:
        """Make both runs, the second at once after the first, for the machine goes when it is idle."""
        began = time.monotonic()
        for name in ("first", "second"):
            left = 60 * self.minutes - (time.monotonic() - began) - _AROUND
            seconds = min(SECONDS[name], left)
            if seconds < _LEAST:
                print(f"no {name} run: {left:.0f} s are left")
                break
            self._one(name, seconds)
        print(f"the visit took {time.monotonic() - began:.0f} s")

    def _one(self, name: str, seconds: float) -> None:
        back = FOLDER / "back" / name
        shutil.rmtree(back, ignore_errors=True)
        back.mkdir(parents=True)
        limit = min(RUN_LIMIT, seconds + _AROUND)
        values = {"command": command(name, seconds, self.flags), "seconds": f"{limit:.0f}"}
        values |= {"carry": str(CARRY.relative_to(ROOT)), "back": str(back)}
        began = time.monotonic()
        code = subprocess.run([word.format(**values) for word in shlex.split(self.template)], cwd=ROOT).returncode
        came = [path for path in back.rglob("*") if path.is_file()]
        took = time.monotonic() - began
        print(f"{name} run: exit code {code}, {took:.0f} s; {size(came):,} bytes in {len(came)} files back")
        for problem in take_back(back):
            print(f"{name} run: {problem}")


def command(run: str, seconds: float, flags: Sequence[str]) -> str:
    """Return the command of a run on the machine."""
    return shlex.join(["sh", "benchmarks/device_suite/there.sh", run, f"{seconds:.0f}", *flags])


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device_suite.visit",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--run", help="the command that runs a command on the machine")
    parser.add_argument("--minutes", type=float, default=15.0, help="of the machine, all in all")
    parser.add_argument("--image", type=Path, default=IMAGE, help="file with the packages of the machine")
    parser.add_argument("--collect", type=Path, help="folder of files that came back otherwise")
    parser.add_argument("--into", type=Path, help="file whose table is written, unless sizes are tiny")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, for a rehearsal on a CPU")
    given = parser.parse_args()
    flags = ("--tiny",) if given.tiny else ()
    if given.collect:
        for problem in take_back(given.collect):
            print(problem)
    else:
        for needed in gather(given.image):
            print(f"taken as it is: {needed}")
        files, carried = tree(), [path for path in CARRY.rglob("*") if path.is_file()]
        wheels = list(WHEELS.glob("*.whl"))
        sent = size(files) + size(carried)
        print(f"travels: {size(files):,} bytes of {len(files)} files, {size(wheels):,} of {len(wheels)} wheels")
        print(f"travels: {sent:,} bytes in all, with the results so far")
        if sent > MOST_SENT:
            raise SystemExit(f"that is more than {MOST_SENT:,} bytes")
        if not given.run:
            for name in ("first", "second"):
                print(f"run there, with {CARRY.relative_to(ROOT)} carried: {command(name, SECONDS[name], flags)}")
            return 0
        Visit(given.run, given.minutes, flags).run()
    if (KEPT / RESULTS).exists():
        saved = json.loads((KEPT / RESULTS).read_text())
        text = table.markdown(saved)
        print(text)
        if given.into and saved["tiny"]:
            print(f"tiny sizes measure nothing: {given.into} stays as it is")
        elif given.into:
            table.write(given.into, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
