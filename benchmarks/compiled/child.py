"""Compile programs and print one JSON line each: `python -m benchmarks.compiled.child DUMPS NAME CHIP`.

DUMPS: the folder of XLA_FLAGS' dumps. It is emptied. NAME: only programs whose names have this text.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import jax

from benchmarks.compiled.programs import all_programs, tpu_programs
from benchmarks.compiled.reading import Reading, read, read_tpu
from benchmarks.compiled.table import CHIPS
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.saved_programs.target import compile_for, make_target


def main(dumps: Path, wanted: str, chip: str) -> None:
    """Compile the programs of a chip whose names have the text `wanted`."""
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    programs = all_programs if chip == "h200" else tpu_programs
    for name, program in programs(make_target(CHIPS[chip]).mesh):
        if wanted in name:
            print(json.dumps({name: _reading(program, dumps, chip)}), flush=True)


def _reading(program: Program, dumps: Path, chip: str) -> Reading:
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    caches = tuple(jax.tree.leaves(program.args[1])) if isinstance(program.args[1], tuple) else ()
    try:
        compiled = compile_for(program)
        return read(compiled, dumps, caches) if chip == "h200" else read_tpu(compiled, caches)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
