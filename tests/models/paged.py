"""Greedy generation through pages, with a model and an attention backend only: chunks of a prompt, then one by one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.models.layers import Cache
from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Heads, get_backend
from jaxserve.ops.paged_attention.sharded import MeshAttention, head_partition
from tests.quick import QUICK

PAGE = 8
NUM_PAGES = 40
BACKEND = get_backend("auto", "cpu")


def greedy(model: LoadedModel, prompt: list[int], count: int, chunk: int) -> list[int]:
    """`count` tokens after `prompt`, which is computed `chunk` tokens at a time."""
    step = jax.jit(
        functools.partial(_step, model),
        donate_argnums=1,
        compiler_options=QUICK,
    )
    pages = np.random.default_rng(0).permutation(NUM_PAGES).astype(np.int32)  # out of order, as in a busy pool
    caches = _empty_caches(model)
    tokens = list(prompt)
    done = 0
    while len(tokens) < len(prompt) + count:
        new = tokens[done : done + chunk]
        width = chunk if done < len(prompt) else 1
        packed = np.array([*new, *(0 for _ in range(width - len(new)))], np.int32)
        caches, chosen = step(model.leaves, caches, packed, pages, np.int32(done), np.int32(len(new)))
        done += len(new)
        if done == len(tokens):
            tokens.append(int(chosen))
    return tokens[len(prompt) :]


def _empty_caches(model: LoadedModel) -> tuple[jax.Array, ...]:
    layers = model.config.attention_layers
    shapes = [
        BACKEND.cache_shape(NUM_PAGES, PAGE, layer.num_kv_heads, layer.head_dim, latent=layer.latent)
        for layer in layers
    ]
    mesh, sharding = _mesh(model), None
    if mesh is not None:
        split = layers[0].num_kv_heads % mesh.shape["tensor"] == 0
        sharding = NamedSharding(mesh, head_partition(BACKEND) if split else PartitionSpec())
    return tuple(jnp.zeros(shape, jnp.float32, device=sharding) for shape in shapes)


def _mesh(model: LoadedModel) -> Mesh | None:
    sharding = model.leaves[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def _step(
    model: LoadedModel,
    leaves: tuple[jax.Array, ...],
    caches: tuple[jax.Array, ...],
    tokens: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[tuple[Cache, ...], jax.Array]:
    """One row of `count` tokens from position `start`; the tokens behind it are padding."""
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    positions = start + index
    place = pages[positions // PAGE] * PAGE + positions % PAGE
    metadata = AttentionMetadata(
        page_table=pages[None, :],
        cu_q_lens=jnp.stack([jnp.int32(0), count]),
        kv_lens=(start + count)[None],
        positions=positions,
        slot_mapping=jnp.where(index < count, place, NUM_PAGES * PAGE),
        decode_only=tokens.shape[0] == 1,
    )

    def attend(layer_index: int, heads: Heads, cache: Cache, sinks: jax.Array | None = None) -> tuple[jax.Array, Cache]:
        assert cache is not None
        spec = model.config.attention_layers[layer_index]
        static = AttentionSpec(spec.scale, spec.num_kv_heads, spec.sliding_window, spec.soft_cap)
        return MeshAttention(BACKEND, _mesh(model))(heads, cache, metadata, static, sinks)

    module = model.bind(leaves)
    hidden, new_caches = module(tokens, positions, caches, attend)
    return new_caches, module.logits(hidden[count - 1][None, :])[0].argmax()
