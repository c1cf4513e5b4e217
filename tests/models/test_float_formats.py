"""NVFP4, MXFP4, MXFP8 and mixtures: logits of transformers with weights decoded by numpy, bytes, refusals."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.checkpoint import open_checkpoint
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.float_formats import float_bytes
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import CHUNK, PartReader, build, inspect, load_model
from jaxserve.models.checkpoint.orbax import convert
from jaxserve.models.checkpoint.published_size import published_size
from jaxserve.models.checkpoint.weight_sources import source_of
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import CASES, STATE_CASES, tensors_of
from tests.models.float_checkpoints import CHECKPOINTS, GOLDENS, MODELOPT_NVFP4, SIZES, hf_of, stored
from tests.models.test_quantization import assert_equal_models
from tests.models.test_quantize_at_load import load, widened

FLOAT32 = jnp.dtype("float32")
FOLDER = Path(__file__).parent / "goldens"
CONFIGS = Path(__file__).parents[3] / "shared" / "data" / "hf_configs"


def checkpoint(form: str, plain: dict[str, np.ndarray] | None = None) -> tuple[dict[str, Any], dict, dict]:
    """(config.json, stored tensors, decoded ones)."""
    name, quantization = CHECKPOINTS[form]
    tensors, wide, floats = stored(form, random_tensors(hf_of(name)) if plain is None else plain)
    tensors = {key: a.view(ml_dtypes.float8_e4m3fn) if key in floats else a for key, a in tensors.items()}
    return hf_of(name) | {"quantization_config": quantization}, tensors, wide


@pytest.mark.parametrize("form", GOLDENS)
def test_logits_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    golden = np.load(FOLDER / f"floats_{form}.npz")
    shapes = {name: tuple(shape) for name, shape in json.loads(str(golden["shapes"])).items()}
    hf, tensors, _ = checkpoint(form, tensors_of(CHECKPOINTS[form][0], shapes))
    kept = load(write_checkpoint(tmp_path, hf, tensors), "stored")
    logits = dense_logits(kept.structure, kept.leaves, jnp.asarray(golden["ids"]))
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-4, atol=1e-4)


def test_a_model_with_recurrent_layers_has_the_logits_of_its_decoded_weights(tmp_path: Path) -> None:
    hf = STATE_CASES["qwen3_5"] | SIZES
    tensors, wide, floats = stored("nvfp4", random_tensors(hf))
    tensors = {key: a.view(ml_dtypes.float8_e4m3fn) if key in floats else a for key, a in tensors.items()}
    kept = load(write_checkpoint(tmp_path / "stored", hf | {"quantization_config": MODELOPT_NVFP4}, tensors), "stored")
    plain = load(write_checkpoint(tmp_path / "plain", hf, wide), "none")
    assert {"linear_attn.out_proj.weight", "self_attn.o_proj.weight"} <= {
        spec.wide().name.split(".", 3)[3] for spec in kept.structure.specs if spec.packing is not None
    }
    ids = jnp.arange(12, dtype=jnp.int32)
    got, expected = (dense_logits(model.structure, model.leaves, ids) for model in (kept, plain))
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", CHECKPOINTS)
def test_weights_are_those_of_the_decoder_and_take_the_published_bytes(form: str, tmp_path: Path) -> None:
    hf, tensors, wide = checkpoint(form)
    directory = write_checkpoint(tmp_path / "stored", hf, tensors)
    plain = load(write_checkpoint(tmp_path / "plain", hf_of(CHECKPOINTS[form][0]), wide), "none")
    kept, decoded = load(directory, "stored"), load(directory, "none")
    for got in (widened(kept), decoded):
        for spec, a, b in zip(plain.structure.specs, got.leaves, plain.leaves, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-7, atol=0, err_msg=spec.name)
    packed = [spec for spec in kept.structure.specs if spec.packing is not None]
    kinds = {spec.packing.kind for spec in packed if spec.packing is not None}
    assert kinds == ({"nvfp4", "fp8"} if form == "mixture" else {form.split()[0]})
    held = sum(leaf.nbytes for spec, leaf in zip(kept.structure.specs, kept.leaves, strict=True) if spec.packing)
    of_values = ("weight_packed", "weight_scale", "weight_scale_2", "weight_global_scale")
    few = {key.rpartition(".")[0] for key in tensors if key.endswith("weight_scale")}
    published = sum(
        a.nbytes for key, a in tensors.items() if key.endswith(of_values) or key.removesuffix(".weight") in few
    )
    fused = 2 * 4 * sum(spec.shape[0] * spec.shape[1] for spec in kept.structure.specs if "qkv_proj" in spec.name)
    assert published - 64 <= held <= published + fused  # a scale for each row of q, k and v
    config = read_config(directory).replace(quantization="stored")
    assert build(config, FLOAT32).num_bytes == inspect(directory, dtype=FLOAT32, config=config).num_bytes
    size = published_size(build(config, FLOAT32))
    halves = sum(a.size * 2 for key, a in tensors.items() if key in wide and a.dtype == np.float32)
    assert published <= size.num_bytes - halves <= published + 3 * 4 * len(packed)


def test_a_converted_mixture_and_an_update_have_the_same_leaves(tmp_path: Path) -> None:
    for form in ("mixture", "mxfp4 compressed"):
        hf, tensors, _ = checkpoint(form)
        source = write_checkpoint(tmp_path / form / "published", hf, tensors)
        before = load(source, "stored")
        convert(before, tmp_path / form / "converted")
        after = load(tmp_path / form / "converted", "stored")
        assert_equal_models(after, before)
        assert after.config.stored_form == before.config.stored_form
        update = source_of(list(tensors.items()), before.structure)
        assert len(update.parameters) < len(before.structure.specs)
        wrong = {key: a.astype(np.float32) if key.endswith("down_proj.weight") else a for key, a in tensors.items()}
        wrong = {key: a for key, a in wrong.items() if "down_proj.weight_" not in key}
        if form == "mixture":
            with pytest.raises(ModelLoadError, match=r"of the wrong shape: .*down_proj.weight is"):
                source_of(list(wrong.items()), before.structure)


def test_damaged_scales_are_named(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight_scale"
    for form, value in (("nvfp4", np.nan), ("nvfp4", -1), ("mxfp8", 255), ("mxfp4", 255)):
        hf, tensors, _ = checkpoint(form)
        tensors[name][0, 1] = value
        with pytest.raises(ModelLoadError, match=f"{name}: 1 of .* scales are no positive numbers"):
            load(write_checkpoint(tmp_path, hf, tensors), "stored")
    hf, tensors, _ = checkpoint("nvfp4")
    tensors[f"{name}_2"][...] = 0
    with pytest.raises(ModelLoadError, match=f"{name}_2: 1 of 1 scales"):
        load(write_checkpoint(tmp_path, hf, tensors), "stored")
    tensors[f"{name}_2"][...] = 1
    tensors[name] = tensors[name].astype(np.float32)
    with pytest.raises(ModelLoadError, match=r"down_proj\.weight_scale"):
        load(write_checkpoint(tmp_path, hf, tensors), "stored")


@pytest.mark.parametrize(
    ("quantization", "problem"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, "'NVFP4_AWQ' is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "'group_size'"),
        ({"quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ' is not supported"),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "int4"}}}, "'dtype'"),
        ({"quant_method": "quark", "layer_quant_config": {"*": {}}}, "'layer_quant_config'"),
        (
            {
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "X"}},
            },
            "'X' is not supported",
        ),
    ],
)
def test_other_formats_are_refused_by_name(quantization: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        from_hf(hf_of("llama3") | {"quantization_config": quantization})


def test_a_file_that_is_cut_or_changed_while_it_is_read_is_named(tmp_path: Path) -> None:
    for form in ("nvfp4", "mxfp4"):
        hf, tensors, _ = checkpoint(form)
        config = from_hf(hf).replace(quantization="stored")
        for size in (0, 100):  # bytes that are cut off
            file = write_checkpoint(tmp_path, hf, tensors) / "model.safetensors"

            def change(_done: int, _total: int, size: int = size, file: Path = file) -> None:
                os.truncate(file, file.stat().st_size - size)

            with pytest.raises(
                ModelLoadError, match=r"model\.safetensors (became shorter|was changed) while it was read"
            ):
                load_model(tmp_path, dtype=FLOAT32, config=config, progress=change)


def test_parts_of_one_weight_in_two_forms_are_refused(tmp_path: Path) -> None:
    hf, tensors, wide = checkpoint("nvfp4")
    name = "model.layers.1.mlp.gate_proj"
    del tensors[f"{name}.weight_scale_2"]
    codes = np.zeros(wide[f"{name}.weight"].shape, ml_dtypes.float8_e4m3fn)
    tensors |= {f"{name}.weight": codes, f"{name}.weight_scale": np.ones((), np.float32)}
    with pytest.raises(ModelLoadError, match=r"gate_proj and .*up_proj differ in form"):
        load(write_checkpoint(tmp_path, hf, tensors), "stored")


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_experts_in_one_tensor_are_refused_by_name(form: str, tmp_path: Path) -> None:
    """No tool publishes such a tensor whose axes are in another order, and it would be read in the wrong one."""
    hf = STATE_CASES["qwen3_5_moe"] | {"quantization_config": {"quant_method": "modelopt", "quant_algo": form.upper()}}
    tensors = random_tensors(hf)
    name = next(name for name in tensors if name.endswith("experts.gate_up_proj"))
    dtype = np.uint8 if form == "nvfp4" else ml_dtypes.float8_e4m3fn
    tensors[name] = np.zeros(tensors[name].shape, dtype)
    tensors[f"{name}.weight_scale"] = np.ones((), ml_dtypes.float8_e4m3fn)
    with pytest.raises(ModelLoadError, match=rf"{name}: one tensor of all experts in {form} is not read"):
        load(write_checkpoint(tmp_path, hf, tensors), "stored")


@pytest.mark.parametrize("form", ["blocks", "experts"])
def test_fp8_experts_in_one_tensor(form: str, tmp_path: Path) -> None:
    """Blocks of 24 rows end within the experts of 64, whose scales are not shared."""
    quantization: dict[str, Any] = {"quant_method": "fp8", "weight_block_size": [24, 32]}
    quantization = quantization if form == "blocks" else {"quant_method": "modelopt", "quant_algo": "FP8"}
    hf = json.loads(json.dumps(CASES["step3p7"]))
    hf["text_config"] |= {"hidden_size": 64, "moe_intermediate_size": 64}
    tensors, rng = random_tensors(hf), np.random.default_rng(0)
    names = [name for name, array in tensors.items() if array.ndim == 3 and name.endswith("_proj.weight")]
    assert len(names) == 6
    wide, stored = dict(tensors), dict(tensors)
    for name in names:
        experts, rows, depth = tensors[name].shape
        shape = (experts, -(-rows // 24), -(-depth // 32)) if form == "blocks" else (experts, 1, 1)
        scales = rng.uniform(0.01, 0.1, shape).astype(np.float32)
        codes = (tensors[name] * 20).astype(ml_dtypes.float8_e4m3fn)
        each = scales.repeat(24, 1)[:, :rows].repeat(32, 2)[:, :, :depth] if form == "blocks" else scales
        wide[name] = codes.astype(np.float32) * each
        stored |= {name: codes, f"{name}_scale{'_inv' if form == 'blocks' else ''}": scales}
    directory = write_checkpoint(tmp_path / "stored", hf | {"quantization_config": quantization}, stored)
    kept = load(directory, "stored")
    plain = load(write_checkpoint(tmp_path / "plain", hf, wide), "none")
    for got in (widened(kept), load(directory, "none")):
        for spec, a, b in zip(plain.structure.specs, got.leaves, plain.leaves, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-7, atol=0, err_msg=spec.name)
    assert sum(spec.packing is not None for spec in kept.structure.specs) == 2 * 2 * 2  # gate and up, and down
    ids = jnp.arange(12, dtype=jnp.int32)
    logits = [dense_logits(model.structure, model.leaves, ids) for model in (kept, plain)]
    np.testing.assert_allclose(*logits, rtol=1e-4, atol=1e-4)


def test_a_part_takes_little_more_memory_than_its_result(tmp_path: Path) -> None:
    """Of each format, with a part of 16 million weights and more: at most 1.3 times the result at any time."""
    rng = np.random.default_rng(0)
    rows, depth = 8192, 4096
    for form, per, dtype in (("nvfp4", 2, np.uint8), ("mxfp4", 2, np.uint8), ("mxfp8", 1, ml_dtypes.float8_e4m3fn)):
        group = 16 if form == "nvfp4" else 32
        kind = ml_dtypes.float8_e4m3fn if form == "nvfp4" else np.uint8
        name = "model.layers.0.mlp.down_proj.weight"
        hf = hf_of("llama3") | {"hidden_size": rows, "intermediate_size": depth, "num_hidden_layers": 1}
        hf |= {"quantization_config": CHECKPOINTS[form][1]}
        tensors = {
            name: rng.integers(0, 100, (rows, depth // per), np.uint8).view(dtype),
            f"{name}_scale": np.full((rows, depth // group), 1, np.uint8).view(kind),
            f"{name}_scale_2": np.ones((), np.float32),
        }
        opened = open_checkpoint(write_checkpoint(tmp_path, hf, tensors))
        config = from_hf(hf).replace(quantization="stored")
        [spec] = [s for s in build(config, FLOAT32).specs if s.name.endswith("down_proj.weight.values")]
        reader = PartReader(opened, None, config.stored_form)
        assert spec.packing is not None
        tracemalloc.start()
        leaves = reader.read_codes(spec.wide(), (slice(None), slice(None)), spec.packing)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak - CHUNK <= 1.3 * sum(leaf.nbytes for leaf in leaves.values()), form  # a thread's buffer beside it


@pytest.mark.slow  # whole models have tens of thousands of tensors
def test_published_configurations_are_planned() -> None:
    if not CONFIGS.is_dir():
        pytest.skip("../shared/data/hf_configs is not there")
    served, refused = [], []
    for file in sorted(CONFIGS.glob("*_config.json")):
        few = any(word in file.name for word in ("NVFP4", "FP8", "gpt-oss"))
        if file.name.endswith("hf_quant_config.json") or not few:
            continue
        try:
            config = read_config(ModelFiles.of_config(file))
        except ModelLoadError as error:
            assert "not s" in str(error), error  # not served, not supported
            refused.append(file.name)
            continue
        structure = build(config.replace(quantization="stored"), jnp.dtype("bfloat16"))
        assert config.stored_form is not None, file.name
        size, form = published_size(structure).num_bytes, config.stored_form
        wide = {part.name: part for spec in structure.specs if spec.packing is None for part in spec.parts}
        for name, part in wide.items():  # input projections of recurrent layers in FP8 or NVFP4 take 16 bits in memory
            own = form.of(name.removesuffix(".weight")) if ".in_proj" in name else None
            if own is not None:
                size += 2 * math.prod(part.shape) - float_bytes(part, own.method, config.weight_block)
        more = 1.005 if "NVFP4" in file.name else 1.04  # FP8's scale of a block is held for each of its rows
        assert size <= structure.num_bytes <= more * size, (file.name, size, structure.num_bytes)
        served.append((file.name.removesuffix("_config.json"), structure.num_bytes / 2**30, form.description))
    print(*served, sep="\n")
    print("refused:", *refused, sep="\n")
    names = {name for name, *_ in served}
    assert names >= {
        f"nvidia--{name}" for name in ("DeepSeek-V3.1-NVFP4", "Qwen3-235B-A22B-NVFP4", "Qwen3.6-27B-NVFP4")
    }
    assert "nvidia--Llama-3.1-70B-Instruct-FP8" in names
