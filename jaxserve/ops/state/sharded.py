"""Recurrent states over a mesh: each device of the "tensor" axis has the heads of its key heads, and needs no other."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxserve.ops.state.base import StateArrays, StateBackend, StateRows, StateSpec, StateWeights

STATE, RING = P(None, "tensor", None, None), P(None, None, "tensor", None)  # of `StateArrays`


@dataclass(frozen=True)
class MeshStates:
    """A layer's recurrence by `backend` over the devices of `mesh`. None: one device."""

    backend: StateBackend
    mesh: Mesh | AbstractMesh | None = None

    def __call__(
        self, spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
    ) -> tuple[jax.Array, StateArrays]:
        """Advance a layer by raw [T, Hk, C] -> (out [T, H, V], arrays). `spec` counts the heads of the whole model.

        The key heads are a multiple of the devices; `ModelConfig.for_tensor` refuses others.
        """
        devices = 1 if self.mesh is None else self.mesh.shape["tensor"]
        if self.mesh is None or self.mesh.size == 1:
            return self.backend.recur(spec, arrays, raw, weights, rows)
        assert spec.key_heads % devices == 0
        mine = dataclasses.replace(spec, key_heads=spec.key_heads // devices, heads=spec.heads // devices)

        def local(
            arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
        ) -> tuple[jax.Array, StateArrays]:
            """Advance the heads of one device."""
            return self.backend.recur(mine, arrays, raw, weights, rows)

        layout = jax.tree.map(lambda x: STATE if x is arrays.state else RING, arrays)
        parameters = jax.tree.map(lambda x: P(None, "tensor", None) if x is weights.conv else P("tensor"), weights)
        whole = P(None, "tensor", None)
        return jax.shard_map(
            local,
            mesh=self.mesh,
            in_specs=(layout, whole, parameters, P()),
            out_specs=(whole, layout),
            check_vma=False,
        )(arrays, raw, weights, rows)
