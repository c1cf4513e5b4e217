"""FP8 and MXFP4 checkpoints: decoded values against transformers' and plain loops, and scales that cannot be right."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.checkpoint import open_checkpoint
from jaxserve.models.checkpoint.float_formats import float_form
from jaxserve.models.checkpoint.loader import LoadedModel, PartReader, load_model
from jaxserve.models.checkpoint.weight_sources import held_checkpoint
from jaxserve.models.weights import Packing, ParamSpec, Part
from jaxserve.ops.quantized import Quantized
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.models.float_checkpoints import E2M1

FLOAT32 = jnp.dtype("float32")
E4M3 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]
PHI = CASES["phi3"] | {"head_dim": 8}
BLOCK_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 12]}}
TENSOR_FP8 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}


def load(directory: Path, hf: dict[str, Any], tensors: Tensors) -> LoadedModel:
    return load_model(write_checkpoint(directory, hf, tensors), dtype=FLOAT32)


def assert_equal_models(got: LoadedModel, expected: LoadedModel) -> None:
    for spec, a, b in zip(got.structure.specs, got.leaves, expected.leaves, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=spec.name)


def quantize_blocks(tensors: Tensors) -> tuple[Tensors, Tensors]:
    """(FP8 checkpoint with a scale for 16 x 12 numbers, the same decoded number by number)."""
    stored, plain = dict(tensors), dict(tensors)
    for name, weight in tensors.items():
        if "_proj.weight" not in name:
            continue
        rows, columns = weight.shape
        scale = np.random.default_rng(1).uniform(0.01, 0.1, (-(-rows // 16), -(-columns // 12))).astype(np.float32)
        low = (weight * 20).astype(E4M3)
        plain[name] = np.array(
            [[np.float32(low[r, c]) * scale[r // 16, c // 12] for c in range(columns)] for r in range(rows)], np.float32
        )
        stored |= {name: low, f"{name}_scale_inv": scale}
    return stored, plain


@pytest.mark.parametrize("hf", [TINY_LLAMA, PHI, CASES["qwen3_moe"]], ids=["llama", "packed", "experts"])
def test_block_scales(hf: dict[str, Any], tmp_path: Path) -> None:
    stored, plain = quantize_blocks(random_tensors(hf))
    assert_equal_models(load(tmp_path / "fp8", hf | BLOCK_FP8, stored), load(tmp_path / "plain", hf, plain))


@pytest.mark.parametrize("shape", [(), (1,), (-1,), (-1, 1)], ids=["scalar", "one", "rows", "column"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensor_and_channel_scales(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    stored = random_tensors(TINY_LLAMA)
    plain = dict(stored)
    for name in [name for name in stored if "_proj.weight" in name]:
        rows = stored[name].shape[0] if -1 in shape else 1
        scale = np.random.default_rng(2).uniform(0.01, 0.1, rows).astype(jnp.dtype(dtype))
        low = (stored[name] * 20).astype(E4M3)
        plain[name] = low.astype(np.float32) * scale.astype(np.float32)[:, None]
        stored |= {name: low, f"{name}_scale": scale.reshape(shape)}
        stored[name.replace("weight", "input_scale")] = np.ones((), np.float32)  # of activations: left aside
    got = load(tmp_path / "fp8", TINY_LLAMA | TENSOR_FP8, stored)
    assert_equal_models(got, load(tmp_path / "plain", TINY_LLAMA, plain))


def test_a_region_decodes_what_the_whole_holds(tmp_path: Path) -> None:
    stored, _ = quantize_blocks(random_tensors(CASES["qwen3_moe"]))
    model = load(tmp_path, CASES["qwen3_moe"] | BLOCK_FP8, stored)
    reader = PartReader(open_checkpoint(tmp_path), model.config.weight_block)
    rng = np.random.default_rng(0)
    for spec, whole in zip(model.structure.specs, model.leaves, strict=True):
        bounds = [sorted(rng.integers(0, n + 1, 2)) for n in spec.shape]
        index = tuple(slice(int(a), int(b)) for a, b in bounds)
        region = reader.read(spec, index)
        assert np.array_equal(region, np.asarray(whole)[index]), spec.name


def test_mxfp4_as_transformers_decodes_it() -> None:
    golden = np.load(Path(__file__).parent / "goldens" / "mxfp4_decoded.npz")
    shape = golden["decoded"].shape
    part = Part("w", shape, shape, (0, 0, 0), mxfp4=True)
    spec = ParamSpec("w", shape, FLOAT32, (None, None, None), "normal", (part,))
    held = held_checkpoint([("w_blocks", golden["blocks"]), ("w_scales", golden["scales"])])
    reader = PartReader(held, None, float_form("gpt-oss"))
    whole = (slice(0, shape[0]), slice(0, shape[1]), slice(0, shape[2]))
    assert np.array_equal(reader.read(spec, whole), golden["decoded"])
    region = (slice(1, 2), slice(2, 5), slice(7, 70))
    assert np.array_equal(reader.read(spec, region), golden["decoded"][region])
    kept = reader.read_codes(spec, whole, Packing("mxfp4", 32, "values", shape, stored=True))
    weight = Quantized(**{role: jnp.asarray(a) for role, a in kept.items()})
    assert np.array_equal(weight.astype(jnp.float32), golden["decoded"])


def gpt_oss_mxfp4() -> tuple[dict[str, Any], Tensors, Tensors]:
    """(config, MXFP4 checkpoint, the same experts as the bfloat16 form holds them)."""
    hf = CASES["gpt_oss"] | {"intermediate_size": 64}
    plain = random_tensors(hf)
    stored, rng = dict(plain), np.random.default_rng(3)
    for name in [name for name in plain if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = plain[name].shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16), np.uint8)
        scales = rng.integers(120, 127, (experts, outputs, inputs // 32), np.uint8)
        values = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
        wide = values * np.exp2(scales.astype(np.float32) - 127)[..., None]
        plain[name] = wide.reshape(experts, outputs, inputs).transpose(0, 2, 1).copy()
        del stored[name]
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return hf, stored, plain


def test_gpt_oss_from_mxfp4_equals_its_plain_form(tmp_path: Path) -> None:
    hf, stored, plain = gpt_oss_mxfp4()
    quantized = hf | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    assert_equal_models(load(tmp_path / "mxfp4", quantized, stored), load(tmp_path / "plain", hf, plain))


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_a_scale_that_is_no_positive_number_is_named(value: float, tmp_path: Path) -> None:
    stored, _ = quantize_blocks(random_tensors(TINY_LLAMA))
    name = "model.layers.1.mlp.down_proj.weight_scale_inv"
    stored[name][0, 1] = value
    with pytest.raises(ModelLoadError, match=f"{name}: 1 of 2 scales are no positive numbers"):
        load(tmp_path, TINY_LLAMA | BLOCK_FP8, stored)


def test_an_mxfp4_scale_of_nan_is_named(tmp_path: Path) -> None:
    hf, stored, _ = gpt_oss_mxfp4()
    stored["model.layers.0.mlp.experts.down_proj_scales"][0, 0, 0] = 255
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.experts\.down_proj_scales: 1 of"):
        load(tmp_path, hf | {"quantization_config": {"quant_method": "mxfp4"}}, stored)


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    stored, _ = quantize_blocks(random_tensors(TINY_LLAMA))
    del stored["model.layers.0.mlp.down_proj.weight_scale_inv"]
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.0\.mlp\.down_proj\.weight_scale_inv"):
        load(tmp_path, TINY_LLAMA | BLOCK_FP8, stored)


@pytest.mark.parametrize(
    "quantization", [{"quant_method": "bitsandbytes"}, {"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}]
)
def test_other_quantizations_are_refused_by_name(quantization: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"bitsandbytes|W4A8_AWQ"):
        load(tmp_path, TINY_LLAMA | {"quantization_config": quantization}, random_tensors(TINY_LLAMA))
