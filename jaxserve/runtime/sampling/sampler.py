"""The sampler: logits of R rows -> one token a row, wholly on the device.

Every feature that is off by default sits under `lax.cond` on a scalar of the batch, so that one program serves every
mix of requests and a plain batch pays for none of them. A row's token is a function of its own logits, its slot's
state and its position: never of its neighbours, the step or a clock. Knows slot rows; nothing of models or pages.

Order, as in Hugging Face and vLLM: repetition, frequency and presence penalties; logit bias; min_tokens; static and
step masks; then greedy, or temperature, top-k, top-p over what top-k left, min-p relative to the likeliest token.
Tokens that tie with the last one kept by top-k or top-p are all kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.vocab import WHOLE, Vocab, first_above
from jaxserve.types.step import RowStatus

TOP_LOGPROBS = 20
MAX_SUPPORT = 256  # candidates of a token that can be told; `Support`
BANNED = np.float32(-1e30)  # min_tokens: below any logit, yet above the -inf of a mask that allows nothing else
LANES = 128  # sums of the first level of the inverse CDF
_BIAS_GROUP = 256  # logit_bias entries added at once
_ONE_BITS = 0x3F800000  # float32 1.0: positive floats are ordered as their bits are


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sampled:
    """tokens int32 [R, 2] of (token id, RowStatus); logprobs int32 [R, 2 + 2*K] of (logprob bits, rank, ids, logprob
    bits). K = min(20, V). Packed so that each is one copy.

    With Details: watched int32 [R, N], bits of the log-probabilities of the given ids, and support, packed as logprobs
    are, of (log-probability of the token among its candidates, their number, their ids, their log-probabilities).
    """

    tokens: jax.Array
    logprobs: jax.Array
    watched: jax.Array | None = None
    support: jax.Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Details:
    """What few requests ask for. wanted: bool scalar, False leaves `support` zero; ids: int32 [R, N] to watch."""

    wanted: jax.Array
    ids: jax.Array


def sample(
    logits: jax.Array,
    slots: jax.Array,
    state: SlotState,
    bitmask: jax.Array,
    masked: jax.Array,
    want_logprobs: jax.Array,
    details: Details | None = None,
    vocab: Vocab = WHOLE,
) -> Sampled:
    """Sample one token for each of R slots.

    logits: float32 [R, V]; slots: int32 [R], max_num_seqs and above for padding; bitmask: int32 [R, W], read only
    if the scalar `masked`; want_logprobs: bool scalar, False leaves `Sampled.logprobs` and `watched` zero. Where
    `vocab` is split, of V the logits and the state's token counts have this device's columns; see `Vocab.call`.
    """
    valid = slots < state.num_slots
    rows = jnp.minimum(slots, state.num_slots - 1)
    shaped = shape_logits(logits, rows, valid, state, bitmask, masked, vocab)
    peak = vocab.max(shaped)
    draw = functools.partial(_choose, shaped, peak, rows, valid, state, vocab)
    if details is None:
        tokens, support = draw(), None
    else:
        draw_telling = functools.partial(_choose_telling, shaped, peak, rows, valid, state, vocab)
        width = 2 + 2 * min(MAX_SUPPORT, vocab.size(logits))
        silent = jnp.zeros((logits.shape[0], width), jnp.int32)
        tokens, support = jax.lax.cond(details.wanted, draw_telling, lambda: (draw(), silent))
    watch = jnp.zeros((logits.shape[0], 0), jnp.int32) if details is None else details.ids
    logprobs_width = 2 + 2 * _top_k_width(vocab.size(logits))
    logprobs, watched = jax.lax.cond(
        want_logprobs,
        lambda: pack_watching(logits, tokens, watch, vocab),
        lambda: (jnp.zeros((logits.shape[0], logprobs_width), jnp.int32), jnp.zeros_like(watch)),
    )
    packed = jnp.stack([tokens, row_status(logits, peak, vocab)], axis=1)
    return Sampled(packed, logprobs, None if details is None else watched, support)


def row_status(logits: jax.Array, peak: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """A RowStatus for each row, int32 [R]. logits: float32 [R, V], the model's; peak: float32 [R], the largest of each
    row after penalties, bias and masks.

    Only the model's own logits decide what is not finite: a client's parameters may overflow too.
    """
    # by a sum, in which -inf may be: XLA's maximum of a long row on a CPU passes over NaN
    finite, allowed = vocab.sum(logits) < np.inf, jnp.isfinite(peak)
    # a row that is -inf throughout has nothing that a mask could have taken; another pass, so only if there is need
    finite = jax.lax.cond(allowed.all(), lambda: finite, lambda: finite & (vocab.max(logits) > -np.inf))
    status = jnp.where(allowed, np.int32(RowStatus.FINE), np.int32(RowStatus.NOTHING_ALLOWED))
    return jnp.where(finite, status, np.int32(RowStatus.NOT_FINITE))


def _choose(
    logits: jax.Array, peak: jax.Array, rows: jax.Array, valid: jax.Array, state: SlotState, vocab: Vocab
) -> jax.Array:
    greedy = first_maximum(logits, peak, vocab)
    random = valid & (state.temperature[rows] > 0)

    def draw() -> jax.Array:
        probs = _candidates(logits, peak, rows, random, state, vocab)
        return jnp.where(random, _draw(probs, rows, random, state, vocab), greedy)

    return jax.lax.cond(random.any(), draw, lambda: greedy)


def _choose_telling(
    logits: jax.Array, peak: jax.Array, rows: jax.Array, valid: jax.Array, state: SlotState, vocab: Vocab
) -> tuple[jax.Array, jax.Array]:
    """`_choose`, and what it chose from: exactly the weights of the draw, which is why both are one function."""
    random = valid & (state.temperature[rows] > 0)
    probs = jax.lax.optimization_barrier(_candidates(logits, peak, rows, random, state, vocab))
    drawn = _draw(probs, rows, random, state, vocab)
    tokens = jnp.where(random, drawn, first_maximum(logits, peak, vocab))
    return tokens, pack_support(probs, tokens, random, vocab)


def _draw(probs: jax.Array, rows: jax.Array, random: jax.Array, state: SlotState, vocab: Vocab) -> jax.Array:
    """A token for each random row, by its seed or its watermark; int32 [R]. probs: float32 [R, V] of `_candidates`."""
    drawn = inverse_cdf(probs, random_uniform(state.seed[rows], state.position[rows]), vocab)
    marked = random & (state.has_watermark[rows] > 0)
    keys, recent = state.watermark[rows], state.recent[rows]
    return jax.lax.cond(
        marked.any(), lambda: jnp.where(marked, draw_marked(probs, keys, recent, vocab), drawn), lambda: drawn
    )


def _candidates(
    logits: jax.Array, peak: jax.Array, rows: jax.Array, random: jax.Array, state: SlotState, vocab: Vocab
) -> jax.Array:
    """float32 [R, V]: the weights that the random rows draw from, the largest of a row is 1."""
    divisor = jnp.where(random, state.temperature[rows], 1)
    probs = jnp.exp((logits - peak[:, None]) / divisor[:, None])
    return filter_probs(probs, state.top_k[rows], state.top_p[rows], state.min_p[rows], random, vocab)


def first_maximum(logits: jax.Array, peak: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """argmax, of equals the first, int32 [R]; any token where the peak is NaN.

    As two plain maxima: XLA on a CPU takes 40 times longer over an argmax, whose loop it does not vectorise.
    """
    vocab_size = vocab.size(logits)
    from_end = vocab_size - vocab.ids(logits, jnp.float32)  # exact below 2**24 tokens
    found = vocab.max(jnp.where(logits == peak[:, None], from_end[None, :], 1))
    return (vocab_size - found).astype(jnp.int32)


# --- logits


def shape_logits(
    logits: jax.Array,
    rows: jax.Array,
    valid: jax.Array,
    state: SlotState,
    bitmask: jax.Array,
    masked: jax.Array,
    vocab: Vocab = WHOLE,
) -> jax.Array:
    """Penalties, bias, min_tokens and masks, each under its own condition. float32 [R, V] -> float32 [R, V]."""
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
    steps: list[tuple[jax.Array, Callable[[jax.Array], jax.Array]]] = [
        (
            ((repetition != 1) | (frequency != 0) | (presence != 0)).any(),
            lambda x: penalize(x, state.token_counts[rows], state.in_prompt[rows], repetition, frequency, presence),
        ),
        (
            (num_bias > 0).any(),
            lambda x: add_bias(x, state.bias_ids[rows], state.bias_values[rows], num_bias, vocab),
        ),
        (
            (early | static | dynamic).any(),
            lambda x: ban(
                x,
                _where_row(static, state.allow_mask[rows]) & _where_row(dynamic, bitmask),
                _where_row(early, state.early_mask[rows]),
                vocab,
            ),
        ),
    ]

    def all_steps(logits: jax.Array) -> jax.Array:
        for needed, step in steps:
            logits = jax.lax.cond(needed, step, lambda x: x, logits)
        return logits

    needed_at_all = functools.reduce(jnp.logical_or, (needed for needed, _ in steps))
    return jax.lax.cond(needed_at_all, all_steps, lambda x: x, logits)


def penalize(
    logits: jax.Array,
    counts: jax.Array,
    in_prompt: jax.Array,
    repetition: jax.Array,
    frequency: jax.Array,
    presence: jax.Array,
) -> jax.Array:
    """Repetition over prompt and output (CTRL, Keskar et al. 2019), frequency and presence over output (OpenAI).

    logits float32 [R, V]; counts int16 [R, V]; in_prompt bool [R, V]; the three penalties float32 [R].
    """
    times = counts.astype(jnp.float32)
    scale = jnp.where(in_prompt | (counts > 0), repetition[:, None], 1)
    logits = jnp.where(logits > 0, logits / scale, logits * scale)
    return logits - frequency[:, None] * times - jnp.where(times > 0, presence[:, None], 0)


def add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array, num: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Add sparse biases: ids int32, values float32 [R, N]; the first num[r] of row r count, N a multiple of 256."""
    row = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]

    def add_group(group: jax.Array, logits: jax.Array) -> jax.Array:
        first = group * _BIAS_GROUP
        index = first + jnp.arange(_BIAS_GROUP, dtype=jnp.int32)
        chosen = jax.lax.dynamic_slice_in_dim(ids, first, _BIAS_GROUP, axis=1)
        added = jax.lax.dynamic_slice_in_dim(values, first, _BIAS_GROUP, axis=1)
        chosen = jnp.where(index[None, :] < num[:, None], vocab.column(logits, chosen), logits.shape[1])
        return logits.at[row, chosen].add(added, mode="drop")

    return jax.lax.fori_loop(0, (num.max() + _BIAS_GROUP - 1) // _BIAS_GROUP, add_group, logits)


def _where_row(active: jax.Array, words: jax.Array) -> jax.Array:
    """The bitmasks of the active rows (bool [R]); in the others every token is allowed. words: int32 [R, W]"""
    return jnp.where(active[:, None], words, np.int32(-1))


def ban(logits: jax.Array, allowed: jax.Array, allowed_early: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """Set tokens whose bit in `allowed` is 0 to -inf, and others whose bit in `allowed_early` is 0 to BANNED.

    logits: float32 [R, V]; the bitmasks: int32 [R, W].
    """
    may, may_early = (vocab.own(logits, unpack_bits(words, vocab.size(logits))) for words in (allowed, allowed_early))
    return jnp.where(may, jnp.where(may_early, logits, BANNED), np.float32(-np.inf))


def unpack_bits(words: jax.Array, vocab_size: int) -> jax.Array:
    """int32 [R, W] -> bool [R, V]: bit v % 32 of word v // 32."""
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return bits.reshape(words.shape[0], -1)[:, :vocab_size].astype(bool)


# --- probabilities


def filter_probs(
    probs: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    active: jax.Array,
    vocab: Vocab = WHOLE,
) -> jax.Array:
    """Zero what top-k, top-p and min-p exclude, in the rows where `active`.

    probs float32 [R, V], the largest of a row is 1, they need not sum to 1. top_k int32, top_p, min_p float32 [R].
    top-k: the k largest and all that tie with the k-th. top-p: the fewest likeliest tokens whose share of what top-k
    left reaches top_p, and all that tie with the last. min-p: at least min_p times the largest.
    """
    some_k, some_p = active & (top_k > 0), active & (top_p < 1)
    counts = jnp.minimum(top_k, vocab.size(probs)).astype(jnp.float32)

    def stage(index: jax.Array, probs: jax.Array) -> jax.Array:
        by_mass = index == 1  # one loop body for both: half the code to compile
        shares = jnp.maximum(top_p * vocab.sum(probs), np.finfo(np.float32).tiny)
        target, wanted = jnp.where(by_mass, shares, counts), jnp.where(by_mass, some_p, some_k)
        return jnp.where(probs >= _border(probs, by_mass, target, wanted, vocab)[:, None], probs, 0)

    def floor(probs: jax.Array) -> jax.Array:
        return jnp.where(probs >= jnp.where(active, min_p, 0)[:, None], probs, 0)

    needed = ((some_k | some_p).any(), (active & (min_p > 0)).any())
    probs = jax.lax.cond(needed[0], lambda p: jax.lax.fori_loop(0, 2, stage, p), lambda p: p, probs)
    return jax.lax.cond(needed[1], floor, lambda p: p, probs)


def _border(probs: jax.Array, by_mass: jax.Array, target: jax.Array, active: jax.Array, vocab: Vocab) -> jax.Array:
    """The largest t for which the tokens with probs >= t reach target, float32 [R]; 0 in rows that are not active.

    They reach the sum of their probabilities, or if not by_mass (a scalar) their number. Bisection on the bits of t:
    at most 30 passes over the probabilities, without sorting them, and usually half as many: a row is decided once
    what lies between its bounds is less than two tokens can be, with room for the rounding of sums. A decided row
    stands still while others go on.
    """
    low = jnp.zeros(probs.shape[0], jnp.int32)
    high = jnp.where(active, _ONE_BITS + 1, 1).astype(jnp.int32)
    weights = jnp.where(by_mass, probs, 1)
    reached_low = jnp.where(active, jnp.inf, 0)

    def undecided(carry: tuple[jax.Array, ...]) -> jax.Array:
        low, high, reached_low, reached_high = carry
        least = jnp.where(by_mass, jax.lax.bitcast_convert_type(low, jnp.float32), 1)
        return (high - low > 1) & (reached_low - reached_high >= 1.5 * least)

    def halve(carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        low, high, reached_low, reached_high = carry
        middle = low + (high - low) // 2
        kept = jnp.where(probs >= jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None], weights, 0)
        reached = vocab.sum(jax.lax.optimization_barrier(kept))  # apart: XLA on a CPU has a kernel for plain sums
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
    """The token at which the cumulative sum passes uniform * total. probs float32 [R, V], uniform [R] -> int32 [R].

    Two levels: the lane in which it passes (tokens equal modulo 128), then the token in the lane; the order in which
    tokens are summed does not matter. A token of probability 0 is never chosen, whatever the rounding of the sums.
    """
    table = vocab.table(probs, LANES)
    sums = vocab.total(jax.lax.optimization_barrier(table).sum(axis=1))
    ends = jnp.cumsum(sums, axis=-1)
    target = uniform * ends[:, -1]
    lane = first_above(ends, target, sums)
    before = jnp.take_along_axis(ends, jnp.maximum(lane - 1, 0)[:, None], axis=1)[:, 0]
    column = jnp.take_along_axis(table, lane[:, None, None], axis=2)[:, :, 0]
    rest = target - jnp.where(lane > 0, before, 0)
    token = vocab.passing_row(probs, column, rest, LANES) * LANES + lane
    return jnp.minimum(token, vocab.size(probs) - 1)


def draw_marked(probs: jax.Array, keys: jax.Array, recent: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """The token that a key chooses among the candidates, int32 [R]: text/watermark.py tells how, and can tell that.

    probs float32 [R, V]; keys uint32 [R, 2]; recent int32 [R, 4]. By the Gumbel-max trick (Aaronson, 2022): over all
    keys a token is chosen as often as `probs` says.
    """
    words = recent.astype(jnp.uint32)
    key0, key1 = threefry2x32(keys[:, 0], keys[:, 1], words[:, 0], words[:, 1])
    key0, key1 = threefry2x32(key0, key1, words[:, 2], words[:, 3])
    ids = jnp.broadcast_to(vocab.ids(probs, jnp.uint32)[None, :], probs.shape)
    wide0, wide1 = (jnp.broadcast_to(key[:, None], probs.shape) for key in (key0, key1))
    bits, _ = threefry2x32(wide0, wide1, ids, jnp.zeros_like(ids))
    # 23 bits: with 24 the largest would be rounded to 1, whose token wins whatever its probability
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * np.float32(2**-23)
    scores = jnp.log(probs) - jnp.log(-jnp.log(uniform))
    return first_maximum(scores, vocab.max(scores), vocab)


def random_uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One float32 in (0, 1) a row from its seed (uint32 [R, 2]) and position (int32 [R])."""
    bits, _ = threefry2x32(seed[:, 0], seed[:, 1], position.astype(jnp.uint32), jnp.zeros_like(seed[:, 0]))
    return ((bits >> 8).astype(jnp.float32) + 0.5) * np.float32(2**-24)


def threefry2x32(key0: jax.Array, key1: jax.Array, count0: jax.Array, count1: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32, 20 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); uint32 arrays.

    Written out so that a seed's bits depend neither on JAX's version nor on its configuration.
    """
    keys = (key0, key1, key0 ^ key1 ^ np.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + np.uint32(group + 1)
    return x0, x1


# --- log-probabilities


def _top_k_width(vocab_size: int) -> int:
    return min(TOP_LOGPROBS, vocab_size)


def pack_watching(
    logits: jax.Array, tokens: jax.Array, watch: jax.Array, vocab: Vocab = WHOLE
) -> tuple[jax.Array, jax.Array]:
    """(packed `token_logprobs`, int32 [R, N]: bits of the log-probabilities of the ids in `watch`, int32 [R, N])"""
    norm = vocab.logsumexp(logits)
    watched = vocab.take(logits, watch, mode="clip") - norm[:, None]
    return pack_logprobs(*token_logprobs(logits, tokens, norm, vocab)), jax.lax.bitcast_convert_type(watched, jnp.int32)


def pack_support(probs: jax.Array, tokens: jax.Array, random: jax.Array, vocab: Vocab = WHOLE) -> jax.Array:
    """int32 [R, 2 + 2K], K = min(256, V), as `pack_logprobs`: what a token was drawn from, likeliest first.

    probs: float32 [R, V], 0 where excluded. A greedy row has one candidate. Of more than K the first K are told.
    """
    scale = jnp.log(vocab.sum(probs))
    top, ids = vocab.top_k(probs, min(MAX_SUPPORT, vocab.size(probs)))
    count = vocab.sum(probs > 0, jnp.int32)
    chosen = vocab.take(probs, tokens[:, None])[:, 0]
    ids = jnp.where(random[:, None], ids.astype(jnp.int32), tokens[:, None])
    logprobs = jnp.where(random[:, None], jnp.log(top) - scale[:, None], 0)
    return pack_logprobs(jnp.where(random, jnp.log(chosen) - scale, 0), jnp.where(random, count, 1), ids, logprobs)


def token_logprobs(
    logits: jax.Array, tokens: jax.Array, norm: jax.Array, vocab: Vocab = WHOLE
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of the model's own distribution: (logprob float32 [R], rank int32 [R], top ids int32 [R, K], top logprobs).

    norm: float32 [R], logsumexp of the logits
    """
    chosen = vocab.take(logits, tokens[:, None])
    rank = 1 + vocab.sum(logits > chosen, jnp.int32)
    top, ids = vocab.top_k(logits, _top_k_width(vocab.size(logits)))
    return chosen[:, 0] - norm, rank, ids.astype(jnp.int32), top - norm[:, None]


def pack_logprobs(logprob: jax.Array, rank: jax.Array, ids: jax.Array, top: jax.Array) -> jax.Array:
    """The four of `token_logprobs` as int32 [R, 2 + 2K], one copy to the host."""

    def bits(values: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(values, jnp.int32)

    return jnp.concatenate([bits(logprob)[:, None], rank[:, None], ids, bits(top)], axis=1)


def unpack_logprobs(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """On the host: int32 [R, 2 + 2K] -> (logprobs [R], ranks [R], top ids [R, K], top logprobs [R, K])."""
    width = (packed.shape[1] - 2) // 2
    floats = packed.view(np.float32)
    return floats[:, 0], packed[:, 1], packed[:, 2 : 2 + width], floats[:, 2 + width :]
