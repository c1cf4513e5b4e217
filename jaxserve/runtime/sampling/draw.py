"""Drawing a token from logits or probabilities: greedy, filters (top-k, top-p, min-p), random draws and watermarks.

A draw depends on the row's probabilities, seed and position only; with a watermark, on its probabilities, the key and
the tokens before it. It never depends on the other rows.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.sampling.vocab import WHOLE, Vocab, first_above
from jaxserve.types.sampling import threefry2x32

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
    """Set to zero what top-k, top-p and min-p exclude, in the rows with `active`, bool [R].

    probs: float32 [R, V]; the largest of a row is 1, and they need not sum to 1. top_k: int32 [R]; top_p, min_p:
    float32 [R].
    top-k keeps the k largest and all that tie with the k-th. top-p (Holtzman et al., arXiv 1904.09751) keeps the
    fewest likeliest tokens whose share of what top-k kept reaches top_p, and all that tie with the last. min-p
    (arXiv 2407.01082) keeps tokens of at least min_p times the largest.
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
