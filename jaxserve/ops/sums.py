"""Sums over devices in the order of the devices, for deterministic mode.

An all-reduce of more than two values adds them in an order that depends on the transport and on a value's position in
the array. A row's last bit would then depend on the rows beside it. A gather is exact, and the additions after it are
the same operations on every device.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import jax
from jax import lax
from jax.sharding import PartitionSpec


def sum_in_order(partial: jax.Array, axes: str | tuple[str, ...]) -> jax.Array:
    """Sum the partial results [...] of the devices of mesh `axes` -> [...] of the same dtype, the same bits on each.

    Call it inside shard_map. Takes the memory of one partial result for each device.
    """
    parts = lax.all_gather(partial, axes)
    return functools.reduce(operator.add, [parts[i] for i in range(parts.shape[0])])


def on_each(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Return function(x) for x [...]. Every device computes it from all of x, so it sums nothing over devices.

    A sharding constraint is not enough: if the result is used in parts, the compiler splits the sum again.
    """
    whole, mesh = PartitionSpec(), jax.typeof(x).sharding.mesh
    return jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)(x)
