"""What a model would need on a mesh of devices that are not there: bytes of weights and KV pages, by shape alone.

Nothing is allocated, so that a 671-billion-parameter model is planned on a laptop. The arithmetic is the server's own:
parameter shardings of models.sharding, page shapes of the attention backend, memory.plan_memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jaxserve.models.config import ModelConfig
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.models.structure import ModelStructure, build
from jaxserve.ops.paged_attention import get_backend
from jaxserve.runtime.mesh import AXES


@dataclass(frozen=True)
class ShapePlan:
    """Bytes are those of each device."""

    tensor: int
    expert: int
    num_parameters: int  # of the model as it is published
    weight_bytes: int
    whole_bytes: int  # of weight_bytes: of parameters that every device holds in full
    largest_whole: tuple[str, int]  # of these, the largest one
    kv_token_bytes: int  # that one token takes in all layers

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert

    def kv_tokens(self, device_bytes: int, memory_fraction: float = 0.9) -> int:
        """Tokens for whose K and V there is room beside the weights; 0 where not even these fit."""
        return max(0, int(device_bytes * memory_fraction) - self.weight_bytes) // self.kv_token_bytes


def default_mesh(config: ModelConfig, num_devices: int) -> tuple[int, int]:
    """(tensor, expert): all over heads; of a mixture of experts, what exceeds the kv heads over the experts."""
    if config.moe is None or config.latent is not None:
        return num_devices, 1
    tensor = math.gcd(num_devices, config.num_kv_heads)
    return tensor, num_devices // tensor


def plan_by_shape(
    config: ModelConfig, dtype: jnp.dtype, tensor: int, expert: int, *, attention: str = "triton", page_size: int = 16
) -> ShapePlan:
    """Raises ModelLoadError where the model cannot be split so."""
    mesh = AbstractMesh((1, tensor, expert), AXES)
    published = build(config, dtype)
    split = for_mesh(config, mesh)
    structure = published if split == config else build(split, dtype)
    weights, whole, largest = _weights(structure, mesh)
    return ShapePlan(
        tensor=tensor,
        expert=expert,
        num_parameters=published.num_parameters,
        weight_bytes=weights,
        whole_bytes=whole,
        largest_whole=largest,
        kv_token_bytes=_kv_token_bytes(split, dtype, tensor, attention, page_size),
    )


def _weights(structure: ModelStructure, mesh: AbstractMesh) -> tuple[int, int, tuple[str, int]]:
    total, whole, largest = 0, 0, ("", 0)
    for spec in structure.specs:
        sharding = param_sharding(spec, mesh)
        size = math.prod(sharding.shard_shape(spec.shape)) * spec.dtype.itemsize
        total += size
        if mesh.size > 1 and sharding.is_fully_replicated:
            whole += size
            largest = max(largest, (spec.name, size), key=lambda pair: pair[1])
    return total, whole, largest


def _kv_token_bytes(config: ModelConfig, dtype: jnp.dtype, tensor: int, attention: str, page_size: int) -> int:
    platform = {"triton": "gpu", "mosaic_gpu": "gpu", "tpu": "tpu"}.get(attention, "cpu")
    backend = get_backend(attention, platform)
    total = 0
    for layer in config.attention_layers:
        heads = layer.num_kv_heads // tensor if layer.num_kv_heads % tensor == 0 else layer.num_kv_heads
        shape = backend.cache_shape(1, page_size, heads, layer.head_dim, latent=layer.latent)
        total += math.prod(shape) * dtype.itemsize
    return total // page_size
