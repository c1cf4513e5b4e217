"""Quantized weights in a model: the layers that have them, and the leaves of each weight.

The code of a layer is the same for both: its `weight[...]` is an array or an `ops.quantized.Quantized`, and `linear`
and `moe` accept either.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import EllipsisType, MappingProxyType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import ModelLoadError
from jaxserve.models.layers import GateUpProj, Linear, QKVProj
from jaxserve.models.moe import ExpertProj
from jaxserve.models.stored_form import Kind, StoredForm
from jaxserve.models.weights import Axes, Packing, Part, Role, full_name
from jaxserve.ops.quantized import BLOCK, Quantized

_QUANTIZED = (Linear, QKVProj, GateUpProj, ExpertProj)
_FIX = "set model.quantization: none"
_HEAD = "lm_head"
_WIDE = (_HEAD, "score")  # not quantized at load; embeddings, norms and routers are modules of other classes
_E4M3 = jnp.float8_e4m3fn
# dtypes of values and scales, and the most weights that share a scale if it is chosen here
_FORMS: Mapping[Kind, tuple[DTypeLike, DTypeLike, int]] = MappingProxyType(
    {
        "int8": (jnp.int8, jnp.float32, 128),
        "int4": (jnp.uint8, jnp.float32, BLOCK),
        "fp8": (_E4M3, jnp.float32, 128),
        "mxfp8": (_E4M3, jnp.uint8, BLOCK),
        "mxfp4": (jnp.uint8, jnp.uint8, BLOCK),
        "nvfp4": (jnp.uint8, _E4M3, 16),
    }
)


class QuantizedWeight(nnx.Module):
    """A layer's quantized weight [..., N, K].

    group: weights of a row that share a scale. ordered: whether it has an order of its inputs
    """

    def __init__(
        self,
        wide: nnx.Param,
        kind: Kind,
        group: int,
        *,
        stored: bool = False,
        zeros: bool = False,
        ordered: bool = False,
    ) -> None:
        *rows, depth = wide.shape
        metadata: dict[str, Any] = {name: wide.get_metadata()[name] for name in ("axes", "init", "parts")}

        def leaf(role: Role, shape: tuple[int, ...], dtype: DTypeLike, axes: Axes | None = None) -> nnx.Param:
            packing = Packing(kind, group, role, wide.shape, stored, zeros)
            own: dict[str, Any] = metadata if axes is None else metadata | {"axes": axes}
            return nnx.Param(jnp.zeros(shape, dtype), packing=packing, **own)

        values, scale, _ = _FORMS[kind]
        self.values = leaf("values", (*rows, depth // 2 if values == jnp.uint8 else depth), values)
        self.scales = leaf("scales", (*rows, depth // group), scale)
        self.zeros = leaf("zeros", (*rows, depth // group), jnp.float32) if zeros else None
        self.order = leaf("order", (depth,), jnp.int32, (None,)) if ordered else None
        shape, axes = _of_tensors(wide.shape, metadata["axes"], metadata["parts"])
        self.tensor_scale = leaf("tensor_scale", shape, jnp.float32, axes) if kind == "nvfp4" else None

    def __getitem__(self, index: EllipsisType) -> Quantized:
        others = (None if leaf is None else leaf[...] for leaf in (self.zeros, self.order, self.tensor_scale))
        return Quantized(self.values[...], self.scales[...], *others)


def _of_tensors(shape: tuple[int, ...], axes: Axes, parts: tuple[Part, ...]) -> tuple[tuple[int, ...], Axes]:
    """Return the shape and axes of the scales of a weight's tensors: 1 and None in place of an axis that all share.

    Experts and kv heads keep their axes, which a mesh may split or copy.
    """

    def shared(axis: int) -> bool:
        whole = all(part.view[axis] == shape[axis] for part in parts)
        return axis == len(shape) - 1 or (whole and axes[axis] not in ("expert", "kv_heads"))

    found = [(1, None) if shared(axis) else (size, axes[axis]) for axis, size in enumerate(shape)]
    sizes, names = zip(*found, strict=True)
    return sizes, names


def quantize(model: nnx.Module, kind: Kind, *, head: bool = False) -> None:
    """Replace the weights of linear layers and experts in a model made under `nnx.eval_shape`.

    A weight stays unquantized if K is not a multiple of 32. Heads, embeddings, norms, routers and MLA's projections
    always stay so. head: quantize the output head too. Raises ModelLoadError if there is no head that can be quantized.
    """
    layers = _layers(model)
    if head and not any(path[0] == _HEAD and module.weight.shape[-1] % BLOCK == 0 for path, module in layers):
        raise ModelLoadError(
            "the model has no output head of its own in rows of whole groups", fix="set model.quantize_head: false"
        )
    for path, module in layers:
        if path[0] in _WIDE and not (head and path[0] == _HEAD):
            continue
        depth = module.weight.shape[-1]
        if depth % BLOCK == 0:
            _replace(module, QuantizedWeight(module.weight, kind, group_size(depth, kind)))


def keep_stored(model: nnx.Module, form: StoredForm) -> None:
    """Replace the weights that a checkpoint stores quantized, in a model made under `nnx.eval_shape`.

    Floating-point weights whose rows cannot be grouped are dequantized. Raises ModelLoadError for a fused weight whose
    parts have different forms, for rows of integers that cannot be grouped, and for GGUF types that cannot stay
    quantized.
    """
    if form.not_held():
        raise ModelLoadError(f"weights of GGUF's type {' and '.join(form.not_held())} do not stay quantized", fix=_FIX)
    for path, module in _layers(model):
        scope, parts = path[:-1] if module.weight.parts else path, module.weight.parts
        if form.method == "gpt-oss" and not any(part.mxfp4 for part in parts):
            continue
        if form.is_integer and any(len(part.shape) != 2 for part in parts):
            continue  # one tensor of all experts, which no tool stores as integers
        names = [full_name(part, scope).rpartition(".")[0] for part in parts] or [".".join(path)]
        quantized = [name for name in names if not form.is_wide(name)]
        if not quantized:
            continue
        depth = module.weight.shape[-1]
        own = form.holding(quantized)
        kind = own.kind
        group = _stored_group(own, depth, kind, experts=isinstance(module, ExpertProj))
        if own.is_float and not group:
            continue
        _check_alike(form, names, quantized)
        if not group or depth % group:
            raise ModelLoadError(
                f"{names[0]}: rows of {depth} numbers are no whole groups of {group or BLOCK}", fix=_FIX
            )
        ordered = form.permuted and not isinstance(module, ExpertProj)
        weight = QuantizedWeight(module.weight, kind, group, stored=True, zeros=own.zeros, ordered=ordered)
        _replace(module, weight)


def _check_alike(form: StoredForm, names: list[str], quantized: list[str]) -> None:
    """Raise ModelLoadError unless the tensors of a fused weight, by the names of their modules, have one form.

    quantized: the names whose tensors are quantized, at least one
    """
    if len(quantized) < len(names):
        wide = next(name for name in names if name not in quantized)
        raise ModelLoadError(f"{quantized[0]} is quantized and {wide} is not, and they are computed as one", fix=_FIX)
    if other := next((name for name in quantized if form.of(name) != form.of(names[0])), None):
        raise ModelLoadError(f"{names[0]} and {other} differ in form, and they are computed as one", fix=_FIX)


def _stored_group(form: StoredForm, depth: int, kind: Kind, *, experts: bool) -> int:
    """Return the number of weights that share a scale in a row of `depth`; 0: they cannot be grouped.

    For 8 bits, one scale for a row is stored once, so that whole rows can be multiplied (`ops.linear.rounded`). For 4
    bits and for experts it is repeated, because their kernels read a scale with each tile.
    """
    if form.group is None:
        if depth % BLOCK:
            return 0
        return group_size(depth, kind) if experts or kind == "int4" else depth
    if not form.is_float:
        return form.group
    if kind != "fp8":
        return form.group if depth % BLOCK == 0 else 0
    group = math.gcd(form.group, depth)  # the last block of a row may be shorter
    return group if group % BLOCK == 0 else 0


def _layers(model: nnx.Module) -> list[tuple[tuple[str, ...], Linear | QKVProj | GateUpProj | ExpertProj]]:
    """Return the layers that may be quantized, with their paths."""
    found = ((tuple(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return [(path, module) for path, module in found if isinstance(module, _QUANTIZED)]


def _replace(module: Linear | QKVProj | GateUpProj | ExpertProj, weight: QuantizedWeight) -> None:
    module.weight = weight  # type: ignore[assignment]


def group_size(depth: int, kind: Kind) -> int:
    """Return the group of weights quantized at load: the largest of `kind` that divides a row of `depth`."""
    return next(group for group in (128, 64, BLOCK, 16) if group <= _FORMS[kind][2] and depth % group == 0)
