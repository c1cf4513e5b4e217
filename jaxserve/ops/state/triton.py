"""Recurrent states on an NVIDIA GPU: short rows by one Triton kernel, prompts as in XLA.

A program has one row, one value head and a block of columns of its state, which stay in registers: columns do not
depend on each other. It reads the state once, takes the row's tokens one after the other, those of the ring first, and
stores the state where it is sure. Convolution and gates before it are XLA's.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.state.base import Prepared, StateSpec, emit_pages
from jaxserve.ops.state.reference import with_skip
from jaxserve.ops.state.xla import Step, XlaStates
from jaxserve.ops.triton_arrays import index_grid


@dataclass(frozen=True)
class TritonStates(XlaStates):
    """See the module docstring and `base.StateBackend`. columns: of a state, of a program."""

    name: str = "triton"
    columns: int = 32
    warps: int = 4
    interpret: bool = False

    def advance_short(
        self, step: Step, live: jax.Array, out: jax.Array, pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Advance the short rows, see `XlaStates.advance_short`. XLA's code serves sizes that are not powers of two."""
        spec = step.spec
        if spec.k_dim & (spec.k_dim - 1) or spec.v_dim % self.columns:
            return super().advance_short(step, live, out, pool)
        rows, pages = step.rows, pool.shape[0]
        oldest = step.arrays.ring.shape[1] - spec.conv_width + 1  # tokens that a row may have to fold
        row = jnp.arange(live.shape[0], dtype=jnp.int32)
        folds = jnp.repeat(row, oldest), (rows.folded[:, None] + jnp.arange(oldest)[None, :]).reshape(-1)
        index = jnp.arange(out.shape[0], dtype=jnp.int32)
        row_of = jnp.searchsorted(rows.cu_q_lens, index, side="right").astype(jnp.int32) - 1
        row_of = jnp.minimum(row_of, live.shape[0] - 1)
        position = rows.starts[row_of] + index - rows.cu_q_lens[row_of]
        old, _ = step.tokens(*folds)
        new, convolved = step.tokens(row_of, position)
        tokens = Prepared(*(jnp.concatenate(pair) for pair in zip(old, new, strict=True)))
        plan = _Plan.of(step, live, oldest, pages)
        answers, pool = self._run(spec, tokens, plan, out.shape, pool)
        answers = with_skip(spec, answers, convolved, step.weights).astype(out.dtype)
        mine = live[row_of] & (index < rows.cu_q_lens[-1])
        return jnp.where(mine[:, None, None], answers, out), pool

    def _run(
        self, spec: StateSpec, tokens: Prepared, plan: _Plan, shape: tuple[int, ...], pool: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the answers float32 [T, H, V] and the pool."""
        inputs = [*tokens, *plan, pool]
        return pl.pallas_call(
            functools.partial(_kernel, spec=spec, columns=self.columns, oldest=tokens.q.shape[0] - shape[0]),
            grid=(plan.counts.shape[0], spec.heads, spec.v_dim // self.columns),
            out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(pool.shape, pool.dtype)],
            input_output_aliases={len(inputs) - 1: 1},
            compiler_params=plt.CompilerParams(num_warps=self.warps),
            interpret=self.interpret,
            name="recurrent_state",
        )(*inputs)


class _Plan(NamedTuple):
    """The work of each row, int32 [R]: tokens, how many of them are the ring's, its first among the step's, pages.

    sure: tokens after which the state is stored. emits [R, E, 2]: (tokens, page) of the copies.
    """

    counts: jax.Array
    folds: jax.Array
    firsts: jax.Array
    reads: jax.Array
    writes: jax.Array
    sure: jax.Array
    emits: jax.Array

    @classmethod
    def of(cls, step: Step, live: jax.Array, oldest: int, pages: int) -> _Plan:
        rows = step.rows
        ends = rows.starts + rows.cu_q_lens[1:] - rows.cu_q_lens[:-1]
        emits = jnp.stack([rows.emits[:, :, 0] - rows.folded[:, None], emit_pages(rows, pages)], axis=-1)
        return cls(
            counts=jnp.where(live, ends - rows.folded, 0),
            folds=jnp.minimum(rows.starts - rows.folded, oldest),
            firsts=rows.cu_q_lens[:-1],
            reads=rows.read,
            writes=jnp.where(live, rows.write, pages),
            sure=rows.sure - rows.folded,
            emits=emits,
        )


def _kernel(
    q_ref, k_ref, v_ref, decay_ref, rate_ref, counts, folds, firsts, reads, writes, sure, emits, pool_in, out, pool,
    *, spec: StateSpec, columns: int, oldest: int,
):  # fmt: skip
    row, head = pl.program_id(0), pl.program_id(1)
    column = pl.program_id(2) * columns + jnp.arange(columns, dtype=jnp.int32)
    key = jnp.arange(spec.k_dim, dtype=jnp.int32)
    key_head, num_rows, pages = head // spec.group, counts.shape[0], pool.shape[0]
    keys, values = index_grid(key, column)
    shape = keys.shape
    read, write, fold, first = reads[row], writes[row], folds[row], firsts[row]

    def place(page):
        """Return the state's block on a page, and whether it is one."""
        return pool.at[jnp.minimum(page, pages - 1), head, keys, values], page < pages

    def keep(page, wanted, state):
        """Store the state on a page if it is wanted there."""
        ref, is_page = place(page)
        plt.store(ref, state, mask=lax.broadcast_in_dim(jnp.logical_and(wanted, is_page), shape, ()))

    ref, is_page = place(read)
    state = plt.load(ref, mask=lax.broadcast_in_dim(is_page, shape, ()), other=0.0)
    keep(write, sure[row] == 0, state)

    def step(i, state):
        """Take the row's i-th token."""
        old = i < fold
        place = jnp.where(old, row * (oldest // num_rows) + i, oldest + first + i - fold)
        k, q = plt.load(k_ref.at[place, key_head, key]), plt.load(q_ref.at[place, key_head, key])
        v, rate = plt.load(v_ref.at[place, head, column]), rate_ref[place, head]
        if spec.kind == "channel_delta":
            state = state * jnp.exp(plt.load(decay_ref.at[place, head, key]))[:, None]
        else:
            state = state * jnp.exp(decay_ref[place, head])
        if spec.kind != "mamba2":
            v = v - jnp.sum(state * k[:, None], axis=0)
        state = state + k[:, None] * (rate * v)[None, :]
        answer = jnp.sum(state * q[:, None], axis=0)
        token = jnp.where(old, 0, first + i - fold)
        plt.store(out.at[token, head, column], answer, mask=lax.broadcast_in_dim(jnp.logical_not(old), (columns,), ()))
        keep(write, sure[row] == i + 1, state)
        for e in range(emits.shape[1]):
            keep(emits[row, e, 1], emits[row, e, 0] == i + 1, state)
        return state

    lax.fori_loop(0, counts[row], step, state)
