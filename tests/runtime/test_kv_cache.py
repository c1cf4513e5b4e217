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
    assert [cache.name for cache in caches] == ["layers.0", "layers.1"]
    assert [cache.page_bytes for cache in caches] == [2 * 8 * 4 * 16 * 2, 2 * 8 * 2 * 32 * 2]
    assert kv_cache.page_bytes(caches) == 2 * 2048
    arrays = kv_cache.allocate(caches, 5)
    assert [array.shape for array in arrays] == [cache.struct(5).shape for cache in caches]
    assert sum(array.nbytes for array in arrays) == 5 * kv_cache.page_bytes(caches)
    assert not any(array.any() for array in arrays)


def test_the_attention_of_a_layer_is_carried(mesh: DeviceMesh) -> None:
    caches = kv_cache.layer_caches(LAYERS, get_backend("xla", "cpu"), 8, jnp.dtype("float32"), mesh)
    second = caches[1].attention
    assert (second.scale, second.num_kv_heads, second.sliding_window, second.soft_cap) == (0.5, 2, 7, 30.0)
