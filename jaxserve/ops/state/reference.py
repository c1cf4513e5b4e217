"""The reference that other backends are tested against: token by token, in float32 and plain jnp. Slow."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxserve.ops.state.base import (
    Prepared,
    StateArrays,
    StateRows,
    StateSpec,
    StateWeights,
    behind,
    convolve,
    emit_pages,
    prepare,
    row_inputs,
    store_rings,
)


@dataclass(frozen=True)
class ReferenceStates:
    """One loop over the rows' tokens, first those that the ring keeps."""

    name: str = "reference"

    def recur(
        self, spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
    ) -> tuple[jax.Array, StateArrays]:
        """Advance a layer by raw [T, Hk, C] -> (out [T, H, V], arrays), see `StateBackend.recur`."""
        ring = store_rings(arrays.ring, raw, rows)
        if arrays.state is None:
            return convolution(spec, arrays, raw, weights, rows), StateArrays(None, ring)
        count = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
        ends = jnp.cumsum(jnp.where(count > 0, rows.starts + count - rows.folded, 0))
        pages, num_tokens = arrays.state.shape[0], raw.shape[0]
        emitted = emit_pages(rows, pages)

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Fold or answer for the i-th token of all rows; carry: its row's state, all states, out."""
            state, pool, out = carry
            row = jnp.searchsorted(ends, i, side="right").astype(jnp.int32)
            position = rows.starts[row] + count[row] - ends[row] + i
            first, sure = position == rows.folded[row], rows.sure[row]
            page = rows.read[row]
            held = jnp.where(page < pages, pool.at[page].get(mode="clip"), 0.0)
            state = jnp.where(first, held, state)
            pool = pool.at[jnp.where(first & (sure == position), rows.write[row], pages)].set(state, mode="drop")

            taps = row_inputs(arrays.ring, raw, rows, row, position + jnp.arange(1 - spec.conv_width, 1))
            convolved = convolve(spec, taps[..., : spec.channels], weights)
            state, answer = advance(spec, state, prepare(spec, convolved, taps[-1, :, spec.channels :], weights))
            token = rows.cu_q_lens[row] + position - rows.starts[row]
            token = jnp.where(position >= rows.starts[row], token, num_tokens)
            out = out.at[token].set(with_skip(spec, answer, convolved, weights).astype(out.dtype), mode="drop")

            pool = pool.at[jnp.where(sure == position + 1, rows.write[row], pages)].set(state, mode="drop")
            here = jnp.where(rows.emits[row, :, 0] == position + 1, emitted[row], pages)
            return state, pool.at[here].set(state[None], mode="drop"), out

        start = jnp.zeros(arrays.state.shape[1:], jnp.float32), arrays.state, _no_answers(spec, raw)
        _, pool, out = jax.lax.fori_loop(0, ends[-1], step, start)
        return out, StateArrays(pool, ring)


def convolution(
    spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
) -> jax.Array:
    """Return the answers [T, H, V] of a layer that has no matrix: the convolution of raw [T, Hk, C]."""
    token = jnp.arange(raw.shape[0], dtype=jnp.int32)
    row = jnp.searchsorted(rows.cu_q_lens, token, side="right").astype(jnp.int32) - 1
    row = jnp.minimum(row, rows.starts.shape[0] - 1)
    position = rows.starts[row] + token - rows.cu_q_lens[row]
    reach = jnp.arange(1 - spec.conv_width, 1, dtype=jnp.int32)
    at = position[:, None] + reach[None, :]
    taps = row_inputs(arrays.ring, raw, rows, jnp.broadcast_to(row[:, None], at.shape), at)
    out = convolve(spec, taps, weights).reshape(raw.shape[0], spec.heads, spec.v_dim)
    return jnp.where((token < rows.cu_q_lens[-1])[:, None, None], out, 0.0).astype(raw.dtype)


def advance(spec: StateSpec, state: jax.Array, token: Prepared) -> tuple[jax.Array, jax.Array]:
    """Advance states [..., H, K, V] by one token of each -> (states, answers [..., H, V])."""
    q, k = (jnp.repeat(x, spec.group, axis=-2) for x in (token.q, token.k))  # [..., H, K]
    decay = jnp.exp(token.decay)
    state = state * (decay[..., None] if spec.kind == "channel_delta" else decay[..., None, None])
    value = token.v
    if spec.kind != "mamba2":
        value = value - jnp.einsum("...kv,...k->...v", state, k, precision="highest")
    state = state + k[..., None] * (token.rate[..., None] * value)[..., None, :]
    return state, jnp.einsum("...kv,...k->...v", state, q, precision="highest")


def with_skip(spec: StateSpec, answer: jax.Array, convolved: jax.Array, weights: StateWeights) -> jax.Array:
    """Add the input that mamba2 leads past its state: answers [..., H, V] of convolved [..., Hk, channels]."""
    if weights.skip is None:
        return answer
    passed = convolved[..., 2 * spec.k_dim :].reshape(answer.shape)
    return answer + behind(answer.ndim - 2, weights.skip[:, None]) * passed


def _no_answers(spec: StateSpec, raw: jax.Array) -> jax.Array:
    return jnp.zeros((raw.shape[0], spec.heads, spec.v_dim), raw.dtype)
