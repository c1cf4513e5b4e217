"""The kernel of norm, rotation and write, interpreted, against numpy: head sizes, norms, rotations, dropped tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import build
from jaxserve.models.layers import StateInputs
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Backend, Heads, ProjectedHeads
from jaxserve.ops.paged_attention.reference import ReferenceBackend
from jaxserve.ops.paged_attention.scaled_pages import Pages
from jaxserve.ops.paged_attention.sharded import MeshAttention
from jaxserve.ops.paged_attention.triton.backend import TritonBackend
from jaxserve.ops.paged_attention.triton.heads import write_heads
from tests.models.families import CASES as CASES_OF_MODELS
from tests.quick import QUICK

PAGES, PAGE = 3, 4


@dataclasses.dataclass(frozen=True)
class Case:
    """The sizes of the heads, how many columns are rotated, and the slots of the tokens; 99: not to be written."""

    id: str
    kv_heads: int = 2
    group: int = 4
    head_dim: int = 32
    rotary: int = 32
    interleaved: bool = False
    normed: bool = False
    offset: float = 0.0
    dtype: str = "float32"
    slots: tuple[int, ...] = (5, 99, 0, 11)


CASES = [
    Case("llama"),
    Case("qwen3-bfloat16", normed=True, dtype="bfloat16"),
    Case("gemma3", kv_heads=1, normed=True, offset=1.0),
    Case("sizes-that-are-no-powers-of-two", group=7, head_dim=20, rotary=20, normed=True),
    Case("rotated-in-part", group=1, rotary=12),
    Case("interleaved", interleaved=True, rotary=16),
    Case("no-positions", rotary=0, normed=True, slots=(2,)),
]


def turned(x: np.ndarray, angles: np.ndarray, case: Case) -> np.ndarray:
    """Rotate the pairs of x [..., D] as complex numbers, by angles [r / 2]."""
    half, out = case.rotary // 2, x.copy()
    real, imaginary = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if case.interleaved else (
        slice(0, half), slice(half, 2 * half)
    )  # fmt: skip
    pairs = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * angles)
    out[..., real], out[..., imaginary] = pairs.real, pairs.imag
    return out


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_heads_are_normed_rotated_and_written(case: Case) -> None:
    rng = np.random.default_rng(5)
    dtype, tokens = jnp.dtype(case.dtype), len(case.slots)
    rows = jnp.asarray(rng.normal(0, 1, (tokens, case.kv_heads, case.group + 2, case.head_dim)), dtype)
    cache = jnp.asarray(rng.normal(0, 1, (PAGES, PAGE, 2 * case.kv_heads, case.head_dim)), dtype)
    weights = [jnp.asarray(rng.normal(1, 0.2, case.head_dim), dtype) for _ in range(2)] if case.normed else None
    angles = rng.uniform(-9, 9, (tokens, case.rotary // 2)).astype(np.float32)
    table = (jnp.cos(angles), jnp.sin(angles)) if case.rotary else None
    norms = None if weights is None else (weights[0], weights[1])
    heads = ProjectedHeads(rows, norms, 1e-5, case.offset, table, case.interleaved)
    q, written = write_heads(heads, cache, jnp.asarray(case.slots, jnp.int32), interpret=True)

    wide, expected = (
        np.asarray(rows, np.float64),
        np.asarray(cache, np.float64).reshape(PAGES * PAGE, -1, 2, case.head_dim),
    )
    tolerance = 1e-5 if dtype == jnp.float32 else 2e-2
    for token, slot in enumerate(case.slots):
        own = wide[token].copy()
        for part, which in (((slice(None), slice(0, case.group)), 0), ((slice(None), case.group), 1)):
            x = own[part]
            if weights is not None:
                x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
                x = x * (np.asarray(weights[which], np.float64) + case.offset)
            own[part] = turned(x, angles[token], case)
        wanted = own[:, : case.group].reshape(-1, case.head_dim)
        np.testing.assert_allclose(np.asarray(q[token], np.float64), wanted, rtol=tolerance, atol=tolerance)
        if slot < PAGES * PAGE:
            expected[slot] = own[:, case.group :]
    got = np.asarray(written, np.float64).reshape(expected.shape)
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
    untouched = [slot for slot in range(PAGES * PAGE) if slot not in case.slots]
    np.testing.assert_array_equal(got[untouched], expected[untouched])


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")
@pytest.mark.parametrize("family", ["qwen3", "gemma3", "phi3", "smollm3", "olmo2"])
def test_a_model_gives_the_same_as_with_xla(family: str) -> None:
    """A step of one prompt in scattered pages: the model hands over what the kernel needs, or nothing (olmo2)."""
    structure = build(from_hf(CASES_OF_MODELS[family]), jnp.dtype("float32"))
    rng = np.random.default_rng(2)
    leaves = tuple(jnp.asarray(rng.normal(0.1, 0.2, spec.shape), jnp.float32) for spec in structure.specs)
    layers, tokens = structure.config.attention_layers, 6
    slots = jnp.asarray([8, 9, 10, 11, 0, 1], jnp.int32)
    place = jnp.arange(tokens, dtype=jnp.int32)
    where = AttentionMetadata(
        jnp.asarray([[2, 0]]), jnp.asarray([0, tokens]), jnp.asarray([tokens]), place, slots
    )  # fmt: skip

    def run(backend: Backend) -> tuple[jax.Array, tuple[Pages, ...]]:
        def attend(
            layer_index: int, heads: Heads | StateInputs, cache: Any, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Any]:
            assert not isinstance(heads, StateInputs)
            layer = layers[layer_index]
            spec = AttentionSpec(layer.scale, layer.num_kv_heads, layer.sliding_window, layer.soft_cap)
            assert cache is not None
            return MeshAttention(backend)(heads, cache, where, spec, sinks)

        shapes = [backend.cache_shape(PAGES, PAGE, layer.num_kv_heads, layer.head_dim) for layer in layers]
        caches = tuple(jnp.zeros(shape, jnp.float32) for shape in shapes)
        forward = jax.jit(
            lambda leaves, caches: structure.bind(leaves)(place + 3, place, caches, attend, Products()),
            compiler_options=QUICK,
        )
        return forward(leaves, caches)

    class CountingTriton(TritonBackend):
        written = 0

        def attend(self, q, cache, metadata, spec, sinks=None):  # the kernel under test is the other one
            return ReferenceBackend().attend(q, cache, metadata, spec, sinks)

        def write_heads(self, heads, cache, slot_mapping):
            CountingTriton.written += 1
            return super().write_heads(heads, cache, slot_mapping)

    hidden, caches = run(CountingTriton(interpret=True))
    assert bool(CountingTriton.written) == (family != "olmo2")
    wanted, kept = run(ReferenceBackend())
    np.testing.assert_allclose(np.asarray(hidden), np.asarray(wanted), rtol=2e-4, atol=2e-4)
    for got, right in zip(caches, kept, strict=True):
        np.testing.assert_allclose(np.asarray(got), np.asarray(right), rtol=2e-4, atol=2e-4)
