"""The accelerator kernels lower, from a machine without one, for the device they are for: an H200 and a TPU v6e.

What this cannot show: that ptxas or the TPU compiler takes the result, and that it is right or fast there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike

from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Backend, Heads
from jaxserve.ops.paged_attention.mosaic_gpu import CONCATENATES, MosaicGpuBackend
from jaxserve.ops.paged_attention.sharded import MeshAttention, head_partition
from jaxserve.ops.paged_attention.tpu import TpuBackend
from jaxserve.ops.paged_attention.triton.backend import TritonBackend
from jaxserve.ops.state import StateArrays, StateRows, StateSpec, StateWeights, ring_length, state_shapes
from jaxserve.ops.state.triton import TritonStates
from jaxserve.runtime.mesh import AXES
from tests.ops.attention_cases import Case, empty_cache

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

DEVICES = {
    "cuda": AbstractDevice("NVIDIA H200", 132, "gpu"),
    "tpu": AbstractDevice("TPU v6e", 1, "tpu"),
}


def struct(*shape: int, dtype: DTypeLike = jnp.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def lower(backend: Backend, platform: str, rows: int, tokens: int | None, page_size: int, **layer) -> str:
    """StableHLO of one layer's attention, in bfloat16; tokens None: decode only."""
    sizes = {
        "num_kv_heads": 8,
        "group": 4,
        "head_dim": 128,
        "window": None,
        "sinks": False,
        "latent": False,
        "pages": None,
        "values": None,
    } | layer
    kv_heads, heads, head_dim = sizes["num_kv_heads"], sizes["num_kv_heads"] * sizes["group"], sizes["head_dim"]

    total = tokens or rows
    metadata = AttentionMetadata(
        struct(rows, 64), struct(rows + 1), struct(rows), struct(total), struct(total), decode_only=tokens is None
    )
    spec = AttentionSpec(head_dim**-0.5, kv_heads, sizes["window"], 30.0 if sizes["window"] else None, sizes["values"])
    q = struct(total, heads, head_dim, dtype=jnp.bfloat16)
    case = Case("", (), kv_heads, 1, head_dim, page_size, "bfloat16", pages=sizes["pages"], latent=sizes["latent"])
    cache = jax.eval_shape(lambda: empty_cache(backend, case, 2000))
    sinks = struct(heads, dtype=jnp.bfloat16) if sizes["sinks"] else None
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[platform])):
        traced = jax.jit(backend.attend, static_argnums=3).trace(q, cache, metadata, spec, sinks)
        return traced.lower(lowering_platforms=(platform,)).as_text()


LAYERS = {
    "llama-8b": {},
    "window-sinks": {"window": 128, "sinks": True, "group": 8, "head_dim": 64},
    "group-7": {"num_kv_heads": 2, "group": 7, "head_dim": 64},
    "head-dim-80": {"num_kv_heads": 32, "group": 1, "head_dim": 80},
    "head-dim-256": {"num_kv_heads": 4, "group": 2, "head_dim": 256},
    "latent": {"num_kv_heads": 1, "group": 16, "head_dim": 576, "latent": True},
    "int8": {"pages": "int8"},
    "fp8": {"pages": "float8_e4m3fn"},
    "deepseek-v3": {"num_kv_heads": 1, "group": 128, "head_dim": 576, "latent": True, "values": 512},
    "latent-int8": {"num_kv_heads": 1, "group": 16, "head_dim": 576, "latent": True, "pages": "int8"},
}


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("tokens", [None, 2048], ids=["decode", "mixed"])
def test_triton_lowers_for_hopper(layer: dict, tokens: int | None) -> None:
    text = lower(TritonBackend(), "cuda", 100, tokens, 16, **layer)
    splits = TritonBackend().tuning.splits(100, layer.get("num_kv_heads", 8), 64 * 16)
    if layer.get("latent"):
        splits = 2 if layer["group"] == 16 else 1  # 128 heads are two blocks, which fill the machine
    assert text.count("gpu$xla.gpu.triton") == (1 if tokens is None else 2) + (splits > 1)  # one kernel joins splits


@pytest.mark.parametrize("rows", [1, 500])
def test_triton_splits_follow_the_batch(rows: int) -> None:
    """One row is cut so that it fills the machine; five hundred are not."""
    splits = TritonBackend().tuning.splits(rows, 8, 64 * 16)
    assert splits == (16 if rows == 1 else 1)
    assert f"tensor<{rows}x{splits}x8x4x128x" in lower(TritonBackend(), "cuda", rows, None, 16)


@pytest.mark.parametrize("layer", [{}, {"num_kv_heads": 1, "group": 16, "latent": True}], ids=["llama-8b", "latent"])
@pytest.mark.parametrize(("rows", "tokens"), [(1, None), (100, None), (100, 2048)])
def test_mosaic_lowers_for_hopper(rows: int, tokens: int | None, layer: dict) -> None:
    text = lower(MosaicGpuBackend(), "cuda", rows, tokens, 16, **layer)
    assert text.count("custom_call @mosaic_gpu") == (1 if tokens is None else 2)


@pytest.mark.skipif(not CONCATENATES, reason="the Mosaic kernel of 8-bit pages needs jax 0.11 (Python 3.12)")
@pytest.mark.parametrize(
    "layer", [{"page_size": 8}, {"head_dim": 64}, {"num_kv_heads": 1, "group": 16, "latent": True}]
)
@pytest.mark.parametrize("pages", ["int8", "float8_e4m3fn"])
def test_mosaic_of_8_bit_pages_lowers_for_hopper(pages: str, layer: dict) -> None:
    text = lower(MosaicGpuBackend(), "cuda", 100, 2048, **{"page_size": 16, "pages": pages} | layer)
    assert text.count("custom_call @mosaic_gpu") == 2


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize(("tokens", "page_size"), [(None, 128), (512, 16)], ids=["decode", "mixed"])
def test_tpu_lowers(layer: dict, tokens: int | None, page_size: int) -> None:
    text = lower(TpuBackend(), "tpu", 64, tokens, page_size, **layer)
    assert text.count("tpu_custom_call") == (1 if tokens is None else 2)


@pytest.mark.parametrize(
    ("backend", "platform"), [(TritonBackend(), "cuda"), (MosaicGpuBackend(), "cuda"), (TpuBackend(), "tpu")]
)
def test_cache_is_donated_through_write_and_attend(backend: Backend, platform: str) -> None:
    """The lowered step promises the cache's memory to its output; whether XLA keeps the promise, a device must show."""
    metadata = AttentionMetadata(struct(8, 4), struct(9), struct(8), struct(8), struct(8), decode_only=True)
    cache = struct(*backend.cache_shape(64, 16, 2, 128), dtype=jnp.bfloat16)
    q, new = (struct(8, heads, 128, dtype=jnp.bfloat16) for heads in (8, 2))

    def step(cache, q, k, v, metadata):
        cache = backend.write(cache, k, v, metadata.slot_mapping)
        return cache, backend.attend(q, cache, metadata, AttentionSpec(0.1, 2))

    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[platform])):
        traced = jax.jit(step, donate_argnums=0).trace(cache, q, new, new, metadata)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "tf.aliasing_output = 0" in text


@pytest.mark.parametrize(
    ("backend", "platform", "columns"),
    [
        (TritonBackend(), "cuda", 128),
        (MosaicGpuBackend(), "cuda", 128),
        (TpuBackend(), "tpu", 128),
        (TpuBackend(), "tpu", 64),
    ],
)
@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (2, 1)])
def test_attention_lowers_over_devices(backend: Backend, platform: str, columns: int, tensor: int, expert: int) -> None:
    """No compiler splits a kernel by itself, also where only experts are on several devices."""
    mesh = AbstractMesh((1, tensor, expert), AXES, abstract_device=DEVICES[platform])

    def over(cut: P, *shape: int, dtype: DTypeLike = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, cut))

    cache = over(head_partition(backend), *backend.cache_shape(64, 16, 2, columns), dtype=jnp.bfloat16)
    heads = P(None, "tensor", None)
    q, new = (over(heads, 8, count, columns, dtype=jnp.bfloat16) for count in (8, 2))
    rows = over(P(), 8)
    metadata = AttentionMetadata(over(P(), 8, 4), over(P(), 9), rows, rows, rows, decode_only=True)

    def step(heads: Heads, cache: jax.Array, metadata: AttentionMetadata) -> tuple[jax.Array, Any]:
        return MeshAttention(backend, mesh)(heads, cache, metadata, AttentionSpec(0.1, 2))

    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(step).trace(Heads(q, new, new), cache, metadata)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    kernels = {"triton": "gpu$xla.gpu.triton", "mosaic_gpu": "custom_call @mosaic_gpu", "tpu": "tpu_custom_call"}
    assert kernels[backend.name] in text


def test_recurrent_states_lower_for_hopper() -> None:
    """A decode step of a layer of Qwen3.5-9B: one kernel for the states of all rows."""
    spec = StateSpec("delta", 16, 32, 128, 128, 4)
    state, ring = state_shapes(spec, 16, ring_length(spec, 0))
    assert state is not None
    arrays = StateArrays(struct(*state, dtype=jnp.float32), struct(*ring, dtype=jnp.bfloat16))
    conv, head = struct(4, 16, spec.channels, dtype=jnp.bfloat16), struct(32, dtype=jnp.float32)
    row = struct(8, dtype=jnp.int32)
    bounds, emits = struct(9, dtype=jnp.int32), struct(8, 4, 2, dtype=jnp.int32)
    rows = StateRows(bounds, row, row, row, row, row, emits, decode_only=True)
    raw = struct(8, 16, spec.width, dtype=jnp.bfloat16)
    traced = jax.jit(TritonStates().recur, static_argnums=0).trace(
        spec, arrays, raw, StateWeights(conv, log_a=head, dt_bias=head), rows
    )
    assert traced.lower(lowering_platforms=("cuda",)).as_text().count("gpu$xla.gpu.triton") == 1
