"""Chooses the attention backend and its kernels' sizes by the device, the model's heads and the dtype.

Triton's default sizes suit the 227 KiB of shared memory of Hopper and of a B200. The TPU's default sizes suit few kv
heads.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp

from jaxserve.errors import ConfigError
from jaxserve.models.config import AttentionLayer
from jaxserve.ops.paged_attention import Backend, get_backend

logger = logging.getLogger(__name__)

_TRITON_SINCE, _HOPPER = (8, 0), (9, 0)  # compute capability; XLA refuses Triton before
_LARGE_MEMORY = (9, 10)  # major numbers of the compute capability
_SMALL_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))  # with 101,376 bytes for a program
_WIDE = 128  # columns of a head; a wider one is padded to 256
_WIDER = 256  # likewise, to 512
_LANES = 128  # columns of a TPU's vector register, to which arrays in its memory are padded
_TPU_MEMORY = 15 * 2**20  # bytes; a kernel has 16 MiB on a v5e
_TPU_SIZES = ((128, 256), (64, 256), (64, 128), (32, 128), (16, 128))  # rows and tile, the fastest first


def compute_capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of a jax device, (0, 0) if it has none."""
    found = getattr(device, "compute_capability", None)
    return tuple(map(int, found.split("."))) if isinstance(found, str) else (0, 0)


def has_triton(device: Any) -> bool:
    """Return whether XLA runs Triton's kernels on a GPU. True if its compute capability is not known."""
    capability = compute_capability(device)
    return not any(capability) or capability >= _TRITON_SINCE


def serving_backend(
    name: str, device: Any, layers: Iterable[AttentionLayer], dtype: jnp.dtype, tensor: int = 1
) -> Backend:
    """Return the backend that `runtime.attention` names, with sizes that fit the device's memory.

    dtype: of activations. tensor: devices over which heads are split
    "auto" takes XLA's on a GPU where Triton's kernels cannot run or spill, and logs it.
    Raises ConfigError if a backend that is named cannot run here.
    """
    layers = list(layers)
    backend = get_backend(name, device.platform)
    if name == "auto" and backend.name == "triton":
        why = _lacks(device) or ("activations of 16 bits" if dtype == jnp.float32 else "")
        if why:
            logger.warning("attention backend 'triton' needs %s; xla serves instead", why)
            return get_backend("xla", device.platform)
    why = _cannot(backend, device, layers, dtype)
    if why:
        raise ConfigError(f"attention backend {name!r} needs {why}", fix="use runtime.attention: auto")
    return _fitted_on_tpu(backend, layers, dtype, tensor) if backend.name == "tpu" else fitted(backend, device, layers)


def _lacks(device: Any) -> str:
    """Return the reason why a GPU cannot run Triton's kernels; empty: it can."""
    found = ".".join(map(str, compute_capability(device)))
    return "" if has_triton(device) else f"a GPU of compute capability 8.0 or more, not {found}"


def _cannot(backend: Backend, device: Any, layers: Sequence[AttentionLayer], dtype: jnp.dtype) -> str:
    """Return the reason why a GPU's backend cannot run; empty: it can.

    Compiled for an H200 in float32, Triton's kernel for prompts takes 344,832 bytes of shared memory with head_dim 256
    and 303,872 with latent rows; with head_dim 128 it spills 37 KB.
    """
    capability = compute_capability(device)
    if backend.name == "mosaic_gpu" and any(capability) and capability != _HOPPER:
        return f"a GPU of compute capability 9.0, not {'.'.join(map(str, capability))}"
    if backend.name != "triton":
        return ""
    large = dtype == jnp.float32 and any(layer.head_dim > _WIDE for layer in layers)
    return _lacks(device) or ("activations of 16 bits for heads wider than 128" if large else "")


def fitted(backend: Backend, device: Any, layers: Iterable[AttentionLayer]) -> Backend:
    """Return the backend with sizes that fit a GPU's shared memory; the backend itself if its default sizes fit.

    Compiled for compute capability 8.0 and 8.9, heads wider than 128 take 172,544 bytes in Triton's kernel for prompts.
    An A100 has 166,912 and an L4 101,376. Half a tile of context, loaded in fewer stages, takes 69,760.
    Latent rows of 576 columns take 152,064 bytes, and 75,008 with half the heads and half the tile.
    """
    capability = compute_capability(device)
    if backend.name != "triton" or not any(capability) or capability[0] in _LARGE_MEMORY:
        return backend
    from jaxserve.ops.paged_attention.triton.backend import TritonBackend  # noqa: PLC0415  not every build of jax has it

    assert isinstance(backend, TritonBackend)
    layers = list(layers)
    if any(layer.head_dim > _WIDE and not layer.latent for layer in layers):
        tuning = dataclasses.replace(backend.tuning, extend_tile=32, extend_stages=4)
        backend = dataclasses.replace(backend, tuning=tuning)
    if capability in _SMALL_MEMORY and any(layer.head_dim > _WIDER and not layer.latent for layer in layers):
        backend = dataclasses.replace(backend, tuning=dataclasses.replace(backend.tuning, decode_tile=16))
    if capability in _SMALL_MEMORY and any(layer.latent for layer in layers):
        backend = dataclasses.replace(backend, latent=dataclasses.replace(backend.latent, rows=32, tile=16))
    return backend


def _fitted_on_tpu(backend: Backend, layers: Sequence[AttentionLayer], dtype: jnp.dtype, tensor: int) -> Backend:
    """Return the backend with sizes that fit the memory of a TPU's core, for prompts too."""
    from jaxserve.ops.paged_attention.tpu import TpuBackend, TpuTuning  # noqa: PLC0415  as above

    assert isinstance(backend, TpuBackend)
    sizes = [TpuTuning(tile=tile, rows=rows) for rows, tile in _TPU_SIZES]

    def fits(tuning: TpuTuning) -> bool:
        return all(_tpu_bytes(tuning.rows, tuning.tile, layer, dtype, tensor) <= _TPU_MEMORY for layer in layers)

    return dataclasses.replace(backend, tuning=next(filter(fits, sizes), sizes[-1]))


def _tpu_bytes(rows: int, tile: int, layer: AttentionLayer, dtype: jnp.dtype, tensor: int) -> int:
    """Return the bytes that the TPU's kernel takes for blocks of `rows` rows and tiles of `tile` tokens.

    With 32 kv heads of 128 columns in bfloat16 and the default sizes that is 20 MiB, as XLA says.
    """
    heads, columns = layer.num_kv_heads, -(-layer.head_dim // _LANES) * _LANES
    heads = heads // tensor if heads % tensor == 0 else heads
    of_row = 4 * columns * dtype.itemsize + 4 * columns + 3 * 4 * _LANES  # q and results twice, sums, softmax, sinks
    of_token = 2 * (1 if layer.latent else 2) * columns * dtype.itemsize  # pages twice
    return heads * (rows * of_row + tile * of_token)
