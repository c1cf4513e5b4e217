"""The committed table of compiled programs, what changed since it was written, and which sources it is of."""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("h200.json")
# The chip of each table, as `runtime.target` calls it. Products are not tuned, and no program runs.
CHIPS = MappingProxyType({"h200": "h200", "v5e": "tpu:v5e:1x1", "v6e": "tpu:v6e:1x1"})
# What the GPU's programs are made of. The C kernels and the host's part of the runtime are not.
_SOURCES = (
    "jaxserve/models/*.py",
    "jaxserve/models/families/*.py",
    "jaxserve/models/vision/*.py",
    "jaxserve/ops/linear/*.py",
    "jaxserve/ops/moe/*.py",
    "jaxserve/ops/paged_attention/**/*.py",
    "jaxserve/ops/quantized/*.py",
    "jaxserve/ops/state/*.py",
    "jaxserve/ops/sums.py",
    "jaxserve/ops/triton_arrays.py",
    "jaxserve/runtime/compilation/buckets.py",
    "jaxserve/runtime/compilation/compiler.py",
    "jaxserve/runtime/kv_cache.py",
    "jaxserve/runtime/program_set.py",
    "jaxserve/runtime/programs.py",
    "jaxserve/runtime/sampling/*.py",
    "jaxserve/runtime/towers.py",
    "benchmarks/compiled/*.py",
)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def digest() -> str:
    """Return a hash of the sources that the programs are made of. Comments and docstrings may change without it."""
    paths = sorted(path for pattern in _SOURCES for path in ROOT.glob(pattern))
    return hashlib.sha256("\0".join(code_of(path.read_text()) for path in paths).encode()).hexdigest()[:16]


def code_of(source: str) -> str:
    """Return Python source, as `ruff format` leaves it, without comments, docstrings and blank lines."""
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column].rstrip()
    dropped: set[int] = set()
    kept: set[int] = set()  # rows of texts of several lines, whose blank lines mean something
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            dropped.update(_rows(node.body[0]))
        elif isinstance(node, (ast.Constant, ast.JoinedStr)) and len(_rows(node)) > 1:
            kept.update(_rows(node))
    return "\n".join(line for row, line in enumerate(lines, 1) if row not in dropped and (line or row in kept))


def _rows(node: ast.stmt | ast.expr) -> range:
    """Return the numbers of the lines that a statement or an expression fills, from 1 on."""
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def path_of(chip: str) -> Path:
    """Return the file of a chip's table."""
    return TABLE.with_name(f"{chip}.json")


def load(chip: str = "h200") -> dict[str, Any]:
    return json.loads(path_of(chip).read_text())


def save(programs: dict[str, Any], lowered: dict[str, str], versions: dict[str, str], chip: str = "h200") -> None:
    """Write the table of these readings, by program. lowered: the hash of each program's text"""
    whole = {"sources": digest(), "versions": versions, "lowered": lowered, "programs": programs}
    path_of(chip).write_text(json.dumps(whole, indent=1) + "\n")


def worse(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each number that grew, and for each program that compiles no more."""
    for name, before in _flat(old):
        after = dict(_flat(new)).get(name)
        if isinstance(before, (int, float)) and isinstance(after, (int, float)) and after > before:
            yield f"{name}: {before} -> {after}"
        elif isinstance(after, str) and before != after:
            yield f"{name}: {before} -> {after}"
        elif after is None and before is not None:
            yield f"{name}: {before} -> nothing"


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(tree, dict):
        yield name, tree
        return
    for key, value in tree.items():
        yield from _flat(value, f"{name}.{key}" if name else key)
