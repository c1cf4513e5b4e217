"""Which mesh axis splits which logical axis: one table, and the shardings that follow from it."""

from __future__ import annotations

from types import MappingProxyType

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.weights import Axes

# logical axis of a parameter -> mesh axis; an axis that is not here is never split
RULES = MappingProxyType(
    {
        "vocab": "tensor",
        "kv_heads": "tensor",
        "q_heads": "tensor",
        "ffn": "tensor",
        "expert": "expert",
    }
)


def partition_spec(axes: Axes, mesh: Mesh) -> PartitionSpec:
    """How a parameter with these logical axes is split over the mesh; a mesh axis that is absent splits nothing."""
    names = (RULES.get(axis) if axis is not None else None for axis in axes)
    return PartitionSpec(*(name if name in mesh.axis_names else None for name in names))


def param_sharding(axes: Axes, mesh: Mesh) -> NamedSharding:
    """The sharding of a parameter."""
    return NamedSharding(mesh, partition_spec(axes, mesh))
