"""The Mosaic kernel in its interpreter, which came with jax 0.11, and what the backend refuses."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention.mosaic_gpu import MosaicGpuBackend, MosaicTuning
from tests.ops.attention_cases import Case, expected, filled_cache, make_batch, run

CASES = [
    Case("decode", ((1, 37), (0, 0), (1, 150)), group=4, dtype="bfloat16", decode_only=True),
    Case("options", ((1, 130),), 1, 7, 128, dtype="bfloat16", window=70, soft_cap=5.0, sinks=True, decode_only=True),
    Case("mixed", ((1, 40), (5, 20), (0, 0), (40, 100)), num_kv_heads=1, group=4, dtype="bfloat16", padding=3),
    Case("prompt-options", ((21, 150),), 1, 7, 64, dtype="bfloat16", window=70, soft_cap=5.0, sinks=True),
    Case("prompt-latent", ((9, 70),), 1, 16, 128, dtype="bfloat16", latent=True),
    Case("decode-int8", ((1, 37), (0, 0), (1, 150)), group=4, dtype="bfloat16", pages="int8", decode_only=True),
    Case("mixed-fp8", ((1, 40), (5, 20), (40, 100)), 1, 4, 64, 8, dtype="bfloat16", pages="float8_e4m3fn", padding=3),
    Case("options-fp8", ((1, 130), (9, 150)), 1, 7, 128, 32, "bfloat16", "float8_e4m3fn", 70, soft_cap=5.0, sinks=True),
    Case("latent-int8", ((9, 70),), 1, 16, 192, 64, dtype="float16", pages="int8", latent=True),
]


@pytest.mark.skipif(
    "InterpretGPUParams" not in dir(plgpu), reason="the Mosaic GPU interpreter needs jax 0.11 (Python 3.12)"
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_matches_dense_attention(case: Case) -> None:
    backend = MosaicGpuBackend(
        interpret=True,
        tuning=MosaicTuning(stages=2, split_tokens=32, programs=8),
    )
    batch = make_batch(case)
    np.testing.assert_allclose(run(backend, batch), expected(batch), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("page_size", "head_dim", "reason"), [(16, 80, "head_dim"), (128, 64, "page_size"), (16, 256, "shared memory")]
)
def test_refuses_shapes_it_has_no_kernel_for(page_size: int, head_dim: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MosaicGpuBackend().cache_shape(10, page_size, 2, head_dim)


def test_refuses_float32() -> None:
    batch = make_batch(Case("", ((1, 5),), decode_only=True))
    cache = filled_cache(MosaicGpuBackend(), batch)
    with pytest.raises(ConfigError, match="16 bit"):
        MosaicGpuBackend().attend(jnp.asarray(batch.q), cache, batch.metadata, batch.case.spec)
