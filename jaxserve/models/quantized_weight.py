"""Quantized weights in a model: the layers that have them, and the leaves of each weight.

The code of a layer is the same for both: its `weight[...]` is an array or an `ops.quantized.Quantized`, and `linear`
and `moe` accept either.
"""

from __future__ import annotations

import math
from types import EllipsisType
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jaxserve.errors import ModelLoadError
from jaxserve.models.layers import GateUpProj, Linear, QKVProj
from jaxserve.models.moe import ExpertProj
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import Kind, Packing, Role
from jaxserve.ops.quantized import BLOCK, Quantized

_QUANTIZED = (Linear, QKVProj, GateUpProj, ExpertProj)
_FIX = "set model.quantization: none"
_HEAD = "lm_head"
_WIDE = (_HEAD, "score")  # not quantized at load; embeddings, norms and routers are modules of other classes
_DTYPES = {"int8": jnp.int8, "int4": jnp.uint8, "fp8": jnp.float8_e4m3fn, "mxfp4": jnp.uint8}
_LARGEST_GROUP = {"int8": 128, "int4": BLOCK, "fp8": 128, "mxfp4": BLOCK}


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

        def leaf(role: Role, shape: tuple[int, ...], dtype: DTypeLike) -> nnx.Param:
            packing = Packing(kind, group, role, wide.shape, stored, zeros)
            axes: dict[str, Any] = {"axes": (None,)} if role == "order" else {}
            return nnx.Param(jnp.zeros(shape, dtype), packing=packing, **metadata | axes)

        halved, scale = kind in ("int4", "mxfp4"), jnp.uint8 if kind == "mxfp4" else jnp.float32
        self.values = leaf("values", (*rows, depth // 2 if halved else depth), _DTYPES[kind])
        self.scales = leaf("scales", (*rows, depth // group), scale)
        self.zeros = leaf("zeros", (*rows, depth // group), jnp.float32) if zeros else None
        self.order = leaf("order", (depth,), jnp.int32) if ordered else None

    def __getitem__(self, index: EllipsisType) -> Quantized:
        zeros, order = (None if leaf is None else leaf[...] for leaf in (self.zeros, self.order))
        return Quantized(self.values[...], self.scales[...], zeros, order)


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

    FP8 weights whose rows cannot be grouped are dequantized. Raises ModelLoadError for a fused weight of which only a
    part is quantized, for rows of integers that cannot be grouped, and for GGUF types that cannot stay quantized.
    """
    if form.not_held():
        raise ModelLoadError(
            f"weights of GGUF's type {' and '.join(form.not_held())} are not kept in few bits", fix=_FIX
        )
    for path, module in _layers(model):
        scope, parts = path[:-1] if module.weight.parts else path, module.weight.parts
        if form.method == "mxfp4" and not any(part.mxfp4 for part in parts):
            continue
        names = [".".join((*scope, *part.name.split(".")[:-1])) for part in parts] or [".".join(path)]
        quantized = [name for name in names if not form.is_wide(name)]
        depth = module.weight.shape[-1]
        own = form.holding(quantized)
        kind = _kind(own)
        group = _stored_group(own, depth, kind, experts=isinstance(module, ExpertProj))
        if not quantized or (kind == "fp8" and not group):
            continue
        if len(quantized) < len(names):
            wide = next(name for name in names if name not in quantized)
            raise ModelLoadError(
                f"{quantized[0]} is quantised and {wide} is not, and they are computed as one", fix=_FIX
            )
        if not group or depth % group:
            raise ModelLoadError(
                f"{names[0]}: rows of {depth} numbers are no whole groups of {group or BLOCK}", fix=_FIX
            )
        ordered = form.permuted and not isinstance(module, ExpertProj)
        weight = QuantizedWeight(module.weight, kind, group, stored=True, zeros=own.zeros, ordered=ordered)
        _replace(module, weight)


def _kind(form: StoredForm) -> Kind:
    match form.method:
        case "fp8" | "mxfp4":
            return form.method
    return "int4" if form.bits == 4 else "int8"


def _stored_group(form: StoredForm, depth: int, kind: Kind, *, experts: bool) -> int:
    """Return the number of weights that share a scale in a row of `depth`; 0: they cannot be grouped.

    For 8 bits, one scale for a row is stored once, so that whole rows can be multiplied (`ops.linear.rounded`). For 4
    bits and for experts it is repeated, because their kernels read a scale with each tile.
    """
    if form.group is None:
        if depth % BLOCK:
            return 0
        return group_size(depth, kind) if experts or kind == "int4" else depth
    if kind != "fp8":
        return form.group
    group = math.gcd(form.group, depth)  # the last block of a row may be shorter
    return group if group % BLOCK == 0 else 0


def _layers(model: nnx.Module) -> list[tuple[tuple[str, ...], Linear | QKVProj | GateUpProj | ExpertProj]]:
    """Return the layers that may be quantized, with their paths."""
    found = ((tuple(map(str, path)), module) for path, module in nnx.iter_modules(model))
    return [(path, module) for path, module in found if isinstance(module, _QUANTIZED)]


def _replace(module: Linear | QKVProj | GateUpProj | ExpertProj, weight: QuantizedWeight) -> None:
    module.weight = weight  # type: ignore[assignment]


def group_size(depth: int, kind: Kind) -> int:
    """Return the largest group of 128 (of 4 bits: 32), 64 or 32 weights that divides a row of `depth`."""
    return next(group for group in (128, 64, BLOCK) if group <= _LARGEST_GROUP[kind] and depth % group == 0)
