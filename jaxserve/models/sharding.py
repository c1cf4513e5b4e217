"""The sharding of every parameter, derived from one table (RULES) that maps logical axes to mesh axes.

Dense weights are split over all devices. Experts are split over "expert", and each expert over "tensor". Heads are
split over "tensor" alone, because the KV cache is. So is a dense weight of a mixture of experts whose groups cannot be
split over all (Step 3.7's shared expert in FP8 has 10). To try another strategy, change RULES.
"""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.weights import Axes, ParamSpec
from jaxserve.ops.native import Weight
from jaxserve.ops.quantized import Quantized

_FITTING = "jaxserve plan MODEL --mesh N shows the splits of N devices that fit"

# Logical axis of a parameter -> mesh axes that split it. An axis that is not in the table is never split.
RULES: MappingProxyType[str, tuple[str, ...]] = MappingProxyType(
    {
        "vocab": ("tensor", "expert"),
        "kv_heads": ("tensor",),
        "q_heads": ("tensor",),
        "ffn": ("tensor", "expert"),
        "expert": ("expert",),
        "expert_ffn": ("tensor",),
    }
)


def for_mesh(config: ModelConfig, mesh: Mesh | AbstractMesh) -> ModelConfig:
    """Return the configuration for a mesh: kv heads are copied if there are fewer heads than devices.

    Raises ModelLoadError if the heads cannot be split evenly.
    """
    try:
        return config.for_tensor(mesh.shape.get("tensor", 1))
    except ValueError as error:
        raise ModelLoadError(
            f"{config.architecture}: {error}", fix=f"choose another mesh.tensor; {_FITTING}"
        ) from error


def param_sharding(spec: ParamSpec, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return the sharding of a parameter. Raises ModelLoadError if a dimension cannot be split evenly."""
    if _shared_by_row(spec):
        spec = dataclasses.replace(spec, axes=(*spec.axes[:-1], None))
    if not _divides(spec, "vocab", mesh):  # split the hidden size instead of the vocabulary
        hidden = tuple("tensor" if axis == "embed" else None for axis in spec.axes)
        if "embed" in spec.axes:
            _check(spec, "embed", mesh.shape.get("tensor", 1), "model.quantize_head: false")
        return _named(hidden, mesh)
    split = [_split(axis, mesh) for axis in spec.axes[:-1]] + [_split(spec.axes[-1], mesh, _num_groups(spec))]
    for axis, names in zip(spec.axes, split, strict=True):
        if axis is not None:
            _check(spec, axis, _size(names, mesh), "model.quantization: none")
    return _named((names or None for names in split), mesh)


def _shared_by_row(spec: ParamSpec) -> bool:
    """Return whether a leaf has one scale for a row, which all devices of the row then have.

    A row is not split if it is quantized at load, because its scale depends on the whole row; nor if it has 4 bits or
    belongs to experts, whose kernels multiply whole groups.
    """
    packing = spec.packing
    if packing is None or spec.shape[-1] != 1 or "expert" in spec.axes:
        return False
    return packing.stored and packing.kind in ("int8", "fp8")


def _num_groups(spec: ParamSpec) -> int:
    """Return how many groups of a row of a quantized weight have a scale; 1 for any other."""
    packing = spec.packing
    return 1 if packing is None else packing.wide[-1] // packing.group


def _split(axis: str | None, mesh: Mesh | AbstractMesh, num_groups: int = 1) -> tuple[str, ...]:
    """Return the mesh axes that split a logical axis; without "expert" if the groups of a dense row are too few."""
    names = _present(axis, mesh)
    if axis == "ffn" and num_groups > 1 and num_groups % _size(names, mesh):
        return tuple(name for name in names if name != "expert")
    return names


def _check(spec: ParamSpec, axis: str, devices: int, wide: str) -> None:
    """Raise ModelLoadError if a logical axis cannot be split evenly. wide: the setting that avoids quantization"""
    size = spec.shape[spec.axes.index(axis)]
    if size % devices:
        other = f", or {wide}" if spec.packing else ""
        raise ModelLoadError(
            f"{spec.name}: {axis} of {size} cannot be split over {devices} devices",
            fix=f"choose other mesh.tensor and mesh.expert{other}; {_FITTING}",
        )


def depth_axes(axes: Axes, weight: Weight) -> tuple[str, ...]:
    """Return the mesh axes that split the last dimension of a weight with logical `axes`: products are summed.

    weight: in a program that is being traced. Returns () on one device.
    """
    mesh = jax.typeof(jax.tree.leaves(weight)[0]).sharding.mesh
    if axes[0] == "vocab" and not vocab_axes(weight.shape[0], mesh):  # see `param_sharding`
        return tuple(name for name in ("tensor",) if mesh.shape.get(name, 1) > 1)
    return _split(axes[-1], mesh, weight.scales.shape[-1] if isinstance(weight, Quantized) else 1)


def vocab_axes(size: int, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes that split a vocabulary of `size` tokens; none if it cannot be split evenly."""
    return _present("vocab", mesh) if size % _count("vocab", mesh) == 0 else ()


def _named(axes: object, mesh: Mesh | AbstractMesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*axes))  # type: ignore[misc]


def _present(axis: str | None, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes that split a logical axis, without axes of one device."""
    return tuple(name for name in RULES.get(axis or "", ()) if mesh.shape.get(name, 1) > 1)


def _count(axis: str, mesh: Mesh | AbstractMesh) -> int:
    return _size(_present(axis, mesh), mesh)


def _size(names: tuple[str, ...], mesh: Mesh | AbstractMesh) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _divides(spec: ParamSpec, axis: str, mesh: Mesh | AbstractMesh) -> bool:
    return axis not in spec.axes or spec.shape[spec.axes.index(axis)] % _count(axis, mesh) == 0
