"""The part of the device suite about what only some models have: routed experts, and latent attention.

A layer's bytes are the weights of the experts that the tokens chose, each read once, and the rows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_suite.kernels import DTYPE, TOLERANCE, HeadSizes, clock, normal, rates, time_grid
from benchmarks.device_suite.rows import Bench, Row
from jaxserve.models.layers import GatedActivation
from jaxserve.ops.linear import ExpertKernels, TpuExperts, TritonExperts
from jaxserve.ops.moe import Chosen, ExpertWeights, moe
from jaxserve.ops.quantized import Quantized

_SWIGLU = GatedActivation("silu", 0.0)


@dataclass(frozen=True)
class ExpertSizes:
    """The sizes of a layer of experts, and whether its weights are MXFP4."""

    experts: int
    per_token: int
    ffn: int
    model: int
    mxfp4: bool = False

    @property
    def expert_bytes(self) -> float:
        """The bytes of one expert's weights. MXFP4 has 4 bits a number and 8 for 32 of them."""
        return 3 * self.ffn * self.model * (17 / 32 if self.mxfp4 else 2)


LAYERS = {
    "gpt-oss-20b": ExpertSizes(32, 4, 2880, 2880, mxfp4=True),
    "mixtral": ExpertSizes(8, 2, 14336, 4096),
    "qwen3-30b": ExpertSizes(128, 8, 768, 2048),
    "gpt-oss-120b": ExpertSizes(128, 4, 2880, 2880, mxfp4=True),
}
TPU_LAYERS = {
    "gpt-oss-20b": ExpertSizes(32, 4, 2880, 2880, mxfp4=True)
}  # XLA's form of more experts takes all the memory
KERNELS = {"triton": TritonExperts, "tpu": TpuExperts}


def numerics(bench: Bench) -> None:
    """Compare the device's kernels, on a CPU Triton's, with XLA's form on few rows."""
    layers, _, kernel = _layers(bench)
    for name, sizes in layers.items():
        cell, question = (
            functools.partial(_compare, bench, sizes, kernel),
            f"Are {kernel} kernels of experts right?",
        )
        bench.cell(f"experts {name}", 8, cell, answers=question, optional=name != next(iter(layers)))


def experts(bench: Bench) -> None:
    """Time the device's kernels and XLA's form."""
    layers, counts, kernel = _layers(bench)
    for name, sizes in layers.items():
        for rows in counts:
            for form in (kernel, "xla"):
                if form == kernel or rows <= 512:  # XLA's form of more rows takes all the memory
                    cell = functools.partial(_time, bench, sizes, rows, form)
                    bench.cell(f"{form} {name} {rows} rows", 20, cell)


def _layers(bench: Bench) -> tuple[dict[str, ExpertSizes], tuple[int, ...], str]:
    """Return the layers, the rows and the kernel of the device."""
    if bench.tiny:
        sizes = ExpertSizes(4, 2, 32, 64)
        return {"tiny": sizes, "tiny-mxfp4": replace(sizes, mxfp4=True)}, (1, 5), "triton"
    counts = (1, 16, 64, 512, 4096)
    return (TPU_LAYERS, counts, "tpu") if bench.platform == "tpu" else (LAYERS, counts, "triton")


def _kernels(form: str) -> ExpertKernels | None:
    """Return the choice of kernels, which a CPU interprets. None: XLA's form."""
    return KERNELS[form](interpret=jax.default_backend() == "cpu") if form in KERNELS else None


def _weights(sizes: ExpertSizes, seed: int) -> ExpertWeights:
    shapes = (sizes.experts, sizes.ffn, 2, sizes.model), (sizes.experts, sizes.model, sizes.ffn)
    make = _mxfp4 if sizes.mxfp4 else _wide
    return ExpertWeights(make(seed, shapes[0]), make(seed + 1, shapes[1]))


def _wide(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return normal(seed, *shape) * jnp.asarray(shape[-1] ** -0.5, DTYPE)


def _mxfp4(seed: int, shape: tuple[int, ...]) -> Quantized:
    """Return random codes [..., K] with scales about 1 / sqrt(K)."""
    *rows, depth = shape
    values = jax.random.bits(jax.random.key(seed), (*rows, depth // 2), jnp.uint8)
    exponent = round(127 - 2 - np.log2(depth) / 2)  # the codes' numbers are about 2
    return Quantized(values, jnp.full((*rows, depth // 32), exponent, jnp.uint8))


def _inputs(sizes: ExpertSizes, rows: int) -> tuple[jax.Array, Chosen]:
    """Return x [T, D], and each token's experts."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((rows, sizes.experts)), axis=1)[:, : sizes.per_token].astype(np.int32)
    weights = jnp.full(ids.shape, 1 / sizes.per_token, jnp.float32)
    return normal(1, rows, sizes.model), Chosen(jnp.asarray(ids), weights)


def _options() -> dict[str, Any]:
    """Return the compiler's options: an interpreted kernel runs once, so LLVM's optimisation would not pay."""
    return {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else {}


def _run(form: str) -> Callable[..., jax.Array]:
    function = functools.partial(moe, activation=_SWIGLU, product=_kernels(form))
    return jax.jit(function, compiler_options=_options())


def _compare(bench: Bench, sizes: ExpertSizes, kernel: str) -> Row:
    args = *_inputs(sizes, 3 if bench.tiny else 40), _weights(sizes, 2)
    got, want = (np.asarray(_run(form)(*args).astype(jnp.float32)) for form in (kernel, "xla"))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return {"rel_err": error, "ok": bool(error < TOLERANCE)}


def _time(bench: Bench, sizes: ExpertSizes, rows: int, form: str) -> Row:
    x, chosen = _inputs(sizes, rows)
    product, calls = _kernels(form), 1 if bench.tiny else 8

    def chain(x: jax.Array, chosen: Chosen, layer: ExpertWeights) -> jax.Array:
        """Run x [T, D] through the layer `calls` times."""
        for _ in range(calls):
            x = moe(x, chosen, layer, _SWIGLU, product)
        return x

    compiled = jax.jit(chain, compiler_options=_options())
    seconds = clock(compiled, x, chosen, _weights(sizes, 2), tiny=bench.tiny, chained=3) / calls
    read = len(np.unique(np.asarray(chosen.ids))) * sizes.expert_bytes
    moved = read + 2 * (2 * x.size + 2 * chosen.ids.size * (sizes.ffn + sizes.model))
    return rates(bench, seconds, moved, 6.0 * chosen.ids.size * sizes.ffn * sizes.model)


def latent(bench: Bench) -> None:
    """Time latent attention of one layer of DeepSeek-V3, whole and as one of eight devices has it."""
    grid = {
        "decode 100 x 305": [(1, 305)] * 100,
        "decode 1 x 4096": [(1, 4096)],
        "decode 32 x 4096": [(1, 4096)] * 32,
        "prefill 2048": [(2048, 2048)],
        "chunk 512 at 4096": [(512, 4096)],
    }
    shapes = {"128 heads ": HeadSizes(1, 128, 576, values=512), "16 heads ": HeadSizes(1, 16, 576, values=512)}
    if bench.tiny:
        grid, shapes = {"mixed": [(1, 20), (9, 20)]}, {"": HeadSizes(1, 4, 40, values=32)}
    for shape, heads in shapes.items():
        time_grid(bench, grid, heads, shape)


SECTIONS: dict[str, Callable[[Bench], None]] = {"experts": experts, "latent": latent}
