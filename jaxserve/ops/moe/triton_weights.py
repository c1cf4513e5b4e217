"""Products with a weight's rows as they lie in memory, for Triton: wide, or in few bits that registers unpack.

A step along a row is a power of two of numbers. In 4 bits the low halves of 16 bytes are the first 16 of 32 numbers, so
a step is two products, one of the low halves and one of the high ones, and no register changes its place.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from jaxserve.ops.quantized import BLOCK, MIDDLE, Quantized
from jaxserve.ops.triton_arrays import dot, index_grid, load


@dataclass(frozen=True)
class Form:
    """How a weight [E, rows, depth] is held, and the numbers of a step along its rows."""

    depth: int
    step: int
    group: int = 0  # numbers that share a scale; 0: there are no scales
    packed: bool = False
    mxfp4: bool = False
    zeros: bool = False

    @classmethod
    def of(cls, weight: jax.Array | Quantized, step: int) -> Form:
        """Return the form of a weight [E, N, K]. The step is at most `step` and divides K; 32 if no more does."""
        depth = weight.shape[-1]
        step = max(BLOCK, math.gcd(step, depth))
        if not isinstance(weight, Quantized):
            return cls(depth, step)
        group = depth // weight.scales.shape[-1]
        step = step if step % group == 0 else math.gcd(step, group)
        return cls(depth, step, group, weight.packed, weight.mxfp4, weight.zeros is not None)

    @property
    def one_scale(self) -> bool:
        """Whether one scale is for all numbers of a step: it multiplies their sum, which is fewer numbers."""
        return self.group >= self.step and not self.mxfp4

    @property
    def limit(self) -> int | None:
        """The limit for masks of columns, None if whole steps make the depth."""
        return self.depth if self.depth % self.step else None


class SomeRows(NamedTuple):
    """Rows of an array in memory: ref [.., K], rows int32 [R]."""

    ref: Any
    rows: jax.Array

    def load(self, columns: jax.Array, limit: int | None) -> jax.Array:
        """Load columns int32 [n] -> [R, n], zeros at the limit and above."""
        return load(self.ref, index_grid(self.rows, columns), (None, limit))


class _Factor(NamedTuple):
    """Scales and zeros of the numbers of a step, float32 [rows, groups]; None: there are none."""

    scale: jax.Array | None
    zero: jax.Array | None

    @property
    def by_row(self) -> jax.Array:
        """The scales [rows], if a step has one group."""
        assert self.scale is not None
        return self.scale.reshape(-1)


def add_products(
    x: SomeRows, weight: Sequence[Any], expert: jax.Array, blocks: tuple[jax.Array, ...], form: Form
) -> list[jax.Array]:
    """Multiply x [R, depth] by rows of an expert's weight -> float32 [R, rows] for each of `blocks`, int32 [rows].

    weight: refs of the weight's leaves, [E, rows, ..].
    """
    values, *factors = weight

    def step(index: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Add step `index`, an int32 [], to the sums."""
        pieces = [(x.load(columns, form.limit), half) for columns, half in _pieces(index, form)]
        added = []
        for rows in blocks:
            factor = _factor(factors, expert, rows, index, form)
            raw = load(values, (expert, *index_grid(rows, _stored_columns(index, form))), (None, None, form.limit))
            wide = [_numbers(raw, half, factor, form, numbers.dtype) for numbers, half in pieces]
            products = [dot(numbers, w, (1, 1)) for (numbers, _), w in zip(pieces, wide, strict=True)]
            y = functools.reduce(jnp.add, products)
            added.append(y * factor.by_row[None, :] if form.one_scale else y)
        return tuple(old + new for old, new in zip(sums, added, strict=True))

    start = tuple(jnp.zeros((x.rows.shape[0], rows.shape[0]), jnp.float32) for rows in blocks)
    return list(lax.fori_loop(0, pl.cdiv(form.depth, form.step), step, start))


def _stored_columns(index: jax.Array, form: Form) -> jax.Array:
    """Return where the values of step `index` are in a row: int32 [step], of 4 bits [step / 2]."""
    size = form.step // 2 if form.packed else form.step
    return index * size + jnp.arange(size, dtype=jnp.int32)


def _pieces(index: jax.Array, form: Form) -> list[tuple[jax.Array, int]]:
    """Return the columns of x for the products of step `index`: all; of 4 bits those of the low and the high halves."""
    if not form.packed:
        return [(_stored_columns(index, form), 0)]
    byte = jnp.arange(form.step // 2, dtype=jnp.int32)
    low = index * form.step + lax.div(byte, BLOCK // 2) * BLOCK + lax.rem(byte, BLOCK // 2)
    return [(low, 0), (low + BLOCK // 2, 1)]


def _factor(factors: Sequence[Any], expert: jax.Array, rows: jax.Array, index: jax.Array, form: Form) -> _Factor:
    if not form.group:
        return _Factor(None, None)
    groups = max(1, form.step // form.group)
    first = lax.div(index * form.step, form.group)
    at = (expert, *index_grid(rows, first + jnp.arange(groups, dtype=jnp.int32)))
    scale = plt.load(factors[0].at[at])
    if form.mxfp4:
        # The exponent of 2^14 is added, see `_numbers`. 255 is infinity.
        exponents = jnp.minimum(scale.astype(jnp.int32) + 14, 255)
        scale = lax.bitcast_convert_type(exponents << 23, jnp.float32)
    return _Factor(scale, plt.load(factors[1].at[at]) if form.zeros else None)


def _numbers(raw: jax.Array, half: int, factor: _Factor, form: Form, dtype: jnp.dtype) -> jax.Array:
    """Return the numbers of stored values [rows, n] in x's dtype, with their scale unless `form.one_scale`."""
    if not form.group or (form.one_scale and not form.packed and factor.zero is None):
        return raw.astype(dtype)
    if form.packed:
        raw = (raw >> 4 if half else raw & 15).astype(jnp.int32)
    if form.mxfp4:
        # The bits of E2M1 in a float16 are the number times 2^-14; its conversion takes the subnormal one exactly.
        bits = ((raw & 7) << 9 | (raw & 8) << 12).astype(jnp.uint16)
        wide = lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)
    else:
        wide = raw.astype(jnp.float32)
        zero = float(MIDDLE * form.packed) if factor.zero is None else _by_column(factor.zero, raw.shape[1])
        wide = wide - zero
    if not form.one_scale and factor.scale is not None:
        wide = wide * _by_column(factor.scale, raw.shape[1])
    return wide.astype(dtype)


def _by_column(x: jax.Array, columns: int) -> jax.Array:
    """Repeat each group's number: [rows, groups] -> [rows, columns], or [rows, 1]."""
    rows, groups = x.shape
    if groups == 1:
        return x
    return jnp.broadcast_to(x[:, :, None], (rows, groups, columns // groups)).reshape(rows, columns)
