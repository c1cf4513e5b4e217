"""Checkpoints for activations of 8 bits: logits of the rounded products beside a forward that rounds in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.structure import LoadedModel
from jaxserve.ops.linear import Products
from jaxserve.ops.linear.rounded import FEW_ROWS
from jaxserve.ops.quantized import Quantized
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.test_fbgemm import FBGEMM, fbgemm
from tests.models.test_quantize_at_load import load
from tests.models.test_stored_floats import MODELS as FP8_MODELS
from tests.models.test_stored_form import FORMS, MODELS, write
from tests.ops.test_quantized import decoded
from tests.ops.test_rounded_devices import rounded_by_numpy

TOKENS = FEW_ROWS + 5


@dataclass(frozen=True)
class ByNumpy(Products):
    """Products in float64 with numbers that numpy decodes and rounds, of quantized weights."""

    kind: str = ""

    def __call__(self, x: jax.Array, w: Any, bias: jax.Array | None = None, **options: Any) -> jax.Array:
        if not isinstance(w, Quantized):
            return super().__call__(x, w, bias, **options)
        assert bias is None

        def multiply(x: np.ndarray, w: Quantized) -> np.ndarray:
            """Multiply x float32 [T, K] by w [N, K] transposed."""
            wide = decoded(w).astype(np.float64)
            return (rounded_by_numpy(x, self.kind, x.shape[1]) @ wide.T).astype(np.float32)

        matrix = w.matrix()
        result = jax.ShapeDtypeStruct((len(x), len(matrix.values)), jnp.float32)
        return jax.pure_callback(multiply, result, x, matrix).reshape(len(x), *w.shape[:-1])


def logits(model: LoadedModel, linear: Products) -> np.ndarray:
    """Compute those of TOKENS tokens."""
    ids = jnp.asarray(np.random.default_rng(1).integers(0, model.config.vocab_size, TOKENS, np.int32))
    decoder, caches = model.structure.bind(model.leaves), (None,) * model.config.num_layers
    hidden, _ = decoder(ids, jnp.arange(TOKENS, dtype=jnp.int32), caches, dense_attend(model.config), linear)
    return np.asarray(decoder.logits(hidden, linear))


def checkpoint(kind: str, directory: Path) -> LoadedModel:
    if kind == "int8":
        form = FORMS["int8 channel, W8A8"]
        tensors, _ = write(random_tensors(MODELS["llama"]), form)
    else:
        form = FBGEMM | {"modules_to_not_convert": ["lm_head"]}
        tensors, _ = fbgemm("layers")
    hf = (MODELS if kind == "int8" else FP8_MODELS)["llama"] | {"quantization_config": form}
    return load(write_checkpoint(directory, hf, tensors), "stored")


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_logits_are_those_of_activations_rounded_in_numpy(kind: str, tmp_path: Path) -> None:
    """Within a thousandth of the largest logit: a number halfway between two steps may go either way."""
    model = checkpoint(kind, tmp_path)
    want, exact = logits(model, ByNumpy(kind=kind)), logits(model, Products())
    got = logits(model, Products(rounded="gpu"))
    bound = 1e-3 * np.abs(want).max()
    assert np.abs(got - want).max() < bound
    assert np.abs(exact - want).max() > 3 * bound
