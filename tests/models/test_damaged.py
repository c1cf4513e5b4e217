"""Damaged checkpoints as an operator meets them: the engine does not start, and one line says why, within 10 s."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import Engine
from jaxserve.cli.main import describe
from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.loader import load_model
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_sharded
from tests.models.test_loader import rewrite_header, shifted
from tests.models.test_quantization import BLOCK_FP8, quantize_blocks


def truncated(directory: Path) -> None:
    shard = directory / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def wrong_offsets(directory: Path) -> None:
    for shard in directory.glob("*.safetensors"):
        if b"model.norm.weight" in shard.read_bytes():
            rewrite_header(shard, shifted)


def without_a_tensor(directory: Path) -> None:
    """The index names it still."""
    for shard in directory.glob("*.safetensors"):
        tensors = load_file(shard)
        tensors.pop("model.norm.weight", None)
        save_file(tensors, shard)


def nan_scale(directory: Path) -> None:
    stored, _ = quantize_blocks(random_tensors(TINY_LLAMA))
    stored["model.layers.0.mlp.up_proj.weight_scale_inv"][0, 0] = np.nan
    for path in directory.iterdir():
        path.unlink()
    write_checkpoint(directory, TINY_LLAMA | BLOCK_FP8, stored)


def own_code(directory: Path) -> None:
    hf = TINY_LLAMA | {"architectures": ["OwnForCausalLM"], "auto_map": {"AutoModelForCausalLM": "own.OwnForCausalLM"}}
    (directory / "config.json").write_text(json.dumps(hf))
    (directory / "own.py").write_text(f"open({str(directory / 'ran')!r}, 'w')")


def cpu_seconds() -> float:
    """Of this process and of its children that have ended: other work on the machine does not count."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (truncated, "model-00002-of-00002.safetensors is truncated"),
        (wrong_offsets, "wrong offsets"),
        (without_a_tensor, "names tensors that no file has: model.norm.weight"),
        (nan_scale, "model.layers.0.mlp.up_proj.weight_scale_inv: 1 of"),
        (own_code, "the code that its directory brings is never run"),
    ],
)
def test_one_line_within_ten_seconds(damage: Callable[[Path], None], cause: str, tmp_path: Path) -> None:
    damage(write_sharded(tmp_path, TINY_LLAMA, random_tensors(TINY_LLAMA)))
    start = cpu_seconds()
    with pytest.raises(ModelLoadError) as caught:
        Engine(str(tmp_path), compile_cache=None)
    line = describe(caught.value)
    assert cpu_seconds() - start < 10
    assert cause in line and "\n" not in line and " -> " in line  # and what to do
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_changed_while_it_is_read_is_named(tmp_path: Path) -> None:
    """In place, with as many bytes, and by another file of the same name."""
    tensors = random_tensors(TINY_LLAMA)
    for how in ("in place", "replaced"):
        file = write_checkpoint(tmp_path, TINY_LLAMA, tensors) / "model.safetensors"

        def change(done: int, _: int, how: str = how, file: Path = file) -> None:
            if how == "replaced" and done:
                other = file.with_name("other")
                other.write_bytes(file.read_bytes())
                other.replace(file)
            else:
                os.utime(file, ns=(1, 1))

        with pytest.raises(ModelLoadError, match=r"model\.safetensors was changed while it was read"):
            load_model(tmp_path, dtype=jnp.dtype("float32"), progress=change)
