"""Recurrent states on a CPU: the C kernel of ops/native, token by token, over the heads of all rows at once.

Sizes that it does not support, and layers without a matrix, are the XLA backend's. A row's bits depend on that row
only, and not on how its tokens are cut into steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.ops import native
from jaxserve.ops.state.base import StateArrays, StateRows, StateSpec, StateWeights
from jaxserve.ops.state.xla import XlaStates

_KINDS = {"delta": 0, "channel_delta": 1, "mamba2": 2}


@dataclass(frozen=True)
class NativeStates(XlaStates):
    """See the module docstring and `base.StateBackend`. Raises ConfigError if the kernel cannot be compiled."""

    name: str = "native"

    def __post_init__(self) -> None:
        native.load()

    def recur(
        self, spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
    ) -> tuple[jax.Array, StateArrays]:
        """Advance a layer by raw [T, Hk, C] -> (out [T, H, V], arrays), see `base.StateBackend.recur`."""
        step, forms = native.HEAD_DIM_STEP, (jnp.float32, jnp.bfloat16)
        known = raw.dtype in forms and weights.conv.dtype in forms
        if arrays.state is None or spec.k_dim % step or spec.v_dim % step or not known:
            return super().recur(spec, arrays, raw, weights, rows)
        assert weights.log_a is not None
        assert weights.dt_bias is not None
        limits = (spec.decay_floor or 0.0, *spec.dt_limits)
        layer = native.RecurrentState(
            arrays.state,
            arrays.ring,
            weights.conv,
            weights.conv_bias,
            weights.log_a,
            weights.dt_bias,
            weights.skip,
            _KINDS[spec.kind],
            limits,
        )
        out, state, ring = native.recur(layer, raw, tuple(jax.tree.leaves(rows)))
        return out, StateArrays(state, ring)
