"""Compile programs and print one JSON line each: `python -m benchmarks.compiled.child DUMPS NAME`.

DUMPS: the folder of XLA_FLAGS' dumps. It is emptied. NAME: only programs whose names have this text.
"""

from __future__ import annotations

import json
import shutil
import sys
import warnings
from pathlib import Path

import jax

from benchmarks.compiled.programs import all_programs
from benchmarks.compiled.reading import Reading, read
from benchmarks.compiled.target import compile_for, make_target
from jaxserve.runtime.compilation.compiler import Program


def main(dumps: Path, wanted: str) -> None:
    """Compile the programs whose names have the text `wanted`."""
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    for name, program in all_programs(make_target()):
        if wanted in name:
            print(json.dumps({name: _reading(program, dumps)}), flush=True)


def _reading(program: Program, dumps: Path) -> Reading:
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    caches = tuple(jax.tree.leaves(program.args[1])) if isinstance(program.args[1], tuple) else ()
    try:
        return read(compile_for(program), dumps, caches)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
