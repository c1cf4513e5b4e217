"""The towers of Qwen3-VL (https://arxiv.org/abs/2511.21631), Qwen3.5 and Qwen2.5-VL (https://arxiv.org/abs/2502.13923).

All project patches, run pre-norm blocks with rotation by row and column, and merge 2 x 2 patches to one row. They
differ in the kind of norm and of MLP. Qwen3-VL adds learned positions and merges the states of some earlier blocks too
(deepstack); Qwen3.5 does without deepstack. Qwen2.5-VL attends in windows in most blocks.

A tower runs in pieces, two or more for each block, so that a step of the language model never waits for a whole
picture. Axes: P patches, D hidden size, N heads, H head_dim, M tokens (P / merge^2), Q patches of a part of the
attention. Parameters are replicated over a mesh.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import Activation
from jaxserve.models.layers import activated, over_rms
from jaxserve.models.rope import RopeTable, apply_rope
from jaxserve.models.vision.config import VisionConfig
from jaxserve.models.weights import param

QueriesKeysValues = tuple[jax.Array, jax.Array, jax.Array]  # [P, N, H] each
QUERY_TILE = 256  # patches whose scores [N, tile, P] are in memory at once


def _row(vector: nnx.Param) -> jax.Array:
    """Return a parameter [n] in float32 as [1, n]."""
    return vector[...].astype(jnp.float32)[None, :]


class Norm(nnx.Module):
    """LayerNorm with bias, or RMSNorm, over the last axis, in float32."""

    def __init__(self, size: int, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.weight = param((size,), (None,), dtype, init="ones")
        self.bias = param((size,), (None,), dtype, init="zeros") if config.norm == "layer" else None
        self.eps = config.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        y, weight = x.astype(jnp.float32), _row(self.weight)
        if self.bias is None:
            return (over_rms(y, self.eps) * weight).astype(x.dtype)
        y = over_rms(y - y.mean(axis=-1, keepdims=True), self.eps)
        return (y * weight + _row(self.bias)).astype(x.dtype)


class Dense(nnx.Module):
    """A linear layer, weight [O, I]. Not a `layers.Linear`: a tower stays unquantized and is never split."""

    def __init__(self, out: int, size: int, dtype: jnp.dtype, *, bias: bool = True) -> None:
        self.weight = param((out, size), (None, None), dtype)
        self.bias = param((out,), (None,), dtype, init="zeros") if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.einsum("pi,oi->po", x, self.weight[...], preferred_element_type=jnp.float32)
        return (y if self.bias is None else y + _row(self.bias)).astype(x.dtype)


class PatchProjection(nnx.Module):
    """The projection of patches, stored as the kernel of a convolution [D, C, frames, patch, patch]."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        shape = (config.hidden_size, config.channels, config.frames, config.patch_size, config.patch_size)
        self.weight = param(shape, (None,) * len(shape), dtype)
        self.bias = param(shape[:1], (None,), dtype, init="zeros") if config.patch_bias else None

    def __call__(self, patches: jax.Array) -> jax.Array:
        """Project float32 patches [P, C * patch * patch] of a still -> float32 [P, D].

        The frames of a still are equal, so their kernels are added. The sum stays in float32: rounded to bfloat16 it
        moves the result by 4e-3.
        """
        kernel = self.weight[...].astype(jnp.float32).sum(axis=2).reshape(self.weight.shape[0], -1)
        y = jnp.einsum("pi,di->pd", patches, kernel, preferred_element_type=jnp.float32)
        return y if self.bias is None else y + _row(self.bias)


class PatchEmbed(nnx.Module):
    """The part that checkpoints call `patch_embed`."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.proj = PatchProjection(config, dtype)


class PositionTable(nnx.Module):
    """Learned positions, weight [table * table, D]."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.weight = param((config.table**2, config.hidden_size), (None, None), dtype)

    def __call__(self, entries: jax.Array, weights: jax.Array) -> jax.Array:
        """Return the weighted sum of four entries for each patch: int32 and float32 [P, 4] -> float32 [P, D]."""
        found = jnp.take(self.weight[...].astype(jnp.float32), entries, axis=0, mode="clip")
        return (found * weights[:, :, None]).sum(axis=1)


class TowerAttention(nnx.Module):
    """Attention of each patch to the patches of its segment, with q, k and v from one projection."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        size = config.hidden_size
        self.heads = config.num_heads
        self.qkv = Dense(3 * size, size, dtype)
        self.proj = Dense(size, size, dtype)

    def __call__(self, x: jax.Array, rope: RopeTable, segments: jax.Array) -> jax.Array:
        """Attend x [P, D] -> [P, D]. segments: int32 [P]"""
        return self.attend(self.project(x, rope), segments, segments)

    def project(self, x: jax.Array, rope: RopeTable) -> QueriesKeysValues:
        """Return the queries and keys, rotated, and the values of x [P, D]."""
        q, k, v = self.qkv(x).reshape(x.shape[0], 3, self.heads, -1).swapaxes(0, 1)
        return apply_rope(q, rope), apply_rope(k, rope), v

    def attend(self, projected: QueriesKeysValues, mine: jax.Array, segments: jax.Array) -> jax.Array:
        """Attend the queries [Q, N, H] of some patches to the keys and values of all -> [Q, D].

        mine, segments: int32 [Q] and [P]
        """
        q, k, v = projected
        count = q.shape[0]
        tile = math.gcd(QUERY_TILE, count)

        def attend(part: tuple[jax.Array, jax.Array]) -> jax.Array:
            """Attend some queries [tile, N, H], with their segments [tile] -> [tile, N, H]."""
            queries, own = part
            scores = jnp.einsum("qnh,knh->nqk", queries, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
            seen = own[:, None] == segments[None, :]
            weights = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1).astype(v.dtype)
            return jnp.einsum("nqk,knh->qnh", weights, v, preferred_element_type=jnp.float32).astype(v.dtype)

        tiles = q.reshape(-1, tile, *q.shape[1:]), mine.reshape(-1, tile)
        return self.proj(jax.lax.map(attend, tiles).reshape(count, -1))


class PlainMLP(nnx.Module):
    """linear_fc2(activation(linear_fc1(x)))."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.activation: Activation = config.activation
        self.linear_fc1 = Dense(config.intermediate_size, config.hidden_size, dtype)
        self.linear_fc2 = Dense(config.hidden_size, config.intermediate_size, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_fc2(activated(self.linear_fc1(x), self.activation))


class GatedMLP(nnx.Module):
    """down_proj(activation(gate_proj(x)) * up_proj(x))."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        size, ffn = config.hidden_size, config.intermediate_size
        self.activation: Activation = config.activation
        self.gate_proj, self.up_proj = Dense(ffn, size, dtype), Dense(ffn, size, dtype)
        self.down_proj = Dense(size, ffn, dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(activated(self.gate_proj(x), self.activation) * self.up_proj(x))


class TowerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Equal for all blocks, so one program computes them all."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.norm1 = Norm(config.hidden_size, config, dtype)
        self.norm2 = Norm(config.hidden_size, config, dtype)
        self.attn = TowerAttention(config, dtype)
        self.mlp = (GatedMLP if config.gated else PlainMLP)(config, dtype)

    def __call__(self, x: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Run the block: x [P, D] -> [P, D]. places: int32 [P, 2] and more, row and column. segments: int32 [P]"""
        return self.feed_forward(self.attend(x, places, segments))

    def attend(self, x: jax.Array, places: jax.Array, segments: jax.Array) -> jax.Array:
        """Run the first half: x [P, D] -> [P, D], see `__call__`."""
        return x + self.attn(self.norm1(x), rotation(self.config, places), segments)

    def project(self, x: jax.Array, places: jax.Array) -> QueriesKeysValues:
        """Run the part of the first half that all its queries need: x [P, D] -> three arrays [P, N, H]."""
        return self.attn.project(self.norm1(x), rotation(self.config, places))

    def attend_part(
        self, x: jax.Array, projected: QueriesKeysValues, segments: jax.Array, first: jax.Array, count: int
    ) -> jax.Array:
        """Run the first half for the patches [first, first + count) -> x [P, D], others as they were.

        projected: of `project`, for x before the first of these parts. first: int32 scalar
        """
        q, k, v = projected
        part, own, mine = (jax.lax.dynamic_slice_in_dim(array, first, count) for array in (q, x, segments))
        attended = own + self.attn.attend((part, k, v), mine, segments)
        return jax.lax.dynamic_update_slice_in_dim(x, attended, first, 0)

    def feed_forward(self, x: jax.Array) -> jax.Array:
        """Run the second half: x [P, D] -> [P, D]."""
        return x + self.mlp(self.norm2(x))


def rotation(config: VisionConfig, places: jax.Array) -> RopeTable:
    """Return the rotation of patches at places int32 [P, 2] and more.

    Half of a head's pairs turn by the row, half by the column.
    """
    half = config.head_dim // 2
    frequencies = config.theta ** (-jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    angles = places[:, :2].astype(jnp.float32)[:, :, None] * frequencies[None, None, :]
    angles = angles.reshape(places.shape[0], -1)
    return RopeTable(jnp.cos(angles), jnp.sin(angles))


class Merger(nnx.Module):
    """Merges merge x merge patches to a row: norm, then two linear layers with an exact GELU between.

    late: the norm is over the merged patches, as in deepstack; else over each patch
    """

    def __init__(self, config: VisionConfig, dtype: jnp.dtype, *, late: bool = False) -> None:
        self.size = config.hidden_size * config.merge**2
        self.norm = Norm(self.size if late else config.hidden_size, config, dtype)
        self.linear_fc1 = Dense(self.size, self.size, dtype)
        self.linear_fc2 = Dense(config.out_size, self.size, dtype)
        self.late = late

    def __call__(self, x: jax.Array) -> jax.Array:
        """Merge x [P, D] -> [M, out_size]."""
        y = self.norm(x.reshape(-1, self.size)) if self.late else self.norm(x).reshape(-1, self.size)
        return self.linear_fc2(activated(self.linear_fc1(y), "gelu"))


class Tower(nnx.Module):
    """A tower, in the pieces that programs run: `embedded`, each of `blocks`, and the mergers."""

    def __init__(self, config: VisionConfig, dtype: jnp.dtype) -> None:
        self.config = config
        self.patch_embed = PatchEmbed(config, dtype)
        self.pos_embed = PositionTable(config, dtype) if config.table else None
        self.blocks = nnx.List([TowerBlock(config, dtype) for _ in range(config.depth)])
        self.merger = Merger(config, dtype)
        self.deepstack_merger_list = nnx.List([Merger(config, dtype, late=True) for _ in config.deepstack])

    def __call__(
        self, patches: jax.Array, places: jax.Array, weights: jax.Array, segments: jax.Array, dtype: jnp.dtype
    ) -> jax.Array:
        """Run the whole tower on patches uint8 [P, W] of pictures with their PatchLayout -> [parts, M, out_size].

        It is what tests compare with transformers and with `runtime.towers`, which runs a tower block by block.
        """
        x = embedded(self.config, self.patch_embed, self.pos_embed, patches, places, weights, dtype)
        early: list[jax.Array] = []
        for index, block in enumerate(self.blocks):
            x = block(x, places, segments[segments_row(self.config, index)])
            if index in self.config.deepstack:
                early.append(self.deepstack_merger_list[len(early)](x))
        return jnp.stack([self.merger(x), *early])


def embedded(
    config: VisionConfig,
    embed: PatchEmbed,
    table: PositionTable | None,
    patches: jax.Array,
    places: jax.Array,
    weights: jax.Array,
    dtype: jnp.dtype,
) -> jax.Array:
    """Normalize and project patches uint8 [P, W], and add their positions -> [P, D] in `dtype`.

    places, weights: as in PatchLayout
    """
    pixels = patches.astype(jnp.float32).reshape(patches.shape[0], config.channels, -1) * jnp.float32(1 / 255)
    mean, std = (jnp.asarray(values, jnp.float32)[None, :, None] for values in (config.mean, config.std))
    x = embed.proj(((pixels - mean) / std).reshape(patches.shape[0], -1))
    if table is not None:
        x = x + table(places[:, 2:], weights)
    return x.astype(dtype)


def segments_row(config: VisionConfig, index: int) -> int:
    """Return the row of `PatchLayout.segments` that block `index` attends by: 1 if in windows, else 0."""
    return int(config.window > 0 and index not in config.whole)
