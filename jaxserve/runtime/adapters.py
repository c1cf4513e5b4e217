"""The adapters on the devices: the stacks of all layers, and which slot of them each running request uses.

An adapter is written to a slot by one program, which is compiled at the start, so that loading compiles nothing. The
stacks are arguments of the step programs, behind the weights. A step that was dispatched before a write reads the old
arrays, since XLA orders the write after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jaxserve.errors import ServerError
from jaxserve.models.adapters import AdaptedStructure, column_axis, update_shape
from jaxserve.models.checkpoint.adapter import Adapter
from jaxserve.models.sharding import param_sharding
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.types.step import SlotInit

NO_ADAPTER = -1


@dataclass(frozen=True, eq=False)
class AdapterArrays:
    """The shapes and shardings of the stacks, and of the table: the adapter of each slot of requests, int32 [S]."""

    adapted: AdaptedStructure
    max_num_seqs: int
    mesh: DeviceMesh

    @property
    def shardings(self) -> list[NamedSharding]:
        return [param_sharding(stack, self.mesh.mesh) for stack in self.adapted.stacks]

    @property
    def stacks(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        pairs = zip(self.adapted.stacks, self.shardings, strict=True)
        return tuple(jax.ShapeDtypeStruct(stack.shape, stack.dtype, sharding=cut) for stack, cut in pairs)

    @property
    def updates(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Structs of the columns of one slot of each stack."""
        return tuple(
            jax.ShapeDtypeStruct(update_shape(stack, self.adapted.shape), stack.dtype, sharding=cut)
            for stack, cut in zip(self.adapted.stacks, self.shardings, strict=True)
        )

    @property
    def table(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.max_num_seqs,), jnp.int32, sharding=self.mesh.replicated)

    @property
    def structs(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """The stacks and the table, in the order in which the step programs take them behind the weights."""
        return (*self.stacks, self.table)

    def write(
        self, stacks: tuple[jax.Array, ...], updates: tuple[jax.Array, ...], slot: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Return the stacks with the columns of one slot replaced. A device program.

        stacks, updates: as the structs of these names. slot: int32 scalar
        """
        first = slot * self.adapted.shape.rank
        return tuple(
            jax.lax.dynamic_update_slice_in_dim(stack, update, first, column_axis(spec))
            for spec, stack, update in zip(self.adapted.stacks, stacks, updates, strict=True)
        )


class DeviceAdapters:
    """The adapters of one runner.

    held: adapters in the memory of the host, by digest. The engine adds and removes them
    write: the compiled `AdapterArrays.write`, which donates the stacks
    """

    def __init__(self, arrays: AdapterArrays, write: jax.stages.Compiled) -> None:
        self.adapted = arrays.adapted
        self.held: dict[str, Adapter] = {}
        self._arrays = arrays
        self._write = write
        self._slots = np.full(arrays.max_num_seqs, NO_ADAPTER, np.int32)
        self._stacks: tuple[jax.Array, ...] = ()
        self.rebuild()

    @property
    def arguments(self) -> tuple[jax.Array, ...]:
        """The arrays that the step programs take behind the weights."""
        return (*self._stacks, self._table)

    def write(self, writes: Mapping[int, str]) -> None:
        """Write adapters to slots of the stacks. writes: digests by slot. Raises ServerError if one is not held"""
        for slot, digest in writes.items():
            if (adapter := self.held.get(digest)) is None:
                raise ServerError(f"the adapter {digest} is not in the memory of the host")
            self._stacks = self._write(self._stacks, adapter.updates, np.int32(slot))

    def assign(self, inits: Sequence[SlotInit]) -> None:
        """Record the adapters of requests that get a slot."""
        slots = self._slots.copy()
        for init in inits:
            slots[init.slot] = init.adapter
        if not np.array_equal(slots, self._slots):
            self._place(slots)

    def warm_up(self) -> None:
        """Run the program that writes, so that the first adapter does not pay for its first run."""
        updates = tuple(np.zeros(update.shape, update.dtype) for update in self._arrays.updates)
        self._stacks = jax.block_until_ready(self._write(self._stacks, updates, np.int32(0)))

    def rebuild(self) -> None:
        """Replace all arrays by empty ones, without compiling."""
        self.release()
        self._stacks = tuple(_zeros(stack) for stack in self._arrays.stacks)
        self._place(np.full_like(self._slots, NO_ADAPTER))

    def release(self) -> None:
        """Free the memory of the devices until `rebuild`."""
        for stack in self._stacks:
            stack.delete()
        self._stacks = ()

    def _place(self, slots: np.ndarray) -> None:
        self._slots = slots
        placed, table = slots.copy(), self._arrays.table  # a copy, because the device may read it in place
        assert table.sharding is not None
        # Over several hosts device_put would compare the array between them, which costs a collective.
        self._table = jax.make_array_from_callback(placed.shape, table.sharding, lambda index: placed[index])


def _zeros(struct: jax.ShapeDtypeStruct) -> jax.Array:
    if jax.process_count() > 1:  # where device_put would compare the array between hosts
        return jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
    # A program of zeros would be compiled at a start with a bundle too.
    return jax.device_put(np.zeros(struct.shape, struct.dtype), struct.sharding, may_alias=False)
