"""A decode step of published models, cut to a few layers, lowers for the kernels of a GPU and a TPU, from a CPU.

What this cannot show: that it is right or fast there.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import build
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import AttentionSpec, Backend
from jaxserve.ops.paged_attention.tpu import TpuBackend
from jaxserve.ops.paged_attention.triton.backend import TritonBackend
from jaxserve.runtime.kv_cache import LayerCache
from jaxserve.runtime.programs import StepPrograms
from jaxserve.runtime.sampling.slots import state_shapes
from jaxserve.runtime.step_input import decode_size
from tests.models.published import PUBLISHED

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
BFLOAT16 = jnp.dtype("bfloat16")
MODELS = (
    "Llama-3.1-8B",
    "Qwen3-8B",
    "Mixtral-8x7B",
    "Gemma-2-9B",
    "Gemma-3-1B",
    "DeepSeek-V3",
    "gpt-oss-120b",
)
ROWS, PAGES, PAGE = 4, 64, {"cuda": 16, "tpu": 128}
TARGETS: dict[str, tuple[AbstractDevice, Backend]] = {
    "cuda": (AbstractDevice("NVIDIA H200", 132, "gpu"), TritonBackend()),
    "tpu": (AbstractDevice("TPU v6e", 1, "tpu"), TpuBackend()),
}


def caches_of(structure: ModelStructure, backend: Backend, page: int) -> list[jax.ShapeDtypeStruct]:
    layers = structure.config.attention_layers
    shapes = [backend.cache_shape(PAGES, page, x.num_kv_heads, x.head_dim, latent=x.latent) for x in layers]
    return [jax.ShapeDtypeStruct(shape, BFLOAT16) for shape in shapes]


def layer_of(structure: ModelStructure, index: int, cache: jax.ShapeDtypeStruct) -> LayerCache:
    layer = structure.config.attention_layers[index]
    spec = AttentionSpec(layer.scale, layer.num_kv_heads, layer.sliding_window, layer.soft_cap)
    sharding: Any = None  # no arrays are made
    return LayerCache(cache.shape[1:], BFLOAT16, sharding, layer.num_kv_heads, spec)


@pytest.mark.parametrize("platform", TARGETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_decode_step_lowers(name: str, platform: str) -> None:
    device, backend = TARGETS[platform]
    hf = PUBLISHED[name].hf | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
    structure = build(from_hf(hf), BFLOAT16)
    caches = caches_of(structure, backend, PAGE[platform])
    steps = StepPrograms(
        bind=structure.bind,
        backend=backend,
        layers=tuple(layer_of(structure, i, cache) for i, cache in enumerate(caches)),
        page_size=PAGE[platform],
        linear=Products(experts="triton" if platform == "cuda" else "auto"),
    )
    leaves = tuple(jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in structure.specs)
    state = state_shapes(ROWS, structure.config.vocab_size, 8)
    packed = jax.ShapeDtypeStruct((decode_size(ROWS),), jnp.int32)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(steps.decode, donate_argnums=(1, 2)).trace(leaves, tuple(caches), state, packed)
        text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert {"cuda": "gpu$xla.gpu.triton", "tpu": "tpu_custom_call"}[platform] in text
    assert ("moe_gate_up" in text) == (platform == "cuda" and structure.config.moe is not None)
