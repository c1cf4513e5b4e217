"""Compile a decode step with weights of few bits for several H200s, which needs none, and count what it runs.

    PYTHONPATH=$PWD JAX_PLATFORMS=cpu ENVIRONMENT/bin/python -m benchmarks.several_gpus [--devices 1 2 8]

ENVIRONMENT: as .ci/compile makes it. The model is Llama 3.1 8B cut to two layers. Prints, of one device, the memory of
arguments and of temporary arrays, and the kernels of the step by kind.
"""

from __future__ import annotations

import argparse
import re
import warnings
from collections import Counter

from benchmarks.compiled.programs import LLAMA, make_set
from jaxserve.runtime.saved_programs.target import compile_for, make_target

MIB = 2**20
_KERNEL = re.compile(r"\b(all-reduce|all-gather|all-to-all|custom-call|fusion)(?:-start)?\(")


def line(devices: int, weights: str, rows: int) -> str:
    """Return the figures of one program."""
    programs = make_set(LLAMA, make_target("h200", tensor=devices).mesh, weights=weights)
    compiled = compile_for(programs.decode(rows))
    memory, text = compiled.memory_analysis(), str(compiled.as_text())
    assert memory is not None
    counts = Counter(_KERNEL.findall(text[text.index("ENTRY") :]))
    arguments, temporary = memory.argument_size_in_bytes / MIB, memory.temp_size_in_bytes / MIB
    sizes = f"arguments {arguments:8.1f} MiB, temporary {temporary:6.1f}"
    return f"{devices} devices, {weights}, {rows} rows: {sizes}; {dict(counts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--weights", nargs="+", default=["int8", "int4"], choices=["int8", "fp8", "int4"])
    parser.add_argument("--rows", type=int, default=16)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    for devices in options.devices:
        for weights in options.weights:
            print(line(devices, weights, options.rows), flush=True)


if __name__ == "__main__":
    main()
