"""Layers that differ from each other: in their heads, in the cache that they attend to, in what a token sees."""

from __future__ import annotations

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.library.dense import dense_attend
from jaxserve.models.config import LayerHeads, ModelConfig
from jaxserve.models.decoder import Layer, LayerFrame, run_layers
from jaxserve.models.layers import AttendFn, Cache, RopeTable, StateInputs
from jaxserve.models.rope import RopeConfig
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import AttentionMetadata, Heads, get_backend
from jaxserve.ops.paged_attention.sharded import MeshAttention
from jaxserve.ops.state import StateArrays
from jaxserve.runtime import kv_cache
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from tests.quick import QUICK, QUICK_FLAGS

CONFIG = ModelConfig(
    architecture="",
    vocab_size=1,
    hidden_size=1,
    intermediate_size=1,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    max_position_embeddings=64,
    rope=RopeConfig(16),
    layer_windows=(None, 3, None, 3),
    layer_chunks=(4, None, 4, None),
    layer_heads=(LayerHeads(8, 4, 16), LayerHeads(4, 4, 32), LayerHeads(8, 4, 16), LayerHeads(4, 4, 32)),
    layer_reads=(None, None, 0, 1),
)
TOKENS, PAGE = 11, 4


class Plain(Layer):
    """Heads that are multiples of x [T, 1], by powers of a prime that depend on the head's index."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        self.heads = config.at(index).num_heads, config.num_kv_heads
        self.head_dim, self.reads = config.at(index).head_dim, config.attention_layers[index].reads is not None

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        queries, kv = self.heads
        columns = jnp.arange(1.0, self.head_dim + 1)[None, None]
        q = jnp.sin(x[:, :, None] * jnp.arange(1.0, queries + 1)[None, :, None] * columns)
        k = jnp.cos(x[:, :, None] * jnp.arange(2.0, kv + 2)[None, :, None] * columns)
        heads = Heads(q, None, None) if self.reads else Heads(q, k, k + 1)
        out, cache = attend(heads, cache)
        return x + out.mean(axis=(1, 2))[:, None], cache


def run(mesh: DeviceMesh) -> tuple[np.ndarray, tuple[Cache, ...]]:
    layers = [Plain(CONFIG, index) for index in range(CONFIG.num_layers)]
    frames = [LayerFrame(spec, None, None) for spec in CONFIG.attention_layers]
    backend = get_backend("xla", "cpu")
    geometry = kv_cache.layer_caches(CONFIG.attention_layers, backend, PAGE, jnp.dtype("float32"), mesh)
    positions = jnp.arange(TOKENS, dtype=jnp.int32)
    metadata = AttentionMetadata(
        page_table=jnp.arange(3, dtype=jnp.int32)[None],
        cu_q_lens=jnp.asarray([0, TOKENS], jnp.int32),
        kv_lens=jnp.asarray([TOKENS], jnp.int32),
        positions=positions,
        slot_mapping=positions,
    )

    def attend(
        layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]:
        assert isinstance(heads, Heads)
        assert cache is not None
        assert not isinstance(cache, StateArrays)
        return MeshAttention(backend, mesh.mesh)(heads, cache, metadata, geometry[layer_index].attention, sinks)

    def forward(caches: tuple[Cache, ...]) -> tuple[jax.Array, tuple[Cache, ...]]:
        x = jnp.linspace(0.1, 1.0, TOKENS)[:, None]
        return run_layers(layers, x, frames, caches, attend, Products())[:2]

    x, caches = jax.jit(forward, compiler_options=QUICK)(kv_cache.allocate(geometry, (3,)))
    return np.asarray(x), caches


def check(tensor: int) -> None:
    """Against attention without pages, whose caches are K and V themselves."""
    x, caches = run(make_mesh(tensor=tensor))
    assert [cache is None for cache in caches] == [False, False, True, True]
    layers = [Plain(CONFIG, index) for index in range(CONFIG.num_layers)]
    frames = [LayerFrame(spec, None, None) for spec in CONFIG.attention_layers]
    start = jnp.linspace(0.1, 1.0, TOKENS)[:, None]
    want, _, _ = run_layers(layers, start, frames, (None,) * 4, dense_attend(CONFIG), Products())
    np.testing.assert_allclose(x, want, rtol=1e-5, atol=1e-6)


def test_layers_with_other_heads_and_another_layers_cache() -> None:
    check(1)


def test_they_are_split_over_devices() -> None:
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", "from tests.models.test_layer_frame import check; check(4)"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_layer_that_reads_takes_no_memory() -> None:
    mesh = make_mesh(tensor=1)
    caches = kv_cache.layer_caches(CONFIG.attention_layers, get_backend("xla", "cpu"), PAGE, jnp.dtype("float32"), mesh)
    assert [cache.page_bytes for cache in caches] == [2 * 4 * 4 * 16 * 4, 2 * 4 * 4 * 32 * 4, 0, 0]
    assert len(jax.tree.leaves(kv_cache.allocate(caches, (3,)))) == 2


def test_heads_of_a_layer_are_copied_for_more_devices() -> None:
    config = CONFIG.replace(layer_heads=(LayerHeads(8, 2, 16), LayerHeads(8, 4, 32), *CONFIG.layer_heads[2:]))
    split = config.for_tensor(4)
    assert (split.at(0).num_kv_heads, split.at(0).kv_repeat, split.at(0).head_dim) == (4, 2, 16)
    assert split.at(1) == config.at(1).replace(layer_heads=split.layer_heads)
    assert [layer.num_kv_heads for layer in split.attention_layers] == [4, 4, 4, 4]
    assert config.for_tensor(1) is config
    with pytest.raises(ValueError, match="6 attention heads"):
        config.replace(layer_heads=(LayerHeads(6, 2, 16),)).for_tensor(4)
