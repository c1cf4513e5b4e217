"""The sampler: logits of R rows -> one token per row, entirely on the device.

Every feature that is off by default is under `lax.cond` on a scalar of the batch. One program then serves every mix of
requests, and a batch without the feature does not pay for it. A row's token depends on its logits, its slot's state and
its position, never on other rows, the step or a clock.

The order is Hugging Face's and vLLM's: repetition, frequency and presence penalties; logit bias; min_tokens; static and
step masks (all these are LogitRules); then greedy, or temperature, top-k, top-p of the tokens that top-k kept, and
min-p relative to the likeliest token. Tokens that tie with the last one that top-k or top-p keeps are all kept.

A draw depends on the row's probabilities, seed and position only; with a watermark, on its probabilities, the key and
the tokens before it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.logprobs import pack_candidates, pack_logprobs_with_ids, top_k_width
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.vocab import WHOLE, Vocab, first_above
from jaxserve.types.extras import MAX_CANDIDATES
from jaxserve.types.sampling import threefry2x32
from jaxserve.types.step import RowStatus

CDF_LANES = 128  # sums of the first level of the inverse CDF
_ONE_BITS = 0x3F800000  # bits of float32 1.0; positive floats are ordered as their bits are


def argmax(logits: jax.Array, vocab: Vocab = WHOLE) -> tuple[jax.Array, jax.Array]:
    """Return the token of each row's maximum, the first one of a tie, int32 [R], and the maximum, float32 [R].

    logits: float32 [R, V]. Any token if the maximum is NaN.
    """

    def by_two_maxima() -> tuple[jax.Array, jax.Array]:
        peak = vocab.max(logits)
        return first_maximum(logits, peak, vocab), peak

    if vocab.axes:
        return by_two_maxima()
    return jax.lax.platform_dependent(cpu=by_two_maxima, default=functools.partial(argmax_in_one_pass, logits))


def argmax_in_one_pass(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Do `argmax` in one reduction over whole rows, logits [R, V]. XLA on a CPU does not vectorise it."""
    ids = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1)

    def larger(a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Return of two pairs (value [], index []) the larger, of equal ones the first. NaN is the largest value."""
        wins = (a[0] > b[0]) | (a[0] != a[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(wins, a[0], b[0]), jnp.where(wins, a[1], b[1])

    start = (np.float32(-np.inf), np.int32(np.iinfo(np.int32).max))
    peak, token = jax.lax.reduce((logits, ids), start, larger, (1,))
    return jnp.minimum(token, logits.shape[1] - 1), peak


def first_maximum(logits: jax.Array, peak: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Return the argmax of logits [R, V], the first one of a tie: int32 [R]. peak: [R], the maximum of each row.

    Any token if the peak is NaN. Computed by two maxima, because XLA on a CPU does not vectorise an argmax and takes 40
    times as long.
    """
    vocab_size = vocab.size(logits)
    from_end = vocab_size - vocab.ids(logits, jnp.float32)  # exact below 2**24 tokens
    found = vocab.max(jnp.where(logits == peak[:, None], from_end[None, :], 1))
    return (vocab_size - found).astype(jnp.int32)


def filter_probs(
    probs: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    active: jax.Array,
    vocab: Vocab = WHOLE,
) -> jax.Array:
    """Set the probabilities that top-k, top-p and min-p exclude to zero, in the rows with `active`, bool [R].

    probs: float32 [R, V]; the largest of a row is 1, and they need not sum to 1. top_k: int32 [R]; top_p, min_p:
    float32 [R].
    top-k keeps the k largest and all that tie with the k-th. top-p (Holtzman et al., arXiv 1904.09751) keeps the
    fewest likeliest tokens whose share of the tokens that top-k kept reaches top_p, and all that tie with the last.
    min-p (arXiv 2407.01082) keeps tokens of at least min_p times the largest.
    """
    some_k, some_p = active & (top_k > 0), active & (top_p < 1)
    counts = jnp.minimum(top_k, vocab.size(probs)).astype(jnp.float32)

    def stage(index: jax.Array, probs: jax.Array) -> jax.Array:
        """Apply top-k (index 0) or top-p (index 1), an int32 scalar, to probs [R, V]."""
        by_mass = index == 1  # one loop body for both halves the code to compile
        shares = jnp.maximum(top_p * vocab.sum(probs), np.finfo(np.float32).tiny)
        target, wanted = jnp.where(by_mass, shares, counts), jnp.where(by_mass, some_p, some_k)
        return jnp.where(probs >= _border(probs, by_mass, target, wanted, vocab)[:, None], probs, 0)

    def floor(probs: jax.Array) -> jax.Array:
        """Apply min-p to probs [R, V]."""
        return jnp.where(probs >= jnp.where(active, min_p, 0)[:, None], probs, 0)

    needed = ((some_k | some_p).any(), (active & (min_p > 0)).any())
    probs = jax.lax.cond(needed[0], lambda p: jax.lax.fori_loop(0, 2, stage, p), lambda p: p, probs)
    return jax.lax.cond(needed[1], floor, lambda p: p, probs)


def _border(probs: jax.Array, by_mass: jax.Array, target: jax.Array, active: jax.Array, vocab: Vocab) -> jax.Array:
    """Return the largest t for which the tokens with probs >= t reach the target, float32 [R]; 0 in inactive rows.

    A row reaches its target by the sum of those probabilities, or, if the bool scalar by_mass is False, by their
    number. Bisects on the bits of t, which needs no sorting and at most 30 passes over the probabilities. Usually half
    as many suffice: a row is decided once there is less between its bounds than two tokens can have, with a margin for
    rounding. A decided row does not change while others continue.
    """
    low = jnp.zeros(probs.shape[0], jnp.int32)
    high = jnp.where(active, _ONE_BITS + 1, 1).astype(jnp.int32)
    weights = jnp.where(by_mass, probs, 1)
    reached_low = jnp.where(active, jnp.inf, 0)

    def undecided(carry: tuple[jax.Array, ...]) -> jax.Array:
        """Return which rows are not decided yet, bool [R]. The carry has four arrays [R]."""
        low, high, reached_low, reached_high = carry
        least = jnp.where(by_mass, jax.lax.bitcast_convert_type(low, jnp.float32), 1)
        return (high - low > 1) & (reached_low - reached_high >= 1.5 * least)

    def halve(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Halve the interval of each undecided row. The carry has four arrays [R]."""
        low, high, reached_low, reached_high = carry
        middle = low + (high - low) // 2
        kept = jnp.where(probs >= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None], weights, 0)
        reached = vocab.sum(jax.lax.optimization_barrier(kept))  # XLA on a CPU has a kernel for plain sums
        enough, open_row = reached >= target, undecided(carry)
        up, down = open_row & enough, open_row & ~enough
        return (
            jnp.where(up, middle, low),
            jnp.where(down, middle, high),
            jnp.where(up, reached, reached_low),
            jnp.where(down, reached, reached_high),
        )

    carry = (low, high, reached_low, jnp.zeros_like(reached_low))
    low, *_ = jax.lax.while_loop(lambda carry: undecided(carry).any(), halve, carry)
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def inverse_cdf(probs: jax.Array, uniform: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Return the token at which the cumulative sum passes uniform * total: int32 [R].

    probs: float32 [R, V]. uniform: float32 [R]. Searches in two levels: first the lane (tokens equal modulo 128), then
    the token in the lane; any order of the tokens gives the same distribution. A token of probability 0 is never
    chosen, whatever the rounding of the sums.
    """
    table = vocab.table(probs, CDF_LANES)
    sums = vocab.total(jax.lax.optimization_barrier(table).sum(axis=1))
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    lane = first_above(ends, target, sums)
    before = jnp.take_along_axis(ends, jnp.maximum(lane - 1, 0)[:, None], axis=1)[:, 0]
    column = jnp.take_along_axis(table, lane[:, None, None], axis=2)[:, :, 0]
    rest = target - jnp.where(lane > 0, before, 0)
    token = vocab.passing_row(probs, column, rest, CDF_LANES) * CDF_LANES + lane
    return jnp.minimum(token, vocab.size(probs) - 1)


def draw_marked(probs: jax.Array, keys: jax.Array, recent: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Draw watermarked tokens: a key and the recent tokens choose among the candidates. Returns int32 [R].

    probs: float32 [R, V]. keys: uint32 [R, 2]. recent: int32 [R, 4]. Uses the Gumbel-max trick (Aaronson, 2022): over
    all keys, a token is chosen with its probability. text/watermark.py describes the scheme and detects it.
    """
    words = recent.astype(jnp.uint32)
    key0, key1 = threefry2x32(keys[:, 0], keys[:, 1], words[:, 0], words[:, 1])
    key0, key1 = threefry2x32(key0, key1, words[:, 2], words[:, 3])
    ids = jnp.broadcast_to(vocab.ids(probs, jnp.uint32)[None, :], probs.shape)
    wide0, wide1 = (jnp.broadcast_to(key[:, None], probs.shape) for key in (key0, key1))
    bits, _ = threefry2x32(wide0, wide1, ids, jnp.zeros_like(ids))
    # 23 bits: with 24 the largest number would round to 1, and its token would win whatever its probability.
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2**-23)
    scores = jnp.log(probs) - jnp.log(-jnp.log(uniform))
    return first_maximum(scores, vocab.max(scores), vocab)


def random_uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """Return one float32 in (0, 1] per row, [R], from its seed, uint32 [R, 2], and its position, int32 [R]."""
    bits, _ = threefry2x32(seed[:, 0], seed[:, 1], position.astype(jnp.uint32), jnp.zeros_like(seed[:, 0]))
    return ((bits >> 8).astype(jnp.float32) + 0.5) * np.float32(2**-24)


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
        """Return whether any row needs any change, a bool scalar."""
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
