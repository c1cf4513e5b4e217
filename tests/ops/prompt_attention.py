"""The C kernel for rows of several tokens beside double precision, for tests of each instruction set."""

import jax.numpy as jnp
import numpy as np

from jaxserve.ops import native

PAGE = 16
# query heads, kv heads, head size, window, soft cap; 40 heads of one kv head are more than the queries of a unit
CASES = [(6, 2, 32, None, None), (40, 1, 16, None, None), (3, 3, 16, 20, None), (8, 2, 16, None, 2.0)]


def attend(parts: list[tuple[int, int]], case: tuple[int, int, int, int | None, float | None]) -> np.ndarray:
    """Attend tokens [first, first + count) of one text of 100 tokens for each part; parts of one token get zeros."""
    heads, kv_heads, depth, window, cap = case
    rng = np.random.default_rng(0)
    q = rng.standard_normal((100, heads, depth), np.float32)
    cache = rng.standard_normal((9, 2, PAGE, kv_heads * depth), np.float32)
    table = np.tile(np.array([3, 8, 0, 5, 7, 1, 6], np.int32), (len(parts), 1))
    starts = np.cumsum([0] + [count for _, count in parts[:-1]])
    counts, lengths = [count for _, count in parts], [first + count for first, count in parts]
    packed = np.concatenate([q[first : first + count] for first, count in parts])
    out = native.attend_prompts(
        jnp.asarray(packed),
        (jnp.asarray(starts, jnp.int32), jnp.asarray(counts, jnp.int32), jnp.asarray(lengths, jnp.int32)),
        native.PagedContext(jnp.asarray(cache), jnp.asarray(table), sliding_window=window, soft_cap=cap),
    )
    return np.asarray(out)


def _dense(case: tuple[int, int, int, int | None, float | None]) -> np.ndarray:
    heads, kv_heads, depth, window, cap = case
    rng = np.random.default_rng(0)
    q = rng.standard_normal((100, heads, depth), np.float32).astype(np.float64)
    cache = rng.standard_normal((9, 2, PAGE, kv_heads * depth), np.float32).astype(np.float64)
    pages = cache[[3, 8, 0, 5, 7, 1, 6]].reshape(7, 2, PAGE, kv_heads, depth)
    k, v = (pages[:, half].reshape(-1, kv_heads, depth)[:100].repeat(heads // kv_heads, axis=1) for half in (0, 1))
    scores = np.einsum("qnd,tnd->nqt", q, k)
    scores = scores if cap is None else np.tanh(scores / cap) * cap
    behind = np.arange(100)[:, None] - np.arange(100)[None, :]
    seen = (behind >= 0) & (behind < (window or 100))
    weights = np.where(seen, np.exp(scores - scores.max(axis=2, keepdims=True)), 0)
    return np.einsum("nqt,tnd->qnd", weights / weights.sum(axis=2, keepdims=True), v)


def check_prompts() -> None:
    """Compare each case with double precision; a text in parts has the bits of the whole."""
    for case in CASES:
        whole = attend([(0, 100)], case)
        np.testing.assert_allclose(whole, _dense(case), rtol=2e-5, atol=1e-5)
        several = attend([(70, 30), (0, 37), (5, 1), (37, 33)], case)
        np.testing.assert_array_equal(several[:30], whole[70:])
        np.testing.assert_array_equal(several[30:67], whole[:37])
        np.testing.assert_array_equal(several[67], 0)
        np.testing.assert_array_equal(several[68:], whole[37:70])
