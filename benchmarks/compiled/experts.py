"""Compile a layer of experts for a TPU, by its kernel and by XLA, and print the bytes that each moves.

    python -m benchmarks.compiled.experts [--chip v5e|v6e] [NAME]

NAME: only layers whose names have this text. Takes about 15 CPU seconds a form. The kernel's own bytes are what it
tells XLA: the weights of as many experts as the rows can choose, and the rows.
"""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding

from benchmarks.compiled.table import CHIPS
from jaxserve.models.layers import GatedActivation
from jaxserve.ops.linear import ExpertKernels, TpuExperts
from jaxserve.ops.moe import Chosen, ExpertWeights, moe
from jaxserve.ops.quantized import Quantized
from jaxserve.runtime.saved_programs.target import make_target

_GPT_OSS_20B, _GPT_OSS_120B, _MIXTRAL = (32, 4, 2880, 2880), (128, 4, 2880, 2880), (8, 2, 14336, 4096)
_QWEN3_30B, _QWEN3_235B, _DEEPSEEK_V3 = (128, 8, 768, 2048), (128, 8, 1536, 4096), (256, 8, 2048, 7168)
# (experts, experts of a token, F, D), values, numbers that share a scale (0: a row does), tokens
LAYERS: dict[str, tuple[tuple[int, int, int, int], str, int, int]] = {
    "gpt-oss-20b mxfp4, 1 token": (_GPT_OSS_20B, "mxfp4", 32, 1),
    "gpt-oss-20b mxfp4, 64 tokens": (_GPT_OSS_20B, "mxfp4", 32, 64),
    "Qwen3-30B-A3B int8, 64 tokens": (_QWEN3_30B, "int8", 0, 64),
    "Qwen3-30B-A3B int4, 64 tokens": (_QWEN3_30B, "int4", 32, 64),
    "Qwen3-30B-A3B fp8, 64 tokens": (_QWEN3_30B, "fp8", 128, 64),
    "Mixtral-8x7B int4, 64 tokens": (_MIXTRAL, "int4", 128, 64),
    "Mixtral-8x7B int4, 2,048 tokens": (_MIXTRAL, "int4", 128, 2048),
    "Qwen3-30B-A3B wide, 1 token": (_QWEN3_30B, "bfloat16", 0, 1),
    "Qwen3-30B-A3B wide, 64 tokens": (_QWEN3_30B, "bfloat16", 0, 64),
    "Qwen3-30B-A3B wide, 2,048 tokens": (_QWEN3_30B, "bfloat16", 0, 2048),
    "Mixtral-8x7B wide, 1 token": (_MIXTRAL, "bfloat16", 0, 1),
    "Mixtral-8x7B wide, 64 tokens": (_MIXTRAL, "bfloat16", 0, 64),
    "Mixtral-8x7B wide, 2,048 tokens": (_MIXTRAL, "bfloat16", 0, 2048),
    "Qwen3-235B-A22B wide, 64 tokens": (_QWEN3_235B, "bfloat16", 0, 64),
    "DeepSeek-V3 wide, 64 tokens": (_DEEPSEEK_V3, "bfloat16", 0, 64),
    "gpt-oss-20b wide, 64 tokens": (_GPT_OSS_20B, "bfloat16", 0, 64),
    "gpt-oss-120b wide, 64 tokens": (_GPT_OSS_120B, "bfloat16", 0, 64),
}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled.experts", description=__doc__)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--chip", choices=("v5e", "v6e"), default="v5e")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    target = make_target(CHIPS[options.chip]).mesh
    for name, layer in LAYERS.items():
        if options.name in name:
            for form, kernels in {"kernel": TpuExperts(), "xla": None}.items():
                print(json.dumps({f"{name}, {form}": _reading(target.replicated, *layer, kernels)}), flush=True)


def _reading(
    sharding: NamedSharding,
    sizes: tuple[int, int, int, int],
    kind: str,
    group: int,
    tokens: int,
    kernels: ExpertKernels | None,
) -> dict[str, Any]:
    """Return what XLA tells of one layer on the device of a sharding."""
    experts, per_token, ffn, model = sizes

    def struct(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def weight(*shape: int) -> Any:
        *rows, depth = shape
        if kind == "bfloat16":
            return struct(jnp.bfloat16, *shape)
        packed = kind in ("int4", "mxfp4")
        values = jnp.uint8 if packed else jnp.int8 if kind == "int8" else jnp.float8_e4m3fn
        scales = struct(jnp.uint8 if kind == "mxfp4" else jnp.float32, *rows, depth // (group or depth))
        return Quantized(struct(values, *rows, depth // 2 if packed else depth), scales)

    def layer(x: jax.Array, chosen: Chosen, weights: ExpertWeights) -> jax.Array:
        """Run x [T, D] through a layer."""
        return moe(x, chosen, weights, GatedActivation("silu", 0.0), kernels)

    weights = ExpertWeights(weight(experts, ffn, 2, model), weight(experts, model, ffn))
    choices = (tokens, per_token)
    args = (
        struct(jnp.bfloat16, tokens, model),
        Chosen(struct(jnp.int32, *choices), struct(jnp.float32, *choices)),
        weights,
    )
    device = AbstractDevice(next(iter(sharding.device_set)).device_kind, 1, "tpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        try:
            compiled = jax.jit(layer).trace(*args).lower(lowering_platforms=("tpu",)).compile()
        except jax.errors.JaxRuntimeError as error:
            return {"error": str(error)[:200]}
    cost: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    return {
        "weights_mib": round(sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights)) / 2**20, 1),
        "mib_accessed": round(cost["bytes accessed"] / 2**20, 1),
        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
        "gflop": round(cost["flops"] / 1e9, 1),
    }


if __name__ == "__main__":
    main()
