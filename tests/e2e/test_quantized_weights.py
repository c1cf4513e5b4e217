"""Weights of few bits on a CPU: the tokens and log-probabilities of the same numbers in float32, bit by bit."""

import json
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import Engine, SamplingParams
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.quantization import by_parameter
from jaxserve.ops.quantized import Quantized
from tests.conftest import FEW_PAGES
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import ENCODERS
from tests.quick import quick_programs

PROMPTS = ["Once upon a time", "A dog and a cat went to the sea. They", "a"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=3),
    SamplingParams(temperature=0.9, seed=7, max_tokens=24, logprobs=3),
]


def answers(engine: Engine) -> list[Any]:
    rows = [
        row for params in PARAMS for row in (*engine.generate(PROMPTS[0], params), *engine.generate(PROMPTS, params))
    ]
    return [(one.token_ids, one.logprobs) for [one] in rows]


# The kernels of each kind are held to the wide numbers by tests/ops, and an engine by the checkpoint below. A kind
# takes 85 s: the bits are equal only in programs that XLA optimises as for a user.
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_tokens_are_those_of_the_wide_numbers(kind: str, compile_cache: str) -> None:
    with Engine(compile_cache=compile_cache, quantization=kind, **FEW_PAGES) as engine:
        found, specs, leaves = answers(engine), engine.runner.structure.specs, iter(engine.runner.leaves)
        wide = []
        for parts in by_parameter(specs):
            held = {spec.packing and spec.packing.role: next(leaves) for spec in parts}
            plain = held[None] if None in held else Quantized(held["values"], held["scales"])
            wide.append(plain.astype(jnp.float32))
    with Engine(compile_cache=compile_cache, dtype="float32", **FEW_PAGES) as engine:
        engine.update_weights(wide)
        assert answers(engine) == found


def fp8_demo(directory: Path) -> Path:
    """The demo model as a checkpoint of FP8 with a scale for each row."""
    source = Path(str(files("jaxserve") / "assets" / "demo"))
    shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {name: array for file in source.glob("*.safetensors") for name, array in load_file(file).items()}
    for name, weight in list(tensors.items()):
        if name.endswith("_proj.weight"):
            scale = (np.abs(weight.astype(np.float32)).max(axis=1, keepdims=True) / 448).astype(np.float32)
            tensors |= {name: (weight / scale).astype(ml_dtypes.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, directory / "model.safetensors")
    hf = json.loads((source / "config.json").read_text())
    hf["quantization_config"] = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (directory / "config.json").write_text(json.dumps(hf))
    return directory


def test_tokens_of_an_fp8_checkpoint_are_those_of_its_decoded_numbers(tmp_path: Path, compile_cache: str) -> None:
    model = str(fp8_demo(tmp_path / "fp8"))
    found, sizes = [], []
    for quantization in ("auto", "fp8", "none"):
        options = {"dtype": "float32", "quantization": quantization, **FEW_PAGES}
        with quick_programs(), Engine(model, compile_cache=compile_cache, **options) as engine:
            found.append(answers(engine))
            sizes.append(engine.runner.structure.num_bytes)
    assert found[0] == found[1] == found[2]
    assert sizes[0] == sizes[1] < 0.5 * sizes[2]


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    hf = ENCODERS["bert"]
    with pytest.raises(ConfigError, match="an encoder's weights cannot be quantized"):
        Engine(str(write_checkpoint(tmp_path, hf, random_tensors(hf))), quantization="int8")
