"""Mixture of experts: each token runs through its experts by grouped matrix products. No token is dropped.

The public function is `moe`. The model does the routing: it chooses the experts and their weights.

Rows (token, choice) are sorted by expert, so the rows of one expert are contiguous:

    rows        [ e0 e0 e0 | e2 | e5 e5 ... | rows of other devices' experts ]
    starts      0          3    4           local rows
    tiles       each group is cut into tiles of TILE_ROWS rows; a tile is one dense product with its expert's weights

On an NVIDIA GPU two Triton kernels run the tiles and read each expert's weights in place, see `triton`. On a TPU one
kernel does so for bfloat16 rows, see `tpu.takes`. On a CPU `product` is a C kernel; without it a loop runs over the
tiles in use. lax.ragged_dot serves if no kernel fits, and for runtime.experts: xla. XLA makes it a product of every row
with every expert.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.ops.linear import ExpertKernels, GroupedProduct, TpuExperts, TritonExperts
from jaxserve.ops.moe.choices import Choices, Chosen
from jaxserve.ops.moe.experts import Activation, ExpertWeights, unscaled
from jaxserve.ops.quantized import Quantized
from jaxserve.ops.sums import sum_in_order

logger = logging.getLogger(__name__)
_AUTO = "use runtime.experts: auto"

ChoicesFunction = Callable[[jax.Array, Choices, ExpertWeights], jax.Array]  # x [T, D] -> weighted [M, D]
RowsFunction = Callable[[jax.Array, jax.Array, ExpertWeights], jax.Array]  # sorted rows [M, D], sizes [E] -> [M, D]


def moe(
    x: jax.Array,
    chosen: Chosen,
    experts: ExpertWeights,
    activation: Activation,
    product: GroupedProduct | ExpertKernels | None = None,
    *,
    in_order: bool = False,
) -> jax.Array:
    """Return the weighted sum of each token's experts: sum over k of weight * down(activation(gate(x), up(x))).

    x [T, D] -> [T, D] in x's dtype. The sum is float32.
    product: multiplies rows sorted by expert, on one device; or the kernels for a GPU or TPU; None: XLA multiplies.
    If the weights are sharded over the mesh axes "expert" or "tensor", it runs under shard_map: experts are split
    over "expert", F over "tensor", every device has all tokens, and one all-reduce ends it.
    in_order: add over devices in their order instead, see `ops.sums`.
    """
    mesh = jax.typeof(jax.tree.leaves(experts.down)[0]).sharding.mesh
    axes = tuple(name for name in ("expert", "tensor") if mesh.shape.get(name, 1) > 1)
    if not axes:
        return _local(x, chosen, experts, _choices_function(activation, product), 0)
    kernels = product if isinstance(product, ExpertKernels) else None
    add = partial(sum_in_order, axes=axes) if in_order else partial(lax.psum, axis_name=axes)
    body = partial(_sharded, run=_choices_function(activation, kernels), axes=axes, add=add)
    whole = PartitionSpec()
    specs = whole, whole, _specs(experts, axes)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=whole, check_vma=False)(x, chosen, experts)


def _specs(experts: ExpertWeights, axes: tuple[str, ...]) -> ExpertWeights:
    """Return the PartitionSpec of each weight, in an ExpertWeights."""
    expert, tensor = (name if name in axes else None for name in ("expert", "tensor"))

    def leaves(weight: jax.Array | Quantized, *axes: str | None) -> Any:
        """Return the PartitionSpec of each leaf. A dimension of 1, as a tensor's scale has, is not split."""
        return jax.tree.map(lambda leaf: PartitionSpec(*_split(leaf, axes)), weight)

    return ExpertWeights(
        gate_up=leaves(experts.gate_up, expert, tensor, None, None),
        down=leaves(experts.down, expert, None, tensor),
        gate_up_bias=None if experts.gate_up_bias is None else PartitionSpec(expert, tensor, None),  # type: ignore
        down_bias=None if experts.down_bias is None else PartitionSpec(expert, None),  # type: ignore[arg-type]
    )


def _split(leaf: jax.Array, axes: tuple[str | None, ...]) -> tuple[str | None, ...]:
    return tuple(axis if size > 1 else None for axis, size in zip(axes, leaf.shape, strict=True))


def _sharded(
    x: jax.Array,
    chosen: Chosen,
    experts: ExpertWeights,
    *,
    run: ChoicesFunction,
    axes: tuple[str, ...],
    add: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    first = lax.axis_index("expert") * experts.down.shape[0] if "expert" in axes else 0
    if "tensor" in axes and experts.down_bias is not None:  # added once: every device of the axis would add it
        bias = jnp.where(lax.axis_index("tensor") == 0, experts.down_bias, jnp.zeros_like(experts.down_bias))
        experts = ExpertWeights(experts.gate_up, experts.down, experts.gate_up_bias, bias)
    return add(_local(x, chosen, experts, run, first))


def _choices_function(activation: Activation, product: GroupedProduct | ExpertKernels | None) -> ChoicesFunction:
    """Return the function that runs choices, in the order of the experts, through them."""
    if isinstance(product, TritonExperts):
        from jaxserve.ops.moe import triton  # noqa: PLC0415  not every build of jax has it

        return partial(triton.run_choices, activation=activation, kernels=product)
    if isinstance(product, TpuExperts):
        from jaxserve.ops.moe import tpu  # noqa: PLC0415

        kernel = partial(tpu.run_rows, activation=activation, kernels=product)
        ragged = partial(_grouped_ragged_dot, activation=activation)

        def run(rows: jax.Array, sizes: jax.Array, experts: ExpertWeights) -> jax.Array:
            """Run sorted rows [M, D], sizes [E], through their experts by the faster form -> [M, D]."""
            return (kernel if tpu.takes(rows, experts, product) else ragged)(rows, sizes, experts)

        return partial(_by_rows, run=run)
    return partial(_by_rows, run=_rows_function(activation, product))


def _rows_function(activation: Activation, product: GroupedProduct | None) -> RowsFunction:
    """Return the function that runs sorted rows through their experts."""
    if product is not None:
        return partial(_grouped_products, activation=activation, product=product)
    tiles, ragged = partial(_grouped_tiles, activation=activation), partial(_grouped_ragged_dot, activation=activation)
    return lambda *args: lax.platform_dependent(*args, cpu=tiles, default=ragged)


def _local(
    x: jax.Array, chosen: Chosen, experts: ExpertWeights, run: ChoicesFunction, first: jax.Array | int
) -> jax.Array:
    """Return the partial sum [T, D] over this device's experts [first, first + E)."""
    tokens, choices = chosen.ids.shape
    count = experts.down.shape[0]
    local = chosen.ids.reshape(-1) - first
    local = jnp.where((local >= 0) & (local < count), local, count)  # other devices' experts sort last
    order = jnp.argsort(local, stable=True)
    # Compared and counted, because a scatter to few places is slow on a GPU.
    sizes = jnp.sum(local[:, None] == jnp.arange(count)[None, :], axis=0, dtype=jnp.int32)
    out = run(x, Choices(order, sizes, chosen.weights.reshape(-1), choices), experts)
    out = jnp.where((local < count)[:, None], out.astype(jnp.float32), 0.0)
    return out.reshape(tokens, choices, -1).sum(axis=1).astype(x.dtype)


def _by_rows(x: jax.Array, choices: Choices, experts: ExpertWeights, run: RowsFunction) -> jax.Array:
    """Return each choice's weighted result: x [T, D] -> float32 [M, D]. A choice without an expert is undefined."""
    rows = jnp.take(x, choices.order // choices.per_token, axis=0)
    weights = jnp.take(choices.weights, choices.order)
    out = run(rows, choices.sizes, experts).astype(jnp.float32) * weights[:, None]
    return jnp.zeros_like(out).at[choices.order].set(out, unique_indices=True)


def _grouped_products(
    rows: jax.Array, sizes: jax.Array, experts: ExpertWeights, activation: Activation, product: GroupedProduct
) -> jax.Array:
    """Run rows [M, D], sorted by expert, through their experts -> [M, D]. Rows after sum(sizes) are undefined."""
    expert = jnp.repeat(jnp.arange(sizes.shape[0]), sizes, total_repeat_length=rows.shape[0])
    count, ffn, parts, _ = experts.gate_up.shape
    weight, scale = unscaled(experts.gate_up)
    gate_up = jax.tree.map(lambda leaf: leaf.reshape(count, parts * ffn, leaf.shape[-1]), weight)
    y = product(rows, gate_up, sizes).reshape(-1, ffn, parts)
    if scale is not None:
        y = (y * jnp.take(scale[..., 0], expert, axis=0)).astype(y.dtype)
    if experts.gate_up_bias is not None:
        y = y + jnp.take(experts.gate_up_bias, expert, axis=0).astype(y.dtype)
    weight, scale = unscaled(experts.down)
    out = product(activation(*(y[:, :, i] for i in range(parts))), weight, sizes)
    if scale is not None:
        out = (out * jnp.take(scale[..., 0], expert, axis=0)).astype(out.dtype)
    return out if experts.down_bias is None else out + jnp.take(experts.down_bias, expert, axis=0).astype(out.dtype)


def _grouped_ragged_dot(rows: jax.Array, sizes: jax.Array, experts: ExpertWeights, activation: Activation) -> jax.Array:
    return _grouped_products(rows, sizes, experts, activation, _ragged_dot)


def _ragged_dot(x: jax.Array, w: jax.Array | Quantized, sizes: jax.Array) -> jax.Array:
    """Multiply each row of x [M, I] by its group's w [E, O, I] transposed -> [M, O]."""
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
    )
    return lax.ragged_dot_general(x, w.astype(x.dtype), sizes, numbers)


TILE_ROWS = 8  # rows per product: enough to reuse an expert's weights once read, few enough that one row wastes little


def _grouped_tiles(rows: jax.Array, sizes: jax.Array, experts: ExpertWeights, activation: Activation) -> jax.Array:
    """Run rows [M, D], sorted by expert, through their experts -> [M, D]. Rows after sum(sizes) are zero."""
    num_rows = rows.shape[0]
    starts = jnp.cumsum(sizes) - sizes
    tiles = -(-sizes // TILE_ROWS)  # of each expert
    last_tile = jnp.cumsum(tiles)

    def one(tile: jax.Array, out: jax.Array) -> jax.Array:
        """Write the results of one tile, an int32 scalar, into out [M, D]."""
        expert = jnp.searchsorted(last_tile, tile, side="right")
        offset = (tile - (last_tile[expert] - tiles[expert])) * TILE_ROWS + jnp.arange(TILE_ROWS, dtype=jnp.int32)
        index = jnp.where(offset < sizes[expert], starts[expert] + offset, num_rows)
        weights = jax.tree.map(lambda w: lax.dynamic_index_in_dim(w, expert, keepdims=False), experts)
        y = _expert(rows.at[index].get(mode="clip"), weights, activation)
        return out.at[index].set(y, mode="drop")

    return lax.fori_loop(0, last_tile[-1], one, jnp.zeros_like(rows))


def _expert(x: jax.Array, w: ExpertWeights, activation: Activation) -> jax.Array:
    """Apply one expert, weights without their first axis, to x [M, D] -> [M, D]."""
    y = lax.dot_general(x, w.gate_up.astype(x.dtype), (((1,), (2,)), ((), ())))
    if w.gate_up_bias is not None:
        y = y + w.gate_up_bias.astype(x.dtype)[None]
    hidden = activation(*(y[:, :, i] for i in range(y.shape[2])))
    out = lax.dot_general(hidden, w.down.astype(x.dtype), (((1,), (1,)), ((), ())))
    return out if w.down_bias is None else out + w.down_bias.astype(x.dtype)[None]


def kernels_of(name: str, platform: str) -> Literal["auto", "xla", "triton", "tpu"]:
    """Return the kernels that `runtime.experts` names, on a platform ("cpu", "gpu" or "tpu"). See `Products.experts`.

    "auto" means Triton's kernels on a GPU if this jax has them, and the TPU's kernel on a TPU. Raises ConfigError if
    "triton" cannot run here.
    """
    if name == "auto" and platform == "tpu":
        return "tpu"
    if name == "xla" or (name == "auto" and platform != "gpu"):
        return name  # type: ignore[return-value]
    if platform != "gpu":
        raise ConfigError(f"runtime.experts {name!r} runs on gpu only, and this is {platform}", fix=_AUTO)
    try:
        importlib.import_module("jaxserve.ops.moe.triton")
    except ImportError as error:
        if name == "auto":
            logger.warning("runtime.experts 'triton' cannot be loaded with this jax: %s; xla serves instead", error)
            return "xla"
        raise ConfigError(f"runtime.experts {name!r} cannot be loaded with this jax: {error}", fix=_AUTO) from error
    return "triton"
