"""Slot states that tests begin with."""

import jax
import jax.numpy as jnp

from jaxserve.runtime.sampling.slots import SlotState, state_shapes


def empty_state(num_slots: int, vocab_size: int, max_pages: int) -> SlotState:
    """All slots free: zeros everywhere."""
    shapes = state_shapes(num_slots, vocab_size, max_pages)
    return jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
