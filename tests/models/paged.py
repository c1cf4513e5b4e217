"""Greedy generation through pages, with a model and an attention backend only: chunks of a prompt, then one by one."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.models.layers import Cache, StateInputs
from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Heads, get_backend
from jaxserve.ops.paged_attention.sharded import MeshAttention, head_partition
from jaxserve.ops.state import StateArrays, StateRows, StateSpec, get_state_backend, ring_length, state_shapes
from jaxserve.ops.state.sharded import RING, STATE, MeshStates
from tests.quick import QUICK

PAGE = 8
NUM_PAGES = 40
BACKEND = get_backend("auto", "cpu")
STATES = get_state_backend("cpu")


def greedy(model: LoadedModel, prompt: list[int], count: int, chunk: int) -> list[int]:
    """`count` tokens after `prompt`, which is computed `chunk` tokens at a time."""
    return generate(model, prompt, count, chunk)[0]


def generate(model: LoadedModel, prompt: list[int], count: int, chunk: int) -> tuple[list[int], tuple[Cache, ...]]:
    """As `greedy`, with the caches that are left. A recurrent state then lacks the last two tokens."""
    step = jax.jit(
        functools.partial(_step, model),
        donate_argnums=1,
        compiler_options=QUICK,
    )
    pages = np.random.default_rng(0).permutation(NUM_PAGES).astype(np.int32)  # out of order, as in a busy pool
    caches = _empty_caches(model)
    tokens = list(prompt)
    done = folded = 0
    while len(tokens) < len(prompt) + count:
        new = tokens[done : done + chunk]
        width = chunk if done < len(prompt) else 1
        packed = np.array([*new, *(0 for _ in range(width - len(new)))], np.int32)
        caches, chosen = step(model.leaves, caches, packed, pages, np.int32(done), np.int32(len(new)), np.int32(folded))
        done += len(new)
        folded = done - 1  # the last token of a step may come again
        if done == len(tokens):
            tokens.append(int(chosen))
    return tokens[len(prompt) :], caches


def _empty_caches(model: LoadedModel) -> tuple[Cache, ...]:
    layers = model.config.attention_layers
    states = iter([_empty_state(model, spec) for spec in model.config.layer_states if spec is not None])
    is_state = [spec is not None for spec in model.config.layer_states] or [False] * len(layers)
    shapes = [
        BACKEND.cache_shape(NUM_PAGES, PAGE, layer.num_kv_heads, layer.head_dim, latent=layer.latent)
        for layer, state in zip(layers, is_state, strict=True)
        if layer.reads is None and not state
    ]
    mesh, sharding = _mesh(model), None
    if mesh is not None:
        split = layers[0].num_kv_heads % mesh.shape["tensor"] == 0
        sharding = NamedSharding(mesh, head_partition(BACKEND) if split else PartitionSpec())
    own = iter([jnp.zeros(shape, jnp.float32, device=sharding) for shape in shapes])
    return tuple(
        next(states) if state else next(own) if layer.reads is None else None
        for layer, state in zip(layers, is_state, strict=True)
    )


def _empty_state(model: LoadedModel, spec: StateSpec) -> StateArrays:
    """Two pages of NaN, which a state that begins must not read."""
    state, ring = state_shapes(spec, 2, ring_length(spec, 0))
    mesh = _mesh(model)

    def nan(shape: tuple[int, ...], cut: PartitionSpec) -> jax.Array:
        return jnp.full(shape, jnp.nan, jnp.float32, device=None if mesh is None else NamedSharding(mesh, cut))

    return StateArrays(None if state is None else nan(state, STATE), nan(ring, RING))


def _mesh(model: LoadedModel) -> Mesh | None:
    sharding = model.leaves[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) else None


def _step(
    model: LoadedModel,
    leaves: tuple[jax.Array, ...],
    caches: tuple[Cache, ...],
    tokens: jax.Array,
    pages: jax.Array,
    start: jax.Array,
    count: jax.Array,
    folded: jax.Array,
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

    page = jnp.ones(1, jnp.int32)
    rows = StateRows(
        cu_q_lens=metadata.cu_q_lens,
        starts=start[None],
        read=jnp.where(start > 0, page, 2),
        write=page,
        folded=folded[None],
        sure=(start + count - 1)[None],
        emits=jnp.full((1, 1, 2), 2, jnp.int32),
        decode_only=metadata.decode_only,
    )

    def attend(
        layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        if isinstance(heads, StateInputs):
            state = model.config.layer_states[layer_index]
            assert state is not None
            assert isinstance(cache, StateArrays)
            return MeshStates(STATES, _mesh(model))(state, cache, *heads, rows)
        assert cache is not None
        assert not isinstance(cache, StateArrays)
        spec = model.config.attention_layers[layer_index]
        static = AttentionSpec(
            spec.scale, spec.num_kv_heads, spec.sliding_window, spec.soft_cap, spec.value_columns, spec.chunk
        )
        return MeshAttention(BACKEND, _mesh(model))(heads, cache, metadata, static, sinks)

    module = model.bind(leaves)
    hidden, new_caches = module(tokens, positions, caches, attend)
    return new_caches, module.logits(hidden[count - 1][None, :])[0].argmax()
