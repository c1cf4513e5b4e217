"""Sequences whose layer is advanced in steps, and the plain recurrence in numpy that all of it must equal.

The oracle knows nothing of pages, rings or rows: it folds a sequence's tokens one after the other in float64. A step
has prompts cut anywhere, rows of one token, rejected drafts, rows that are run again because their token mask came
late, sequences that begin at a snapshot, and padding. All pages begin as NaN.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.ops.state import StateArrays, StateBackend, StateRows, StateSpec, StateWeights, ring_length, state_shapes
from jaxserve.ops.state.base import CHUNK, Kind

EMITS = 4


def spec_of(kind: Kind, *, key_heads: int = 2, group: int = 2, k_dim: int = 16, v_dim: int = 32) -> StateSpec:
    """Return a small layer of a kind; channel_delta has one value head a key head, a convolution no keys."""
    group = 1 if kind in ("channel_delta", "convolution") else group
    k_dim = 0 if kind == "convolution" else k_dim
    return StateSpec(kind, key_heads, key_heads * group, k_dim, v_dim, conv_width=3 if kind == "convolution" else 4)


def weights_of(spec: StateSpec, rng: np.random.Generator) -> StateWeights:
    """Return weights as published models have them: A up to 16, and steps from 0.001 to 0.1 before their gate."""
    conv = rng.standard_normal((spec.conv_width, spec.key_heads, spec.channels), np.float32) / 2
    if spec.kind == "convolution":
        return StateWeights(jnp.asarray(conv))
    per_head = (spec.heads, spec.k_dim) if spec.kind == "channel_delta" else (spec.heads,)
    step = np.exp(rng.uniform(np.log(0.001), np.log(0.1), per_head))
    return StateWeights(
        jnp.asarray(conv),
        jnp.asarray(rng.standard_normal((spec.key_heads, spec.channels), np.float32))
        if spec.kind == "mamba2"
        else None,
        jnp.asarray(np.log(rng.uniform(0.01, 16, spec.heads)), jnp.float32),
        jnp.asarray(step + np.log(-np.expm1(-step)), jnp.float32),
        jnp.asarray(rng.standard_normal(spec.heads), jnp.float32) if spec.kind == "mamba2" else None,
    )


def plain(
    spec: StateSpec, weights: StateWeights, raw: np.ndarray, dtype: type[np.floating] = np.float64
) -> tuple[np.ndarray, np.ndarray]:
    """Fold raw [n, Hk, C] -> the answers [n, H, V], and the states after 0 .. n tokens [n + 1, H, K, V]."""
    n, w, k_dim, r = len(raw), spec.conv_width, spec.k_dim, spec.group
    conv, bias, log_a, dt_bias, skip = (None if x is None else np.asarray(x, dtype) for x in weights)
    assert conv is not None
    inputs = np.concatenate([np.zeros((w - 1, *raw.shape[1:]), dtype), raw.astype(dtype)])[:, :, : spec.channels]
    y = sum(inputs[j : j + n] * conv[j] for j in range(w)) + (0 if bias is None else bias)
    assert isinstance(y, np.ndarray)
    states = np.zeros((n + 1, spec.heads, k_dim, spec.v_dim), dtype)
    if spec.kind == "convolution":
        return y.reshape(n, spec.heads, spec.v_dim), states
    assert log_a is not None
    assert dt_bias is not None
    y = y / (1 + np.exp(-y))
    gates = raw[:, :, spec.channels :].astype(dtype)
    answers = np.zeros((n, spec.heads, spec.v_dim), dtype)
    for t in range(n):
        for h in range(spec.heads):
            head, j = divmod(h, r)
            q, k = y[t, head, :k_dim], y[t, head, k_dim : 2 * k_dim]
            v = y[t, head, 2 * k_dim + j * spec.v_dim :][: spec.v_dim]
            if spec.kind == "mamba2":
                dt = np.clip(np.logaddexp(0, gates[t, head, j] + dt_bias[h]), *spec.dt_limits)
                state = states[t, h] * np.exp(-np.exp(log_a[h]) * dt) + np.outer(k, dt * v)
                answers[t, h] = state.T @ q + (0 if skip is None else skip[h] * v)
            else:
                q = q / np.sqrt(q @ q + 1e-6) / np.sqrt(k_dim)
                k = k / np.sqrt(k @ k + 1e-6)
                shift = gates[t, head, r + j] if spec.kind == "delta" else gates[t, head, r:]
                decay = np.exp(-np.exp(log_a[h]) * np.logaddexp(0, shift + dt_bias[h]))
                state = states[t, h] * (decay if spec.kind == "delta" else decay[:, None])
                state = state + np.outer(k, (v - state.T @ k) / (1 + np.exp(-gates[t, head, j])))
                answers[t, h] = state.T @ q
            states[t + 1, h] = state
    return answers, states


@dataclass
class Sequence:
    """A sequence: its true inputs [n, Hk, C], how many are computed, and what the device knows of it."""

    raw: np.ndarray
    answers: np.ndarray  # [n, H, V]
    states: np.ndarray  # [n + 1, H, K, V]
    page: int
    read: int
    computed: int = 0
    folded: int = 0


@dataclass(frozen=True)
class Row:
    """A row of a step: `count` true tokens, of which the last `unsure` stay out of the state, then rejected drafts."""

    sequence: Sequence
    count: int
    unsure: int = 0
    drafts: int = 0
    emits: tuple[tuple[int, int], ...] = ()


@dataclass
class World:
    """The pages of a layer and the sequences on them, advanced by a backend."""

    spec: StateSpec
    backend: StateBackend
    max_drafts: int = 0
    num_pages: int = 12
    per_token: bool = False
    dtype: str = "float32"
    seed: int = 0
    tolerance: float = 2e-5
    free: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.weights = weights_of(self.spec, self.rng)
        state, ring = state_shapes(self.spec, self.num_pages, ring_length(self.spec, self.max_drafts))
        nan = jnp.nan
        self.arrays = StateArrays(
            None if state is None else jnp.full(state, nan, jnp.float32), jnp.full(ring, nan, self.dtype)
        )
        self.free = list(range(self.num_pages))

    def sequence(self, length: int, snapshot: tuple[Sequence, int, int] | None = None) -> Sequence:
        """Return a sequence of random tokens; snapshot: (whose first tokens it has, how many, page of their state)."""
        raw = self.rng.standard_normal((length, self.spec.key_heads, self.spec.width), np.float32)
        raw = np.array(jnp.asarray(raw, self.dtype).astype(jnp.float32))
        if snapshot is not None:
            raw[: snapshot[1]] = snapshot[0].raw[: snapshot[1]]
        new = Sequence(raw, *plain(self.spec, self.weights, raw), self.free.pop(), self.num_pages)
        if snapshot is not None:
            _, new.computed, new.read = snapshot
            new.folded = new.computed
        return new

    def step(self, rows: list[Row], *, padding: int = 3, again: bool = False, empty_rows: int = 1) -> np.ndarray:
        """Run a step, compare its answers and states, and return the answers. again: twice, as for a late mask."""
        packed, expected = [], []
        for row in rows:
            s, after = row.sequence, row.sequence.computed + row.count
            drafts = self.rng.standard_normal((row.drafts, *s.raw.shape[1:]), np.float32)
            drafts = np.array(jnp.asarray(drafts, self.dtype).astype(jnp.float32))
            packed += [s.raw[s.computed : after], drafts]
            with_drafts = np.concatenate([s.raw[:after], drafts])
            expected.append(plain(self.spec, self.weights, with_drafts)[0] if row.drafts else s.answers[:after])
        noise = np.full((padding, self.spec.key_heads, self.spec.width), np.nan, np.float32)
        counts = [row.count + row.drafts for row in rows]
        arguments = self._rows(rows, counts, empty_rows)
        raw = jnp.asarray(np.concatenate([*packed, noise]), self.dtype)
        out, self.arrays = _recur(self.backend, self.spec, self.arrays, raw, self.weights, arguments)
        if again:  # only the states have moved on
            arguments = dataclasses.replace(
                arguments, read=arguments.write, folded=jnp.minimum(arguments.sure, arguments.starts)
            )
            out, self.arrays = _recur(self.backend, self.spec, self.arrays, raw, self.weights, arguments)
        out = np.asarray(out.astype(jnp.float32))
        ends = np.cumsum(counts)
        np.testing.assert_array_equal(out[ends[-1] :], 0)
        for row, end, count, answers in zip(rows, ends, counts, expected, strict=True):
            self._close(out[end - count : end], answers[row.sequence.computed :])
            s, sure = row.sequence, row.sequence.computed + row.count - row.unsure
            for depth, page in [(sure, s.page), *(e for e in row.emits if s.folded < e[0] <= sure)]:
                if self.arrays.state is not None:
                    self._close(np.asarray(self.arrays.state[page]), s.states[depth])
            s.computed, s.folded, s.read = s.computed + row.count, sure, s.page
        return out

    def _close(self, got: np.ndarray, want: np.ndarray) -> None:
        scale = max(1.0, float(np.abs(want).max(initial=0)))
        np.testing.assert_allclose(got, want, rtol=0, atol=self.tolerance * scale)

    def _rows(self, rows: list[Row], counts: list[int], empty: int) -> StateRows:
        emits = np.full((len(rows) + empty, EMITS, 2), self.num_pages, np.int32)
        emits[:, :, 0] = CHUNK  # a place without a page: nowhere
        for place, row in enumerate(rows):
            for i, emit in enumerate(row.emits):
                emits[place, i] = emit
        s = [row.sequence for row in rows]

        def ints(values: list[int], other: int) -> jax.Array:
            return jnp.asarray([*values, *[other] * empty], jnp.int32)

        return StateRows(
            cu_q_lens=jnp.asarray(np.cumsum([0, *counts, *[0] * empty]), jnp.int32),
            starts=ints([x.computed for x in s], 7),
            read=ints([x.read for x in s], self.num_pages),
            write=ints([x.page for x in s], 0),  # a row without tokens writes nothing, whatever its page
            folded=ints([x.folded for x in s], 7),
            sure=ints([x.computed + row.count - row.unsure for x, row in zip(s, rows, strict=True)], 7),
            emits=jnp.asarray(emits),
            decode_only=all(count == 1 for count in counts) and not empty,
            per_token=self.per_token,
        )


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _recur(
    backend: StateBackend, spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
) -> tuple[jax.Array, StateArrays]:
    return backend.recur(spec, arrays, raw, weights, rows)
