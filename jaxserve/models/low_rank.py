"""The low-rank matrices of adapters in a linear layer (LoRA, https://arxiv.org/abs/2106.09685), for many at once.

A layer with weight W adds B A x to W x. The adapters of all slots are side by side: A is [P, K, in] and B [*out, K],
where K is slots x rank, and P the number of checkpoint tensors that a fused weight is made of. A x is computed for all
slots, and is 0 in the columns of the slots that a row does not use: there is no gather and no sort.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.weights import Axes, param
from jaxserve.ops.linear import Products


class LowRank(nnx.Module):
    """A and B of all slots of one layer.

    inputs: length and logical axis of the weight's last dimension. outputs: shapes and axes of the rows of each B;
    several are put side by side along `axis`. columns: K
    """

    def __init__(
        self,
        inputs: tuple[int, str | None],
        outputs: list[tuple[tuple[int, ...], Axes]],
        axis: int,
        columns: int,
        dtype: jnp.dtype,
    ) -> None:
        size, name = inputs
        self.a = param((len(outputs), columns, size), (None, None, name), dtype, "zeros")
        self.b = nnx.List([param((*rows, columns), (*axes, None), dtype, "zeros") for rows, axes in outputs])
        self.axis = axis

    def __call__(self, x: jax.Array, y: jax.Array, linear: Products, split: tuple[str, ...]) -> jax.Array:
        """Add the rows' adapters to y [T, *out], the product of x [T, in]. split: mesh axes that split `in`

        On a CPU a step without adapters computes none.
        """
        rows = linear.adapters
        assert rows is not None
        if not linear.native:
            return self._added(x, y, linear, split)
        # What follows is then compiled as without adapters. Otherwise it is fused with the sum, which changes its bits.
        return jax.lax.cond(rows.any_used, lambda x, y: self._added(x, y, linear, split), lambda x, y: y, x, y)

    def _added(self, x: jax.Array, y: jax.Array, linear: Products, split: tuple[str, ...]) -> jax.Array:
        rows, a = linear.adapters, self.a[...]
        assert rows is not None
        inner = linear(x, a.reshape(-1, a.shape[-1]), split=split).reshape(x.shape[0], *a.shape[:2])
        inner = jnp.where(rows.columns[:, None, :], inner, jnp.zeros((), inner.dtype))
        added = [linear(inner[:, part], b[...]) for part, b in enumerate(self.b)]
        delta = added[0] if len(added) == 1 else jnp.concatenate(added, axis=1 + self.axis)
        return jnp.where(rows.used.reshape(-1, *(1,) * (y.ndim - 1)), y + delta, y)


class Adaptable(nnx.Module):
    """A linear layer that adapters may change. `models.adapters` gives a model's layers their matrices."""

    weight: Any  # a parameter [*out, in], or a QuantizedWeight
    adapters: LowRank | None = None

    def adapted(self, x: jax.Array, y: jax.Array, linear: Products, split: tuple[str, ...] = ()) -> jax.Array:
        """Return y [T, *out], the layer's product of x [T, in], with the rows' adapters added."""
        return y if self.adapters is None else self.adapters(x, y, linear, split)
