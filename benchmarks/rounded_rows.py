"""Measure how far 8-bit weights with one scale for a row, and activations rounded as for them, move a model.

    python -m benchmarks.rounded_rows MODEL [--stories 300]

Writes MODEL as two checkpoints, W8A8 in int8 and in FP8, and prints the figures of benchmarks.divergence for each with
exact and with rounded products. Those are XLA's of GPUs and TPUs (`ops/linear/rounded.py`), computed on a CPU with
float32 activations. In groups: the same weights in groups of 128 as `model.quantization` makes them, and rows that are
rounded by group and multiplied wide, because their kernel is Hopper's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.compiled.programs import w8a8
from benchmarks.divergence import FLOAT32, compared, log_probabilities, stories
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.ops.linear import Products, rounded
from jaxserve.ops.quantized import Quantized


@dataclass(frozen=True)
class InGroups(Products):
    """Products whose rows are rounded by group for weights in groups of 128."""

    def __call__(self, x: jax.Array, w: Any, bias: jax.Array | None = None, **options: Any) -> jax.Array:
        if isinstance(w, Quantized) and w.group % rounded.GROUP_NUMBERS == 0:
            x = rounded.rounded(x, w).astype(x.dtype)
        return super().__call__(x, w, bias, **options)


def write(model: Path, form: str, directory: Path) -> None:
    """Write a model as a W8A8 checkpoint in int8 or fp8."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: array for file in model.glob("*.safetensors") for name, array in load_file(file).items()}
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            wide = weight.astype(np.float32)
            scale = np.abs(wide).max(axis=1, keepdims=True) / (127 if form == "int8" else 448)
            steps = wide / scale
            codes = np.rint(steps).astype(np.int8) if form == "int8" else steps.astype(ml_dtypes.float8_e4m3fn)
            tensors |= {name: codes, f"{name}_scale": scale}
    save_file(tensors, directory / "model.safetensors")
    hf = json.loads((model / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(hf | {"quantization_config": w8a8(form)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stories", type=int, default=300)
    options = parser.parse_args()
    config, windows = read_config(options.model), stories(options.model, options.stories)
    plain = log_probabilities(load_model(options.model, dtype=FLOAT32, config=config), windows, Products())
    exact, by_row = Products(), Products(rounded="gpu")
    for form in ("int8", "fp8"):
        with tempfile.TemporaryDirectory() as folder:
            write(options.model, form, directory := Path(folder, form))
            stored = read_config(directory).replace(quantization="stored", activation_dtype="float32")
            rows = load_model(directory, dtype=FLOAT32, config=stored)
        groups = load_model(options.model, dtype=FLOAT32, config=config.replace(quantization=form))
        for held, model, rounding in (("row", rows, by_row), ("group", groups, InGroups())):
            for name, products in (("exact", exact), ("rounded", rounding)):
                found = log_probabilities(model, windows, products)
                print(f"{form}, a scale for a {held}, {name}: {compared(plain, found, windows)}", flush=True)


if __name__ == "__main__":
    main()
