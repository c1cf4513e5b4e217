"""Compile every program, print what got worse, and write the table.

    python -m benchmarks.compiled [--chip h200|v5e|v6e] [--write] [NAME]

Without --write the exit code is 1 if a number of the committed table got worse. NAME: only programs whose names have
this text. Takes about 8 CPU seconds a program.
"""

from __future__ import annotations

import argparse
import json
import os
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
    parser.add_argument("name", nargs="?", default="", help="only programs whose names have this text")
    parser.add_argument("--write", action="store_true", help="write the table")
    parser.add_argument("--chip", choices=table.CHIPS, default="h200")
    options = parser.parse_args()
    old = table.load(options.chip)["programs"] if table.path_of(options.chip).exists() else {}
    with tempfile.TemporaryDirectory() as dumps:
        found = _compile_all(options.name, options.chip, dumps)
    if options.write:
        kept = {name: reading for name, reading in old.items() if options.name and options.name not in name}
        packages = _PACKAGES.get(options.chip, _TPU_PACKAGES)
        table.save(kept | found, {name: metadata.version(name) for name in packages}, options.chip)
        return 0
    lines = list(table.worse({name: reading for name, reading in old.items() if name in found}, found))
    print("\n".join(lines) or "nothing got worse")
    return int(bool(lines))


def _compile_all(wanted: str, chip: str, dumps: str) -> dict[str, Any]:
    """Compile in a process of its own, because jax reads its environment when it is imported."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    if chip == "h200":
        environment |= {"XLA_FLAGS": " ".join((f"--xla_dump_to={dumps}", *_DUMPS))}
    command = [sys.executable, "-m", "benchmarks.compiled.child", dumps, wanted, chip]
    found = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            print(line, end="", flush=True)
            found |= json.loads(line)
    assert child.returncode == 0
    return found


if __name__ == "__main__":
    sys.exit(main())
