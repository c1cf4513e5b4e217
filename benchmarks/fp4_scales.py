"""Measure what other choices of scales and numbers would give a model in NVFP4 or MXFP4.

    python -m benchmarks.fp4_scales MODEL [--stories 300] [--forms nvfp4 mxfp4]

MODEL: a Llama. Its weights are quantized here in several ways, dequantized and measured as in `benchmarks.divergence`:

    squared error   as `model.quantization` chooses: the scales of the least squared error
    gain, gain^2    the squares weighted by the gain of the norm before the weight
    factor F        NVFP4, the tensor's scale times F
    GPTQ            errors fed back through second moments of inputs (https://arxiv.org/abs/2210.17323): of random
                    tokens, or of eight windows of the measured text itself, which shows the most that data could give
    without NAME    squared error, and weights with this text in their name unquantized
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.divergence import FLOAT32, WINDOW, compared, log_probabilities, stories
from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, build, load_model
from jaxserve.models.checkpoint.quantization import rounded_to_e2m1, scales_of_mxfp4, scales_of_nvfp4
from jaxserve.ops.linear import Products

_GROUP = {"nvfp4": 16, "mxfp4": 32}
_FACTORS = (0.9, 0.94, 1.06, 1.1, 1.5)
_DAMPING = 0.01  # of the mean of the moments' diagonal, as in GPTQ
_PARTS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")  # a layer's products, in order
Quantizer = Callable[[str, np.ndarray], np.ndarray]  # a name and a tensor [N, K] -> the dequantized tensor


def best_scales(groups: np.ndarray, kind: str, importance: np.ndarray) -> np.ndarray:
    """Return the scales of the least squared error, [N, G, 1].

    groups: [N, G, group]. importance: of each square, [G, group]
    """
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    best, least = np.zeros_like(largest), np.full_like(largest, np.inf)
    for scales in scales_of_mxfp4(largest) if kind == "mxfp4" else scales_of_nvfp4(largest):
        off = rounded_to_e2m1(groups / scales) * scales - groups
        squares = (importance * off * off).sum(axis=-1, keepdims=True)
        best, least = np.where(squares < least, scales, best), np.minimum(squares, least)
    return best


def tensor_scale(wide: np.ndarray, kind: str, factor: float = 1) -> np.float32:
    """Return the scale of an NVFP4 tensor times `factor`; 1 for MXFP4."""
    return np.float32(np.abs(wide).max() / (6 * 448) * factor) if kind == "nvfp4" else np.float32(1)


def nearest(wide: np.ndarray, kind: str, importance: np.ndarray | None = None, factor: float = 1) -> np.ndarray:
    """Quantize and dequantize a tensor [N, K]. importance: of each input, [K]"""
    scale = tensor_scale(wide, kind, factor)
    groups = (wide / scale).reshape(len(wide), -1, _GROUP[kind])
    weights = np.ones(groups.shape[1:], np.float32) if importance is None else importance.reshape(groups.shape[1:])
    scales = best_scales(groups, kind, weights)
    return (rounded_to_e2m1(groups / scales) * scales).reshape(wide.shape) * scale


def fed_back(wide: np.ndarray, kind: str, moments: np.ndarray) -> np.ndarray:
    """Quantize a tensor [N, K] column by column, each error spread over the columns after it. moments: [K, K]"""
    scale, group = tensor_scale(wide, kind), _GROUP[kind]
    left, depth = (wide / scale).astype(np.float64), wide.shape[1]
    damped = moments + _DAMPING * np.mean(np.diag(moments)) * np.eye(depth)
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    found = np.zeros_like(left)
    for first in range(0, depth, group):
        columns = slice(first, first + group)
        importance = 1 / np.diag(upper)[columns].astype(np.float32) ** 2
        scales = best_scales(left[:, None, columns].astype(np.float32), kind, importance[None])[:, 0, 0]
        for k in range(first, first + group):
            found[:, k] = rounded_to_e2m1((left[:, k] / scales).astype(np.float32)) * scales
            left[:, k:] -= np.outer((left[:, k] - found[:, k]) / upper[k, k], upper[k, k:])
    return (found * scale).astype(np.float32)


def moments_of(model: LoadedModel, windows: jax.Array) -> dict[str, np.ndarray]:
    """Return the second moments [K, K] of the inputs of each weight over windows int32 [N, WINDOW]."""
    total: dict[str, np.ndarray] = {}
    positions, caches = jnp.arange(WINDOW, dtype=jnp.int32), (None,) * model.config.num_layers
    inputs: list[np.ndarray] = []

    class Recorded(Products):
        """Products that keep their inputs, in the order in which they are called without jit."""

        def __call__(self, x: jax.Array, *rest: Any, **options: Any) -> jax.Array:
            inputs.append(np.asarray(x, np.float64))
            return super().__call__(x, *rest, **options)

    for window in windows:
        inputs.clear()
        with jax.disable_jit():
            model.structure.bind(model.leaves)(window, positions, caches, dense_attend(model.config), Recorded())
        for place, rows in enumerate(inputs):
            layer, part = divmod(place, len(_PARTS))
            name = f"model.layers.{layer}.{_PARTS[part]}.weight"
            total[name] = total.get(name, np.zeros(())) + rows.T @ rows
    return total


def with_numbers(model: LoadedModel, names: frozenset[str], quantize: Quantizer) -> LoadedModel:
    """Return a float32 model with the tensors of these parameters replaced by what `quantize` returns."""
    leaves = list(model.leaves)
    for place, spec in enumerate(model.structure.specs):
        if spec.name in names:
            wide = np.array(leaves[place])
            for part in spec.parts or ():
                corner = tuple(slice(a, a + size) for a, size in zip(part.start, part.view, strict=True))
                tensor = np.ascontiguousarray(wide[corner])
                wide[corner] = quantize(spec.name, tensor.reshape(-1, tensor.shape[-1])).reshape(tensor.shape)
            leaves[place] = jnp.asarray(wide)
    return dataclasses.replace(model, leaves=tuple(leaves))


def choices(
    kind: str, model: LoadedModel, moments: dict[str, dict[str, np.ndarray]]
) -> Iterator[tuple[str, Quantizer, tuple[str, ...]]]:
    """Yield what is measured: its name, how it quantizes, and the texts in names of weights that stay unquantized."""
    numbers = dict(zip((spec.name for spec in model.structure.specs), map(np.asarray, model.leaves), strict=True))

    def plain(_: str, wide: np.ndarray, factor: float = 1) -> np.ndarray:
        return nearest(wide, kind, factor=factor)

    def by_gain(name: str, wide: np.ndarray, power: int) -> np.ndarray:
        *layer, _, part, _ = name.split(".")
        norm = {"qkv_proj": "input_layernorm", "gate_up_proj": "post_attention_layernorm"}.get(part)
        gain = None if norm is None else np.abs(numbers[".".join((*layer, norm, "weight"))]) ** power
        return nearest(wide, kind, gain)

    def corrected(name: str, wide: np.ndarray, found: dict[str, np.ndarray]) -> np.ndarray:
        return fed_back(wide, kind, found[name])

    yield "squared error", plain, ()
    for power in (1, 2):
        yield f"gain^{power}", partial(by_gain, power=power), ()
    for factor in _FACTORS if kind == "nvfp4" else ():
        yield f"factor {factor}", partial(plain, factor=factor), ()
    for what, found in moments.items():
        yield f"GPTQ, {what}", partial(corrected, found=found), ()
    first, last = "layers.0.", f"layers.{model.config.num_layers - 1}."
    for without in ((first,), (last,), (first, last)):
        yield f"without {' and '.join(without)}", plain, without


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--stories", type=int, default=300)
    parser.add_argument("--forms", nargs="+", default=list(_GROUP), choices=list(_GROUP))
    options = parser.parse_args()
    config, windows = read_config(options.model), stories(options.model, options.stories)
    model = load_model(options.model, dtype=FLOAT32, config=config)
    wide = log_probabilities(model, windows, Products())
    random = jnp.asarray(np.random.default_rng(0).integers(3, config.vocab_size, (8, WINDOW)).astype(np.int32))
    moments = {"random tokens": moments_of(model, random), "the text": moments_of(model, windows[:8])}
    for kind in options.forms:
        specs = build(config.replace(quantization=kind), FLOAT32).specs
        names = frozenset(spec.wide().name for spec in specs if spec.packing is not None)
        for what, quantize, without in choices(kind, model, moments):
            kept = frozenset(name for name in names if not any(text in name for text in without))
            found = log_probabilities(with_numbers(model, kept, quantize), windows, Products())
            print(f"{kind}, {what}: {compared(wide, found, windows)}", flush=True)


if __name__ == "__main__":
    main()
