"""Changes to logits before sampling: penalties, logit bias, min_tokens and token masks, in this order."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.vocab import WHOLE, Vocab

BANNED = np.float32(-1e30)  # for min_tokens: below every logit, yet above the -inf of a mask that allows nothing else
_BIAS_GROUP = 256  # logit_bias entries added at once


@dataclass(frozen=True)
class LogitRules:
    """The changes that the rows of a batch need: (whether any row needs it, bool scalar; the change)."""

    steps: tuple[tuple[jax.Array, Callable[[jax.Array], jax.Array]], ...]

    @classmethod
    def of(
        cls, slots: jax.Array, state: SlotState, bitmask: jax.Array, masked: jax.Array, vocab: Vocab = WHOLE
    ) -> LogitRules:
        """Collect the rules of R slots.

        slots: int32 [R], max_num_seqs and above for padding. bitmask: int32 [R, W], read only if the bool scalar
        `masked`.
        """
        valid, rows = slots < state.num_slots, jnp.minimum(slots, state.num_slots - 1)
        repetition, frequency, presence = (
            jnp.where(valid, values[rows], neutral)
            for values, neutral in (
                (state.repetition_penalty, 1.0),
                (state.frequency_penalty, 0.0),
                (state.presence_penalty, 0.0),
            )
        )
        early = valid & (state.num_outputs[rows] < state.min_tokens[rows])
        static = valid & (state.has_allow[rows] > 0)
        dynamic = valid & masked
        num_bias = jnp.where(valid, state.num_bias[rows], 0)

        def penalties(x: jax.Array) -> jax.Array:
            """Apply the penalties to logits [R, V]."""
            return penalize(x, state.token_counts[rows], state.in_prompt[rows], repetition, frequency, presence)

        def bias(x: jax.Array) -> jax.Array:
            """Apply logit_bias to logits [R, V]."""
            return add_bias(x, state.bias_ids[rows], state.bias_values[rows], num_bias, vocab)

        def masks(x: jax.Array) -> jax.Array:
            """Apply min_tokens and the masks to logits [R, V]."""
            allowed = _where_row(static, state.allow_mask[rows]) & _where_row(dynamic, bitmask)
            return ban(x, allowed, _where_row(early, state.early_mask[rows]), vocab)

        penalized = (repetition != 1) | (frequency != 0) | (presence != 0)
        return cls(
            (
                (penalized.any(), penalties),
                ((num_bias > 0).any(), bias),
                ((early | static | dynamic).any(), masks),
            )
        )

    @property
    def needed(self) -> jax.Array:
        """Whether any row needs any change, a bool scalar."""
        return functools.reduce(jnp.logical_or, (needed for needed, _ in self.steps))

    def apply(self, logits: jax.Array) -> jax.Array:
        """Make the changes that some row needs to logits float32 [R, V] -> float32 [R, V]."""
        for needed, step in self.steps:
            logits = jax.lax.cond(needed, step, lambda x: x, logits)
        return logits


def penalize(
    logits: jax.Array,
    counts: jax.Array,
    in_prompt: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Apply the repetition penalty to prompt and output tokens, frequency and presence penalties to output tokens.

    Repetition: CTRL (Keskar et al., 2019, arXiv 1909.05858). Frequency and presence: as the OpenAI API defines them.
    logits float32 [R, V]; counts int16 [R, V]; in_prompt bool [R, V]; the three penalties float32 [R].
    """
    times = counts.astype(jnp.float32)
    scale = jnp.where(in_prompt | (counts > 0), repetition[:, None], 1)
    logits = jnp.where(logits > 0, logits / scale, logits * scale)
    return logits - frequency[:, None] * times - jnp.where(times > 0, presence[:, None], 0)


def add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array, num: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Add sparse biases to logits [R, V]: ids int32 [R, N], values float32 [R, N], N a multiple of 256.

    num: int32 [R]; the first num[r] entries of row r are valid.
    """
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def add_group(group: jax.Array, logits: jax.Array) -> jax.Array:
        """Add the entries of one group, an int32 scalar, to logits [R, V]."""
        first = group * _BIAS_GROUP
        index = first + jnp.arange(_BIAS_GROUP, dtype=jnp.int32)
        chosen = jax.lax.dynamic_slice_in_dim(ids, first, _BIAS_GROUP, axis=1)
        added = jax.lax.dynamic_slice_in_dim(values, first, _BIAS_GROUP, axis=1)
        chosen = jnp.where(index[None, :] < num[:, None], vocab.column(logits, chosen), logits.shape[1])
        return logits.at[row, chosen].add(added, mode="drop")

    return jax.lax.fori_loop(0, (num.max() + _BIAS_GROUP - 1) // _BIAS_GROUP, add_group, logits)


def _where_row(active: jax.Array, words: jax.Array) -> jax.Array:
    """Return the bitmasks of the active rows, and masks that allow every token for the others.

    active: bool [R]. words: int32 [R, W].
    """
    return jnp.where(active[:, None], words, np.int32(-1))


def ban(logits: jax.Array, allowed: jax.Array, allowed_early: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Set tokens whose bit in `allowed` is 0 to -inf, and others whose bit in `allowed_early` is 0 to BANNED.

    logits: float32 [R, V]; the bitmasks: int32 [R, W].
    """
    may, may_early = (vocab.own(logits, unpack_bits(words, vocab.size(logits))) for words in (allowed, allowed_early))
    return jnp.where(may, jnp.where(may_early, logits, BANNED), np.float32(-np.inf))


def unpack_bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """Unpack bitmasks int32 [R, W] -> bool [R, V]. Token v is bit v % 32 of word v // 32."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size].astype(bool)
