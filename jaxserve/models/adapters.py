"""A model whose linear layers have room for adapters: its structure, and where the tensors of an adapter belong.

`AdaptedStructure` is made of a ModelStructure. Its stacks, A and B of each layer (`models.low_rank`), are arrays beside
the leaves, so the weights are loaded, replaced and quantized as without adapters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.decoder import CausalLM
from jaxserve.models.low_rank import Adaptable, LowRank
from jaxserve.models.weights import ParamSpec, Part, full_name, param_specs
from jaxserve.ops.linear import AdapterRows

_WEIGHT = ".weight"
_STACKS = "adapters"  # the attribute of a layer that has them


@dataclass(frozen=True)
class AdapterShape:
    """The room for adapters. slots: adapters on the devices at once. rank: the highest that fits, a power of two"""

    slots: int
    rank: int

    @property
    def columns(self) -> int:
        """Return K of `models.low_rank`."""
        return self.slots * self.rank

    def rows(self, slots: jax.Array) -> AdapterRows:
        """Return the adapters of T rows by their slots, int32 [T]. A row of slot -1 has none."""
        of_column = jnp.arange(self.columns, dtype=jnp.int32) // self.rank
        used = slots >= 0
        return AdapterRows(slots[:, None] == of_column[None, :], used, used.any())


@dataclass(frozen=True)
class AdaptedTensor:
    """A checkpoint tensor [out, in] that an adapter may change.

    parts: the rectangles of the layer's weight that its rows fill. origin: index in the weight, without the last
    dimension, at which these rows begin
    """

    shape: tuple[int, int]
    parts: tuple[Part, ...]
    origin: tuple[int, ...]


@dataclass(frozen=True)
class AdaptedLayer:
    """A layer with room for adapters.

    weight: name of its weight
    axis: dimension of the weight along which the rows of several tensors are side by side
    tensors: by the name of their module in the checkpoint
    a: index of A among the stacks
    b: index of B among the stacks, for each tensor
    rows: shape of B without its columns, for each tensor
    """

    weight: str
    axis: int
    tensors: Mapping[str, AdaptedTensor]
    a: int
    b: tuple[int, ...]
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class AdaptedStructure:
    """A model without its weights, with room for adapters. stacks: specs of the arrays of all slots, in order"""

    shape: AdapterShape
    structure: ModelStructure
    stacks: tuple[ParamSpec, ...]
    layers: tuple[AdaptedLayer, ...]
    _graphdef: nnx.GraphDef
    _treedef: Any
    _places: tuple[int, ...]  # of the model's arrays, in order, among the leaves followed by the stacks

    def bind(self, arrays: tuple[jax.Array, ...]) -> CausalLM:
        """Make the module of the leaves and, behind them, the stacks: arrays [*spec.shape]. Others are not read."""
        model = nnx.merge(self._graphdef, jax.tree.unflatten(self._treedef, [arrays[i] for i in self._places]))
        assert isinstance(model, CausalLM)
        return model

    @property
    def tensors(self) -> dict[str, AdaptedTensor]:
        """The tensors that an adapter may change, by the names of their modules in the checkpoint."""
        return {name: tensor for layer in self.layers for name, tensor in layer.tensors.items()}

    def updates(self, pairs: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, ...]:
        """Return the columns of one slot of every stack, for an adapter of checked shapes.

        pairs: A [r, in] and B [out, r], float32, by the name of their module; B is scaled
        """
        found: list[np.ndarray | None] = [None] * len(self.stacks)
        for layer in self.layers:
            a = np.zeros(self._update_shape(layer.a), np.float32)
            for part, (name, tensor) in enumerate(layer.tensors.items()):
                b = np.zeros((*layer.rows[part], self.shape.rank), np.float32)
                if (pair := pairs.get(name)) is not None:
                    rank = pair[0].shape[0]
                    a[part, :rank] = pair[0]
                    _place(pair[1], tensor, b[..., :rank])
                found[layer.b[part]] = b
            found[layer.a] = a
        return tuple(
            update.astype(spec.dtype) for update, spec in zip(found, self.stacks, strict=True) if update is not None
        )

    def merge(self, leaves: Sequence[jax.Array], updates: Sequence[np.ndarray]) -> tuple[jax.Array, ...]:
        """Return the model's leaves [*spec.shape] with an adapter added, computed in float32.

        updates: as the method `updates` makes them. Raises ModelLoadError if a weight that it changes is quantized.
        """
        merged, names = list(leaves), [spec.name for spec in self.structure.specs]
        for layer in self.layers:
            if not any(updates[i].any() for i in layer.b):
                continue
            if layer.weight not in names:
                raise ModelLoadError(f"{layer.weight} is quantized", fix="convert with --quantization none")
            a = updates[layer.a].astype(np.float32)
            parts = [np.tensordot(updates[i].astype(np.float32), a[part], 1) for part, i in enumerate(layer.b)]
            place = names.index(layer.weight)
            leaf = merged[place]
            added = np.asarray(leaf).astype(np.float32) + np.concatenate(parts, axis=layer.axis)
            merged[place] = jax.device_put(added.astype(leaf.dtype), leaf.sharding)
        return tuple(merged)

    def _update_shape(self, index: int) -> tuple[int, ...]:
        return update_shape(self.stacks[index], self.shape)


def update_shape(stack: ParamSpec, shape: AdapterShape) -> tuple[int, ...]:
    """Return the shape of one slot's columns of a stack."""
    axis = column_axis(stack)
    return tuple(shape.rank if i == axis else size for i, size in enumerate(stack.shape))


def column_axis(stack: ParamSpec) -> int:
    """Return the dimension of a stack that has the columns of all slots."""
    return 1 if stack.name.endswith(".a") else len(stack.shape) - 1


def _place(b: np.ndarray, tensor: AdaptedTensor, out: np.ndarray) -> None:
    """Write the rows of b [out, r] to the rectangles of its tensor in out [*rows, r]."""
    for part in tensor.parts:
        first, last = part.rows or (0, part.shape[0])
        once = (part.view[0] // part.repeat, *part.view[1:-1], b.shape[1])
        view = np.repeat(b[first:last].reshape(once), part.repeat, axis=0)
        begins = [start - begin for start, begin in zip(part.start[:-1], tensor.origin, strict=True)]
        out[tuple(slice(a, a + n) for a, n in zip(begins, part.view[:-1], strict=True))] = view


def adapt(structure: ModelStructure, shape: AdapterShape) -> AdaptedStructure:
    """Return the structure with room for adapters in every linear layer of the decoder's layers that can have some.

    Experts, embeddings and the head have none.
    """
    leaves = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in structure.specs]
    model = nnx.merge(structure.graphdef, jax.tree.unflatten(structure.treedef, leaves))
    own = [spec.name for spec in structure.specs]
    found: dict[str, tuple[dict[str, AdaptedTensor], int]] = {}
    for path, module in list(nnx.iter_modules(model)):
        names = tuple(map(str, path))
        if isinstance(module, Adaptable) and names[:2] == ("model", "layers"):
            tensors, axis = _give_room(module, names, shape, structure.activation_dtype)
            if tensors:
                found[".".join(names)] = tensors, axis
    graphdef, state = nnx.split(model)
    specs = list(param_specs(state))
    stacks = tuple(spec for spec in specs if spec.name not in set(own))
    index = {name: i for i, name in enumerate((*own, *(stack.name for stack in stacks)))}
    layers = tuple(_layer(path, tensors, axis, stacks) for path, (tensors, axis) in found.items())
    places = tuple(index[spec.name] for spec in specs)
    return AdaptedStructure(shape, structure, stacks, layers, graphdef, jax.tree.structure(state), places)


def _layer(path: str, tensors: dict[str, AdaptedTensor], axis: int, stacks: Sequence[ParamSpec]) -> AdaptedLayer:
    names = [stack.name for stack in stacks]
    begin = f"{path}.{_STACKS}"
    b = tuple(names.index(f"{begin}.b.{part}") for part in range(len(tensors)))
    return AdaptedLayer(
        f"{path}{_WEIGHT}", axis, tensors, names.index(f"{begin}.a"), b, tuple(stacks[i].shape[:-1] for i in b)
    )


def _give_room(
    module: Adaptable, path: tuple[str, ...], shape: AdapterShape, dtype: jnp.dtype
) -> tuple[dict[str, AdaptedTensor], int]:
    """Give a layer its stacks. Returns its tensors, by the names of their modules, and the axis, see AdaptedLayer.

    There are no tensors, and no stacks, if the layer's weight has a form that adapters cannot have: a transposed or
    split tensor, one of all experts, or tensors that are not side by side along one axis.
    """
    weight, wide = module.weight, None
    if not isinstance(weight, nnx.Variable):  # a QuantizedWeight
        weight = weight.values
        wide = weight.get_metadata()["packing"].wide
    size: tuple[int, ...] = tuple(weight.shape) if wide is None else wide
    metadata = weight.get_metadata()
    axes, parts = metadata["axes"], metadata["parts"]
    scope = path[:-1] if parts else path
    parts = parts or (Part("weight", size, size, (0,) * len(size)),)
    by_name: dict[str, list[Part]] = {}
    for part in parts:
        by_name.setdefault(full_name(part, scope), []).append(part)
    if any(part.transpose or part.split or part.mxfp4 or len(part.shape) != 2 for part in parts):
        return {}, 0
    if (found := _side_by_side(list(by_name.values()), size)) is None:
        return {}, 0
    axis, spans = found
    rows = [tuple(end - begin if i == axis else n for i, n in enumerate(size[:-1])) for begin, end in spans]
    outputs = [(shape, tuple(axes[:-1])) for shape in rows]
    module.adapters = nnx.eval_shape(lambda: LowRank((size[-1], axes[-1]), outputs, axis, shape.columns, dtype))
    tensors = {
        name.removesuffix(_WEIGHT): AdaptedTensor(
            (own[0].shape[0], own[0].shape[1]),
            tuple(own),
            tuple(begin if i == axis else 0 for i in range(len(size) - 1)),
        )
        for (name, own), (begin, _) in zip(by_name.items(), spans, strict=True)
    }
    return tensors, axis


def _side_by_side(tensors: Sequence[Sequence[Part]], size: tuple[int, ...]) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the axis of a weight along which the rows of its tensors are side by side, and the span of each.

    tensors: the parts of each. size: of the weight. None: they are not side by side
    """
    if len(tensors) == 1:
        return 0, [(0, size[0])]
    starts = [part.start for parts in tensors for part in parts]
    axis, *others = (i for i in range(len(size)) if len({start[i] for start in starts}) > 1)
    spans = [_span(parts, axis) for parts in tensors]
    follow = [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
    return (axis, spans) if follow and not others else None


def _span(parts: Sequence[Part], axis: int) -> tuple[int, int]:
    """Return the first row of a tensor's parts along an axis of the weight, and the first one behind them."""
    return min(part.start[axis] for part in parts), max(part.start[axis] + part.view[axis] for part in parts)
