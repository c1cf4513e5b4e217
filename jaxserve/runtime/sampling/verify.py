"""Verification of drafts: the sampler draws one token after another for as long as it draws a row's drafts.

A token depends on its logits, the slot's state and its position. All three are the same as in a step without drafts, so
the tokens are the same too, with every sampling parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.logprobs import top_k_width
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.sampling.slots import APPENDED, SlotState, append_tokens
from jaxserve.types.step import RowStatus

# logits [R, V], slots [R], the state, bitmask [R, W] -> one token per row
Draw = Callable[[jax.Array, jax.Array, SlotState, jax.Array], Sampled]


# number of the next token, slots that need it, the arrays named APPENDED, the results so far
Carry = tuple[jax.Array, jax.Array, dict[str, jax.Array], "Verified"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class VerifyInput:
    """The rows of a step with drafts: R rows, T tokens in all.

    slots, first, num_drafts: int32 [R]; `first` is the index of a row's last known token, which its drafts follow.
    drafts: int32 [T], the draft after each token. want_logprobs, masked: bool scalars.
    """

    slots: jax.Array
    first: jax.Array
    num_drafts: jax.Array
    drafts: jax.Array
    want_logprobs: jax.Array
    masked: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Verified:
    """The tokens of R rows, at most Q each. tokens, logprobs: [R, Q, ...] of `Sampled`. num_valid: int32 [R]."""

    tokens: jax.Array
    logprobs: jax.Array
    num_valid: jax.Array


def verify(
    logits: jax.Array, rows: VerifyInput, state: SlotState, bitmask: jax.Array, draw: Draw, most: int
) -> tuple[SlotState, Verified]:
    """Draw the tokens of all rows and append them to their slots.

    logits: float32 [T, V]. bitmask: int32 [T, W], allowed tokens after each token, read only if `rows.masked`.
    most: drafts of a row at most. If a token after a row's first one is not FINE, the row ends before that token. Its
    next step draws the token again and fails.
    """
    num_rows, width = rows.slots.shape[0], 2 + 2 * top_k_width(logits.shape[1])

    def goes_on(carry: Carry) -> jax.Array:
        """Return whether a row needs another token."""
        place, slots, *_ = carry
        return (place <= most) & (slots < state.num_slots).any()

    def step(carry: Carry) -> Carry:
        """Draw the next token of each row whose drafts were right so far."""
        place, slots, fields, found = carry
        index = rows.first + place
        now = state.replace(**fields)
        sampled = draw(logits.at[index].get(mode="clip"), slots, now, bitmask.at[index].get(mode="clip"))
        tokens, fine = sampled.tokens[:, 0], sampled.tokens[:, 1] == np.int32(RowStatus.FINE)
        taken = jnp.where(fine | (place == 0), slots, state.num_slots)
        now = append_tokens(now, taken, tokens)
        found = Verified(
            found.tokens.at[:, place].set(sampled.tokens),
            found.logprobs.at[:, place].set(sampled.logprobs),
            found.num_valid + (taken < state.num_slots).astype(jnp.int32),
        )
        right = fine & (place < rows.num_drafts) & (tokens == rows.drafts.at[index].get(mode="clip"))
        fields = {name: getattr(now, name) for name in APPENDED}
        return place + 1, jnp.where(right, slots, state.num_slots), fields, found

    none = Verified(
        jnp.zeros((num_rows, most + 1, 2), jnp.int32),
        jnp.zeros((num_rows, most + 1, width), jnp.int32),
        jnp.zeros(num_rows, jnp.int32),
    )
    first: Carry = jnp.int32(0), rows.slots, {name: getattr(state, name) for name in APPENDED}, none
    _, _, fields, found = jax.lax.while_loop(goes_on, step, first)
    return state.replace(**fields), found
