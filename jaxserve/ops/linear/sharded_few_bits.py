"""Products with weights of few bits over several devices: each multiplies the part of the weight that it holds.

For the kernels of `few_bits` and `few_bits_tpu`, and for `rounded`, whose rows were rounded by the maxima of all of K.

The partitioner asks here how to split the product, because it cannot split a kernel. Outputs stay on the devices of
their rows of the weight. Where the weight is split along K, each device multiplies its numbers, and the results are
added over these devices in the result's dtype, as XLA adds those of a wide weight.
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

    x: rows as the product takes them.
    """
    shape, w = w.shape[:-1], w.matrix()
    leaves, form = jax.tree.flatten((x, w))
    of_x = jax.tree.structure(x).num_leaves

    def local(*leaves: jax.Array) -> jax.Array:
        """Multiply what one device holds: leaves of x [T, ...] and of w [its N, ...] -> [T, its N]."""
        return product(*jax.tree.unflatten(form, leaves), out_dtype)

    partitioned = custom_partitioning(local)
    # The leaves [T or N, numbers, bytes or groups] share K's factor, the groups: a device holds whole ones. Without
    # groups it is K. What all of a row shares, one column, is never split.
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
    """Return the factors of a leaf's columns. name: of its numbers in a group. size: how many, 0 if all share one."""
    return f"(g {name})" if size > 1 else "g" if size else name


def _partition(
    local: Callable[..., jax.Array], of_x: int, mesh: Mesh, args: Sequence[Any], _result: Any
) -> tuple[Mesh, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    """Return how each device computes its part, and how arguments and result are split: by the weight's values.

    of_x: the first arguments, which are of x.
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
