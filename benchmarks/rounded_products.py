"""Compile one linear layer with 8-bit weights, exact and rounded, for a chip that is not there.

    ENVIRONMENT/bin/python -m benchmarks.rounded_products [--chip h200|v5e|v6e] [--rows 2048] [--shape 14336 4096]

ENVIRONMENT has jax with its CUDA plugin or libtpu. Prints for each form of weight and each kind of product the
temporary memory and the number of operations. Of a GPU also the megabytes that these read and write, and a floor in
microseconds: the longer of these bytes at its bandwidth and the products at its rate. Of a TPU the million cycles that
XLA estimates; it has no estimate of a Pallas kernel.
"""

from __future__ import annotations

import argparse
import math
import re
import string
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.compiled.table import CHIPS
from jaxserve.ops.linear import Products
from jaxserve.ops.quantized import Quantized
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.saved_programs.target import compile_for, make_target

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ((?:\(.*?\)|\S+)) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+\d+)(?:e4m3fn)?\[([\d,]*)\]")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_FREE = {"parameter", "bitcast", "get-tuple-element", "tuple", "constant"}


# Of an H200 as published: GB/s, and 1e12 operations a second of bfloat16 and 8 bits.
_BANDWIDTH, _EXACT, _ROUNDED = 4800, 989, 1979


def moved(text: str) -> tuple[int, int]:
    """Return the bytes of the operands and results of a program's operations, and how many operations there are."""
    sizes, total, count = {}, 0, 0
    for line in text.partition("\nENTRY ")[2].splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        name, result, kind, rest = found.groups()
        sizes[name] = sum(map(_bytes, _ARRAY.findall(result)))
        if kind not in _FREE:
            operands = re.findall(r"%([\w.-]+)", rest.partition(")")[0])
            total, count = total + sizes[name] + sum(sizes.get(operand, 0) for operand in operands), count + 1
    return total, count


def _bytes(array: tuple[str, str]) -> int:
    """Return the bytes of an array that is written as (its dtype, its sizes)."""
    sizes = (int(size) for size in array[1].split(",") if size)
    return math.prod(sizes) * int(array[0].lstrip(string.ascii_letters)) // 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=CHIPS, default="h200")
    parser.add_argument("--rows", type=int, nargs="+", default=[2048])
    parser.add_argument("--shape", type=int, nargs=2, default=[14336, 4096], help="outputs and K")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    target, (outputs, depth) = make_target(CHIPS[options.chip]).mesh, options.shape
    device, few = ("hopper", "gpu") if options.chip == "h200" else ("tpu", "tpu")

    def struct(shape: tuple[int, int], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=target.replicated)

    for rows in options.rows:
        x = struct((rows, depth), jnp.bfloat16)
        for form, dtype in (("int8", jnp.int8), ("fp8", jnp.float8_e4m3fn)):
            for name, groups in (("row", 1), ("group", depth // 128)):
                w = Quantized(struct((outputs, depth), dtype), struct((outputs, groups), jnp.float32))
                for rounding in (None, device):
                    products: Any = Products(few_bits=few, rounded=rounding)
                    compiled = compile_for(Program("product", products, (x, w), (), target.replicated))
                    words = f"{form}, a scale for a {name}, {'rounded' if rounding else 'exact'}"
                    rate = _ROUNDED if rounding else _EXACT
                    print(f"{rows} rows, {words}: {_figures(compiled, options.chip, rows * outputs * depth, rate)}")


def _figures(compiled: jax.stages.Compiled, chip: str, multiplications: int, rate: float) -> str:
    """Return the figures of a program in words. rate: in 1e12 operations a second."""
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert memory is not None
    size, count = moved(text)
    found = f"temporary {memory.temp_size_in_bytes / 2**20:.0f} MiB, {count} operations"
    if chip == "h200":
        floor = max(size / _BANDWIDTH * 1e-3, 2 * multiplications / rate * 1e-6)
        return f"{found}, {size / 2**20:.0f} MiB, floor {floor:.0f} us"
    cycles = sum(map(int, _CYCLES.findall(text.partition("\nENTRY ")[2])))
    return found + (", a Pallas kernel" if "tpu_custom_call" in text else f", {cycles / 1e6:.2f} million cycles")


if __name__ == "__main__":
    main()
