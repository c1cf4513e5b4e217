"""The vocabulary over devices: which columns of [R, V] a device holds, and everything that looks across a row of them.

Where the head is split over its vocabulary, the sampler runs under shard_map on each device's columns, and these are
its reductions. What crosses devices is by row a value, 128 sums or a top-k's candidates of each device: never a row.
Where rows are whole each method is the plain operation. Knows nothing of requests or of what is sampled.

Partial results are gathered and reduced in one order everywhere, not left to an all-reduce: every device gets the same
bits, on which its loops and branches depend, whatever a collective's algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.models.sharding import vocab_axes


@dataclass(frozen=True)
class Vocab:
    """axes: the mesh axes over which columns are split evenly; none: every device has whole rows.

    Methods but `of`, `parts`, `columns` and `call` are for use inside `call`. x is [R, columns of this device].
    """

    mesh: Mesh | AbstractMesh | None = None
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, size: int, mesh: Mesh | AbstractMesh | None) -> Vocab:
        """As the head of a model with `size` tokens lies on a mesh."""
        return cls(mesh, () if mesh is None else vocab_axes(size, mesh))

    @property
    def parts(self) -> int:
        """Devices among which a row is divided."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def columns(self) -> P:
        """The partition of an array [R, V]."""
        return P(None, self.axes) if self.axes else P()

    def call(self, function: Callable[..., Any], specs: tuple[Any, ...], *args: Any) -> Any:
        """function(*args) on each device's part of the arguments, as `specs` cut them; results are alike on all."""
        if not self.axes:
            return function(*args)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)(*args)

    # --- places

    def size(self, x: jax.Array) -> int:
        """V"""
        return x.shape[1] * self.parts

    def first(self, x: jax.Array) -> jax.Array:
        """The token of the first column, int32 scalar."""
        return jax.lax.axis_index(self.axes).astype(jnp.int32) * x.shape[1] if self.axes else jnp.int32(0)

    def ids(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """The token of each column."""
        ids = jnp.arange(x.shape[1], dtype=dtype)
        return ids + self.first(x).astype(dtype) if self.axes else ids

    def column(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """The column of each token; past the last for tokens of other devices."""
        if not self.axes:
            return ids
        column = ids - self.first(x)
        return jnp.where((column >= 0) & (column < x.shape[1]), column, x.shape[1])

    def own(self, x: jax.Array, whole: jax.Array) -> jax.Array:
        """Of [R, V] the columns that x has."""
        return jax.lax.dynamic_slice_in_dim(whole, self.first(x), x.shape[1], axis=1) if self.axes else whole

    # --- over a row

    def gather(self, partial: jax.Array) -> jax.Array:
        """Every device's [...], in the order of their columns: [parts, ...]."""
        return jax.lax.all_gather(partial, self.axes)

    def total(self, partial: jax.Array) -> jax.Array:
        """The sum of every device's partial sums, of the same shape."""
        return self.gather(partial).sum(axis=0, dtype=partial.dtype) if self.axes else partial

    def sum(self, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """[R]"""
        return self.total(x.sum(axis=-1, dtype=dtype))

    def max(self, x: jax.Array) -> jax.Array:
        """[R]"""
        most = x.max(axis=-1)
        return self.gather(most).max(axis=0) if self.axes else most

    def logsumexp(self, x: jax.Array) -> jax.Array:
        """[R]"""
        if not self.axes:
            return jax.nn.logsumexp(x, axis=-1)
        most = self.max(x)
        base = jnp.where(jnp.isfinite(most), most, 0)
        return jnp.log(self.sum(jnp.exp(x - base[:, None]))) + base

    def take(self, x: jax.Array, ids: jax.Array, mode: str | None = None) -> jax.Array:
        """x at tokens int32 [R, N], which are in the vocabulary or, with mode "clip", brought there."""
        if not self.axes:
            return jnp.take_along_axis(x, ids, axis=1, mode=mode)
        column = self.column(x, ids.clip(0, self.size(x) - 1))
        found = jnp.take_along_axis(x, column, axis=1, mode="clip")
        return self.total(jnp.where(column < x.shape[1], found, 0))

    def top_k(self, x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k largest of a row and their tokens, [R, k]; of equals the first token first, as `jax.lax.top_k`."""
        if not self.axes:
            return jax.lax.top_k(x, k)
        values, columns = jax.lax.top_k(x, min(k, x.shape[1]))
        offers = self._side_by_side(values), self._side_by_side(columns.astype(jnp.int32) + self.first(x))
        top, places = jax.lax.top_k(offers[0], k)  # of equals the first device's, whose tokens come first
        return top, jnp.take_along_axis(offers[1], places, axis=1)

    def _side_by_side(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axes, axis=1, tiled=True)

    # --- in the order of the inverse CDF: tokens equal modulo `lanes`, each such column from the first row to the last

    def table(self, x: jax.Array, lanes: int) -> jax.Array:
        """x as [R, rows, lanes], a token in the lane `token % lanes`; zeros where the device has no token."""
        num_rows, width = x.shape
        if not self.axes or width % lanes == 0:
            return jnp.pad(x, ((0, 0), (0, -width % lanes))).reshape(num_rows, -1, lanes)
        rows = -(-(width + lanes - 1) // lanes)  # room for the first column in any lane
        shift = self.first(x) % lanes
        return jax.lax.dynamic_update_slice_in_dim(
            jnp.zeros((num_rows, rows * lanes), x.dtype), x, shift, axis=1
        ).reshape(num_rows, rows, lanes)

    def passing_row(self, x: jax.Array, weights: jax.Array, target: jax.Array, lanes: int) -> jax.Array:
        """The first row of `table(x, lanes)` at which the sum of one of its columns, weights [R, rows], is above the
        target [R], or else the last row of positive weight; int32 [R], counted over all devices."""
        if not self.axes:
            return first_above(jnp.cumsum(weights, axis=-1), target, weights)
        sums = self.gather(weights.sum(axis=-1))
        before = jnp.where(jnp.arange(self.parts)[:, None] < jax.lax.axis_index(self.axes), sums, 0).sum(axis=0)
        ends = before[:, None] + jnp.cumsum(weights, axis=-1)
        rows = self.first(x) // lanes + jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
        passed = jnp.where((weights > 0) & (ends > target[:, None]), rows, jnp.iinfo(jnp.int32).max).min(axis=-1)
        last = jnp.where(weights > 0, rows, 0).max(axis=-1)
        return jnp.minimum(self.gather(passed).min(axis=0), self.gather(last).max(axis=0))


def first_above(ends: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """Index of the first end above target, but no further than the last positive weight. int32 [R]."""
    passed = (ends <= target[:, None]).sum(axis=-1, dtype=jnp.int32)
    indices = jnp.arange(weights.shape[1], dtype=jnp.int32)
    last = jnp.where(weights > 0, indices[None, :], 0).max(axis=-1)
    return jnp.minimum(passed, last)


WHOLE = Vocab()
