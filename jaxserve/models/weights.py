"""Declarations of parameters: shape, logical axes, initial value, and the checkpoint tensors they are made of.

`param` declares a parameter, and `param_specs` reads the declarations back from a module.

A parameter has the name of its checkpoint tensor, as `tensor_names.renamed` gives it. A fused parameter has several
tensors, its parts. A part is a checkpoint tensor that is reshaped to `view` and fills the rectangle
[start, start + view) of the parameter:

    qkv_proj [KH, (G + 2) * H, D]   q_proj [KH * G * H, D] -> view [KH, G * H, D] at [0, 0,           0]
                                    k_proj [KH * H, D]     -> view [KH, H, D]     at [0, G * H,       0]
                                    v_proj [KH * H, D]     -> view [KH, H, D]     at [0, (G + 1) * H, 0]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from flax import nnx

from jaxserve.models.stored_form import Kind

Axes = tuple[str | None, ...]
Init = Literal["normal", "ones", "zeros"]
Role = Literal["values", "scales", "zeros", "order", "tensor_scale"]


@dataclass(frozen=True)
class Part:
    """One checkpoint tensor and the rectangle of the parameter that it fills.

    name: relative to the module two levels above the parameter ("q_proj.weight" for "...self_attn.qkv_proj.weight"); a
      leading dot means one level more.
    shape: in the checkpoint.
    rows: use only these rows of its first axis.
    split: a shape with more axes, applied before `transpose`, whose axes are in a new order before `view`.
    repeat: each index of the view's first axis is repeated this many times; `view` includes the copies.
    mxfp4: the checkpoint has `name`_blocks and `name`_scales, which are dequantized to `shape` (see float_formats).
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    start: tuple[int, ...]
    rows: tuple[int, int] | None = None
    split: tuple[int, ...] | None = None
    transpose: tuple[int, ...] | None = None
    repeat: int = 1
    mxfp4: bool = False


@dataclass(frozen=True)
class Packing:
    """The role of a leaf in a quantized parameter, whose unquantized shape is `wide`; see `ops.quantized`.

    stored: the checkpoint has quantized values; else they are quantized at load. zeros: whether there are zeros
    """

    kind: Kind
    group: int
    role: Role
    wide: tuple[int, ...]
    stored: bool = False
    zeros: bool = False


@dataclass(frozen=True)
class ParamSpec:
    """A declared parameter of a model, or a leaf of a quantized one. Its `parts` have full checkpoint names."""

    name: str
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: Axes
    init: Init
    parts: tuple[Part, ...]
    packing: Packing | None = None

    @property
    def num_parameters(self) -> int:
        """Return the number of weights in this leaf. A leaf of scales has 0."""
        if self.packing is None:
            return math.prod(self.shape)
        return math.prod(self.packing.wide) if self.packing.role == "values" else 0

    def wide(self) -> ParamSpec:
        """Return the unquantized parameter that a leaf belongs to, in float32; itself if it is unquantized."""
        if self.packing is None:
            return self
        name = self.name.rpartition(".")[0]
        dtype = jnp.dtype(jnp.float32)
        return dataclasses.replace(self, name=name, shape=self.packing.wide, dtype=dtype, packing=None)


def param(
    shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype, init: Init = "normal", parts: tuple[Part, ...] = ()
) -> nnx.Param:
    """Declare a parameter. `axes` has a logical name, or None, per dimension. Call it under `nnx.eval_shape`."""
    assert len(shape) == len(axes), (shape, axes)
    assert not parts or math.prod(shape) == sum(math.prod(part.view) for part in parts), (shape, parts)
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes, init=init, parts=parts)


def param_specs(state: nnx.State) -> Iterator[ParamSpec]:
    """Yield the declared parameters of an abstract model's state, in the order of its leaves."""
    for path, variable in nnx.to_flat_state(state):
        metadata = variable.get_metadata()
        packing = metadata.get("packing")
        leaf = tuple(str(p) for p in path)
        names, shape = (leaf, tuple(variable.shape)) if packing is None else (leaf[:-1], packing.wide)
        whole = Part(names[-1], shape, shape, (0,) * len(shape))
        scope = names[:-2] if metadata["parts"] else names[:-1]
        parts = tuple(_with_scope(part, scope) for part in metadata["parts"] or (whole,))
        kept = metadata["axes"], metadata["init"], parts, packing
        yield ParamSpec(".".join(leaf), tuple(variable.shape), variable.dtype, *kept)


def _with_scope(part: Part, scope: tuple[str, ...]) -> Part:
    return dataclasses.replace(part, name=full_name(part, scope))


def full_name(part: Part, scope: tuple[str, ...]) -> str:
    """Return the checkpoint's name of a part. scope: the module that its name is relative to"""
    name = part.name.lstrip(".")
    levels = len(part.name) - len(name)
    return ".".join((*scope[: len(scope) - levels], name))
