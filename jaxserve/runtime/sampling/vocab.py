"""The vocabulary axis over devices: the columns of [R, V] that a device has, and the reductions across them.

If the head is split over its vocabulary, the sampler runs under shard_map on each device's columns and uses these
reductions. Per row a device sends one value, 128 sums or the candidates of a top-k; it never sends a whole row.
If rows are not split, each method is the plain operation.

Partial results are gathered and reduced in the same order on every device, instead of by an all-reduce. All devices
then get the same bits whatever the collective's algorithm, and their loops and branches agree.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.models.sharding import vocab_axes


@dataclass(frozen=True)
class Vocab:
    """The split of the vocabulary. axes: mesh axes that split the columns evenly; none: every device has whole rows.

    All methods except `of`, `parts`, `columns` and `call` must run inside `call`. x is [R, columns of this device].
    """

    mesh: Mesh | AbstractMesh | None = None
    axes: tuple[str, ...] = ()

    @classmethod
    def of(cls, size: int, mesh: Mesh | AbstractMesh | None) -> Vocab:
        """Return the split of the head of a model with `size` tokens on a mesh."""
        return cls(mesh, () if mesh is None else vocab_axes(size, mesh))

    @property
    def parts(self) -> int:
        """Return the number of devices over which a row is split."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in self.axes)

    @property
    def columns(self) -> P:
        """Return the PartitionSpec of an array [R, V]."""
        return P(None, self.axes) if self.axes else P()

    def call(self, function: Callable[..., Any], specs: tuple[Any, ...], *args: Any) -> Any:
        """Call function(*args) on each device's part of the arguments, split by `specs`. Results are replicated."""
        if not self.axes:
            return function(*args)
        return jax.shard_map(function, mesh=self.mesh, in_specs=specs, out_specs=P(), check_vma=False)(*args)

    # --- columns

    def size(self, x: jax.Array) -> int:
        """Return V, the number of columns of x [R, columns] over all devices."""
        return x.shape[1] * self.parts

    def first(self, x: jax.Array) -> jax.Array:
        """Return the token of the first column of x [R, columns], an int32 scalar."""
        return jax.lax.axis_index(self.axes).astype(jnp.int32) * x.shape[1] if self.axes else jnp.int32(0)

    def ids(self, x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Return the token of each column of x [R, columns], of `dtype` [columns]."""
        ids = jnp.arange(x.shape[1], dtype=dtype)
        return ids + self.first(x).astype(dtype) if self.axes else ids

    def column(self, x: jax.Array, ids: jax.Array) -> jax.Array:
        """Return the column of x [R, columns] of each token, ids int32 [...]. Other devices: past the last."""
        if not self.axes:
            return ids
        column = ids - self.first(x)
        return jnp.where((column >= 0) & (column < x.shape[1]), column, x.shape[1])

    def own(self, x: jax.Array, whole: jax.Array) -> jax.Array:
        """Return the columns of whole [R, V] that x [R, columns] has."""
        return jax.lax.dynamic_slice_in_dim(whole, self.first(x), x.shape[1], axis=1) if self.axes else whole

    # --- over a row

    def gather(self, partial: jax.Array) -> jax.Array:
        """Gather every device's partial [...] in the order of their columns -> [parts, ...]."""
        return jax.lax.all_gather(partial, self.axes)

    def total(self, partial: jax.Array) -> jax.Array:
        """Sum every device's partial sums [...] -> [...]."""
        return self.gather(partial).sum(axis=0, dtype=partial.dtype) if self.axes else partial

    def sum(self, x: jax.Array, dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
        """Sum the rows of x -> [R]."""
        return self.total(x.sum(axis=-1, dtype=dtype))

    def max(self, x: jax.Array) -> jax.Array:
        """Return the maximum of each row of x -> [R]."""
        most = x.max(axis=-1)
        return self.gather(most).max(axis=0) if self.axes else most

    def logsumexp(self, x: jax.Array) -> jax.Array:
        """Return log(sum(exp(x))) of each row -> [R]."""
        if not self.axes:
            return jax.nn.logsumexp(x, axis=-1)
        most = self.max(x)
        base = jnp.where(jnp.isfinite(most), most, 0)
        return jnp.log(self.sum(jnp.exp(x - base[:, None]))) + base

    def take(self, x: jax.Array, ids: jax.Array, mode: str | None = None) -> jax.Array:
        """Return x at tokens ids int32 [R, N] -> [R, N]. With mode "clip" ids are clipped to the vocabulary."""
        if not self.axes:
            return jnp.take_along_axis(x, ids, axis=1, mode=mode)
        column = self.column(x, ids.clip(0, self.size(x) - 1))
        found = jnp.take_along_axis(x, column, axis=1, mode="clip")
        return self.total(jnp.where(column < x.shape[1], found, 0))

    def top_k(self, x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """Return the k largest of each row and their tokens, [R, k] each. Ties are in token order, as in lax.top_k."""
        if not self.axes:
            by_groups = functools.partial(top_k_by_groups, k=k)
            return jax.lax.platform_dependent(x, cuda=by_groups, default=functools.partial(_top_k, k=k))
        values, columns = jax.lax.top_k(x, min(k, x.shape[1]))
        offers = self._side_by_side(values), self._side_by_side(columns.astype(jnp.int32) + self.first(x))
        top, places = jax.lax.top_k(offers[0], k)  # a tie goes to the first device, whose tokens come first
        return top, jnp.take_along_axis(offers[1], places, axis=1)

    def _side_by_side(self, x: jax.Array) -> jax.Array:
        return jax.lax.all_gather(x, self.axes, axis=1, tiled=True)

    # --- for the inverse CDF, which orders tokens by lane (token % lanes) and then by row (token // lanes)

    def table(self, x: jax.Array, lanes: int) -> jax.Array:
        """Reshape x to [R, rows, lanes] with each token in lane `token % lanes`. Zeros for tokens of other devices."""
        num_rows, width = x.shape
        if not self.axes or width % lanes == 0:
            return jnp.pad(x, ((0, 0), (0, -width % lanes))).reshape(num_rows, -1, lanes)
        rows = -(-(width + lanes - 1) // lanes)  # room for the first column in any lane
        shift = self.first(x) % lanes
        return jax.lax.dynamic_update_slice_in_dim(
            jnp.zeros((num_rows, rows * lanes), x.dtype), x, shift, axis=1
        ).reshape(num_rows, rows, lanes)

    def passing_row(self, x: jax.Array, weights: jax.Array, target: jax.Array, lanes: int) -> jax.Array:
        """Return the first table row at which the cumulative sum of a lane passes a target, int32 [R].

        weights: [R, rows], the lane of `table(x, lanes)`. target: [R]. If no row passes it, the last row of positive
        weight. Rows are numbered over all devices.
        """
        if not self.axes:
            return first_above(jnp.cumsum(weights, axis=-1), target, weights)
        sums = self.gather(weights.sum(axis=-1))
        before = jnp.where(jnp.arange(self.parts)[:, None] < jax.lax.axis_index(self.axes), sums, 0).sum(axis=0)
        ends = before[:, None] + jnp.cumsum(weights, axis=-1)
        rows = self.first(x) // lanes + jnp.arange(weights.shape[1], dtype=jnp.int32)[None, :]
        passed = jnp.where((weights > 0) & (ends > target[:, None]), rows, jnp.iinfo(jnp.int32).max).min(axis=-1)
        last = jnp.where(weights > 0, rows, 0).max(axis=-1)
        return jnp.minimum(self.gather(passed).min(axis=0), self.gather(last).max(axis=0))


def _top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    values, columns = jax.lax.top_k(x, k)
    return values, columns


def top_k_by_groups(x: jax.Array, k: int, width: int = 128) -> tuple[jax.Array, jax.Array]:
    """Do lax.top_k on x float32 [R, V], where a sort of whole rows is slow, as on a GPU: ([R, k], int32 [R, k]).

    The k largest are in the k groups of `width` columns with the largest maxima; only these groups are sorted.
    """
    num_rows, size = x.shape
    groups = jnp.pad(x, ((0, 0), (0, -size % width)), constant_values=-np.inf).reshape(num_rows, -1, width)
    if groups.shape[1] <= k:
        return _top_k(x, k)
    _, best = jax.lax.top_k(groups.max(axis=2), k)  # of equal groups the first ones
    best = jnp.sort(best, axis=1)  # equal values stay in token order
    chosen = jnp.take_along_axis(groups, best[:, :, None], axis=1).reshape(num_rows, -1)
    values, places = jax.lax.top_k(chosen, k)
    group = jnp.take_along_axis(best, places // width, axis=1)
    return values, group * width + places % width


def first_above(ends: jax.Array, target: jax.Array, weights: jax.Array) -> jax.Array:
    """Return the index of the first end above the target, at most the index of the last positive weight: int32 [R].

    ends, weights: [R, n]. target: [R].
    """
    passed = (ends <= target[:, None]).sum(axis=-1, dtype=jnp.int32)
    indices = jnp.arange(weights.shape[1], dtype=jnp.int32)
    last = jnp.where(weights > 0, indices[None, :], 0).max(axis=-1)
    return jnp.minimum(passed, last)


WHOLE = Vocab()
