"""The oracle of `moe`: every token through every expert, in float32, weighted by what was chosen."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.ops.moe import Activation, ExpertWeights


def moe_reference(
    x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, experts: ExpertWeights, activation: Activation
) -> jax.Array:
    """As `moe`, in float32: E / K times the work."""
    w = jax.tree.map(lambda a: a.astype(jnp.float32), experts)
    y = jnp.einsum("td,efgd->tefg", x.astype(jnp.float32), w.gate_up)
    if w.gate_up_bias is not None:
        y = y + w.gate_up_bias[None]
    out = jnp.einsum("tef,edf->ted", activation(y[..., 0], y[..., 1]), w.down)
    if w.down_bias is not None:
        out = out + w.down_bias[None]
    chosen = jax.nn.one_hot(expert_ids, out.shape[1]) * expert_weights[:, :, None]
    return jnp.einsum("ted,te->td", out, chosen.sum(axis=1))
