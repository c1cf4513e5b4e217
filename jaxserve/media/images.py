"""Decodes pictures and resizes them: the only file that imports Pillow. It runs in the picture worker.

Pillow reads PNG, JPEG, WebP and the first frame of a GIF. Its other decoders cannot be reached: clients send these
four, and the faults of Pillow that were published in 2026 are in the others. A picture is made upright (EXIF), opaque
(on white) and RGB, as transformers' processors do. Two calls resize the width first and then the height, as Pillow
before 13 and torchvision do: Pillow 13 begins with the cheaper axis, which gives other bits.
"""

from __future__ import annotations

import importlib
import io
import struct
import warnings
from typing import Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from jaxserve.media.processor import PictureSettings, patches_of

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_PLUGINS = ("PngImagePlugin", "JpegImagePlugin", "MpoImagePlugin", "WebPImagePlugin", "GifImagePlugin")
MAX_SIDE = 16_384
# the errors of Pillow for a damaged picture, and MemoryError, which comes at the limit of the process
DAMAGED = (
    *(UnidentifiedImageError, OSError, ValueError, SyntaxError, MemoryError, EOFError, LookupError, TypeError),
    *(ArithmeticError, struct.error, Image.DecompressionBombError, RuntimeError),
)
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
_MAX_EXIF = 1 << 20  # bytes; the orientation stands in the first few
_WHITE = (255, 255, 255, 255)


class PictureError(Exception):
    """A picture that cannot be read. `str()` is for the client."""


def load_formats(max_pixels: int) -> None:
    """Import the decoders, and make them refuse a picture of more pixels when it is opened.

    Pillow refuses at twice the number that it is told, and warns before.
    """
    for name in _PLUGINS:
        importlib.import_module(f"PIL.{name}")
    Image.MAX_IMAGE_PIXELS = max(1, max_pixels // 2)
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)


def upright_size(data: bytes, max_pixels: int) -> tuple[int, int]:
    """Return height and width of the upright picture, from its header. Raises PictureError."""
    image, turn = _opened(data, max_pixels)
    return (image.width, image.height) if turn >= 5 else (image.height, image.width)


def patches(data: bytes, settings: PictureSettings, max_pixels: int) -> np.ndarray:
    """Return the patches of a picture, uint8 [P, 3 * p * p]. Raises PictureError."""
    image, turn = _opened(data, max_pixels)
    try:
        image.load()
        image = _opaque(image)
        if turn in _TURNS:
            image = image.transpose(_TURNS[turn])
        height, width = settings.fitted(image.height, image.width)
        bicubic = Image.Resampling.BICUBIC
        image = image.resize((width, image.height), bicubic).resize((width, height), bicubic)
    except DAMAGED as error:
        raise PictureError(_reason(error)) from None
    return patches_of(np.asarray(image), settings)


def _opened(data: bytes, max_pixels: int) -> tuple[Any, int]:
    """Return the picture, of which only the header is read, and its EXIF orientation."""
    try:
        image: Any = Image.open(io.BytesIO(data), formats=FORMATS)
        turn = _orientation(image, data)
    except UnidentifiedImageError:
        raise PictureError("Unsupported image format; use PNG, JPEG, WebP or GIF.") from None
    except DAMAGED as error:
        raise PictureError(_reason(error)) from None
    if image.width * image.height > max_pixels or max(image.size) > MAX_SIDE:
        shown = f"{image.width} x {image.height}"
        raise PictureError(f"The image has {shown} pixels; at most {max_pixels} are taken, and {MAX_SIDE} a side.")
    return image, turn


def _reason(error: BaseException) -> str:
    if isinstance(error, Image.DecompressionBombError):
        return "The image has too many pixels."
    if isinstance(error, MemoryError):
        return "The image needs too much memory."
    return "The image is damaged and cannot be decoded."


def _orientation(image: Any, data: bytes) -> int:
    """Return the EXIF orientation, 1 to 8. An unreadable one is 1: upright.

    Pillow reads a PNG's only once it is decoded if it stands behind the pixels, so the chunks are walked here.
    """
    try:
        exif = image.getexif()
        if image.format == "PNG" and _ORIENTATION not in exif and (found := _png_exif(data)) is not None:
            exif = Image.Exif()
            exif.load(found)
        turn = exif.get(_ORIENTATION, 1)
    except DAMAGED:
        return 1
    return turn if isinstance(turn, int) and 1 <= turn <= 8 else 1


def _png_exif(data: bytes) -> bytes | None:
    place = len(_PNG_MAGIC)
    while place + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"eXIf":
            return data[place + 8 : place + 8 + size] if size <= _MAX_EXIF else None
        place += 12 + size
    return None


def _opaque(image: Any) -> Any:
    """Return the picture as RGB on white."""
    if image.mode.startswith("I"):  # 16 bits of grey, which `convert` clips at 255: their high bytes
        high = np.asarray(image) >> 8
        clear = image.info.get("transparency")
        grey = Image.fromarray(high.astype(np.uint8))
        if isinstance(clear, int):
            grey.putalpha(Image.fromarray(np.where(np.asarray(image) == clear, 0, 255).astype(np.uint8)))
        image = grey
    if "A" in image.getbands() or "a" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, _WHITE), image).convert("RGB")
    return image.convert("RGB")
