"""Ragged batches for the attention tests, and an oracle that shares nothing with the package: dense numpy, float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Backend
from jaxserve.ops.paged_attention.scaled_pages import Pages, ScaledPages, held, is_scaled
from tests.quick import OPTIMIZED, QUICK

# The numbers of FP8 E4M3 that are not negative, in the order of their codes: 4 bits of exponent, 3 of mantissa.
E4M3 = np.array([np.ldexp(c % 8 + 8 * (c >= 8), max(c // 8, 1) - 10) for c in range(127)])


@dataclass(frozen=True)
class Case:
    """A batch by its rows (q_len, kv_len) and a layer by its sizes. `id` names the test."""

    id: str
    rows: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: str = "float32"
    pages: str | None = None  # dtype of the cache, None: `dtype`
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    decode_only: bool = False
    latent: bool = False  # V is K
    value_columns: int | None = None  # of the result that are compared
    padding: int = 0  # tokens behind the last row
    wide_table: int = 3  # columns of the page table behind the longest row
    kernels: bool = True  # run by the interpreted kernels too, at two seconds each

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def spec(self) -> AttentionSpec:
        sizes = self.head_dim**-0.5, self.num_kv_heads, self.window, self.soft_cap, self.value_columns, self.chunk
        return AttentionSpec(*sizes)

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        if self.chunk is not None:
            return position - position % self.chunk
        return 0 if self.window is None else max(0, position - self.window + 1)


@dataclass(frozen=True)
class Batch:
    case: Case
    q: np.ndarray  # [T, N, D] float32
    contexts: list[tuple[np.ndarray, np.ndarray]]  # per row k, v [kv_len, KH, D] float32
    metadata: AttentionMetadata
    sinks: np.ndarray | None
    num_pages: int
    all_slots: np.ndarray = field(repr=False)  # [sum of kv_lens] slot of each context token, rows in order


def make_batch(case: Case, seed: int = 0) -> Batch:
    """Random contents; pages in random order; table entries behind a row's context, and before the window of its first
    token, point at pages of NaN or nowhere."""
    rng = np.random.default_rng(seed)
    q_lens = np.array([q for q, _ in case.rows], np.int32)
    kv_lens = np.array([kv for _, kv in case.rows], np.int32)
    used = -(-kv_lens // case.page_size)
    num_pages = int(used.sum()) + 4
    table = np.full((len(case.rows), int(used.max(initial=0)) + case.wide_table), num_pages - 1, np.int32)
    table[:, -1] = 10**6
    order = rng.permutation(num_pages - 4)
    slots, contexts = [], []
    for row, kv_len in enumerate(kv_lens):
        pages, order = order[: used[row]], order[used[row] :]
        table[row, : used[row]] = pages
        table[row, : case.first(max(0, kv_len - q_lens[row])) // case.page_size] = num_pages - 1
        slots.append((pages[:, None] * case.page_size + np.arange(case.page_size)).reshape(-1)[:kv_len])
        k, v = rng.standard_normal((2, kv_len, case.num_kv_heads, case.head_dim), np.float32)
        contexts.append((k, k if case.latent else v))
    tokens = len(case.rows) if case.decode_only else int(q_lens.sum()) + case.padding
    positions = np.zeros(tokens, np.int32)
    step_slots = np.full(tokens, num_pages * case.page_size, np.int32)
    starts = np.arange(len(case.rows) + 1) if case.decode_only else np.concatenate([[0], np.cumsum(q_lens)])
    for row, (q_len, kv_len) in enumerate(case.rows):
        own = slice(starts[row], starts[row] + q_len)
        positions[own] = np.arange(kv_len - q_len, kv_len)
        step_slots[own] = slots[row][kv_len - q_len :]
    metadata = AttentionMetadata(
        page_table=jnp.asarray(table),
        cu_q_lens=jnp.asarray(starts, jnp.int32),
        kv_lens=jnp.asarray(kv_lens),
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(step_slots),
        decode_only=case.decode_only,
    )
    q = rng.standard_normal((tokens, case.num_heads, case.head_dim), np.float32)
    sinks = rng.standard_normal(case.num_heads).astype(np.float32) if case.sinks else None
    return Batch(case, q, contexts, metadata, sinks, num_pages, np.concatenate(slots).astype(np.int32))


def empty_cache(backend: Backend, case: Case, num_pages: int, fill: float = 0.0) -> Pages:
    """Pages whose every number is `fill`. int8 has no NaN, so its values are 1 and its scales `fill`."""
    sizes = num_pages, case.page_size, case.num_kv_heads
    shape = backend.cache_shape(*sizes, case.head_dim, latent=case.latent)
    dtype = jnp.dtype(case.pages or case.dtype)
    if not is_scaled(dtype):
        return held(jnp.full(shape, fill), backend.held_dtype(dtype))
    scales = jnp.full(backend.scale_shape(*sizes, latent=case.latent), fill, jnp.float32)
    values = jnp.full(shape, 1 if dtype == jnp.int8 else fill)
    return ScaledPages(held(values, backend.held_dtype(dtype)), scales)


def filled_cache(backend: Backend, batch: Batch) -> Pages:
    """A pool of NaN, but for the contexts of the batch, written by the backend: one program, not twenty single ones."""
    case = batch.case

    def filled(k: jax.Array, v: jax.Array, slots: jax.Array) -> Pages:
        return backend.write(empty_cache(backend, case, batch.num_pages, math.nan), k, v, slots)

    k, v = (np.concatenate([context[half] for context in batch.contexts]) for half in (0, 1))
    k, v = (half.astype(jnp.dtype(case.dtype)) for half in (k, v))
    return jax.jit(filled, compiler_options=QUICK)(k, v, batch.all_slots)


def run(backend: Backend, batch: Batch, *, optimized: bool = False) -> np.ndarray:
    """optimized: compile as for a user, and not by QUICK for a program that runs once"""
    sinks = None if batch.sinks is None else jnp.asarray(batch.sinks)
    q = jnp.asarray(batch.q.astype(jnp.dtype(batch.case.dtype)))
    attend = jax.jit(backend.attend, static_argnums=3, compiler_options=OPTIMIZED if optimized else QUICK)
    out = attend(q, filled_cache(backend, batch), batch.metadata, batch.case.spec, sinks)
    columns = batch.case.value_columns
    assert out.dtype == q.dtype and out.shape in (q.shape, (*q.shape[:2], columns))
    return np.asarray(out).astype(np.float32)[..., :columns]


def expected(batch: Batch) -> np.ndarray:
    """Dense softmax attention of each row, float64, on inputs rounded to the case's dtype."""
    out = np.zeros(batch.q.shape, np.float64)
    starts = np.asarray(batch.metadata.cu_q_lens)
    for row, (q_len, kv_len) in enumerate(batch.case.rows):
        k, v = (_kept(half, batch.case) for half in batch.contexts[row])
        for i in range(q_len if kv_len else 0):
            token = starts[row] + i
            q = _rounded(batch.q[token], batch.case.dtype)
            out[token] = _dense(batch.case, q, k, v, kv_len - q_len + i, batch.sinks)
    return out[..., : batch.case.value_columns]


def _kept(x: np.ndarray, case: Case) -> np.ndarray:
    """K or V [tokens, KH, D] as the pages hold it: 8 bits are multiples of a float32 scale, ties to even."""
    if case.pages is None:
        return _rounded(x, case.dtype)
    x = _rounded(x, case.dtype).astype(np.float32)
    steps = np.arange(128.0) if case.pages == "int8" else E4M3
    scale = np.abs(x).max(axis=-1, keepdims=True) * np.float32(1 / steps[-1])
    wanted = np.abs(x * (np.float32(1) / scale))
    above = np.clip(np.searchsorted(steps, wanted), 1, len(steps) - 1)
    low, high = steps[above - 1], steps[above]
    up = (wanted - low > high - wanted) | ((wanted - low == high - wanted) & (above % 2 == 0))
    return np.copysign(np.where(up, high, low), x) * scale.astype(np.float64)


def _rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    return x.astype(jnp.dtype(dtype)).astype(np.float64)


def _dense(
    case: Case, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int, sinks: np.ndarray | None
) -> np.ndarray:
    first = case.first(position)
    out = np.empty_like(q)
    for head in range(case.num_heads):
        keys, values = (half[first : position + 1, head // case.group] for half in (k, v))
        scores = keys @ q[head] / np.sqrt(case.head_dim)
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        weights = np.exp(scores)
        denominator = weights.sum() + (0 if sinks is None else np.exp(np.float64(sinks[head])))
        out[head] = weights @ values / denominator
    return out
