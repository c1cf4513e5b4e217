"""The weights of a runner while it serves: replaced without compiling, kept in host memory, or dropped.

No step may be on the devices during any of these calls. `tensor_of` reads a checkpoint tensor back from the parameters
made of it, as the inverse of models/checkpoint/loader.py.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.errors import ConflictError, InvalidValueError, WeightsLostError
from jaxserve.models.checkpoint.quantization import by_parameter
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.checkpoint.weight_sources import Specs, WeightSource
from jaxserve.models.weights import ParamSpec, Part

MAX_NUMBERS = 2**19  # values of one answer; more would delay the HTTP process by at least 0.1 s


def tensor_of(specs: Sequence[ParamSpec], leaves: Sequence[jax.Array], name: str, num_rows: int) -> np.ndarray:
    """Return the first `num_rows` indices of the first axis of checkpoint tensor `name`: float32 [rows, ...].

    specs, leaves: of all parameters, in the same order. Raises InvalidValueError if no parameter has the tensor, if it
    is quantized, or if the answer would have more than MAX_NUMBERS values.
    """
    found = list(_parts_of(specs, leaves, name))
    if not found:
        raise InvalidValueError(f"the model has no tensor {name[:200]!r}", param="name")
    shape = found[0][1].shape
    if not shape:  # one number
        return _numbers(np.asarray(found[0][0]), found[0][1]).astype(np.float32).reshape(())
    num_rows = min(num_rows, shape[0])
    if (most := MAX_NUMBERS // max(1, int(np.prod(shape[1:])))) < num_rows:
        raise InvalidValueError(
            f"{num_rows} rows of a tensor {list(shape)} are too many; at most {most}", param="truncate_size"
        )
    out = np.zeros(shape, np.float32)
    for leaf, part in found:
        first, last = part.rows or (0, shape[0])
        out[first:last] = _numbers(np.asarray(leaf), part).reshape(last - first, *shape[1:])
    return out[:num_rows]


def _parts_of(specs: Sequence[ParamSpec], leaves: Sequence[jax.Array], name: str) -> Iterator[tuple[jax.Array, Part]]:
    for spec, leaf in zip(specs, leaves, strict=True):
        for part in spec.parts:
            if part.name == name:
                if spec.packing is not None:
                    raise InvalidValueError(f"{name} is held in {spec.packing.kind}", param="name")
                yield leaf, part


def _numbers(leaf: np.ndarray, part: Part) -> np.ndarray:
    """Return the values that a part has of its checkpoint tensor, in that tensor's order."""
    view = leaf[tuple(slice(start, start + size) for start, size in zip(part.start, part.view, strict=True))]
    once = view[:: part.repeat]
    if part.transpose is None:
        return once
    first, last = part.rows or (0, part.shape[0])
    shape = part.split or (last - first, *part.shape[1:])
    return once.reshape([shape[axis] for axis in part.transpose]).transpose(np.argsort(part.transpose))


Leaves = tuple[jax.Array, ...]
Tick = Callable[[], None]  # called after each parameter, so that a long call is seen to make progress
Place = Literal["device", "host", "none"]
_HOST = "pinned_host"


class HoldsLeaves(Protocol):
    """The part of a runner that has its weights. draft_leaves: of a draft model"""

    leaves: Leaves
    draft_leaves: Leaves


@dataclass(frozen=True)
class _Staged:
    """Weights in the memory of the host, by the name of their parameter."""

    leaves: dict[str, Leaves]
    arrays: Sequence[Any] = ()

    @property
    def parameters(self) -> frozenset[str]:
        return frozenset(self.leaves)

    def make(self, specs: Specs, shardings: Sequence[Sharding]) -> Leaves:
        staged = self.leaves.pop(specs[0].wide().name)
        leaves = tuple(jax.device_put(leaf, place) for leaf, place in zip(staged, shardings, strict=True))
        jax.block_until_ready(leaves)
        _delete(staged)
        return leaves


class DeviceWeights:
    """Replaces, moves and drops the weights of a runner.

    place: where the weights are. Weights can only be used on the devices.

    No update has the weights of a draft model. They leave the devices and come back with the model's, and wait in the
    memory of the host also while those are dropped.
    """

    def __init__(self, runner: HoldsLeaves, structure: ModelStructure) -> None:
        self.structure = structure
        self.place: Place = "device"
        self._runner = runner
        self._shardings: list[Sharding] = [leaf.sharding for leaf in runner.leaves]
        self._draft_shardings: list[Sharding] = [leaf.sharding for leaf in runner.draft_leaves]
        self._hosted: list[jax.Array] = []
        self._hosted_draft: list[jax.Array] = []

    def staged(self, source: WeightSource, tick: Tick = lambda: None) -> WeightSource:
        """Return the weights of `source`, made in the memory of the host. If that fails, nothing has changed."""
        hosts = [sharding.with_memory_kind(_HOST) for sharding in self._shardings]
        made: dict[str, Leaves] = {}
        for _, specs, leaves in self._made(source, hosts):
            made[specs[0].wide().name] = leaves
            tick()
        return _Staged(made)

    def replace(self, source: WeightSource, tick: Tick = lambda: None) -> None:
        """Use the weights of `source` from the next step on.

        One parameter is replaced after the other, so that the devices hold one parameter more than the weights. Arrays
        of this runner are copied first, because they are freed here.
        Raises WeightsLostError if that fails half way, ConflictError if parameters would be missing.
        """
        if self._shares(source.arrays):
            source = self.staged(source)
        if self.place != "device":
            self._bring_back(source)
        self._replace(source, tick)

    def read(self, name: str, num_rows: int) -> np.ndarray:
        """Return the first rows of a checkpoint tensor, see `tensor_of`. Raises ConflictError unless on the devices."""
        if self.place != "device":
            raise ConflictError("the weights are not on the devices")
        return tensor_of(self.structure.specs, self._runner.leaves, name, num_rows)

    def check(self, source: WeightSource) -> None:
        """Raise ConflictError if the weights were dropped, and `source` does not have all of them."""
        if self.place == "none" and not self._has_all(source):
            raise ConflictError("the weights were dropped, so an update must have all of them")

    def _has_all(self, source: WeightSource) -> bool:
        return source.parameters >= {spec.wide().name for spec in self.structure.specs}

    def _bring_back(self, source: WeightSource) -> None:
        """Prepare an update of weights that are not on the devices. A complete update needs no old weights."""
        self.check(source)
        if self._has_all(source):
            self.drop()
        else:
            self.to_device()

    def _made(self, source: WeightSource, shardings: list[Sharding]) -> Iterator[tuple[range, Specs, Leaves]]:
        """Yield the new leaves of each parameter of the source, with their indices."""
        for indices, specs in self._groups():
            if specs[0].wide().name in source.parameters:
                leaves = source.make(specs, [shardings[i] for i in indices])
                yield indices, specs, jax.block_until_ready(leaves)

    def _groups(self) -> Iterator[tuple[range, Specs]]:
        first = 0
        for specs in by_parameter(self.structure.specs):
            yield range(first, first + len(specs)), specs
            first += len(specs)

    def _replace(self, source: WeightSource, tick: Tick) -> None:
        leaves, begun = list(self._runner.leaves), False
        try:
            for indices, _, new in self._made(source, self._shardings):
                begun = True
                for i, leaf in zip(indices, new, strict=True):
                    leaves[i].delete()
                    leaves[i] = leaf
                tick()
            self._draft_to_device()
        except BaseException as error:
            if not begun and self.place == "device":
                raise
            self._runner.leaves = tuple(leaves)
            self._free()
            raise WeightsLostError(f"the update failed half way: {type(error).__name__}: {error}") from error
        self._runner.leaves = tuple(leaves)
        self.place = "device"

    def _shares(self, arrays: Sequence[Any]) -> bool:
        """Return whether one of the arrays shares memory with this runner's leaves."""
        own = sorted(bounds for leaf in self._runner.leaves for bounds in _bounds(leaf))
        ends = [end for _, end in own]
        for array in arrays:
            for begin, end in _bounds(array):
                place = bisect.bisect_right(ends, begin)
                if place < len(own) and own[place][0] < end:
                    return True
        return False

    # --- asleep

    def to_host(self) -> None:
        """Move the weights to the memory of the host."""
        if self.place != "device":
            return
        hosted = _on_host(self._runner.leaves)
        self._draft_to_host()
        self._hosted = hosted
        _delete(self._runner.leaves)
        self.place = "host"

    def to_device(self) -> None:
        """Move the weights back from the memory of the host. Dropped weights stay dropped."""
        if self.place != "host":
            return
        leaves = _placed(self._hosted, self._shardings)
        self._draft_to_device()
        self._runner.leaves = leaves
        _delete(self._hosted)
        self._hosted = []
        self.place = "device"

    def drop(self) -> None:
        """Free the weights wherever they are. Those of a draft model move to the memory of the host."""
        self._draft_to_host()
        self._free()

    def _free(self) -> None:
        _delete(self._hosted)
        self._hosted = []
        _delete(self._runner.leaves)
        self.place = "none"

    def _draft_to_host(self) -> None:
        if not self._hosted_draft:
            self._hosted_draft = _on_host(self._runner.draft_leaves)
            _delete(self._runner.draft_leaves)

    def _draft_to_device(self) -> None:
        if self._hosted_draft:
            self._runner.draft_leaves = _placed(self._hosted_draft, self._draft_shardings)
            _delete(self._hosted_draft)
            self._hosted_draft = []


def _on_host(leaves: Leaves) -> list[jax.Array]:
    """Return copies [shape] of the leaves in the memory of the host."""
    hosts = [leaf.sharding.with_memory_kind(_HOST) for leaf in leaves]
    copies = [jax.device_put(leaf, host, may_alias=False) for leaf, host in zip(leaves, hosts, strict=True)]
    return jax.block_until_ready(copies)


def _placed(leaves: Sequence[jax.Array], shardings: Sequence[Sharding]) -> Leaves:
    """Return copies [shape] of the leaves on the devices."""
    return tuple(jax.block_until_ready([jax.device_put(x, place) for x, place in zip(leaves, shardings, strict=True)]))


def _delete(leaves: Sequence[jax.Array]) -> None:
    for leaf in leaves:
        leaf.delete()


def _bounds(array: jax.Array | np.ndarray) -> list[tuple[int, int]]:
    """Return the addresses of the memory of an array: [first, last + 1) of each piece."""
    if isinstance(array, np.ndarray):
        return [np.lib.array_utils.byte_bounds(array)]
    if array.is_deleted():
        return []
    pieces = [shard.data for shard in array.addressable_shards]
    return [(piece.unsafe_buffer_pointer(), piece.unsafe_buffer_pointer() + piece.nbytes) for piece in pieces]
