"""Quantizing at load: which weights, their bytes, and the tokens of the same numbers held wide."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.chosen_form import choose_head
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, build, load_model, random_model
from jaxserve.models.checkpoint.quantization import by_parameter, encode
from jaxserve.models.sharding import param_sharding
from jaxserve.ops.quantized import Quantized
from tests.models import paged
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.quick import QUICK_FLAGS

FLOAT32 = jnp.dtype("float32")
LLAMA = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
MODELS = {
    "llama": LLAMA,
    "packed": CASES["phi3"] | {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32},
    "qwen3_moe": CASES["qwen3_moe"] | {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def load(directory: Path, kind: Any, mesh: Any = None) -> LoadedModel:
    config = read_config(directory).replace(quantization=kind)
    return load_model(directory, dtype=FLOAT32, config=config, mesh=mesh)


def widened(model: LoadedModel) -> LoadedModel:
    """The same numbers without quantization."""
    structure = build(model.config.replace(quantization="none"), FLOAT32)
    leaves, rest = [], iter(model.leaves)
    for specs in by_parameter(model.structure.specs):
        parts: dict[Any, Any] = {spec.packing and spec.packing.role: next(rest) for spec in specs}
        leaves.append(parts[None] if None in parts else Quantized(**parts).astype(FLOAT32))
    return dataclasses.replace(model, structure=structure, leaves=tuple(leaves))


ERRORS = {"int8": 0.01, "fp8": 0.07, "int4": 0.15, "mxfp4": 0.3, "nvfp4": 0.2}
# each model and each kind once
USUAL = (("llama", "int8"), ("packed", "fp8"), ("qwen3_moe", "int4"), ("packed", "nvfp4"), ("qwen3_moe", "mxfp4"))
PAIRS = [
    pytest.param(name, kind, marks=() if (name, kind) in USUAL else pytest.mark.slow)
    for name in MODELS
    for kind in ERRORS
]


@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_weights_and_tokens(name: str, kind: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, MODELS[name], random_tensors(MODELS[name]))
    got, plain = load(directory, kind), load(directory, "none")
    same = widened(got)
    quantized = {spec.wide().name for spec in got.structure.specs if spec.packing}
    assert got.structure.num_parameters == plain.structure.num_parameters
    assert got.structure.num_bytes == sum(leaf.nbytes for leaf in got.leaves) < plain.structure.num_bytes
    for spec, mine, theirs in zip(plain.structure.specs, same.leaves, plain.leaves, strict=True):
        off = float(jnp.linalg.norm(mine - theirs) / jnp.linalg.norm(theirs))
        assert (0 < off < ERRORS[kind]) if spec.name in quantized else off == 0, spec.name
        wide = any(word in spec.name for word in ("norm", "embed", "lm_head", "mlp.gate.", "bias"))
        assert (spec.name in quantized) != wide, spec.name
    assert paged.greedy(got, PROMPT, 12, 8) == paged.greedy(same, PROMPT, 12, 8)


def test_scales_of_fp8_have_the_least_squared_error() -> None:
    """Of sixteen scales in an octave, tried here one by one with the true conversion."""
    wide = np.random.default_rng(3).normal(0, 0.02, (40, 64)).astype(np.float32)
    wide[3, :32] = 0
    values, scales = encode(wide, "fp8", 32)
    groups = wide.reshape(40, 2, 32)
    got = ((values.astype(np.float32).reshape(groups.shape) * scales[..., None] - groups) ** 2).sum(-1)
    least = np.maximum(np.abs(groups).max(-1) / 448, 1e-30)
    errors = []
    for factor in 2.0 ** (np.arange(16) / 16):
        scale = (least * factor).astype(np.float32)[..., None]
        numbers = np.clip(groups / scale, -448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
        errors.append(((numbers - groups) ** 2).sum(-1))
    np.testing.assert_allclose(got, np.min(errors, axis=0), rtol=1e-3, atol=1e-12)
    assert got.sum() < 0.7 * errors[0].sum()


def test_rows_of_other_lengths_stay_wide(tmp_path: Path) -> None:
    """Of 16 and 24 numbers; MLA multiplies its projections in other orders."""
    for name in ("llama", "deepseek_v3"):
        hf = TINY_LLAMA if name == "llama" else CASES[name]
        found = load(write_checkpoint(tmp_path / name, hf, random_tensors(hf)), "int8").structure.specs
        packed = [spec.wide() for spec in found if spec.packing]
        assert bool(packed) == (name == "deepseek_v3")
        assert not any(spec.shape[-1] % 32 or "kv_b" in spec.name for spec in packed)


def test_the_head_on_request(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", LLAMA, random_tensors(LLAMA))
    config = read_config(directory).replace(quantization="int8", quantized_head=True)
    got, without = load_model(directory, dtype=FLOAT32, config=config), load(directory, "int8")
    names = [{spec.wide().name for spec in each.structure.specs if spec.packing} for each in (got, without)]
    assert names[0] - names[1] == {"lm_head.weight"}
    assert paged.greedy(got, PROMPT, 12, 8) == paged.greedy(widened(got), PROMPT, 12, 8)
    orbax.convert(got, tmp_path / "converted")
    again = load_model(tmp_path / "converted", dtype=FLOAT32)
    assert again.structure.specs == got.structure.specs
    tied = write_checkpoint(tmp_path / "tied", LLAMA | {"tie_word_embeddings": True}, {})
    with pytest.raises(ModelLoadError, match="no output head of its own"):
        build(read_config(tied).replace(quantization="int8", quantized_head=True), FLOAT32)


def test_a_head_whose_groups_cannot_be_split(tmp_path: Path) -> None:
    """The vocabulary of 97 cannot be split, and neither can rows of two groups over four devices."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"vocab_size": 97}))
    config = read_config(tmp_path).replace(quantization="int8", quantized_head=True)
    scales = next(spec for spec in build(config, FLOAT32).specs if spec.name == "lm_head.weight.scales")
    with pytest.raises(ModelLoadError, match="embed of 2 cannot be split over 4 devices") as refusal:
        param_sharding(scales, AbstractMesh((4,), ("tensor",)))
    assert "model.quantize_head: false" in str(refusal.value.fix)
    assert param_sharding(scales, AbstractMesh((2,), ("tensor",))).spec == PartitionSpec(None, "tensor")


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_rows_of_one_group_are_not_split(kind: str, tmp_path: Path) -> None:
    """Each device would quantize its part of a group by a scale of its own."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"intermediate_size": 32}))
    specs = build(read_config(tmp_path).replace(quantization=kind), FLOAT32).specs
    scales = next(spec for spec in specs if spec.name.endswith("down_proj.weight.scales"))
    with pytest.raises(ModelLoadError, match="ffn of 1 cannot be split over 2 devices"):
        param_sharding(scales, AbstractMesh((2,), ("tensor",)))


def test_the_head_where_it_is_not_quantized_at_load(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "model", LLAMA, random_tensors(LLAMA))
    assert choose_head(True, "int4", ModelFiles.open(directory))
    assert not choose_head(False, "int4", ModelFiles.open(directory))
    for held in ("none", "stored"):
        with pytest.raises(ConfigError, match=r"model.quantize_head is for weights that are quantized at load"):
            choose_head(True, held, ModelFiles.open(directory))
    orbax.convert(load(directory, "int8"), tmp_path / "converted")
    with pytest.raises(ConfigError, match="whose head is not quantized"):
        choose_head(True, "int8", ModelFiles.open(tmp_path / "converted"))


def test_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_checkpoint(tmp_path, LLAMA, random_tensors(LLAMA))
    whole = load(directory, "int4")
    monkeypatch.setattr("jaxserve.models.checkpoint.quantization.ENCODED_BYTES", 4 * 1000)
    for one, other in zip(whole.leaves, load(directory, "int4").leaves, strict=True):
        np.testing.assert_array_equal(one, other)


def test_random_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    config = read_config(tmp_path).replace(quantization="int8")
    model = random_model(tmp_path, dtype=FLOAT32, config=config)
    plain = random_model(tmp_path, dtype=FLOAT32)
    for one, other in zip(widened(model).leaves, plain.leaves, strict=True):
        np.testing.assert_allclose(one, other, atol=4e-4)


def test_a_converted_checkpoint_is_refused(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "source", LLAMA, random_tensors(LLAMA))
    orbax.convert(load(directory, "none"), tmp_path / "converted")
    with pytest.raises(ModelLoadError, match="converted checkpoint, which is not quantized"):
        load(tmp_path / "converted", "int8")


@pytest.mark.slow  # 45 s; test_stored_floats.py shards the same forms as published
def test_over_devices(tmp_path: Path) -> None:
    """The same leaves and tokens as on one device; groups that cannot be split evenly are refused by name."""
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.models.test_quantize_at_load", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def devices(tensor: int, expert: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: tensor * expert]).reshape(1, tensor, expert), ("data", "tensor", "expert"))


def main(directory: Path) -> None:
    """Compare one device and four. Groups of 128 in rows of 384 are 3, which 2 devices cannot share."""
    for name, kind in (("llama", "int4"), ("qwen3_moe", "int4"), ("qwen3_moe", "nvfp4")):
        mesh = devices(2, 1 if name == "llama" else 2)
        hf = MODELS[name] if name == "llama" else MODELS[name] | {"moe_intermediate_size": 64, "intermediate_size": 128}
        source = write_checkpoint(directory / name, hf, random_tensors(hf))
        one, several = load(source, kind), load(source, kind, mesh)
        for spec, mine, theirs in zip(one.structure.specs, one.leaves, several.leaves, strict=True):
            np.testing.assert_array_equal(mine, theirs, err_msg=spec.name)
        assert paged.greedy(several, PROMPT, 8, 8) == paged.greedy(one, PROMPT, 8, 8)
    with pytest.raises(ModelLoadError, match=r"down_proj.weight.scales: ffn of 3 cannot be split over 2 devices"):
        load(directory / "llama", "int8", devices(2, 1))
    odd = LLAMA | {"vocab_size": 97}
    config = read_config(write_checkpoint(directory / "odd", odd, random_tensors(odd)))
    config = config.replace(quantization="int4", quantized_head=True)
    one, several = (
        load_model(directory / "odd", dtype=FLOAT32, config=config, mesh=mesh) for mesh in (None, devices(2, 1))
    )
    assert paged.greedy(several, PROMPT, 8, 8) == paged.greedy(one, PROMPT, 8, 8)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
