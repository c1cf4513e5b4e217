"""Converted checkpoints: the same weights back, in other dtypes, and what is refused. Other meshes: test_sharding."""

import gc
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models import orbax
from jaxserve.models.loader import load_model
from jaxserve.models.structure import LoadedModel
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint

FLOAT32, BFLOAT16 = jnp.dtype("float32"), jnp.dtype("bfloat16")


@pytest.fixture
def source(tmp_path: Path) -> LoadedModel:
    directory = write_checkpoint(tmp_path / "source", TINY_LLAMA, random_tensors(TINY_LLAMA))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "modeling.py").write_text("raise SystemExit")
    return load_model(directory, dtype=FLOAT32)


def test_round_trip(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "arrays",
        "config.json",
        "jaxserve.json",
        "tokenizer.json",
    ]
    seen: list[tuple[int, int]] = []
    back = load_model(tmp_path / "out", dtype=FLOAT32, progress=lambda done, total: seen.append((done, total)))
    assert back.structure == source.structure
    assert all(np.array_equal(a, b) for a, b in zip(back.leaves, source.leaves, strict=True))
    assert seen[-1] == (source.structure.num_bytes,) * 2


def test_another_dtype(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    back = load_model(tmp_path / "out", dtype=BFLOAT16, load_format="orbax")
    for a, b in zip(back.leaves, source.leaves, strict=True):
        assert a.dtype == BFLOAT16 and np.array_equal(a, b.astype(BFLOAT16))


def test_a_directory_in_use_is_not_written_to(source: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match="is not empty"):
        orbax.convert(source, source.directory)


def test_another_config_is_refused(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": 40}))
    with pytest.raises(ModelLoadError, match=r"2 parameters are not this config's: lm_head\.weight, model\.embed"):
        load_model(tmp_path / "out", dtype=FLOAT32)


def test_another_format_is_refused(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    manifest = tmp_path / "out" / "jaxserve.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(ModelLoadError, match="has format 99"):
        load_model(tmp_path / "out", dtype=FLOAT32)


# Orbax leaves the reads of the other arrays behind when one fails: they complain when they are collected
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("damage", ["arrays", "data", "manifest", "nothing converted"])
def test_damage_is_named(damage: str, source: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    orbax.convert(source, out)
    match damage:
        case "arrays":
            shutil.rmtree(out / "arrays")
        case "data":
            largest = max((out / "arrays").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else 0)
            largest.write_bytes(largest.read_bytes()[:100])
        case "manifest":
            (out / "jaxserve.json").write_text("{")
        case "nothing converted":
            out = source.directory
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(out, dtype=FLOAT32, load_format="orbax")
    gc.collect()
