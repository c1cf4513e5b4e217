"""FP8 of fbgemm and compressed-tensors: logits of weights decoded here bit by bit, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import build
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.test_quantize_at_load import load
from tests.models.test_stored_floats import E4M3, FLOAT32, MODELS, PROMPT, Tensors, num_kept

# As Meta publishes Llama 3.1 405B: the layers' MLPs but the first one's, and no attention.
WIDE = [
    "lm_head",
    "model.layers.0.mlp",
    *(f"model.layers.{i}.self_attn.{name}_proj" for i in (0, 1) for name in "qkvo"),
]
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": WIDE}


def number(code: int) -> float:
    """The number of an E4M3 code: a sign, 4 bits of exponent biased by 7, 3 of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


NUMBERS = np.array([np.nan if code & 127 == 127 else number(code) for code in range(256)], np.float32)


def fbgemm(chosen: str = "layers.1.mlp") -> tuple[Tensors, Tensors]:
    """(the checkpoint, the same decoded here), with the projections of `chosen` quantized."""
    stored, rng = random_tensors(MODELS["llama"]), np.random.default_rng(5)
    plain = dict(stored)
    for name, weight in plain.items():
        if chosen in name and name.endswith("_proj.weight"):
            codes = rng.integers(0, 256, weight.shape, np.uint8)
            codes[codes & 127 == 127] = 0
            scale = rng.uniform(1e-4, 1e-3, (len(weight), 1)).astype(np.float32)
            plain[name] = np.stack([NUMBERS[row] * factor for row, factor in zip(codes, scale[:, 0], strict=True)])
            stored |= {name: codes.view(E4M3), f"{name}_scale": scale}
    return stored, plain


def test_logits_are_those_of_weights_decoded_here(tmp_path: Path) -> None:
    stored, plain = fbgemm()
    hf = MODELS["llama"] | {"quantization_config": FBGEMM}
    kept = load(write_checkpoint(tmp_path / "fbgemm", hf, stored), "stored")
    assert kept.config.stored_form is not None and kept.config.stored_form.rounds_activations
    expected = load(write_checkpoint(tmp_path / "plain", MODELS["llama"], plain), "none")
    assert num_kept(kept) == 2  # gate and up are one
    got, wanted = (
        np.asarray(dense_logits(model.structure, model.leaves, jnp.array(PROMPT))) for model in (kept, expected)
    )
    np.testing.assert_array_equal(got, wanted)
    planned = build(read_config(tmp_path / "fbgemm").replace(quantization="stored"), FLOAT32)
    assert [spec.name for spec in planned.specs] == [spec.name for spec in kept.structure.specs]


def test_a_part_of_a_fused_weight_is_refused_by_name(tmp_path: Path) -> None:
    stored, _ = fbgemm("layers.1.mlp.up_proj")
    directory = write_checkpoint(tmp_path, MODELS["llama"] | {"quantization_config": FBGEMM}, stored)
    with pytest.raises(ModelLoadError, match=r"layers\.1\.mlp\.up_proj is quantized and .*gate_proj is not"):
        load(directory, "stored")
    assert num_kept(load(directory, "none")) == 0


def groups(*schemes: dict[str, Any], **others: Any) -> dict[str, Any]:
    layers = {str(i): {"weights": {"type": "float", "num_bits": 8} | each} | others for i, each in enumerate(schemes)}
    return {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": layers}


BLOCK = {"strategy": "block", "block_structure": [128, 128]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    (FBGEMM | {"activation_scale_ub": -1}, "'activation_scale_ub' must be a positive number"),
    (FBGEMM | {"activation_scale_ub": "1200"}, "'activation_scale_ub' must be a positive number"),
    (FBGEMM | {"modules_to_not_convert": "lm_head"}, "'modules_to_not_convert' must be a list of names"),
    (groups({"strategy": "group"}), "'strategy' of a quantized checkpoint is 'group'"),
    (groups({"num_bits": 4}), "'group_size' of a quantized checkpoint is None"),
    (groups({"num_bits": 6}), "'num_bits' of a quantized checkpoint is 6"),
    (groups(BLOCK, {"strategy": "channel"}), "'block_structure' differs between groups of layers"),
    (groups(BLOCK | {"block_structure": [128]}), "'block_structure' must be two sizes"),
    (groups({}, input_activations={"num_bits": 4}), "'input_activations' of a quantized checkpoint"),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_computed_is_refused_by_name(form: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"] | {"quantization_config": form}))
    with pytest.raises(ModelLoadError) as error:
        read_config(tmp_path)
    assert message in str(error.value)


def test_blocks_as_a_text(tmp_path: Path) -> None:
    form = groups(BLOCK | {"block_structure": "128x64"})
    (tmp_path / "config.json").write_text(json.dumps(MODELS["llama"] | {"quantization_config": form}))
    assert read_config(tmp_path).weight_block == (128, 64)
