"""The picture workers: hostile pictures are a 400, the next one is read, and an equal one is decoded once."""

from __future__ import annotations

import base64
import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator

import pytest
from PIL import Image

from jaxserve.config import MediaSection
from jaxserve.errors import InvalidValueError, MediaMemoryError
from jaxserve.media.processor import PictureSettings
from jaxserve.media.reader import PictureReader, Source
from tests.media.pictures import encoded, kinds, pixels, png
from tests.waiting import LAST_RESORT

SETTINGS = PictureSettings(patch_size=16, merge_size=2, min_pixels=1024, max_pixels=262_144)
MUTATIONS = 200
MOST_SECONDS = 15.0  # the wall limit of a picture


def raw(data: bytes) -> Source:
    return Source.of(data, is_base64=False)


@pytest.fixture(scope="module")
def reader() -> Iterator[PictureReader]:
    made = PictureReader(MediaSection.model_validate({}), SETTINGS, "qwen3_vl")
    for process in (made._process, made._long_process):
        process.wall_seconds = LAST_RESORT
    yield made
    made.stop()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_of(width: int, height: int, *extra: bytes, body: bytes = b"") -> bytes:
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + b"".join(extra) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


BOMB = zlib.compress(bytes(64 * 2**20), 9)
HOSTILE = {
    "nothing": b"",
    "text": b"a text",
    "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>',
    "an SVG as PNG": b"\x89PNG\r\n\x1a\n<svg/>",
    "10^9 pixels": png_of(31_623, 31_623, body=zlib.compress(b"")),
    "10^9 pixels in a row": png_of(10**9, 1, body=zlib.compress(b"")),
    "1 x 10,000": png_of(1, 10_000, body=zlib.compress(bytes(4 * 10_000))),
    "pixels that are missing": png_of(5_000, 5_000, body=zlib.compress(b"")),
    "eXIf of 1 MB": png_of(8, 8, chunk(b"eXIf", b"MM\0*" + b"\xff" * 2**20), body=zlib.compress(b"")),
    "zTXt bomb": png_of(8, 8, chunk(b"zTXt", b"a\0\0" + BOMB), body=zlib.compress(b"")),
    "iCCP bomb": png_of(8, 8, chunk(b"iCCP", b"a\0\0" + BOMB), body=zlib.compress(b"")),
    "no size": png_of(0, 0, body=zlib.compress(b"")),
    "a GIF of no size": b"GIF89a\0\0\0\0\0\0\0;",
    "a WebP canvas": b"RIFF\x4e\0\0\0WEBPVP8X\x0a\0\0\0\x02\0\0\0\x27\x23\0\x27\x23\0ANIM\x06\0\0\0" + bytes(50),
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "TIFF": encoded(Image.new("RGB", (8, 8)), "TIFF"),
    "BMP": encoded(Image.new("RGB", (8, 8)), "BMP"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_refused(reader: PictureReader, name: str) -> None:
    """With words for the client, and none from the picture."""
    with pytest.raises(InvalidValueError) as error:
        reader.read(raw(HOSTILE[name]), SETTINGS, "")
    assert "image" in error.value.message.lower() or "picture" in error.value.message
    assert len(error.value.message) < 150


def test_cut_and_changed_files_end_soon(reader: PictureReader) -> None:
    """Each format cut at 5 places, and 200 files with changed bytes: an error or a picture, and nothing hangs."""
    dice = random.Random(0)
    whole = [data for name, data in kinds().items() if name in ("rgb", "palette", "gif", "webp", "animated_webp")]
    image = Image.fromarray(pixels(100, 120))
    whole += [encoded(image, "JPEG"), encoded(image, "JPEG", progressive=True), encoded(image.convert("CMYK"), "JPEG")]
    files = [data[: len(data) * part // 6] for data in whole for part in range(1, 6)]
    for _ in range(MUTATIONS):
        changed = bytearray(dice.choice(whole))
        for _ in range(dice.randint(1, 8)):
            place = dice.randrange(min(len(changed), dice.choice((64, 512, 10**6))))
            changed[place] = dice.randrange(256)
        files.append(bytes(changed))
    refused = 0
    for data in files:
        began = time.monotonic()
        try:
            assert reader.read(raw(data), SETTINGS, "").num_tokens > 0
        except InvalidValueError:
            refused += 1
        assert time.monotonic() - began < MOST_SECONDS
    assert refused > 40  # the cut ones alone
    assert reader.read(raw(png(40, 40)), SETTINGS, "").num_tokens == 1


def test_base64_is_strict_except_for_blanks(reader: PictureReader) -> None:
    data = png(40, 40, seed=5)
    text = base64.encodebytes(data)
    found = reader.read(Source.of(text, is_base64=True), SETTINGS, "")
    assert found.patches == reader.read(raw(data), SETTINGS, "").patches
    for wrong in (text + b"=", text.replace(b"A", b"*", 1), text[:-3], b"A==="):
        with pytest.raises(InvalidValueError, match="no valid base64"):
            reader.read(Source.of(wrong, is_base64=True), SETTINGS, "")


def test_the_limits_of_bytes_and_pixels() -> None:
    section = MediaSection.model_validate({"max_bytes": 2_000, "max_pixels": 10_000})
    reader = PictureReader(section, SETTINGS, "qwen3_vl")
    try:
        assert reader.size(raw(encoded(Image.new("RGB", (100, 100))))) == (100, 100)
        with pytest.raises(InvalidValueError, match="pixels"):
            reader.size(raw(encoded(Image.new("RGB", (101, 100)))))
        with pytest.raises(InvalidValueError, match="bytes"):
            reader.size(raw(png(90, 90)))
    finally:
        reader.stop()


def test_a_worker_that_dies_costs_one_picture(reader: PictureReader) -> None:
    """Its kill answers the picture that it held; the next one gets a new worker."""
    process = reader._process
    process.start()
    assert process.pid is not None
    first = process.pid
    assert os.getpriority(os.PRIO_PROCESS, first) > os.getpriority(os.PRIO_PROCESS, 0) or os.nice(0) >= 10
    os.kill(first, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (first, signal.SIGKILL)).start()
    with pytest.raises(InvalidValueError, match="too long or too much memory"):
        reader.size(raw(png(41, 41)))
    assert reader.size(raw(png(41, 41))) == (41, 41)
    assert process.pid != first


def test_an_equal_picture_is_decoded_once_within_its_namespace() -> None:
    hits: list[int] = []
    reader = PictureReader(MediaSection.model_validate({}), SETTINGS, "qwen3_vl", on_hit=lambda: hits.append(1))
    try:
        data = raw(png(40, 60))
        first = reader.read(data, SETTINGS, "one")
        assert reader.read(data, SETTINGS, "one") is first and hits == [1]
        other = reader.read(data, SETTINGS, "two")
        assert other is not first and other.digest == first.digest and hits == [1]
        lower = reader.read(data, SETTINGS.within("low", None, 1_024, "p"), "one")
        assert lower.digest != first.digest
        assert reader.read(raw(png(40, 60, seed=1)), SETTINGS, "one").digest != first.digest
    finally:
        reader.stop()


def test_memory_that_requests_hold_is_not_given_twice() -> None:
    """Kept pictures make room; those that requests hold do not, and free it when they are let go."""
    size = 64 * 64 * 3
    section = MediaSection.model_validate({"memory": 2 * size, "cache": size})
    reader = PictureReader(section, SETTINGS, "qwen3_vl")
    try:
        held = [reader.read(raw(png(64, 64, seed=seed)), SETTINGS, "") for seed in (0, 1)]
        with pytest.raises(MediaMemoryError) as error:
            reader.read(raw(png(64, 64, seed=2)), SETTINGS, "")
        assert error.value.status == 503 and error.value.retry_after
        held.clear()
        assert reader.memory.held <= size
        assert reader.read(raw(png(64, 64, seed=2)), SETTINGS, "").num_tokens == 4
        assert reader.memory.held <= 2 * size
    finally:
        reader.stop()


def test_a_text_server_has_no_pillow() -> None:
    code = "import sys, jaxserve.api.app, jaxserve.media.reader; print('PIL' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"
