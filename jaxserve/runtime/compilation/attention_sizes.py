"""The sizes of the attention kernels on GPUs with less shared memory than the 227 KiB of Hopper and of a B200."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxserve.models.config import AttentionLayer
from jaxserve.ops.paged_attention import Backend

_LARGE_MEMORY = (9, 10)  # major numbers of the compute capability
_WIDE = 128  # columns of a head; a wider one is padded to 256


def compute_capability(device: Any) -> tuple[int, ...]:
    """Return the compute capability of a jax device, (0, 0) if it has none."""
    found = getattr(device, "compute_capability", None)
    return tuple(map(int, found.split("."))) if isinstance(found, str) else (0, 0)


def fitted(backend: Backend, device: Any, layers: Iterable[AttentionLayer]) -> Backend:
    """Return the backend with sizes that a GPU's shared memory holds; itself if the default ones are.

    Heads wider than 128 take 172,544 bytes in Triton's kernel for prompts, compiled for compute capability 8.0 and 8.9.
    An A100 has 166,912 and an L4 101,376. Half a tile of context, loaded in fewer stages, takes 69,760.
    """
    wide = any(layer.head_dim > _WIDE and not layer.latent for layer in layers)
    capability = compute_capability(device)
    if backend.name != "triton" or not wide or not any(capability) or capability[0] in _LARGE_MEMORY:
        return backend
    from jaxserve.ops.paged_attention.triton.backend import TritonBackend  # noqa: PLC0415  not every build of jax has it

    assert isinstance(backend, TritonBackend)
    tuning = dataclasses.replace(backend.tuning, extend_tile=32, extend_stages=4)
    return dataclasses.replace(backend, tuning=tuning)
