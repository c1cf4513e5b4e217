"""Mixture of experts: each token through its few experts, dropless, by grouped matrix products.

Public function `moe`; `reference.py` is the oracle. Routing (which experts, with which weights) is the model's.

Rows (token, choice) are sorted by expert, so that each expert's rows are contiguous:

    rows        [ e0 e0 e0 | e2 | e5 e5 ... | rows of other devices' experts ]
    starts      0          3    4           local rows
    tiles       each group is cut into tiles of TILE rows; a tile is one dense product with its expert's weights

On CPU the tiles run in a loop whose bound is the number of live ones: lax.ragged_dot would there multiply every row by
every expert. Elsewhere it is lax.ragged_dot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

Activation = Callable[[jax.Array, jax.Array], jax.Array]  # (gate, up) -> ffn input


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Experts:
    """Weights of E experts; biases where the family has them."""

    gate_up: jax.Array  # [E, F, 2, D]
    down: jax.Array  # [E, D, F]
    gate_up_bias: jax.Array | None = None  # [E, F, 2]
    down_bias: jax.Array | None = None  # [E, D]


def moe(
    x: jax.Array, expert_ids: jax.Array, expert_weights: jax.Array, experts: Experts, activation: Activation
) -> jax.Array:
    """x [T, D], int32 expert_ids [T, K], float32 expert_weights [T, K] -> [T, D] in x's dtype.

    sum over k of weight * down(activation(gate(x), up(x))), the sum in float32. Where the weights lie on a mesh with
    axes "expert" or "tensor" of more than one device it runs under shard_map: experts split over the first, F over
    the second, tokens on all, one all-reduce at the end.
    """
    mesh = jax.typeof(experts.down).sharding.mesh
    axes = tuple(name for name in ("expert", "tensor") if mesh.shape.get(name, 1) > 1)
    if not axes:
        return _local(x, expert_ids, expert_weights, experts, activation, 0)
    spec = _specs(experts, axes)
    body = partial(_sharded, activation=activation, axes=axes)
    whole = PartitionSpec()
    return jax.shard_map(body, mesh=mesh, in_specs=(whole, whole, whole, spec), out_specs=whole, check_vma=False)(
        x, expert_ids, expert_weights, experts
    )


def _specs(experts: Experts, axes: tuple[str, ...]) -> Experts:
    """PartitionSpecs in the place of the arrays."""
    expert, tensor = (name if name in axes else None for name in ("expert", "tensor"))
    return Experts(
        gate_up=PartitionSpec(expert, tensor, None, None),  # type: ignore[arg-type]
        down=PartitionSpec(expert, None, tensor),  # type: ignore[arg-type]
        gate_up_bias=None if experts.gate_up_bias is None else PartitionSpec(expert, tensor, None),  # type: ignore
        down_bias=None if experts.down_bias is None else PartitionSpec(expert, None),  # type: ignore[arg-type]
    )


def _sharded(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    experts: Experts,
    *,
    activation: Activation,
    axes: tuple[str, ...],
) -> jax.Array:
    first = lax.axis_index("expert") * experts.down.shape[0] if "expert" in axes else 0
    if "tensor" in axes and experts.down_bias is not None:  # every part of F would add it: let one do so
        bias = jnp.where(lax.axis_index("tensor") == 0, experts.down_bias, jnp.zeros_like(experts.down_bias))
        experts = Experts(experts.gate_up, experts.down, experts.gate_up_bias, bias)
    return lax.psum(_local(x, expert_ids, expert_weights, experts, activation, first), axes)


def _local(
    x: jax.Array,
    expert_ids: jax.Array,
    expert_weights: jax.Array,
    experts: Experts,
    activation: Activation,
    first: jax.Array | int,
) -> jax.Array:
    """The part of the sum that the experts [first, first + E) of this device give."""
    tokens, choices = expert_ids.shape
    count = experts.down.shape[0]
    local = expert_ids.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)  # the others sort behind
    order = jnp.argsort(local, stable=True)
    sizes = jnp.bincount(local, length=count).astype(jnp.int32)
    rows = jnp.take(x, order // choices, axis=0)
    run = partial(_grouped_tiles, activation=activation), partial(_grouped_ragged_dot, activation=activation)
    out = lax.platform_dependent(rows, sizes, experts, cpu=run[0], default=run[1])
    kept = jnp.take(local, order) < count
    weight = jnp.take(expert_weights.reshape(-1), order)
    out = jnp.where(kept[:, None], out.astype(jnp.float32) * weight[:, None], 0.0)
    by_token = jnp.zeros_like(out).at[order].set(out, unique_indices=True).reshape(tokens, choices, -1)
    return by_token.sum(axis=1).astype(x.dtype)


def _grouped_ragged_dot(rows: jax.Array, sizes: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """Rows [M, D] sorted by expert -> [M, D]; rows behind sum(sizes) are undefined."""
    expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows.shape[0])
    count, ffn, _, model = experts.gate_up.shape
    y = _ragged_dot(rows, experts.gate_up.reshape(count, 2 * ffn, model), sizes).reshape(-1, ffn, 2)
    if experts.gate_up_bias is not None:
        y = y + jnp.take(experts.gate_up_bias, expert, axis=0)
    out = _ragged_dot(activation(y[:, :, 0], y[:, :, 1]), experts.down, sizes)
    return out if experts.down_bias is None else out + jnp.take(experts.down_bias, expert, axis=0)


def _ragged_dot(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [M, I], w [E, O, I] -> [M, O]."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(x, w, sizes, numbers)


TILE = 8  # rows: enough to share one reading of an expert's weights, few enough that a row alone wastes little


def _grouped_tiles(rows: jax.Array, sizes: jax.Array, experts: Experts, activation: Activation) -> jax.Array:
    """Rows [M, D] sorted by expert -> [M, D]; rows behind sum(sizes) are zero."""
    num_rows = rows.shape[0]
    starts = jnp.cumsum(sizes) - sizes
    tiles = -(-sizes // TILE)  # of each expert
    last_tile = jnp.cumsum(tiles)

    def one(tile: jax.Array, out: jax.Array) -> jax.Array:
        expert = jnp.searchsorted(last_tile, tile, side="right")
        offset = (tile - (last_tile[expert] - tiles[expert])) * TILE + jnp.arange(TILE, dtype=jnp.int32)
        index = jnp.where(offset < sizes[expert], starts[expert] + offset, num_rows)
        weights = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), experts)
        y = _expert(rows.at[index].get(mode="clip"), weights, activation)
        return out.at[index].set(y, mode="drop")

    return lax.fori_loop(0, last_tile[-1], one, jnp.zeros_like(rows))


def _expert(x: jax.Array, w: Experts, activation: Activation) -> jax.Array:
    """One expert's weights (without their first axis) on x [M, D]."""
    y = lax.dot_general(x, w.gate_up, (((1,), (2,)), ((), ())))
    if w.gate_up_bias is not None:
        y = y + w.gate_up_bias[None]
    out = lax.dot_general(activation(y[:, :, 0], y[:, :, 1]), w.down, (((1,), (1,)), ((), ())))
    return out if w.down_bias is None else out + w.down_bias[None]
