"""Pictures become transformers' arrays to the bit: sizes, patches, orientation, transparency, and every mode."""

from __future__ import annotations

import hashlib
import json
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from jaxserve.errors import ConfigError, InvalidValueError
from jaxserve.media.images import PictureError, patches, upright_size
from jaxserve.media.processor import PictureSettings, read_settings
from jaxserve.types.picture import PictureInfo
from tests.media.pictures import PROCESSORS, SIZES, encoded, kinds, pixels, png

GOLDENS = json.loads((Path(__file__).parent / "digests.json").read_text())["pictures"]
KINDS = kinds()
MAX_PIXELS = 40_000_000
INFO = PictureInfo(
    kind="qwen3_vl",
    patch_size=16,
    merge_size=2,
    width=768,
    token_id=7,
    max_tokens=16_384,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
)


def settings(kind: str) -> PictureSettings:
    patch, merge, least, most, _ = PROCESSORS[kind]
    return PictureSettings(patch_size=patch, merge_size=merge, min_pixels=least, max_pixels=most)


def pixel_values(found: np.ndarray, kind: str) -> np.ndarray:
    """Normalize patches as transformers does, and send the frame of a still twice: float32 [P, 3 * 2 * p * p]."""
    patch, *_, (mean, std) = PROCESSORS[kind]
    scaled = (found.reshape(-1, 3, 1, patch * patch).astype(np.float64) * (1 / 255)).astype(np.float32)
    shape = (1, 3, 1, 1)
    normal = (scaled - np.array(mean, np.float32).reshape(shape)) / np.array(std, np.float32).reshape(shape)
    return np.ascontiguousarray(np.repeat(normal, 2, axis=2)).reshape(len(found), -1)


@pytest.mark.parametrize("case", GOLDENS)
def test_patches_are_those_of_transformers_to_the_bit(case: str) -> None:
    kind, name = case.split()
    data = KINDS[name] if name in KINDS else png(*SIZES[name])
    height, width = upright_size(data, MAX_PIXELS)
    found = patches(data, settings(kind), MAX_PIXELS)
    grid = settings(kind).grid(height, width)
    assert list(grid) == GOLDENS[case]["grid"]
    assert len(found) == grid[1] * grid[2] == 4 * settings(kind).num_tokens(height, width)
    assert hashlib.sha256(pixel_values(found, kind).tobytes()).hexdigest() == GOLDENS[case]["sha256"]


@pytest.mark.parametrize(
    ("size", "qwen2_5", "qwen3"),
    [
        ((20, 20), 4, 64),
        ((480, 640), 391, 300),
        ((768, 1024), 999, 768),
        ((1365, 2048), 3_577, 2_752),
        ((1123, 794), 1_120, 875),
        ((3000, 4000), 15_301, 11_750),
    ],
)
def test_the_published_numbers_of_tokens(size: tuple[int, int], qwen2_5: int, qwen3: int) -> None:
    assert settings("qwen2_vl").num_tokens(*size) == qwen2_5
    assert settings("qwen3_vl").num_tokens(*size) == qwen3


def test_a_picture_too_narrow_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="narrow"):
        settings("qwen3_vl").num_tokens(1, 201)


@pytest.mark.parametrize("turn", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "late PNG"])
def test_every_orientation_is_upright(kind: str, turn: int) -> None:
    """The corner of the upright picture that is red, in each format, also behind a PNG's pixels."""
    upright = np.zeros((64, 96, 3), np.uint8)
    upright[:32, :32] = 255, 0, 0
    stored = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}[turn]
    exif = Image.Exif()
    exif[0x0112] = stored
    image = Image.fromarray(upright)
    turned = image if stored == 1 else _turned(image, stored)
    exif[0x0112] = _inverse(stored)
    if kind == "late PNG":
        data = _with_late_exif(encoded(turned, "PNG"), exif.tobytes())
    else:
        data = encoded(turned, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    assert upright_size(data, MAX_PIXELS) == (64, 96)
    one = PictureSettings(patch_size=32, merge_size=1, min_pixels=1024, max_pixels=2**24)
    means = patches(data, one, MAX_PIXELS).reshape(6, 3, -1).mean(-1)
    assert means[0, 0] > 180 and means[1:, 0].max() < 60


def _turned(image: Image.Image, turn: int) -> Image.Image:
    ways = Image.Transpose
    return image.transpose(
        {
            2: ways.FLIP_LEFT_RIGHT,
            3: ways.ROTATE_180,
            4: ways.FLIP_TOP_BOTTOM,
            5: ways.TRANSPOSE,
            6: ways.ROTATE_270,
            7: ways.TRANSVERSE,
            8: ways.ROTATE_90,
        }[turn]
    )


def _inverse(turn: int) -> int:
    return {6: 8, 8: 6}.get(turn, turn)


def _with_late_exif(data: bytes, exif: bytes) -> bytes:
    body = exif.removeprefix(b"Exif\0\0")
    chunk = len(body).to_bytes(4, "big") + b"eXIf" + body + zlib.crc32(b"eXIf" + body).to_bytes(4, "big")
    return data[:-12] + chunk + data[-12:]


def test_modes_that_pillow_would_read_otherwise() -> None:
    one = PictureSettings(patch_size=32, merge_size=1, min_pixels=1024, max_pixels=2**24)
    grey = encoded(Image.fromarray(np.full((32, 32), 0x4080, np.uint16)))
    assert set(patches(grey, one, MAX_PIXELS).ravel()) == {0x40}
    ink = encoded(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG", quality=95)
    red, green, blue = patches(ink, one, MAX_PIXELS).reshape(3, -1).mean(-1)
    assert red > 240 and green < 15 and blue < 15
    clear = encoded(Image.new("RGBA", (32, 32), (0, 0, 0, 0)))
    assert set(patches(clear, one, MAX_PIXELS).ravel()) == {255}


def test_other_formats_and_too_many_pixels_are_refused() -> None:
    image = Image.fromarray(pixels(32, 32))
    for kind in ("BMP", "TIFF", "PPM", "ICO"):
        with pytest.raises(PictureError, match="use PNG, JPEG, WebP or GIF"):
            upright_size(encoded(image, kind), MAX_PIXELS)
    with pytest.raises(PictureError, match="pixels"):
        upright_size(encoded(image), 32 * 31)


def test_settings_come_from_the_files_of_the_model(tmp_path: Path) -> None:
    nested = {"image_processor": {"size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}, "patch_size": 16}}
    (tmp_path / "processor_config.json").write_text(json.dumps(nested))
    assert read_settings(tmp_path, INFO) == settings("qwen3_vl")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 4_096, "max_pixels": 9_216}))
    found = read_settings(tmp_path, INFO)
    assert (found.min_pixels, found.max_pixels) == (4_096, 9_216)
    low = read_settings(tmp_path, msgspec.structs.replace(INFO, max_tokens=4))
    assert low.max_pixels == 4 * 32 * 32


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"image_processor_type": "PixtralImageProcessor"}, "image_processor_type"),
        ({"resample": 2}, "resample"),
        ({"size": 224}, "size"),
        ({"min_pixels": 0.5}, "are not whole numbers"),
        ({"rescale_factor": 1.0}, "rescale_factor"),
    ],
)
def test_a_processor_that_is_not_computed_is_refused(tmp_path: Path, found: dict[str, object], said: str) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=said) as error:
        read_settings(tmp_path, INFO)
    assert "media.max_items: 0" in str(error.value.fix)


def test_the_processor_must_normalize_as_the_tower_does(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.4, 0.4, 0.4]}))
    own = msgspec.structs.replace(INFO, mean=(0.4, 0.4, 0.4))
    assert read_settings(tmp_path, own).patch_size == 16
    with pytest.raises(ConfigError, match="image_mean"):
        read_settings(tmp_path, INFO)


def test_one_picture_may_ask_for_an_area_within_the_servers() -> None:
    whole = settings("qwen3_vl")
    assert whole.within("low", None, None, "p").max_pixels == 512 * 512
    assert whole.within("high", None, 100_000, "p").max_pixels == 100_000
    for least, most in ((1, None), (None, 2**30), (90_000, 80_000)):
        with pytest.raises(InvalidValueError) as error:
            whole.within(None, least, most, "messages.0")
        assert error.value.param == "messages.0"


def test_equal_pixels_make_equal_patches_of_all_formats() -> None:
    image = Image.fromarray(pixels(64, 64))
    found = [patches(encoded(image, kind, **how), settings("qwen3_vl"), MAX_PIXELS) for kind, how in _LOSSLESS]
    assert all(np.array_equal(found[0], each) for each in found)


_LOSSLESS = (("PNG", {}), ("WEBP", {"lossless": True}), ("PNG", {"interlace": True}))
