"""`few_bits` and `few_bits_tpu` over several devices: each multiplies the part of the weight that it holds.

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

from jaxserve.ops.quantized import Quantized

Product = Callable[..., jax.Array]  # `matmul` of a kernel for one device
_Axes = str | tuple[str, ...] | None


def matmul(product: Product, x: jax.Array, w: Quantized, out_dtype: DTypeLike, *, interpret: bool = False) -> jax.Array:
    """Do `product`, a kernel's `matmul`, in a program over several devices: x [T, K], w [*out, K] -> [T, *out]."""
    shape, w = w.shape[:-1], w.matrix()
    leaves, form = jax.tree.flatten(w)

    def local(x: jax.Array, *leaves: jax.Array) -> jax.Array:
        """Multiply what one device holds: x [T, its K], leaves [its N, ...] -> [T, its N]."""
        return product(x, jax.tree.unflatten(form, leaves), out_dtype, interpret=interpret)

    partitioned = custom_partitioning(local)
    # x [T, K] and the leaves [N, numbers, bytes or groups] share K's factor, the groups: a device holds whole ones.
    groups = w.scales.shape[1]
    widths = [leaf.shape[1] // groups for leaf in (x, *leaves)]
    columns = [f"(g {_name(i)})" if width > 1 else "g" for i, width in enumerate(widths)]
    rule = f"t {columns[0]}, {', '.join(f'n {each}' for each in columns[1:])} -> t n"
    sizes: dict[str, Any] = {_name(i): width for i, width in enumerate(widths) if width > 1}
    partitioned.def_partition(
        functools.partial(_partition, local),
        sharding_rule=rule,
        reduction_factors=("g",),
        **sizes,
    )
    return partitioned(x, *leaves).reshape(x.shape[0], *shape)


def _name(index: int) -> str:
    """Return the name of the factor of a group's numbers in argument `index`."""
    return f"k{index}"


def _partition(
    local: Callable[..., jax.Array], mesh: Mesh, args: Sequence[Any], _result: Any
) -> tuple[Mesh, Callable[..., jax.Array], NamedSharding, tuple[NamedSharding, ...]]:
    """Return how each device computes its part, and how arguments and result are split: by the weight's values."""
    outputs, depth = _axes_of(args[1].sharding)

    def part(*shards: jax.Array) -> jax.Array:
        y = local(*shards)
        return y if depth is None else lax.psum(y, depth)

    def placed(*axes: _Axes) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*axes))

    weights = tuple(placed(outputs, depth) for _ in args[1:])
    return mesh, part, placed(None, outputs), (placed(None, depth), *weights)


def _axes_of(sharding: NamedSharding) -> tuple[_Axes, _Axes]:
    """Return the mesh axes that split the rows and the columns of a weight."""
    rows, columns = (*sharding.spec, None, None)[:2]
    return rows, columns
