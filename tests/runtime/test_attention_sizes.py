"""The attention backend that serves, and the sizes of its kernels, by GPU."""

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention import get_backend
from jaxserve.runtime.compilation.attention_sizes import fitted, serving_backend

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
NARROW, WIDE, WIDER = (SimpleNamespace(head_dim=size, latent=False) for size in (128, 256, 512))
LATENT = SimpleNamespace(num_kv_heads=1, head_dim=576, latent=True)


def serves(name: str, capability: str | None, dtype: str, *layers: Any) -> Any:
    device = SimpleNamespace(platform="gpu", compute_capability=capability)
    return serving_backend(name, device, layers, jnp.dtype(dtype))


@pytest.mark.parametrize(
    ("capability", "dtype", "found"),
    [
        ("7.5", "float16", "xla"),  # XLA has Triton from 8.0 on
        ("8.0", "bfloat16", "triton"),
        ("9.0", "float16", "triton"),
        ("9.0", "float32", "xla"),
        (None, "bfloat16", "triton"),
    ],
)
def test_auto_takes_xla_where_triton_cannot_run(
    capability: str | None, dtype: str, found: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert serves("auto", capability, dtype, NARROW).name == found
    assert ("xla serves instead" in caplog.text) == (found == "xla")


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "layer", "needs"),
    [
        ("triton", "7.5", "float16", NARROW, "compute capability 8.0 or more, not 7.5"),
        ("triton", "9.0", "float32", WIDE, "activations of 16 bits"),
        ("triton", "9.0", "float32", LATENT, "activations of 16 bits"),
        ("mosaic_gpu", "8.9", "bfloat16", NARROW, "compute capability 9.0, not 8.9"),
        ("mosaic_gpu", "10.0", "bfloat16", NARROW, "compute capability 9.0, not 10.0"),
    ],
)
def test_a_backend_that_is_named_and_cannot_run_is_refused(
    name: str, capability: str, dtype: str, layer: Any, needs: str
) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' needs .*{needs}"):
        serves(name, capability, dtype, layer)
    assert serves(name, "9.0", "bfloat16", layer).name == name
    assert serves("triton", "9.0", "float32", NARROW).name == "triton"


def test_latent_rows_fit_into_the_shared_memory_of_each_gpu() -> None:
    for small in ("8.6", "8.9", "12.0"):
        latent = serves("auto", small, "bfloat16", LATENT).latent
        assert (latent.rows, latent.tile) == (32, 16)
        assert serves("auto", small, "bfloat16", WIDE).latent.rows == 64
    for large in ("8.0", "9.0", "10.0"):
        latent = serves("auto", large, "bfloat16", LATENT).latent
        assert (latent.rows, latent.tile) == (64, 32)


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "tensor", "dtype", "sizes"),
    [
        (8, 128, 1, "bfloat16", (128, 256)),
        (8, 256, 1, "float32", (128, 256)),
        (32, 128, 1, "bfloat16", (64, 256)),  # XLA asks for 20 MiB with the default, and a v5e has 16
        (32, 96, 1, "bfloat16", (64, 256)),
        (32, 128, 4, "bfloat16", (128, 256)),
        (40, 128, 1, "bfloat16", (64, 128)),
        (64, 128, 1, "float32", (16, 128)),
    ],
)
def test_prompts_of_many_kv_heads_fit_into_the_memory_of_a_tpu(
    kv_heads: int, head_dim: int, tensor: int, dtype: str, sizes: tuple[int, int]
) -> None:
    layers: list[Any] = [LATENT, SimpleNamespace(num_kv_heads=kv_heads, head_dim=head_dim, latent=False)]
    backend: Any = serving_backend("auto", SimpleNamespace(platform="tpu"), layers, jnp.dtype(dtype), tensor)
    assert (backend.tuning.rows, backend.tuning.tile) == sizes


def test_wide_heads_fit_into_the_shared_memory_of_each_gpu() -> None:
    triton: Any = get_backend("triton", "gpu")

    def tile_and_stages(capability: str | None, *layers: Any, backend: Any = triton) -> tuple[int, int]:
        tuning = fitted(backend, SimpleNamespace(compute_capability=capability), layers).tuning  # type: ignore[attr-defined]
        return tuning.extend_tile, tuning.extend_stages

    # Compiled for compute capability 8.9 and head_dim 256, XLA asks for 172,544 bytes with the default, and 69,760.
    for small in ("8.0", "8.6", "8.9", "12.0"):
        assert tile_and_stages(small, NARROW, WIDE) == (32, 4)
        assert tile_and_stages(small, NARROW, LATENT) == (64, 5)
    for large in ("9.0", "10.0", None):
        assert tile_and_stages(large, NARROW, WIDE) == (64, 5)
    xla = get_backend("xla", "gpu")
    assert fitted(xla, SimpleNamespace(compute_capability="8.0"), [WIDE]) is xla  # type: ignore[list-item]


def test_heads_of_512_fit_into_the_shared_memory_of_each_gpu() -> None:
    """Compiled for an H200, a prompt's kernel takes 459,264 bytes with the sizes of smaller heads, of 232,448."""
    for capability, decode_tile in (("8.0", 32), ("8.9", 16), ("9.0", 32), ("12.0", 16)):
        tuning = serves("auto", capability, "bfloat16", WIDE, WIDER).tuning
        assert (tuning.decode_tile, tuning.extend_sizes(512)) == (decode_tile, (32, tuning.extend_tile // 2))
        assert tuning.extend_sizes(256) == (64, tuning.extend_tile)
