"""Sizes of the attention kernels by GPU."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.ops.paged_attention import get_backend
from jaxserve.runtime.compilation.attention_sizes import fitted


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
def test_wide_heads_fit_into_the_shared_memory_of_each_gpu() -> None:
    triton: Any = get_backend("triton", "gpu")
    narrow, wide = (SimpleNamespace(head_dim=size, latent=False) for size in (128, 256))
    latent = SimpleNamespace(head_dim=576, latent=True)

    def tile_and_stages(capability: str | None, *layers: Any, backend: Any = triton) -> tuple[int, int]:
        tuning = fitted(backend, SimpleNamespace(compute_capability=capability), layers).tuning  # type: ignore[attr-defined]
        return tuning.extend_tile, tuning.extend_stages

    # Compiled for compute capability 8.9 and head_dim 256, XLA asks for 172,544 bytes with the default, and 69,760.
    for small in ("8.0", "8.6", "8.9", "12.0"):
        assert tile_and_stages(small, narrow, wide) == (32, 4)
        assert tile_and_stages(small, narrow, latent) == (64, 5)
    for large in ("9.0", "10.0", None):
        assert tile_and_stages(large, narrow, wide) == (64, 5)
    xla = get_backend("xla", "gpu")
    assert fitted(xla, SimpleNamespace(compute_capability="8.0"), [wide]) is xla  # type: ignore[list-item]
