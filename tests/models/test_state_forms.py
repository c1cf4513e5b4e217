"""Quantized checkpoints of families with recurrent layers: the weights are those that the tests' writers decode.

Which layers stay quantized: attention, MLPs, experts and output projections. The input projections of a recurrence are
held by key head, as no kernel of few bits reads them, and are converted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.models import test_stored_form
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import STATE_CASES
from tests.models.test_quantization import assert_equal_models
from tests.models.test_quantize_at_load import load, widened

WIDE = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
EXPERTS = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16}
# sizes of which each weight's rows are whole groups of 32, and their number a multiple of 8
MODELS = {
    "qwen3_next": STATE_CASES["qwen3_next"] | WIDE | EXPERTS,
    "qwen3_5": STATE_CASES["qwen3_5"] | WIDE,
    "lfm2": STATE_CASES["lfm2"] | WIDE | {"block_ff_dim": 96, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 64},
    "granite4": STATE_CASES["granite4"] | WIDE | HEADS | {"shared_intermediate_size": 32},
    "bamba": STATE_CASES["bamba"] | WIDE | HEADS | {"mamba_proj_bias": False},
    "nemotron_h": STATE_CASES["nemotron_h"]
    | WIDE
    | {"moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 32, "moe_latent_size": 32}
    | {"mamba_num_heads": 8, "mamba_head_dim": 8},
    "kimi_linear": STATE_CASES["kimi_linear"]
    | WIDE
    | {"moe_intermediate_size": 64, "kv_lora_rank": 32, "v_head_dim": 16}
    | {"linear_attn_config": STATE_CASES["kimi_linear"]["linear_attn_config"] | {"num_heads": 8, "head_dim": 32}},
    "falcon_h1": STATE_CASES["falcon_h1"] | WIDE | HEADS | {"mamba_d_ssm": 128},
}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
FORMS = ("fp8 blocks", "int8 channel", "packed 4 bits with zeros", "gptq", "awq")
Tensors = dict[str, np.ndarray]


def in_fp8(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return (the checkpoint in blocks of FP8, the same decoded)."""
    stored, plain, rng = dict(tensors), dict(tensors), np.random.default_rng(2)
    for name, weight in tensors.items():
        if test_stored_form.PROJECTION.search(name):
            codes = (weight * 20).astype(ml_dtypes.float8_e4m3fn)
            scale = rng.uniform(0.01, 0.1, [-(-n // 32) for n in weight.shape]).astype(np.float32)
            stored |= {name: codes, f"{name}_scale_inv": scale}
            each = scale.repeat(32, axis=0).repeat(32, axis=1)[: weight.shape[0], : weight.shape[1]]
            plain[name] = codes.astype(np.float32) * each
    return stored, plain


def described(form: str) -> dict[str, Any]:
    """The quantization_config of a form, which leaves gates unquantized: of a shared expert, and of a delta rule."""
    if form == "fp8 blocks":
        return FP8_BLOCKS
    found = test_stored_form.FORMS[form]
    if "ignore" in found:
        return found | {"ignore": [*found["ignore"], "re:.*_gate$", r"re:.*\.in_proj_(a|b|ba)$"]}
    return found | {"modules_to_not_convert": [*found["modules_to_not_convert"], "shared_expert_gate"]}


# one of each family and of each form in the usual tiers
QUICK = {("qwen3_5", "awq"), ("nemotron_h", "gptq"), ("falcon_h1", "fp8 blocks"), ("lfm2", "int8 channel")}
ALL = [
    pytest.param(name, form, marks=[] if (name, form) in QUICK else [pytest.mark.slow])
    for name in MODELS
    for form in FORMS
]


@pytest.mark.parametrize(("name", "form"), ALL)
def test_kept_and_widened(name: str, form: str, tmp_path: Path) -> None:
    quantization, tensors = described(form), random_tensors(MODELS[name])
    stored, plain = in_fp8(tensors) if form == "fp8 blocks" else test_stored_form.write(tensors, quantization)
    directory = write_checkpoint(tmp_path / "stored", MODELS[name] | {"quantization_config": quantization}, stored)
    expected = load(write_checkpoint(tmp_path / "plain", MODELS[name], plain), "none")
    kept = load(directory, "stored")
    packed = {spec.wide().name for spec in kept.structure.specs if spec.packing is not None}
    assert any("o_proj" in each for each in packed)
    assert not any("in_proj" in each for each in packed)
    assert_equal_models(load(directory, "none"), expected)
    assert_equal_models(widened(kept), expected)
    ids = jnp.arange(12, dtype=jnp.int32)
    got, wanted = (np.asarray(dense_logits(model.structure, model.leaves, ids)) for model in (kept, expected))
    assert np.abs(got - wanted).max() < 1e-4 * np.abs(wanted).max()
