"""Compile every program, print what got worse, and write the table.

    python -m benchmarks.compiled [--chip h200|v5e|v6e] [--write] [NAME]
    python -m benchmarks.compiled [--chip h200|v5e|v6e] --lowered

Without --write the exit code is 1 if a number of the committed table got worse. NAME: only programs whose names match
this expression. Takes about 8 CPU seconds a program.

--lowered compiles nothing. If every program has the text that the table's programs had, the table is of the present
sources, and is marked so: files were moved, or code was written in another way. Takes about 1 CPU second a program.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from typing import Any

from benchmarks.compiled import table

_DUMPS = ("--xla_dump_hlo_as_text", "--xla_gpu_dump_llvmir=true", "--xla_dump_emitter_re=ptx")  # what `reading` reads
_PACKAGES = {"h200": ("jax", "jaxlib", "jax-cuda13-plugin")}
_TPU_PACKAGES = ("jax", "jaxlib", "libtpu")


def main() -> int:
    """Run the command line. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=__doc__)
    parser.add_argument("name", nargs="?", default="", help="only programs whose names match this expression")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--chip", choices=table.CHIPS, default="h200")
    parser.add_argument("--lowered", action="store_true", help="compare the programs' texts only")
    options = parser.parse_args()
    if options.lowered:
        return _compare_texts(options.chip)
    old = table.load(options.chip)["programs"] if table.path_of(options.chip).exists() else {}
    found = _run_child(options.name, options.chip)
    if options.write:
        kept = _others(old, options.name)
        packages = _PACKAGES.get(options.chip, _TPU_PACKAGES)
        texts = _others(table.load(options.chip).get("lowered", {}), options.name) if old else {}
        texts |= {name: each["lowered"] for name, each in _run_child(options.name, options.chip, "--lower").items()}
        table.save(kept | found, texts, {name: metadata.version(name) for name in packages}, options.chip)
        return 0
    lines = list(table.worse({name: reading for name, reading in old.items() if name in found}, found))
    print("\n".join(lines) or "nothing got worse")
    return int(bool(lines))


def _others(entries: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entries of programs that are not made anew: those that match may no longer exist. name: "" is all"""
    return {own: entry for own, entry in entries.items() if name and not re.search(name, own)}


def _compare_texts(chip: str) -> int:
    """Mark the table as one of the present sources if each program's text is unchanged. Returns the exit code."""
    found = {name: each["lowered"] for name, each in _run_child("", chip, "--lower").items()}
    before = table.load(chip)
    changed = sorted(
        name for name in found.keys() | before["lowered"] if found.get(name) != before["lowered"].get(name)
    )
    if changed:
        print("\n".join(f"{name}: its text changed" for name in changed))
        return 1
    table.save(before["programs"], found, before["versions"], chip)
    print(f"{len(found)} programs have the same text")
    return 0


def _run_child(wanted: str, chip: str, *flags: str) -> dict[str, Any]:
    """Compile or lower in a process of its own, because jax reads its environment when it is imported."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    found = {}
    with tempfile.TemporaryDirectory() as dumps:
        if chip == "h200":
            environment |= {"XLA_FLAGS": " ".join((f"--xla_dump_to={dumps}", *_DUMPS))}
        command = [sys.executable, "-m", "benchmarks.compiled.child", dumps, wanted, chip, *flags]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                print(line, end="", flush=True)
                found |= json.loads(line)
    assert child.returncode == 0
    return found


if __name__ == "__main__":
    sys.exit(main())
