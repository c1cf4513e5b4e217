"""How Qwen's processors size a picture and cut it into patches: the numbers of a checkpoint, without Pillow.

The number of tokens of a picture follows from its height and width alone, so a prompt is counted without decoding.

Source: smart_resize and the patch order of transformers' Qwen2VLImageProcessorPil (Qwen2-VL to Qwen3.5 share it).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from jaxserve.errors import ConfigError, InvalidValueError
from jaxserve.model_files import picture_processor
from jaxserve.types.picture import PictureInfo

logger = logging.getLogger(__name__)

MAX_RATIO = 200  # of the longer side to the shorter
LOW_PIXELS = 512 * 512  # of a picture with `detail: low`
CHANNELS = 3

_PROCESSORS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_PROCESSORS += ("Qwen2_5_VLImageProcessor", "Qwen3VLImageProcessor", "Qwen3VLImageProcessorFast")
_DEFAULT_PIXELS = (56 * 56, 28 * 28 * 1280)  # the class's own, for files that say nothing
_BICUBIC = 3
_TEXT_ONLY = "set media.max_items: 0, with which the model is served as text"


class PictureSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a processor.

    patch_size: side of a patch in pixels. merge_size: a token is merge_size x merge_size patches
    min_pixels, max_pixels: smallest and largest area of a resized picture, in pixels
    """

    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    @property
    def factor(self) -> int:
        """Pixels of the side of a token. The sides of a resized picture are multiples of it."""
        return self.patch_size * self.merge_size

    def fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width that a picture is resized to. Raises InvalidValueError if it is too narrow."""
        if max(height, width) > MAX_RATIO * min(height, width):
            raise InvalidValueError(
                f"a picture of {width} x {height} pixels is too narrow; the ratio is over {MAX_RATIO}"
            )
        factor = self.factor
        rows, columns = round(height / factor) * factor, round(width / factor) * factor
        if rows * columns > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            rows = max(factor, math.floor(height / beta / factor) * factor)
            columns = max(factor, math.floor(width / beta / factor) * factor)
        elif rows * columns < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            rows = math.ceil(height * beta / factor) * factor
            columns = math.ceil(width * beta / factor) * factor
        return rows, columns

    def num_tokens(self, height: int, width: int) -> int:
        """Return the tokens of a picture of this size. Raises InvalidValueError if it is too narrow."""
        rows, columns = self.fitted(height, width)
        return (rows // self.factor) * (columns // self.factor)

    def grid(self, height: int, width: int) -> tuple[int, int, int]:
        """Return the frames, rows and columns of patches of a picture. Raises InvalidValueError if it is too narrow."""
        rows, columns = self.fitted(height, width)
        return 1, rows // self.patch_size, columns // self.patch_size

    def within(self, detail: str | None, min_pixels: int | None, max_pixels: int | None, param: str) -> PictureSettings:
        """Return the settings of one picture of a request.

        detail: "low" limits its area to LOW_PIXELS; other values change nothing
        min_pixels, max_pixels: its own limits, within the server's; None: the server's
        Raises InvalidValueError that names `param`.
        """
        least, most = min_pixels or self.min_pixels, max_pixels or self.max_pixels
        if not self.min_pixels <= least <= most <= self.max_pixels:
            message = f"{param}: min_pixels and max_pixels must be in order and between {self.min_pixels} and "
            raise InvalidValueError(f"{message}{self.max_pixels} here.", param=param)
        if detail == "low":
            most = max(least, min(most, LOW_PIXELS))
        return msgspec.structs.replace(self, min_pixels=least, max_pixels=most)


def patches_of(pixels: np.ndarray, settings: PictureSettings) -> np.ndarray:
    """Cut a resized picture, uint8 [H, W, 3], into patches, uint8 [P, 3 * p * p].

    The merge_size x merge_size patches of a token follow each other. A patch is channels, rows, columns.
    """
    p, m = settings.patch_size, settings.merge_size
    rows, columns = pixels.shape[0] // (p * m), pixels.shape[1] // (p * m)
    blocks = pixels.reshape(rows, m, p, columns, m, p, CHANNELS)
    return np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(-1, CHANNELS * p * p)


def read_settings(directory: Path, info: PictureInfo) -> PictureSettings:
    """Read the numbers of a model's picture processor.

    An area over `info.max_tokens` is lowered to it. Raises ConfigError for a processor that this file does not compute.
    """
    found = picture_processor(directory)
    if found is None:
        logger.warning("%s has no preprocessor_config.json; pictures are sized by the class's defaults", directory)
        found = {}
    _check_config(found, info)
    size = found.get("size") or {}
    if not isinstance(size, dict):
        raise ConfigError(f"size of the picture processor is {size!r:.80}; here it can be an object", fix=_TEXT_ONLY)
    least = found.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or _DEFAULT_PIXELS[0]
    most = found.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or _DEFAULT_PIXELS[1]
    area = (info.patch_size * info.merge_size) ** 2
    if not all(type(each) is int and each > 0 for each in (least, most)):
        raise ConfigError(f"the picture sizes of {directory} are not whole numbers", fix=_TEXT_ONLY)
    most = max(area, min(most, info.max_tokens * area))
    return PictureSettings(
        patch_size=info.patch_size, merge_size=info.merge_size, min_pixels=min(least, most), max_pixels=most
    )


def _check_config(found: Mapping[str, Any], info: PictureInfo) -> None:
    """Raise ConfigError for a value of the file that differs from what is computed here, or from the tower's."""
    expected: dict[str, tuple[Any, ...]] = {
        "image_processor_type": (None, *_PROCESSORS),
        "patch_size": (None, info.patch_size),
        "merge_size": (None, info.merge_size),
        "temporal_patch_size": (None, 2),
        "resample": (None, _BICUBIC),
        "image_mean": (None, list(info.mean)),
        "image_std": (None, list(info.std)),
        "do_resize": (None, True),
        "do_rescale": (None, True),
        "do_normalize": (None, True),
    }
    for name, values in expected.items():
        if found.get(name) not in values:
            message = f"{name} of the picture processor is {found[name]!r}; here it can be {values[-1]!r}"
            raise ConfigError(message, fix=_TEXT_ONLY)
    factor = found.get("rescale_factor")
    if factor is not None and (not isinstance(factor, float) or abs(factor * 255 - 1) > 1e-9):
        message = f"rescale_factor of the picture processor is {factor!r}; here it can be 1/255"
        raise ConfigError(message, fix=_TEXT_ONLY)
