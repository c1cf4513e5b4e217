"""Compile programs and print one JSON line each: `python -m benchmarks.compiled.child DUMPS NAME CHIP [--lower]`.

DUMPS: the folder of XLA_FLAGS' dumps. It is emptied. NAME: only programs whose names match this expression.
--lower: do not compile, and print the SHA-256 of each program's text instead.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any

import jax
from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.compiled.programs import all_programs, tpu_programs
from benchmarks.compiled.reading import Reading, read, read_tpu
from benchmarks.compiled.table import CHIPS
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.saved_programs.target import compile_for, lowered_text, make_target

_MOSAIC_GPU = re.compile(r'kernel_hash = "(?:[^"\\]|\\.)*", module = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(rb'\\([0-9A-F]{2}|\\|")')


def main(dumps: Path, wanted: str, chip: str, *, lower: bool) -> None:
    """Compile, or lower only, the programs of a chip whose names match the expression `wanted`."""
    jax.config.update("jax_traceback_in_locations_limit", 0)  # a moved file changes no program
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    programs = all_programs if chip == "h200" else tpu_programs
    for name, program in programs(make_target(CHIPS[chip]).mesh):
        if re.search(wanted, name):
            found = {"lowered": _lowered(program)} if lower else _reading(program, dumps, chip)
            print(json.dumps({name: found}), flush=True)


def _lowered(program: Program) -> str:
    jax.clear_caches()  # a kernel that another program has lowered before has other names in the text
    text = _MOSAIC_GPU.sub(lambda kernel: _without_paths(kernel[1]), lowered_text(program))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_paths(module: str) -> str:
    """Return the text of a Mosaic GPU kernel from its escaped bytecode, which names the file that it came from."""
    bytecode = _ESCAPED.sub(lambda one: bytes.fromhex(one[1].decode()) if len(one[1]) == 2 else one[1], module.encode())
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    mosaic_gpu_dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=False))


def _caches(program: Program) -> tuple[Any, ...]:
    """Return the structs of the arrays that a program must change in place: the KV caches, or the rows of pictures."""
    held = program.args[1]
    if program.name.startswith("encode"):
        return (held,) if program.name.startswith(("encode_deep", "encode_end")) else ()
    return tuple(jax.tree.leaves(held)) if isinstance(held, tuple) else ()


def _reading(program: Program, dumps: Path, chip: str) -> Reading:
    shutil.rmtree(dumps, ignore_errors=True)
    dumps.mkdir()
    caches = _caches(program)
    try:
        compiled = compile_for(program)
        found = read(compiled, dumps, caches) if chip == "h200" else read_tpu(compiled, caches)
        # Weights, and room for adapters, which a step reads once. XLA does not count the bytes of a GPU's program.
        weights = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(program.args[0]))
        return found | {"weights_mib": round(weights / 2**20, 1)}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], lower="--lower" in sys.argv[4:])
