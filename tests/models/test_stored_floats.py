"""FP8 and MXFP4 checkpoints as they are published: bit by bit the numbers and logits of decoding them at load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, build, inspect, random_model
from jaxserve.models.checkpoint.weight_sources import directory_source, source_of
from jaxserve.runtime.fingerprint import describe
from jaxserve.runtime.weights import DeviceWeights
from tests.models import paged
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import CASES
from tests.models.test_quantization import Tensors, assert_equal_models, gpt_oss_mxfp4
from tests.models.test_quantize_at_load import PROMPT, devices, load, widened
from tests.quick import QUICK_FLAGS
from tests.runtime.test_device_weights import Holder

FLOAT32 = jnp.dtype("float32")
E4M3 = ml_dtypes.float8_e4m3fn
TWO = {"num_hidden_layers": 2}
MODELS = {
    "llama": TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16},
    "packed": CASES["phi3"] | TWO | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "experts": CASES["qwen3_moe"] | TWO | {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64},
    "deepseek": CASES["deepseek_v3"]
    | TWO
    | {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 128, "q_lora_rank": 32, "v_head_dim": 16},
}
LAYERS = {"llama": 8, "packed": 8, "experts": 8, "deepseek": 12}  # weights that are kept
SCALES: dict[str, tuple[dict[str, Any], Any]] = {
    "tensor": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda rows, depth: ()),
    "channel": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, lambda rows, depth: (rows, 1)),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": [24, 32]},
        lambda rows, depth: (-(-rows // 24), -(-depth // 32)),
    ),
    "fbgemm": (
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        lambda rows, depth: (rows, 1),
    ),
    "compressed blocks": (
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [24, 32]},
                    "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group"},
                }
            },
        },
        lambda rows, depth: (-(-rows // 24), -(-depth // 32)),
    ),
    "large blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        lambda rows, depth: (-(-rows // 128), 1),
    ),
}
DOWN = "model.layers.1.mlp.down_proj.weight"


def fp8(name: str, kind: str, seed: int = 0, skipped: str = "lm_head") -> tuple[dict[str, Any], Tensors]:
    """(config.json, tensors) of a model whose projections are FP8."""
    quantization, shape = SCALES[kind]
    suffix = "_scale_inv" if "weight_block_size" in quantization else "_scale"
    stored, rng = random_tensors(MODELS[name], seed), np.random.default_rng(seed)
    for key, weight in list(stored.items()):
        if key.endswith("_proj.weight") or "kv_a_proj_with_mqa" in key:
            if skipped in key:
                continue
            scale = rng.uniform(0.01, 0.1, shape(*weight.shape)).astype(np.float32)
            stored |= {key: (weight * 20).astype(E4M3), f"{key}{suffix}": scale}
    return MODELS[name] | {"quantization_config": quantization}, stored


def gpt_oss() -> tuple[dict[str, Any], Tensors]:
    hf, stored, _ = gpt_oss_mxfp4()
    lists = ["model.layers.*.self_attn", "lm_head"]
    return hf | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": lists}}, stored


def num_kept(model: LoadedModel) -> int:
    return sum(spec.packing is not None and spec.packing.role == "values" for spec in model.structure.specs)


def assert_same(kept: LoadedModel, decoded: LoadedModel) -> None:
    assert_equal_models(widened(kept), decoded)
    ids = jnp.array(PROMPT)
    logits = [np.asarray(dense_logits(model.structure, model.leaves, ids)) for model in (kept, decoded)]
    np.testing.assert_array_equal(logits[0].view(np.int32), logits[1].view(np.int32))


@pytest.mark.parametrize(
    ("name", "kind"), [("llama", kind) for kind in SCALES] + [(name, "blocks") for name in MODELS if name != "llama"]
)
def test_fp8(name: str, kind: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, *fp8(name, kind))
    kept, decoded = load(directory, "stored"), load(directory, "none")
    assert num_kept(kept) == LAYERS[name] and num_kept(decoded) == 0
    assert_same(kept, decoded)
    planned = build(read_config(directory).replace(quantization="stored"), FLOAT32).num_bytes
    checked = inspect(directory, dtype=FLOAT32, config=read_config(directory).replace(quantization="stored")).num_bytes
    assert planned == checked == sum(leaf.nbytes for leaf in kept.leaves) < 0.6 * decoded.structure.num_bytes


def test_programs_and_pages_of_an_fp8_model_have_the_same_names_in_every_process(tmp_path: Path) -> None:
    """The order of a frozenset is another one in each process."""
    published = write_checkpoint(tmp_path / "published", *fp8("llama", "channel"))
    orbax.convert(load(published, "stored"), tmp_path / "converted")
    for directory in (published, tmp_path / "converted"):
        config = inspect(directory, dtype=FLOAT32, config=read_config(directory).replace(quantization="stored")).config
        assert config.stored_form is not None and len(config.stored_form.found or ()) > LAYERS["llama"]
        assert repr(sorted(config.stored_form.found or ())) in describe(config)


def test_mxfp4(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, *gpt_oss())
    kept, decoded = load(directory, "stored"), load(directory, "none")
    assert num_kept(kept) == 2 * kept.config.num_layers
    assert_same(kept, decoded)
    experts = sum(leaf.nbytes for spec, leaf in zip(kept.structure.specs, kept.leaves, strict=True) if spec.packing)
    stored = gpt_oss()[1]
    assert experts == sum(array.nbytes for name, array in stored.items() if name.endswith(("_blocks", "_scales")))
    planned = build(read_config(directory).replace(quantization="stored"), FLOAT32).num_bytes
    assert planned == sum(leaf.nbytes for leaf in kept.leaves)


def test_what_is_not_e4m3_in_rows_of_32_is_decoded(tmp_path: Path) -> None:
    hf, stored = fp8("llama", "channel")
    directory = write_checkpoint(tmp_path / "some", hf, stored | {DOWN: stored[DOWN].astype(ml_dtypes.float8_e5m2)})
    kept = load(directory, "stored")
    assert num_kept(kept) == LAYERS["llama"] - 1
    assert_same(kept, load(directory, "none"))
    hf, stored = fp8("llama", "channel", skipped="layers.1.mlp")
    assert num_kept(load(write_checkpoint(tmp_path / "layer", hf, stored), "stored")) == LAYERS["llama"] - 2
    small = hf | TINY_LLAMA | {"head_dim": 4}
    names = [name for name in stored if name.endswith("_scale")]
    rows = random_tensors(TINY_LLAMA)
    rows |= {name.removesuffix("_scale"): rows[name.removesuffix("_scale")].astype(E4M3) for name in names}
    rows |= {name: np.ones((), np.float32) for name in names}
    assert num_kept(load(write_checkpoint(tmp_path / "small", small, rows), "stored")) == 0


LISTS: list[tuple[dict[str, Any], str]] = [
    ({"modules_to_not_convert": ["model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"]}, "fp8"),
    ({"ignore": ["re:.*layers.1.mlp.(gate|up)_proj"], "format": "naive-quantized"}, "compressed-tensors"),
    ({"exclude_modules": ["lm_head", "*.1.mlp.[gu]*"], "quant_algo": "FP8"}, "beside"),
]


@pytest.mark.parametrize(("lists", "method"), LISTS)
def test_a_plan_reads_the_lists(lists: dict[str, Any], method: str, tmp_path: Path) -> None:
    hf, stored = fp8("llama", "tensor", skipped="1.mlp.")
    stored |= {name: tensor for name, tensor in fp8("llama", "tensor")[1].items() if name.startswith(DOWN)}
    directory = write_checkpoint(tmp_path, hf | {"quantization_config": {"quant_method": method} | lists}, stored)
    if method == "beside":
        (directory / "config.json").write_text(json.dumps(MODELS["llama"]))
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": lists}))
    planned = build(read_config(directory).replace(quantization="stored"), FLOAT32)
    kept = load(directory, "stored")
    assert [spec.name for spec in planned.specs] == [spec.name for spec in kept.structure.specs]
    assert num_kept(kept) == LAYERS["llama"] - 1


def test_a_mixture_is_refused_by_name(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, *fp8("llama", "channel", skipped="layers.1.self_attn.k_proj"))
    with pytest.raises(ModelLoadError, match=r"q_proj is quantized and model.layers.1.self_attn.k_proj is not"):
        load(directory, "stored")
    assert num_kept(load(directory, "none")) == 0


@pytest.mark.parametrize("quantization", ["stored", "none"])
@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_numbers_that_cannot_be_right_are_named(quantization: str, value: float, tmp_path: Path) -> None:
    hf, stored = fp8("llama", "channel")
    stored[f"{DOWN}_scale"][3] = value
    with pytest.raises(ModelLoadError, match=f"{DOWN}_scale: 1 of 64 scales are no positive numbers"):
        load(write_checkpoint(tmp_path / "scale", hf, stored), quantization)
    _, stored = fp8("llama", "channel")
    stored[DOWN][3, 4] = np.nan
    with pytest.raises(ModelLoadError, match=f"{DOWN}: not all numbers are finite"):
        load(write_checkpoint(tmp_path / "code", hf, stored), quantization)
    hf, stored = gpt_oss()
    stored["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    with pytest.raises(ModelLoadError, match=r"experts\.down_proj_scales: 1 of"):
        load(write_checkpoint(tmp_path / "mxfp4", hf, stored), quantization)


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_new_weights(name: str, tmp_path: Path) -> None:
    made = [gpt_oss(), gpt_oss()] if name == "gpt_oss" else [fp8(name, "blocks"), fp8(name, "blocks", seed=1)]
    if name == "gpt_oss":
        made[1] = made[1][0], {key: array[::-1].copy() for key, array in made[1][1].items()}
    old, new = (write_checkpoint(tmp_path / str(i), *each) for i, each in enumerate(made))
    served, expected = load(old, "stored"), [np.asarray(leaf) for leaf in load(new, "stored").leaves]
    for source in (
        lambda: source_of(made[1][1], served.structure),
        lambda: directory_source(new, served.structure, ModelFiles.open(old)),
        lambda: source_of(expected, served.structure),
    ):
        holder = Holder(load(old, "stored").leaves)
        DeviceWeights(holder, served.structure).replace(source())
        for got, wanted in zip(holder.leaves, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_new_weights_in_another_form_are_refused(tmp_path: Path) -> None:
    hf, stored = fp8("llama", "channel")
    served = load(write_checkpoint(tmp_path, hf, stored), "stored")
    wide = {name: array.astype(np.float32) for name, array in stored.items() if not name.endswith("_scale")}
    with pytest.raises(ModelLoadError, match=r"q_proj.weight is float32.*expected float8_e4m3fn"):
        source_of(wide, served.structure)


@pytest.mark.parametrize("name", ["deepseek", "gpt_oss"])
def test_random_weights(name: str, tmp_path: Path) -> None:
    hf, _ = gpt_oss() if name == "gpt_oss" else fp8(name, "blocks")
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = read_config(tmp_path).replace(quantization="stored")
    model = random_model(tmp_path, dtype=FLOAT32, config=config)
    kept = {spec.wide().name for spec in model.structure.specs if spec.packing}
    wide = widened(model)
    for spec, leaf in zip(wide.structure.specs, wide.leaves, strict=True):
        if spec.name in kept:
            assert float(jnp.std(leaf)) == pytest.approx(0.02, rel=0.2), spec.name


def test_a_converted_checkpoint_is_wide(tmp_path: Path) -> None:
    decoded = load(write_checkpoint(tmp_path / "source", *fp8("llama", "blocks")), "none")
    orbax.convert(decoded, tmp_path / "converted")
    found = load(tmp_path / "converted", "stored")
    assert num_kept(found) == 0
    assert_equal_models(found, decoded)
    assert inspect(tmp_path / "converted", dtype=FLOAT32, config=found.config).num_bytes == decoded.structure.num_bytes


def test_over_devices(tmp_path: Path) -> None:
    """The same leaves and tokens as on one device; groups that cannot be split evenly are refused by name."""
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.models.test_stored_floats", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(directory: Path) -> None:
    MODELS["shared"] = MODELS["deepseek"] | {"moe_intermediate_size": 96}  # 3 groups, which 2 devices cannot share
    for name, tensor in (("deepseek", 2), ("gpt_oss", 2), ("shared", 1)):
        source = write_checkpoint(directory / name, *(gpt_oss() if name == "gpt_oss" else fp8(name, "blocks")))
        one, several = load(source, "stored"), load(source, "stored", devices(tensor, 2))
        for spec, mine, theirs in zip(one.structure.specs, one.leaves, several.leaves, strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=spec.name)
        assert paged.greedy(several, PROMPT, 4, 8) == paged.greedy(one, PROMPT, 4, 8)
    with pytest.raises(ModelLoadError, match=r"down_proj.weight.scales: ffn of 3 cannot be split over 2 devices"):
        load(write_checkpoint(directory / "llama", *fp8("llama", "blocks")), "stored", devices(2, 1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
