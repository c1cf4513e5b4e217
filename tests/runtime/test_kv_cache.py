from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jaxserve.models.config import AttentionLayer
from jaxserve.ops.paged_attention import get_backend
from jaxserve.runtime import kv_cache
from jaxserve.runtime.mesh import DeviceMesh

LAYERS = [AttentionLayer(8, 4, 16, 0.25), AttentionLayer(8, 2, 32, 0.5, sliding_window=7, soft_cap=30.0)]


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_layers_have_their_own_geometry(mesh: DeviceMesh, backend: str) -> None:
    caches = kv_cache.layer_caches(LAYERS, get_backend(backend, "cpu"), 8, jnp.dtype("bfloat16"), mesh)
    assert len(caches) == 2
    assert [cache.page_bytes for cache in caches] == [2 * 8 * 4 * 16 * 2, 2 * 8 * 2 * 32 * 2]
    assert kv_cache.page_bytes(caches) == 2 * 2048
    arrays = jax.tree.leaves(kv_cache.allocate(caches, (5,)))
    assert [array.shape for array in arrays] == [cache.struct(5).shape for cache in caches]
    assert sum(array.nbytes for array in arrays) == 5 * kv_cache.page_bytes(caches)
    assert not any(array.any() for array in arrays)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_pages_of_8_bits_have_scales(mesh: DeviceMesh, dtype: str) -> None:
    for backend in ("xla", "reference"):
        caches = kv_cache.layer_caches(LAYERS, get_backend(backend, "cpu"), 8, jnp.dtype(dtype), mesh)
        assert [cache.page_bytes for cache in caches] == [2 * 8 * 4 * (16 + 4), 2 * 8 * 2 * (32 + 4)]
        leaves = jax.tree.leaves(kv_cache.allocate(caches, (5,)))
        assert sum(leaf.nbytes for leaf in leaves) == 5 * kv_cache.page_bytes(caches)
        held = "uint8" if backend == "xla" and dtype == "float8_e4m3fn" else dtype
        assert [str(leaf.dtype) for leaf in leaves] == [held, "float32"] * 2


def test_the_attention_of_a_layer_is_carried(mesh: DeviceMesh) -> None:
    caches = kv_cache.layer_caches(LAYERS, get_backend("xla", "cpu"), 8, jnp.dtype("float32"), mesh)
    second = caches[1].attention
    assert (second.scale, second.num_kv_heads, second.sliding_window, second.soft_cap) == (0.5, 2, 7, 30.0)


def test_layers_with_a_window_are_a_group(mesh: DeviceMesh) -> None:
    backend, groups = get_backend("xla", "cpu"), kv_cache.layer_groups(LAYERS, 128)
    caches = kv_cache.layer_caches(LAYERS, backend, 8, jnp.dtype("float32"), mesh, groups=groups)
    assert [cache.group for cache in caches] == [0, 1]
    assert [kv_cache.page_bytes(caches, group) for group in (0, 1)] == [cache.page_bytes for cache in caches]
    assert [array.shape[0] for array in kv_cache.allocate(caches, (9, 4))] == [9, 4]


def test_layers_of_each_width_are_a_group(mesh: DeviceMesh) -> None:
    layers = [*LAYERS, replace(LAYERS[1], sliding_window=12), replace(LAYERS[1], sliding_window=None, chunk=7)]
    groups = kv_cache.layer_groups(layers, 128)
    assert groups == (("window", 12), ("chunk", 7), ("window", 7))
    caches = kv_cache.layer_caches(layers, get_backend("xla", "cpu"), 8, jnp.dtype("float32"), mesh, groups=groups)
    assert [cache.group for cache in caches] == [0, 3, 1, 2]
    assert kv_cache.layer_groups(layers, 12) == (("chunk", 7), ("window", 7)), "no sequence is longer than 12 tokens"
    assert kv_cache.layer_groups(LAYERS[:1], 128) == ()
