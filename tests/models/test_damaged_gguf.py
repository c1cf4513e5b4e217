"""Damaged and malicious GGUF files: each is refused at once by one line that names the file."""

from __future__ import annotations

import random
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint import gguf as gguf_blocks
from jaxserve.models.checkpoint.gguf import read_gguf
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.hub import resolve
from jaxserve.models.checkpoint.loader import inspect
from tests.models.test_gguf import FLOAT32, written
from tests.models.test_quantize_at_load import load


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(values: bytes = b"", tensors: bytes = b"", *, version: int = 3, counts: tuple[int, int] = (0, 0)) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + values + tensors


def tensor(sizes: tuple[int, ...], kind: int, offset: int = 0, count: int | None = None) -> bytes:
    dimensions = struct.pack(f"<I{len(sizes)}Q", len(sizes) if count is None else count, *sizes)
    return text("token_embd.weight") + dimensions + struct.pack("<IQ", kind, offset)


DAMAGED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is no GGUF file"),
    "magic": (b"GGML" + bytes(40), "is no GGUF file"),
    "version": (header(version=1), "version 1 of GGUF is not supported"),
    "big-endian": (header(version=3 << 24), "is not supported"),
    "many tensors": (header(counts=(2**63, 0)), "it says that it has 9223372036854775808 tensors"),
    "many values": (header(counts=(0, 2**40)), "it says that it has 0 tensors and 1099511627776 values"),
    "cut off": (header(counts=(1, 0)), "its header is cut off"),
    "long key": (header(struct.pack("<Q", 2**63), counts=(0, 1)), "its header is cut off"),
    "unknown value": (header(text("a") + struct.pack("<I", 77), counts=(0, 1)), "a value of the unknown type 77"),
    "long array": (header(text("a") + struct.pack("<IIQ", 9, 0, 2**63), counts=(0, 1)), "its header is cut off"),
    "many texts": (
        header(text("a") + struct.pack("<IIQ", 9, 8, 2**63), counts=(0, 1)),
        "its arrays have more than 2097152 texts",
    ),
    "cut off texts": (header(text("a") + struct.pack("<IIQ", 9, 8, 2), counts=(0, 1)), "its header is cut off"),
    "a key twice": (header((text("a") + struct.pack("<II", 4, 1)) * 2, counts=(0, 2)), "it has the value a twice"),
    "a long text": (
        header(text("general.architecture") + struct.pack("<I", 8) + text("a" * 2**21), counts=(0, 1)),
        "'a text of 2097152 bytes' of GGUF is not supported",
    ),
    "nested arrays": (header(text("a") + struct.pack("<IIQ", 9, 9, 1), counts=(0, 1)), "a value of the unknown type 9"),
    "not UTF-8": (header(struct.pack("<Q", 1) + b"\xff", counts=(0, 1)), "can't decode byte"),
    "alignment": (
        header(text("general.alignment") + struct.pack("<II", 4, 0), counts=(0, 1)),
        "'general.alignment' is 0",
    ),
    "unknown type": (header(tensors=tensor((32,), 999), counts=(1, 0)), "999 is not a valid"),
    "no decoder": (header(tensors=tensor((32,), 26), counts=(1, 0)), "I32 cannot be decoded"),
    "no size": (header(tensors=tensor((0, 4), 0), counts=(1, 0)), r"sizes \[0, 4\] cannot have the type F32"),
    "half a block": (header(tensors=tensor((16, 4), 8), counts=(1, 0)), r"sizes \[16, 4\] cannot have the type Q8_0"),
    "a vector of blocks": (header(tensors=tensor((32,), 8), counts=(1, 0)), "cannot have the type Q8_0"),
    "dimensions": (header(tensors=tensor((4,), 0, count=2**31), counts=(1, 0)), "has 2147483648 dimensions"),
    "large": (header(tensors=tensor((2**62, 2**62), 0), counts=(1, 0)), "the file is cut off"),
    "far away": (header(tensors=tensor((4,), 0, offset=2**63), counts=(1, 0)), "the file is cut off"),
    "twice": (header(tensors=tensor((4,), 0) * 2, counts=(2, 0)) + bytes(64), "is there twice, or overlaps"),
    "a later part": (
        header(text("split.count") + struct.pack("<IH", 2, 7), counts=(0, 1)),
        "is one of 7 parts",
    ),
    "no architecture": (header(), "None of GGUF is not supported"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_one_clear_error(name: str, tmp_path: Path) -> None:
    content, message = DAMAGED[name]
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelLoadError, match=message) as error:
        read_config(resolve(tmp_path))
    assert "model.gguf" in str(error.value)
    assert "\n" not in str(error.value)


def test_any_cut_and_any_wrong_byte_is_an_error_or_loads(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "Q8_0")
    whole, rng = file.read_bytes(), random.Random(5)
    changed = [whole[: rng.randrange(len(whole))] for _ in range(60)]
    for _ in range(300):
        place = rng.randrange(4, 2600)
        changed.append(whole[:place] + rng.randbytes(rng.choice((1, 4, 8))) + whole[place + 8 :])
    refused = 0
    for content in changed:
        file.write_bytes(content)
        try:
            inspect(file, dtype=FLOAT32, config=read_config(file))
        except ModelLoadError as error:
            assert "\n" not in str(error)
            refused += 1
    assert 200 < refused <= len(changed)


def test_many_tensors_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the package decodes a type is tried once for a type, not for each tensor."""
    decoded: list[int] = []
    monkeypatch.setattr(gguf.quants, "dequantize", lambda raw, _: decoded.append(len(raw)))
    gguf_blocks._decoded.cache_clear()
    kind = gguf.GGMLQuantizationType.Q2_K
    sizes, entries = gguf.GGML_QUANT_SIZES[kind], b""
    for i in range(50):
        entries += text(f"t{i}") + struct.pack("<IQQIQ", 2, sizes[0], 1, kind, i * sizes[1])
    (tmp_path / "model.gguf").write_bytes(header(tensors=entries, counts=(50, 0)) + bytes(50 * sizes[1] + 32))
    try:
        assert len(read_gguf(tmp_path / "model.gguf").tensors) == 50
    finally:
        gguf_blocks._decoded.cache_clear()
    assert len(decoded) == 1


def test_a_type_that_needs_a_missing_package_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    gguf_blocks._decoded.cache_clear()
    (tmp_path / "model.gguf").write_bytes(header(tensors=tensor((256, 4), 10), counts=(1, 0)))
    with pytest.raises(ModelLoadError, match=r"model.gguf: tensors of GGUF's type 10 are decoded by the package gguf"):
        read_config(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("name", "kind", "place"),
    [("llama", "Q8_0", 0), ("llama of blocks", "Q4_K", 0), ("llama of blocks", "Q6_K", 208)],  # of a block's scale
)
@pytest.mark.parametrize("scale", [np.nan, np.inf])
def test_a_scale_that_is_no_number_is_named(name: str, kind: str, place: int, scale: float, tmp_path: Path) -> None:
    file, _ = written(tmp_path, name, kind)
    found = next(tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_up.weight")
    content, first = bytearray(file.read_bytes()), found.data_offset + place
    content[first : first + 2] = np.float16(scale).tobytes()
    file.write_bytes(bytes(content))
    with pytest.raises(ModelLoadError, match=r"model.layers.1.mlp.up_proj.weight: not all scales are numbers"):
        load(file, "stored")
