"""Recurrent states in plain XLA, for all platforms: short rows token by token, prompts 64 tokens at a time.

Short rows advance together: a loop takes the i-th token of each, those of the ring first. A row of CHUNK and more
tokens is cut at the multiples of CHUNK. Within a piece the recurrence has a closed form (https://arxiv.org/abs/2412.06464,
section 3; for mamba2 https://arxiv.org/abs/2405.21060, section 6), with c the sum of log decays since its start:

    L_ij = beta_i (k_i . k_j) exp(c_i - c_j), j < i;   u = (I + L)^-1 beta (v - exp(c) (k S))       mamba2: u = dt v
    o = exp(c) (q S) + lower((q_i . k_j) exp(c_i - c_j)) u;   S = exp(c_n) S + (exp(c_n - c) k)^T u

The system is solved by substitution: powers of L grow past float32 if keys repeat. A decay per channel has no such
form without exponentials that overflow, so channel_delta goes token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.ops.state.base import (
    CHUNK,
    Prepared,
    StateArrays,
    StateRows,
    StateSpec,
    StateWeights,
    convolve,
    emit_pages,
    prepare,
    row_inputs,
    store_rings,
)
from jaxserve.ops.state.reference import advance, convolution, with_skip


@dataclass(frozen=True)
class XlaStates:
    """See the module docstring and `base.StateBackend`."""

    name: str = "xla"

    def advance_short(
        self, step: Step, live: jax.Array, out: jax.Array, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Advance the short rows, bool [R] -> (out [T, H, V] with their answers, pool [N, H, K, V])."""
        return step.advance_short(live, out, pool)

    def recur(
        self, spec: StateSpec, arrays: StateArrays, raw: jax.Array, weights: StateWeights, rows: StateRows
    ) -> tuple[jax.Array, StateArrays]:
        """Advance a layer by raw [T, Hk, C] -> (out [T, H, V], arrays), see `base.StateBackend.recur`."""
        if arrays.state is None:
            out = convolution(spec, arrays, raw, weights, rows)
            return out, StateArrays(None, store_rings(arrays.ring, raw, rows))
        step = Step(spec, arrays, raw, weights, rows)
        count = rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
        never = rows.per_token or rows.decode_only or spec.kind == "channel_delta" or raw.shape[0] < CHUNK
        long = jnp.zeros_like(count, bool) if never else count >= CHUNK
        out = jnp.zeros((raw.shape[0], spec.heads, spec.v_dim), raw.dtype)
        carry = self.advance_short(step, (count > 0) & ~long, out, arrays.state)
        out, pool = carry if never else step.advance_long(long, *carry)
        # The rings are read above: a store before that would need a copy of them.
        out, ring = lax.optimization_barrier((out, arrays.ring))
        return out, StateArrays(pool, store_rings(ring, raw, rows))


@dataclass(frozen=True)
class Step:
    """The arguments of `recur`."""

    spec: StateSpec
    arrays: StateArrays
    raw: jax.Array
    weights: StateWeights
    rows: StateRows

    def advance_short(self, live: jax.Array, out: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance the rows of bool [R] by one token of each at a time -> (out [T, H, V], pool [N, H, K, V])."""
        rows, pages = self.rows, pool.shape[0]
        row = jnp.arange(live.shape[0], dtype=jnp.int32)
        ends = rows.starts + rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
        steps = jnp.max(jnp.where(live, ends - rows.folded, 0), initial=0)
        emitted = emit_pages(rows, pages)
        held = self._held(pool, rows.read)

        def step(
            i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
            """Advance each row by its i-th token; carry: states, states to keep, pool, out."""
            states, kept, pool, out = carry
            position = rows.folded + i
            now = live & (position < ends)
            token, convolved = self.tokens(row, position)
            states, answers = advance(self.spec, states, token)
            answers = with_skip(self.spec, answers, convolved, self.weights)
            place = rows.cu_q_lens[:-1] + position - rows.starts
            place = jnp.where(now & (position >= rows.starts), place, out.shape[0])
            out = out.at[place].set(answers.astype(out.dtype), mode="drop")
            sure = now & (position < rows.sure)
            kept = jnp.where(sure[:, None, None, None], states, kept)
            here = (rows.emits[:, :, 0] == position[:, None] + 1) & sure[:, None]
            page = jnp.min(jnp.where(here, emitted, pages), axis=1)
            pool = lax.cond(
                jnp.any(page < pages), lambda pool: pool.at[page].set(states, mode="drop"), lambda pool: pool, pool
            )
            return states, kept, pool, out

        _, kept, pool, out = lax.fori_loop(0, steps, step, (held, held, pool, out))
        return out, pool.at[jnp.where(live, rows.write, pages)].set(kept, mode="drop")

    def advance_long(self, live: jax.Array, out: jax.Array, pool: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Advance the rows of bool [R] by pieces of CHUNK positions -> (out [T, H, V], pool [N, H, K, V])."""
        rows, pages = self.rows, pool.shape[0]
        row_ends = rows.starts + rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
        first_piece = rows.folded // CHUNK
        pieces = jnp.cumsum(jnp.where(live, (row_ends - 1) // CHUNK - first_piece + 1, 0))
        emitted = emit_pages(rows, pages)

        def step(i: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Advance a row by one piece; carry: its state, pool, out."""
            state, pool, out = carry
            row = jnp.searchsorted(pieces, i, side="right").astype(jnp.int32)
            border = ((row_ends[row] - 1) // CHUNK + 1 - pieces[row] + i) * CHUNK
            position = border + jnp.arange(CHUNK, dtype=jnp.int32)
            folded, sure = rows.folded[row], rows.sure[row]
            first = border <= folded
            state = jnp.where(first, self._held(pool, rows.read[row]), state)
            live = (position >= folded) & (position < row_ends[row])
            token, convolved = self.tokens(jnp.full_like(position, row), position)
            answers, change = _chunk(self.spec, state, _silenced(token, live))
            answers = with_skip(self.spec, answers, convolved, self.weights)
            place = rows.cu_q_lens[row] + position - rows.starts[row]
            place = jnp.where(live & (position >= rows.starts[row]), place, out.shape[0])
            out = out.at[place].set(answers.astype(out.dtype), mode="drop")

            after = change.apply(state, live)
            part = position < sure
            kept = lax.cond(jnp.all(part | ~live), lambda: after, lambda: change.apply(state, live & part))
            stored = ((border < sure) & (sure <= border + CHUNK)) | (first & (sure == folded))
            here = (rows.emits[row, :, 0] == border + CHUNK) & (border + CHUNK <= sure)
            targets = jnp.append(jnp.where(here, emitted[row], pages), jnp.where(stored, rows.write[row], pages))
            pool = lax.cond(
                jnp.any(targets < pages),
                lambda pool: pool.at[targets].set(kept[None], mode="drop"),
                lambda pool: pool,
                pool,
            )
            return after, pool, out

        state = jnp.zeros(pool.shape[1:], jnp.float32)
        _, pool, out = lax.fori_loop(0, pieces[-1], step, (state, pool, out))
        return out, pool

    def _held(self, pool: jax.Array, page: jax.Array) -> jax.Array:
        """Return the states of pages int32 [...], zeros for N and above: [..., H, K, V]."""
        held = pool.at[page].get(mode="clip")
        return jnp.where((page < pool.shape[0])[..., None, None, None], held, 0.0)

    def tokens(self, row: jax.Array, position: jax.Array) -> tuple[Prepared, jax.Array]:
        """Return the operands of tokens at positions [n] of rows [n], and their convolved [n, Hk, channels]."""
        spec = self.spec
        at = position[:, None] + jnp.arange(1 - spec.conv_width, 1, dtype=jnp.int32)[None, :]
        taps = row_inputs(self.arrays.ring, self.raw, self.rows, jnp.broadcast_to(row[:, None], at.shape), at)
        convolved = convolve(spec, taps[..., : spec.channels], self.weights)
        return prepare(spec, convolved, taps[:, -1, :, spec.channels :], self.weights), convolved


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _Change:
    """The change of a state by a piece of n tokens: keys [H, n, K], u [H, n, V], c: sums of log decays [H, n]."""

    keys: jax.Array
    u: jax.Array
    c: jax.Array

    def apply(self, state: jax.Array, live: jax.Array) -> jax.Array:
        """Return the state [H, K, V] after the tokens of bool [n], the first of the piece's live ones."""
        # Log decays are at most 0, so the smallest sum is that of the last token.
        total = jnp.min(jnp.where(live[None, :], self.c, 0.0), axis=1)
        fade = jnp.where(live[None, :], jnp.exp(jnp.minimum(total[:, None] - self.c, 0.0)), 0.0)
        keys = self.keys * fade[:, :, None]
        return jnp.exp(total)[:, None, None] * state + _dot("hnk,hnv->hkv", keys, self.u)


def _silenced(token: Prepared, live: jax.Array) -> Prepared:
    """Return tokens [n] of which those that are not live change nothing."""

    def mask(x: jax.Array) -> jax.Array:
        return jnp.where(live.reshape(-1, *(1,) * (x.ndim - 1)), x, 0.0)

    return Prepared(*map(mask, token))


def _chunk(spec: StateSpec, state: jax.Array, token: Prepared) -> tuple[jax.Array, _Change]:
    """Return the answers [n, H, V] of n tokens to a state [H, K, V], and their change. Decays are by head."""
    q, k = (jnp.repeat(x.swapaxes(0, 1), spec.group, axis=0) for x in (token.q, token.k))  # [H, n, K]
    v, rate, c = token.v.swapaxes(0, 1), token.rate.T, jnp.cumsum(token.decay.T, axis=1)
    n = c.shape[1]
    index = jnp.arange(n)
    lower = (index[:, None] >= index[None, :])[None]
    fade = jnp.exp(jnp.where(lower, c[:, :, None] - c[:, None, :], -jnp.inf))  # [H, n, n]
    u = rate[:, :, None] * v
    if spec.kind == "delta":
        u = u - (rate * jnp.exp(c))[:, :, None] * _dot("hnk,hkv->hnv", k, state)
        # The solver reads only what lies below the diagonal.
        system = rate[:, :, None] * _dot("hik,hjk->hij", k, k) * fade
        u = lax.linalg.triangular_solve(system, u, left_side=True, lower=True, unit_diagonal=True)
    out = jnp.exp(c)[:, :, None] * _dot("hnk,hkv->hnv", q, state)
    out = out + _dot("hij,hjv->hiv", _dot("hik,hjk->hij", q, k) * fade, u)
    return out.swapaxes(0, 1), _Change(k, u, c)


def _dot(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, precision="highest")
