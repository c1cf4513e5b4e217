"""Products with quantized weights over several devices: each device multiplies its own part of the weight.

It serves the kernels of `few_bits` and `few_bits_tpu`, and `rounded`, whose rows were quantized by the maxima over all
of K. The partitioner asks here how to split the product, because it cannot split a kernel. Outputs stay on the devices
of their rows of the weight. If the weight is split along K, each device multiplies its columns, and the results are
added over these devices in the result's dtype, as XLA does for an unquantized weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jaxserve.ops.quantized import Quantized, Rounded

Product = Callable[..., jax.Array]  # of x, w and a dtype, on one device
_Axes = str | tuple[str, ...] | None


def matmul(product: Product, x: jax.Array | Rounded, w: Quantized, out_dtype: DTypeLike) -> jax.Array:
    """Do `product` in a program over several devices: x [T, K], w [*out, K] -> [T, *out].

    x: rows in the form that `product` accepts
    """
    shape, w = w.shape[:-1], w.matrix()
    leaves, form = jax.tree.flatten((x, w))
    of_x = jax.tree.structure(x).num_leaves

    def local(*leaves: jax.Array) -> jax.Array:
        """Multiply one device's leaves of x [T, ...] by its leaves of w [its N, ...] -> [T, its N]."""
        return product(*jax.tree.unflatten(form, leaves), out_dtype)

    partitioned = custom_partitioning(local)
    # The leaves [T or N, values, bytes or groups] share K's factor, the groups: a device has whole groups. Without
    # groups the factor is K. A leaf with one column, for a whole row, is never split.
    groups = min(leaf.shape[1] for leaf in leaves if leaf.shape[1] > 1)
    sizes: dict[str, Any] = {f"k{i}": leaf.shape[1] // groups for i, leaf in enumerate(leaves)}
    operands = [f"{'t' if i < of_x else 'n'} {_columns(f'k{i}', size)}" for i, size in enumerate(sizes.values())]
    partitioned.def_partition(
        functools.partial(_partition, local, of_x),
        sharding_rule=f"{', '.join(operands)} -> t n",
        reduction_factors=("g",),
        **{name: size for name, size in sizes.items() if size > 1},
    )
    return partitioned(*leaves).reshape(leaves[0].shape[0], *shape)


def _columns(name: str, size: int) -> str:
    """Return the factors of a leaf's columns. name: of its values in a group. size: their number; 0: one for all"""
    return f"(g {name})" if size > 1 else "g" if size else name


def _partition(
    local: Callable[..., jax.Array], of_x: int, mesh: Mesh, args: Sequence[Any], _result: Any
) -> tuple[Mesh, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    """Return the function for a device's part, and the shardings of arguments and result: the weight's values decide.

    of_x: the first arguments, which belong to x
    """
    outputs, depth = _axes_of(args[of_x].sharding)

    def part(*shards: jax.Array) -> jax.Array:
        y = local(*shards)
        return y if depth is None else lax.psum(y, depth)

    def placed(*axes: _Axes) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    places = [placed(None if i < of_x else outputs, depth if arg.shape[1] > 1 else None) for i, arg in enumerate(args)]
    return mesh, part, placed(None, outputs), tuple(places)


def _axes_of(sharding: NamedSharding) -> tuple[_Axes, _Axes]:
    """Return the mesh axes that split the rows and the columns of a weight."""
    rows, columns = (*sharding.spec, None, None)[:2]
    return rows, columns
