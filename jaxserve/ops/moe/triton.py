"""Experts on NVIDIA GPUs in Pallas, lowered through Triton: rows sorted by expert, weights read in place.

There are two kernels. A program of either takes a tile of one expert's rows and a block of its weight's rows:
    moe_gate_up   gate and up, biases and activation: x [T, D] -> [M, F], in the order of the experts. Or up alone
    moe_down      down, bias and the routing weight: [M, F] -> [M, D], in the order of the choices

An expert without rows is not read. Quantized weights are dequantized in registers.

A step along a row is a power of two of values. Of 4-bit values the low halves of a block's bytes are its first half, so
a step is two products, one for the low and one for the high halves, and no value moves to another register.
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

from jaxserve.ops.linear import TritonExperts
from jaxserve.ops.moe.choices import Choices
from jaxserve.ops.moe.experts import Activation, ExpertWeights, unscaled
from jaxserve.ops.quantized import BLOCK, MIDDLE, Quantized, scale_numbers
from jaxserve.ops.triton_arrays import TENSOR_CORE_ROWS, dot, index_grid, load, mask_of


@dataclass(frozen=True)
class Form:
    """The form of a weight [E, rows, depth] in memory, and the number of values in a step along its rows."""

    depth: int
    step: int
    group: int = 0  # values that share a scale; 0: there are no scales
    packed: bool = False
    is_e2m1: bool = False
    zeros: bool = False
    block: int = BLOCK  # 4-bit values that are packed together

    @classmethod
    def of(cls, weight: jax.Array | Quantized, step: int) -> Form:
        """Return the form of a weight [E, N, K]. The step divides K and is at most `step`, at least 32."""
        depth = weight.shape[-1]
        step = max(BLOCK, math.gcd(step, depth))
        if not isinstance(weight, Quantized):
            return cls(depth, step)
        group = depth // weight.scales.shape[-1]
        step = step if step % group == 0 else math.gcd(step, group)
        return cls(depth, step, group, weight.packed, weight.is_e2m1, weight.zeros is not None, weight.block)

    @property
    def one_scale(self) -> bool:
        """Return whether a step has one scale for a row: it then multiplies the sum, which is less work."""
        return self.group >= self.step and not self.is_e2m1

    @property
    def limit(self) -> int | None:
        """Return the limit for masks of columns, None if the depth is a multiple of the step."""
        return self.depth if self.depth % self.step else None


class SomeRows(NamedTuple):
    """Rows of an array in memory: ref [.., K], rows int32 [R]."""

    ref: Any
    rows: jax.Array

    def load(self, columns: jax.Array, limit: int | None) -> jax.Array:
        """Load columns int32 [n] -> [R, n], zeros at the limit and above."""
        return load(self.ref, index_grid(self.rows, columns), (None, limit))


class _Factor(NamedTuple):
    """Scales and zeros of the values of a step, float32 [rows, groups]; None: there are none."""

    scale: jax.Array | None
    zero: jax.Array | None

    @property
    def by_row(self) -> jax.Array:
        """Return the scales [rows], if a step has one group."""
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
    """Return the columns of the values of step `index` in a row: int32 [step], of 4 bits [step / 2]."""
    size = form.step // 2 if form.packed else form.step
    return index * size + jnp.arange(size, dtype=jnp.int32)


def _pieces(index: jax.Array, form: Form) -> list[tuple[jax.Array, int]]:
    """Return the columns of x for the products of step `index`: one array; for 4 bits two, for low and high halves."""
    if not form.packed:
        return [(_stored_columns(index, form), 0)]
    byte = jnp.arange(form.step // 2, dtype=jnp.int32)
    half = form.block // 2
    low = index * form.step + lax.div(byte, half) * form.block + lax.rem(byte, half)
    return [(low, 0), (low + half, 1)]


def _factor(factors: Sequence[Any], expert: jax.Array, rows: jax.Array, index: jax.Array, form: Form) -> _Factor:
    if not form.group:
        return _Factor(None, None)
    groups = max(1, form.step // form.group)
    first = lax.div(index * form.step, form.group)
    at = (expert, *index_grid(rows, first + jnp.arange(groups, dtype=jnp.int32)))
    scale = plt.load(factors[0].at[at])
    if not form.is_e2m1:
        scale = scale_numbers(scale)
    elif scale.dtype != jnp.uint8:
        scale = scale.astype(jnp.float32) * 2.0**14  # see `_numbers`
    else:
        # The exponent of 2^14 is added. 255 is infinity.
        exponents = jnp.minimum(scale.astype(jnp.int32) + 14, 255)
        scale = lax.bitcast_convert_type(exponents << 23, jnp.float32)
    return _Factor(scale, plt.load(factors[1].at[at]) if form.zeros else None)


def _numbers(raw: jax.Array, half: int, factor: _Factor, form: Form, dtype: jnp.dtype) -> jax.Array:
    """Dequantize stored values [rows, n] to x's dtype, without their scale if `form.one_scale`."""
    if not form.group or (form.one_scale and not form.packed and factor.zero is None):
        return raw.astype(dtype)
    if form.packed:
        raw = (raw >> 4 if half else raw & 15).astype(jnp.int32)
    if form.is_e2m1:
        # The bits of E2M1 in a float16 are the value times 2^-14; its conversion is exact for the subnormal one too.
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
    """Repeat each group's scale or zero: [rows, groups] -> [rows, columns], or [rows, 1]."""
    rows, groups = x.shape
    if groups == 1:
        return x
    return jnp.broadcast_to(x[:, :, None], (rows, groups, columns // groups)).reshape(rows, columns)


# Tiles of rows that take turns at a block of weights, so that the second-level cache serves all but one.
_SIDE_BY_SIDE = 8


@dataclass(frozen=True)
class Blocks:
    """The sizes of a program: a tile of rows, a block of a weight's rows and a step along them; Triton's options."""

    rows: int
    columns: int
    step: int
    warps: int
    stages: int

    @classmethod
    def of(cls, rows: int, experts: int, *, one_size: bool) -> Blocks:
        """Return the sizes for so many rows of so many experts. Few rows wait for memory: long steps, small blocks."""
        mean = 1 if one_size else max(1, rows // experts)
        tile = min(128, max(TENSOR_CORE_ROWS, pl.next_power_of_2(mean)))
        if tile <= 32:
            return cls(tile, 64, 128, 4, 4)
        return cls(tile, 128, 64, 4 if tile == 64 else 8, 4)

    def tiles(self, rows: int, experts: int) -> int:
        """Return the largest number of tiles that so many rows can need, however they are spread over the experts."""
        return min(rows, experts) + rows // self.rows


class Tiles(NamedTuple):
    """The tiles of rows sorted by expert, int32 [tiles]: expert, first row, number of rows (0 if unused)."""

    expert: jax.Array
    first: jax.Array
    size: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array, rows: int, blocks: Blocks) -> Tiles:
        """Cut the rows of each expert, sizes int32 [E], into tiles."""
        experts = sizes.shape[0]
        tiles = (sizes + blocks.rows - 1) // blocks.rows
        ends, starts = jnp.cumsum(tiles), jnp.cumsum(sizes) - sizes
        index = jnp.arange(blocks.tiles(rows, experts), dtype=jnp.int32)
        expert = jnp.minimum(jnp.sum(index[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), experts - 1)
        before = (index - (ends - tiles)[expert]) * blocks.rows
        size = jnp.clip(sizes[expert] - before, 0, blocks.rows)
        return cls(expert, starts[expert] + before, size)


def run_choices(
    x: jax.Array, choices: Choices, experts: ExpertWeights, *, activation: Activation, kernels: TritonExperts
) -> jax.Array:
    """Return each choice's weighted result: x [T, D] -> [M, D]. A choice without an expert is undefined.

    The results are in x's dtype, the sums and the activation in float32.
    """
    rows, count = choices.order.shape[0], experts.down.shape[0]
    blocks = Blocks.of(rows, count, one_size=kernels.one_size)
    tiles = Tiles.of(choices.sizes, rows, blocks)
    weight, scale = unscaled(experts.gate_up)
    gate_up = jax.tree.map(lambda leaf: leaf.reshape(count, -1, leaf.shape[-1]), weight)
    call = functools.partial(_call, tiles=tiles, blocks=blocks, interpret=kernels.interpret)
    ffn, parts = experts.gate_up.shape[1:3]
    bias = None if experts.gate_up_bias is None else experts.gate_up_bias.reshape(count, -1)
    beside = _Beside(bias, None if scale is None else scale.reshape(count, parts))
    first = functools.partial(_gate_up_kernel, activation=activation, per_token=choices.per_token)
    hidden = call(first, [x, choices.order], gate_up, beside, out=(rows, ffn), name="moe_gate_up")
    weight, scale = unscaled(experts.down)
    beside = _Beside(experts.down_bias, None if scale is None else scale.reshape(count, 1))
    inputs = [hidden, choices.order, choices.weights]
    return call(_down_kernel, inputs, weight, beside, out=(rows, x.shape[1]), name="moe_down")


class _Beside(NamedTuple):
    """Arrays beside a weight, or their refs: bias [E, rows], scales of the tensors float32 [E, 1 or 2]."""

    bias: Any
    scale: Any

    @classmethod
    def taken(cls, refs: list[Any], given: tuple[bool, bool]) -> _Beside:
        """Take the first refs, as many as are given."""
        return cls(*(refs.pop(0) if each else None for each in given))


def _call(
    kernel, inputs: list[jax.Array], weight: jax.Array | Quantized, beside: _Beside, *, tiles, blocks, out, **keys
) -> jax.Array:
    """Run a kernel over all tiles and all blocks of `out`'s columns. keys: name, interpret"""
    form = Form.of(weight, blocks.step)
    # Gate and up, if there is a gate, are two weights' rows for a column of the result.
    block = blocks.columns * out[1] // weight.shape[1]
    arrays = [*tiles, *inputs, *jax.tree.leaves(beside), *jax.tree.leaves(weight)]
    specs = [pl.BlockSpec(array.shape, lambda *_, ndim=array.ndim: (0,) * ndim) for array in arrays]
    kernel = functools.partial(
        kernel,
        form=form,
        tile_rows=blocks.rows,
        block=block,
        given=tuple(each is not None for each in beside),
        count=tiles.expert.shape[0],
    )
    return pl.pallas_call(
        kernel,
        grid=(tiles.expert.shape[0] * pl.cdiv(out[1], block),),
        in_specs=specs,
        out_specs=pl.BlockSpec(out, lambda *_: (0, 0)),
        out_shape=jax.ShapeDtypeStruct(out, inputs[0].dtype),
        compiler_params=plt.CompilerParams(num_warps=blocks.warps, num_stages=blocks.stages),
        **keys,
    )(*arrays)


def _place(columns: int, count: int) -> tuple[jax.Array, jax.Array]:
    """Return this program's tile and block of columns, int32 []. `columns`: number of blocks; count: tiles."""
    program = pl.program_id(0)
    first = lax.div(program, _SIDE_BY_SIDE * columns) * _SIDE_BY_SIDE
    beside = jnp.minimum(count - first, _SIDE_BY_SIDE)
    within = lax.rem(program, _SIDE_BY_SIDE * columns)
    return first + lax.rem(within, beside), lax.div(within, beside)


class _Rows(NamedTuple):
    """A tile's rows int32 [tile], and whether each exists. A row that does not exist repeats the last."""

    place: jax.Array
    live: jax.Array


def _rows(first: jax.Array, count: jax.Array, tile: int) -> _Rows:
    offset = jnp.arange(tile, dtype=jnp.int32)
    return _Rows(first + jnp.minimum(offset, count - 1), offset < count)


def _gate_up_kernel(
    expert_ref, first_ref, size_ref,  # `Tiles`
    x_ref,  # [T, D]
    order_ref,  # int32 [M]
    # those of `_Beside` that are given, leaves of the weight [E, 2F, D] or without a gate [E, F, D], result [M, F]
    *refs,
    activation, per_token: int, form: Form, tile_rows: int, block: int, given: tuple[bool, bool], count: int,
) -> None:  # fmt: skip
    *weight, out_ref = refs
    bias_ref, scale_ref = _Beside.taken(weight, given)
    ffn = out_ref.shape[1]
    tile, column_block = _place(pl.cdiv(ffn, block), count)

    @pl.when(size_ref[tile] > 0)
    def _live() -> None:
        expert = expert_ref[tile]
        rows = _rows(first_ref[tile], size_ref[tile], tile_rows)
        token = lax.div(plt.load(order_ref.at[rows.place]), per_token)
        columns = column_block * block + jnp.arange(block, dtype=jnp.int32)
        inside = jnp.minimum(columns, ffn - 1)  # a column that does not exist is computed and not stored
        is_gated = weight[0].shape[1] > ffn
        parts = (2 * inside, 2 * inside + 1) if is_gated else (inside,)
        sums = add_products(SomeRows(x_ref, token), weight, expert, parts, form)
        if scale_ref is not None:
            sums = [y * scale_ref[expert, part] for part, y in enumerate(sums)]
        if bias_ref is not None:
            bias = (plt.load(bias_ref.at[expert, rows]).astype(jnp.float32) for rows in parts)
            sums = [y + own[None] for y, own in zip(sums, bias, strict=True)]
        _store(out_ref, rows, rows.place, columns, activation(*sums))


def _down_kernel(
    expert_ref, first_ref, size_ref,  # `Tiles`
    x_ref,  # [M, F]
    order_ref,  # int32 [M]
    weights_ref,  # float32 [M]
    # those of `_Beside` that are given, leaves of the weight [E, D, F], result [M, D]
    *refs,
    form: Form, tile_rows: int, block: int, given: tuple[bool, bool], count: int,
) -> None:  # fmt: skip
    *weight, out_ref = refs
    bias_ref, scale_ref = _Beside.taken(weight, given)
    width = out_ref.shape[1]
    tile, column_block = _place(pl.cdiv(width, block), count)

    @pl.when(size_ref[tile] > 0)
    def _live() -> None:
        expert = expert_ref[tile]
        rows = _rows(first_ref[tile], size_ref[tile], tile_rows)
        columns = column_block * block + jnp.arange(block, dtype=jnp.int32)
        inside = jnp.minimum(columns, width - 1)
        [y] = add_products(SomeRows(x_ref, rows.place), weight, expert, (inside,), form)
        if scale_ref is not None:
            y = y * scale_ref[expert, 0]
        if bias_ref is not None:
            y = y + plt.load(bias_ref.at[expert, inside]).astype(jnp.float32)[None]
        choice = plt.load(order_ref.at[rows.place])
        y = y * plt.load(weights_ref.at[choice])[:, None]
        _store(out_ref, rows, choice, columns, y)


def _store(out_ref, rows: _Rows, place: jax.Array, columns: jax.Array, values: jax.Array) -> None:
    """Store values float32 [tile, columns] of the rows that exist at place int32 [tile], where there are columns."""
    # All rows have different places, even those that are not stored: Pallas' interpreter would write their old values.
    own = index_grid(jnp.where(rows.live, place, out_ref.shape[0]), columns)
    plt.store(out_ref.at[own], values.astype(out_ref.dtype), mask=mask_of(own, out_ref.shape))
