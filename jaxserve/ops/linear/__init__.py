"""Linear layers: x @ W.T, in the formulation that is fastest on the platform.

That is an XLA dot, or on a CPU the C kernel of `ops.native`. Weights keep the checkpoint's layout, [out, in].
BENCHMARKS.md, "Tried and rejected", has the measurements behind the choice.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxserve.ops import native as kernels

WEIGHT_FIRST_ROWS = 64  # up to this many rows W @ x.T is faster on a CPU: x @ W.T repacks W at every call


def linear(
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None = None,
    *,
    deterministic: bool = False,
    native: bool = False,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:
    """Multiply x [T, in] by w [*out, in] transposed and add bias [*out].

    Returns [T, *out] in `out_dtype`, by default x's dtype. The formulation depends on the platform that the program
    is lowered for and on T, which is static.

    deterministic: a row's result depends on that row only. One formulation serves every T, and XLA's kernel for a
      single row is avoided because it sums in another order. Needs the options of runtime.compilation.compiler.
    native: use the C kernels for float32. The caller has loaded `ops.native`, and the program runs on one CPU.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    if native and x.dtype == w.dtype == out_dtype == jnp.float32:
        product = kernels.matvec if x.shape[0] == 1 and not deterministic else kernels.matmul
        y = product(x, w.reshape(-1, w.shape[-1])).reshape(x.shape[0], *w.shape[:-1])
    elif deterministic:
        y = _at_least_two_rows(x, w, out_dtype)
    elif x.shape[0] <= WEIGHT_FIRST_ROWS:
        on_cpu, elsewhere = partial(_weight_first, out_dtype=out_dtype), partial(_plain, out_dtype=out_dtype)
        y = lax.platform_dependent(x, w, cpu=on_cpu, default=elsewhere)
    else:
        y = _plain(x, w, out_dtype)
    return y if bias is None else y + bias.astype(out_dtype)[None]


def _plain(x: jax.Array, w: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    # Two dimensions only: with more, XLA on a CPU first writes a transposed copy of the weight at every call.
    flat = w.reshape(-1, w.shape[-1])
    y = lax.dot_general(x, flat, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)
    return y.reshape(x.shape[0], *w.shape[:-1])


def _weight_first(x: jax.Array, w: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    contract = (((w.ndim - 1,), (1,)), ((), ()))
    y = lax.dot_general(w, x, contract, preferred_element_type=out_dtype)
    return jnp.moveaxis(lax.optimization_barrier(y), -1, 0)  # without the barrier XLA rewrites it to x @ W.T


def _at_least_two_rows(x: jax.Array, w: jax.Array, out_dtype: DTypeLike) -> jax.Array:
    padded = jnp.pad(x, ((0, max(0, 2 - x.shape[0])), (0, 0)))
    return _plain(padded, w, out_dtype)[: x.shape[0]]
