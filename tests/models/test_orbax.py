"""Converted checkpoints: the same weights back, in other dtypes, and what is refused. Other meshes: test_sharding."""

import itertools
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.loader import inspect, load_model
from jaxserve.models.checkpoint.orbax_reader import open_array
from jaxserve.models.checkpoint.structure import LoadedModel
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
    back = load_model(tmp_path / "out", dtype=BFLOAT16)
    for a, b in zip(back.leaves, source.leaves, strict=True):
        assert a.dtype == BFLOAT16 and np.array_equal(a, b.astype(BFLOAT16))


def test_a_directory_in_use_is_not_written_to(source: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match="is not empty"):
        orbax.convert(source, source.directory)


def test_an_interrupted_conversion_is_replaced(
    source: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It left a directory that the next call refused, half of a checkpoint in it."""

    def interrupted(*_: object) -> None:
        with pytest.raises(ModelLoadError, match="another process converts"):
            orbax.convert(source, target)
        raise KeyboardInterrupt

    target = tmp_path / "out"
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(orbax, "_checksums", interrupted)
        orbax.convert(source, target)
    assert [path.name for path in target.iterdir()] == [orbax.INCOMPLETE]
    (target / "arrays.orbax-checkpoint-tmp").mkdir()  # by a thread that went on, as after a kill
    (target / "old.json").write_text("{}")
    orbax.convert(source, target)
    assert sorted(path.name for path in target.iterdir()) == [
        "arrays",
        "config.json",
        "jaxserve.json",
        "tokenizer.json",
    ]
    with pytest.raises(ModelLoadError, match="is not empty"):
        orbax.convert(source, target)


def test_another_config_is_refused(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text(json.dumps(TINY_LLAMA | {"vocab_size": 40}))
    with pytest.raises(ModelLoadError, match=r"2 parameters are not this config's: lm_head\.weight, model\.embed"):
        load_model(tmp_path / "out", dtype=FLOAT32)


def test_another_format_is_refused(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    manifest = tmp_path / "out" / "jaxserve.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(ModelLoadError, match="it has format 99"):
        load_model(tmp_path / "out", dtype=FLOAT32)


def test_orbax_itself_reads_it(source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    wanted = {spec.name: leaf for spec, leaf in zip(source.structure.specs, source.leaves, strict=True)}
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore((tmp_path / "out" / "arrays").absolute(), wanted)
    for spec, leaf in zip(source.structure.specs, source.leaves, strict=True):
        assert np.array_equal(arrays[spec.name], leaf)


@pytest.mark.parametrize("chunks", [(12, 10), (4, 5), (5, 4), (12, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_region_of_chunks(chunks: tuple[int, int], dtype: str, tmp_path: Path) -> None:
    whole = np.random.default_rng(0).normal(size=(12, 10)).astype(np.float32)
    header = {"zarr_format": 2, "shape": [12, 10], "chunks": chunks, "dtype": "<f4", "order": "C"}
    header |= {"compressor": None, "filters": None, "fill_value": None, "dimension_separator": "."}
    (tmp_path / ".zarray").write_text(json.dumps(header))
    padded = np.pad(whole, ((0, -12 % chunks[0]), (0, -10 % chunks[1])))
    for i, j in itertools.product(range(padded.shape[0] // chunks[0]), range(padded.shape[1] // chunks[1])):
        part = padded[i * chunks[0] : (i + 1) * chunks[0], j * chunks[1] : (j + 1) * chunks[1]]
        (tmp_path / f"{i}.{j}").write_bytes(part.tobytes())
    array = open_array(tmp_path)
    for index in itertools.product((slice(0, 12), slice(3, 7), slice(8, 8)), (slice(0, 10), slice(4, 5), slice(2, 9))):
        got = array.read(index, jnp.dtype(dtype))
        assert got.dtype == jnp.dtype(dtype) and np.array_equal(got, whole[index].astype(jnp.dtype(dtype)))


def test_another_form_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".zarray").write_text(json.dumps({"zarr_format": 2, "compressor": {"id": "zstd"}}))
    with pytest.raises(ModelLoadError, match="compressed or of another version"):
        open_array(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chunks": [-2, -16, -16]},
        {"chunks": [0, 0, 0]},
        {"chunks": [1.5, 16, 16]},
        {"chunks": [True, 16, 16]},
        {"chunks": [1]},
        {"chunks": [2**62] * 3},
        {"shape": [-2, 16, 16]},
        {"shape": [2**40, 2**40, 1]},
        {"dtype": "|O"},
        {"dtype": {"a": 1}},
        {"filters": [{"id": "pickle"}]},
    ],
    ids=str,
)
def test_a_crafted_array_is_refused(wrong: dict[str, object], source: LoadedModel, tmp_path: Path) -> None:
    """Negative chunks were read as memory that nobody had written."""
    orbax.convert(source, tmp_path / "out")
    header = tmp_path / "out" / "arrays" / "model.layers.1.self_attn.qkv_proj.weight" / ".zarray"
    header.write_text(json.dumps(json.loads(header.read_text()) | wrong))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(tmp_path / "out", dtype=FLOAT32)
    with pytest.raises(ModelLoadError, match="cannot be read"):  # before any weight is read, as `jaxserve doctor` does
        inspect(tmp_path / "out", dtype=FLOAT32, config=source.config)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_a_changed_byte_is_found(dtype: jnp.dtype, source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    chunk = tmp_path / "out" / "arrays" / "model.layers.1.self_attn.qkv_proj.weight" / "0.0.0"
    data = bytearray(chunk.read_bytes())
    data[77] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(ModelLoadError, match="its bytes are not those that were written"):
        load_model(tmp_path / "out", dtype=dtype)


@pytest.mark.parametrize(
    "wrong",
    [{"kv_repeat": 0}, {"kv_repeat": -1}, {"kv_repeat": 10**9}, {"kv_repeat": 1.5}, {"checksums": [1]}],
    ids=str,
)
def test_a_crafted_manifest_is_refused(wrong: dict[str, object], source: LoadedModel, tmp_path: Path) -> None:
    orbax.convert(source, tmp_path / "out")
    manifest = tmp_path / "out" / "jaxserve.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | wrong))
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(tmp_path / "out", dtype=FLOAT32)


@pytest.mark.parametrize("damage", ["arrays", "data", "shape", "file", "manifest"])
def test_damage_is_named(damage: str, source: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "out"
    orbax.convert(source, out)
    chunk = out / "arrays" / "model.layers.1.self_attn.qkv_proj.weight" / "0.0.0"
    match damage:
        case "arrays":
            shutil.rmtree(out / "arrays")
        case "data":
            chunk.write_bytes(chunk.read_bytes()[:100])
        case "shape":
            header = chunk.parent / ".zarray"
            header.write_text(header.read_text().replace("[2,16,16]", "[2,16,17]"))
        case "file":
            chunk.unlink()
        case "manifest":
            (out / "jaxserve.json").write_text("{")
    with pytest.raises(ModelLoadError, match="cannot be read"):
        load_model(out, dtype=FLOAT32)
