"""The sampler: logits of R rows -> one token per row, entirely on the device.

Every feature that is off by default is under `lax.cond` on a scalar of the batch. One program then serves every mix of
requests, and a batch without the feature does not pay for it. A row's token depends on its logits, its slot's state and
its position, never on other rows, the step or a clock.

Order, as in Hugging Face and vLLM: repetition, frequency and presence penalties; logit bias; min_tokens; static and
step masks; then greedy, or temperature, top-k, top-p of what top-k kept, and min-p relative to the likeliest token.
Tokens that tie with the last one that top-k or top-p keeps are all kept.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.draw import (
    argmax,
    draw_marked,
    filter_probs,
    first_maximum,
    inverse_cdf,
    random_uniform,
)
from jaxserve.runtime.sampling.logit_rules import LogitRules
from jaxserve.runtime.sampling.logprobs import pack_candidates, pack_logprobs_with_ids, top_k_width
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.vocab import WHOLE, Vocab
from jaxserve.types.extras import MAX_CANDIDATES
from jaxserve.types.step import RowStatus


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """The sampler's result, packed so that each array is one copy to the host.

    tokens       int32 [R, 2], (token id, RowStatus)
    logprobs     int32 [R, 2 + 2K], (logprob bits, rank, top ids, top logprob bits), K = min(20, V)
    id_logprobs  with ExtraInputs: int32 [R, N], bits of the log-probabilities of the requested ids
    candidates   with ExtraInputs: the sampling mask, packed like logprobs: (log-probability of the token among its
                 candidates, their number, their ids, their log-probabilities)
    """

    tokens: jax.Array
    logprobs: jax.Array
    id_logprobs: jax.Array | None = None
    candidates: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowsToSample:
    """The slots to sample a token for, int32 [R]; max_num_seqs and above for padding. The others are bool scalars.

    masked: whether the step's token mask is read. want_logprobs: if False, `logprobs` and `id_logprobs` are zeros
    """

    slots: jax.Array
    masked: jax.Array
    want_logprobs: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ExtraInputs:
    """Requests for extra outputs. want_candidates: bool scalar; if False, `Sampled.candidates` is zeros.

    logprob_ids: int32 [R, N], tokens whose log-probabilities are requested
    """

    want_candidates: jax.Array
    logprob_ids: jax.Array


def sample(
    logits: jax.Array,
    asked: RowsToSample,
    state: SlotState,
    bitmask: jax.Array,
    extras: ExtraInputs | None = None,
    vocab: Vocab = WHOLE,
) -> Sampled:
    """Sample one token for each of R slots.

    logits: float32 [R, V]. bitmask: int32 [R, W], read only if `asked.masked`.
    If `vocab` is split, the logits and the state's token counts have this device's columns only; see `Vocab.call`.
    """
    slots = asked.slots
    rows = jnp.minimum(slots, state.num_slots - 1)
    random = (slots < state.num_slots) & (state.temperature[rows] > 0)
    rules = LogitRules.of(slots, state, bitmask, asked.masked, vocab)
    want_candidates = jnp.bool_(False) if extras is None else extras.want_candidates
    width = 0 if extras is None else 2 + 2 * min(MAX_CANDIDATES, vocab.size(logits))
    no_candidates = jnp.zeros((logits.shape[0], width), jnp.int32)

    def choose() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return the tokens and their RowStatus, int32 [R] each, and the packed candidates, int32 [R, width]."""
        shaped = rules.apply(logits)
        peak = vocab.max(shaped)
        greedy = first_maximum(shaped, peak, vocab)

        def draw() -> tuple[jax.Array, jax.Array]:
            """Return the tokens and the packed candidates, which come from the same weights."""
            probs = _candidates(shaped, peak, rows, random, state, vocab)
            tokens = jnp.where(random, _draw(probs, rows, random, state, vocab), greedy)
            if extras is None:
                return tokens, no_candidates
            packed = functools.partial(pack_candidates, probs, tokens, random, vocab)
            return tokens, jax.lax.cond(want_candidates, packed, lambda: no_candidates)

        draws = random.any() | want_candidates
        tokens, candidates = jax.lax.cond(draws, draw, lambda: (greedy, no_candidates))
        return tokens, row_status(logits, peak, vocab), candidates

    def likeliest() -> tuple[jax.Array, jax.Array, jax.Array]:
        """Do `choose` for rows that all take their likeliest token: one pass over the logits on a GPU, and no copy."""
        tokens, peak = argmax(logits, vocab)
        finite = (vocab.sum(logits) < np.inf) & (peak > -np.inf)
        return tokens, jnp.where(finite, np.int32(RowStatus.FINE), np.int32(RowStatus.NOT_FINITE)), no_candidates

    chooses = rules.needed | random.any() | want_candidates
    tokens, status, candidates = jax.lax.cond(chooses, choose, likeliest)
    ids = jnp.zeros((logits.shape[0], 0), jnp.int32) if extras is None else extras.logprob_ids
    logprobs_width = 2 + 2 * top_k_width(vocab.size(logits))
    logprobs, id_logprobs = jax.lax.cond(
        asked.want_logprobs,
        lambda: pack_logprobs_with_ids(logits, tokens, ids, vocab),
        lambda: (jnp.zeros((logits.shape[0], logprobs_width), jnp.int32), jnp.zeros_like(ids)),
    )
    packed = jnp.stack([tokens, status], axis=1)
    return Sampled(packed, logprobs, *((None, None) if extras is None else (id_logprobs, candidates)))


def row_status(logits: jax.Array, peak: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Return the RowStatus of each row, int32 [R].

    logits: float32 [R, V], the model's. peak: float32 [R], maximum of each row after penalties, bias and masks.
    Only the model's logits decide NOT_FINITE, because a client's parameters may overflow too.
    """
    # A sum propagates NaN. XLA's maximum of a long row on a CPU ignores NaN.
    finite, allowed = vocab.sum(logits) < np.inf, jnp.isfinite(peak)
    # A row whose own logits are all -inf is not finite. The check is another pass, so it runs only if it is needed.
    finite = jax.lax.cond(allowed.all(), lambda: finite, lambda: finite & (vocab.max(logits) > -np.inf))
    status = jnp.where(allowed, np.int32(RowStatus.FINE), np.int32(RowStatus.NOTHING_ALLOWED))
    return jnp.where(finite, status, np.int32(RowStatus.NOT_FINITE))


def _draw(probs: jax.Array, rows: jax.Array, random: jax.Array, state: SlotState, vocab: Vocab) -> jax.Array:
    """Draw a token per random row, by its seed or its watermark: int32 [R]. probs: float32 [R, V] of `_candidates`."""
    drawn = inverse_cdf(probs, random_uniform(state.seed[rows], state.position[rows]), vocab)
    marked = random & (state.has_watermark[rows] > 0)
    keys, recent = state.watermark[rows], state.recent[rows]
    return jax.lax.cond(
        marked.any(), lambda: jnp.where(marked, draw_marked(probs, keys, recent, vocab), drawn), lambda: drawn
    )


def _candidates(
    logits: jax.Array, peak: jax.Array, rows: jax.Array, random: jax.Array, state: SlotState, vocab: Vocab
) -> jax.Array:
    """Return the weights that the random rows draw from, float32 [R, V]. The largest of a row is 1."""
    divisor = jnp.where(random, state.temperature[rows], 1)
    probs = jnp.exp((logits - peak[:, None]) / divisor[:, None])
    return filter_probs(probs, state.top_k[rows], state.top_p[rows], state.min_p[rows], random, vocab)
