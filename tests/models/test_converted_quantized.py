"""Converted checkpoints in few bits: the same leaves back, in the form that they were written with and no other."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.cli.main import main
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.chosen_form import choose_quantization
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, inspect, load_model
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.test_fbgemm import FBGEMM, fbgemm
from tests.models.test_quantize_at_load import LLAMA, load
from tests.models.test_stored_floats import FLOAT32, MODELS, fp8, gpt_oss
from tests.models.test_stored_form import FORMS, hf_of, write
from tests.models.test_stored_form import MODELS as INTEGERS


def published(directory: Path, form: str) -> Path:
    match form:
        case "gptq" | "awq" | "gptq act-order":
            stored, _ = write(random_tensors(INTEGERS["llama"]), FORMS[form])
            return write_checkpoint(directory, hf_of("llama", FORMS[form]), stored)
        case "fbgemm":
            return write_checkpoint(directory, MODELS["llama"] | {"quantization_config": FBGEMM}, fbgemm()[0])
        case "blocks":
            return write_checkpoint(directory, *fp8("experts", "blocks"))
        case "mxfp4":
            return write_checkpoint(directory, *gpt_oss())
    return write_checkpoint(directory, LLAMA, random_tensors(LLAMA))


def assert_equal(got: LoadedModel, expected: LoadedModel) -> None:
    assert got.structure.specs == expected.structure.specs
    for spec, mine, theirs in zip(got.structure.specs, got.leaves, expected.leaves, strict=True):
        assert mine.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs), err_msg=spec.name)


@pytest.mark.parametrize("form", ["int8", "fp8", "int4", "nvfp4", "gptq act-order", "awq", "fbgemm", "blocks", "mxfp4"])
def test_the_same_leaves(form: str, tmp_path: Path) -> None:
    source, target = published(tmp_path / "source", form), tmp_path / "target"
    kind = form if form in ("int8", "fp8", "int4", "nvfp4") else "stored"
    before = load(source, kind)
    orbax.convert(before, target)
    assert choose_quantization("auto", read_config(target), ModelFiles.open(target)) == kind
    after = load(target, kind)
    assert_equal(after, before)
    assert_equal(load_model(target, dtype=FLOAT32), before)  # without a word about the form
    planned = inspect(target, dtype=FLOAT32, config=read_config(target).replace(quantization=kind))
    assert planned.num_bytes == sum(leaf.nbytes for leaf in after.leaves)


def test_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = published(tmp_path / "source", "plain"), tmp_path / "target"
    command = ["convert", str(source), str(target), "--device", "cpu", "--dtype", "float32"]
    assert main([*command, "--quantization", "int8"]) == 0
    assert "as int8 weights and float32" in capsys.readouterr().out
    assert_equal(load(target, "int8"), load(source, "int8"))
    assert main(["plan", str(target), "--mesh", "1"]) == 0
    assert "as int8 and bfloat16" in capsys.readouterr().out
    assert main(["plan", str(target), "--quantization", "int4"]) == 2
    assert "is a converted checkpoint with quantized weights" in capsys.readouterr().err


def test_another_form_is_refused(tmp_path: Path) -> None:
    source, target = published(tmp_path / "source", "plain"), tmp_path / "target"
    orbax.convert(load(source, "int8"), target)
    for asked in ("none", "int4"):
        with pytest.raises(ConfigError, match=f"model.quantization: {asked} does not change"):
            choose_quantization(asked, read_config(target), ModelFiles.open(target))
    with pytest.raises(ModelLoadError, match="which is not quantized at load"):
        load(target, "int4")
    manifest = target / "jaxserve.json"
    whole = json.loads(manifest.read_text())
    for wrong in (
        {"quantization": "stored"},
        {"quantization": "int3"},
        {"quantized_modules": "x"},
        {"quantization": "fp8"},
    ):
        manifest.write_text(json.dumps(whole | wrong))
        with pytest.raises(ModelLoadError, match=r"does not describe|cannot be read|are not this config's"):
            load_model(target, dtype=FLOAT32)


def test_a_manifest_of_the_last_version(tmp_path: Path) -> None:
    """Format 3 had wide weights only."""
    source, target = published(tmp_path / "source", "plain"), tmp_path / "target"
    before = load(source, "none")
    orbax.convert(before, target)
    manifest = target / "jaxserve.json"
    whole = json.loads(manifest.read_text()) | {"format": 3}
    manifest.write_text(json.dumps({key: whole[key] for key in whole if not key.startswith("quanti")}))
    assert_equal(load_model(target, dtype=jnp.dtype("float32")), before)
