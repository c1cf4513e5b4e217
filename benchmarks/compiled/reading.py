"""What XLA wrote about one compiled program: its kernels, CUDA graphs, memory, and the registers of Pallas kernels.

The dumps are read as text, because a compiled program tells none of this. A thunk is what XLA's runtime executes: a
kernel, a copy, a graph (kCommandBuffer) or a branch. Indentation says which thunk is inside which.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jax

Reading = dict[str, Any]

_THUNK = re.compile(r"^( *)\d+: (k\w+)\s+\[[^\]]*\]\s*(\S*)(?:.*shared_memory: (\d+))?")
_PALLAS = re.compile(r"paged_\w+|moe_\w+|linear_\w+|\w*_join\b|recurrent_state\w*")
_NO_WORK = {"kCommandBuffer", "kConditional", "kWhile", "kSequential"}


def read(compiled: jax.stages.Compiled, dumps: Path, caches: tuple[Any, ...]) -> Reading:
    """Read one program's numbers. The folder `dumps` must have the dumps of this program only.

    caches: the structs of the KV caches that the program takes, scales among them.
    """
    thunks = _thunks(_only(dumps, "*thunk_sequence_after_thunk_passes.txt").read_text())
    memory: Any = compiled.memory_analysis()
    donated = sum(cache.size * cache.dtype.itemsize for cache in caches)
    return {
        "graphs": sum(kind == "kCommandBuffer" and depth == 0 for depth, kind, _, _ in thunks),
        "outside_graphs": sum(kind != "kCommandBuffer" and depth == 0 for depth, kind, _, _ in thunks),
        "kernels_per_layer": _distance([name for _, kind, name, _ in thunks if kind not in _NO_WORK]),
        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "caches_not_in_place": int(memory.alias_size_in_bytes < donated),
        "cache_copies": _copies(compiled.as_text() or "", caches),
        "pallas": _kernels(dumps, {name: int(shared or 0) for _, _, name, shared in thunks}),
    }


def read_tpu(compiled: jax.stages.Compiled, caches: tuple[Any, ...]) -> Reading:
    """Read a TPU program's numbers. It is one executable, which its host starts once. caches: see `read`."""
    memory: Any = compiled.memory_analysis()
    cost: Any = compiled.cost_analysis()
    text = compiled.as_text() or ""
    donated = sum(cache.size * cache.dtype.itemsize for cache in caches)
    return {
        "pallas_calls": len(re.findall(r'custom_call_target="tpu_custom_call"', text)),
        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "caches_not_in_place": int(memory.alias_size_in_bytes < donated),
        "cache_copies": _copies(text, caches),
        "mib_accessed": round(cost["bytes accessed"] / 2**20, 1),
        "gflop": round(cost["flops"] / 1e9, 2),
    }


def _only(dumps: Path, pattern: str) -> Path:
    found = list(dumps.glob(pattern))
    assert len(found) == 1, (pattern, [path.name for path in found])
    return found[0]


def _thunks(text: str) -> list[tuple[int, str, str, str | None]]:
    """Return (depth, kind, kernel's name, bytes of shared memory) of each thunk."""
    found = (_THUNK.match(line) for line in text.splitlines())
    return [(len(match[1]) // 4, match[2], match[3], match[4]) for match in found if match]


def _distance(kernels: list[str]) -> int | None:
    """Return the number of kernels from one layer's attention to the next one's. None without two such layers."""
    attention = [i for i, name in enumerate(kernels) if re.match(r"paged_(decode|extend|attention)", name)]
    first = kernels[attention[-1]] if attention else ""
    same = [i for i in attention if kernels[i] == first]
    return same[-1] - same[-2] if len(same) > 1 else None


def _copies(hlo: str, caches: tuple[Any, ...]) -> int:
    """Return how many copies of a whole cache the program makes, in its own dtype or another."""
    shapes = {",".join(map(str, cache.shape)) for cache in caches}
    return sum(shape in shapes for shape in re.findall(r"\[([\d,]+)\]\S* (?:copy|copy-start|convert)\(", hlo))


def _kernels(dumps: Path, shared: dict[str, int]) -> dict[str, dict[str, int]]:
    """Return the registers, spilled bytes and shared memory of each Pallas kernel, from its PTX."""
    found: dict[str, dict[str, int]] = {}
    for path in dumps.glob("*.ptx"):
        for name in re.findall(r"\.entry (\w+)", path.read_text()):
            if _PALLAS.fullmatch(name):
                found[name] = _assembled(path) | {"shared_bytes": shared.get(name, 0)}
    return dict(sorted(found.items()))


def _assembled(ptx: Path) -> dict[str, int]:
    run = [_ptxas(), "-v", "-arch=sm_90a", str(ptx), "-o", "/dev/null"]
    told = subprocess.run(run, capture_output=True, text=True, check=True).stderr
    registers, spilled = re.search(r"Used (\d+) registers", told), re.search(r"(\d+) bytes spill stores", told)
    assert registers is not None
    return {"registers": int(registers[1]), "spilled_bytes": int(spilled[1]) if spilled else 0}


def _ptxas() -> str:
    """Return the path of the assembler: of the package nvidia-cuda-nvcc, or of the machine."""
    package = importlib.util.find_spec("nvidia")
    roots = [] if package is None else list(package.submodule_search_locations or [])
    inside = [path for root in roots for path in Path(root).glob("*/bin/ptxas")]
    path = str(inside[0]) if inside else shutil.which("ptxas")
    assert path is not None, "no ptxas: pip install nvidia-cuda-nvcc"
    return path
