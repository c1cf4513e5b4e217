"""Pictures of every kind, made by code: numpy and Pillow only, because the oracle's environment reads this file too."""

from __future__ import annotations

import functools
import io
from typing import Any

import numpy as np
from PIL import Image

SIZES = {  # height x width
    "icon": (20, 20),
    "vga": (480, 640),
    "xga": (768, 1024),
    "photo": (1365, 2048),
    "page": (1123, 794),
    "tall": (900, 90),
    "flat": (9, 90),
    "narrow": (10, 2000),
    "odd": (333, 517),
}
# image processor settings: (patch, merge, least and most area, mean and std)
CLIP = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
HALF = ([0.5] * 3, [0.5] * 3)
PROCESSORS: dict[str, tuple[int, int, int, int, Any]] = {
    "qwen2_vl": (14, 2, 3136, 12_845_056, CLIP),
    "qwen2_5_vl": (14, 2, 3136, 1_003_520, CLIP),
    "qwen3_vl": (16, 2, 65_536, 16_777_216, HALF),
}


def pixels(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    """A picture with slopes, edges and noise, uint8 [height, width, channels]."""
    y, x = np.mgrid[:height, :width]
    base = np.stack([x * 255 // max(1, width - 1), y * 255 // max(1, height - 1), (x // 7 + y // 5) % 2 * 255], -1)
    if channels == 4:
        base = np.concatenate([base, ((x + y) % 256)[..., None]], -1)
    noise = np.random.default_rng(seed).integers(-40, 41, (height, width, channels))
    return np.clip(base[..., :channels] + noise, 0, 255).astype(np.uint8)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


@functools.cache
def png(height: int, width: int, seed: int = 0) -> bytes:
    return encoded(Image.fromarray(pixels(height, width, seed=seed)), compress_level=1)


def kinds() -> dict[str, bytes]:
    """Lossless pictures of each mode, 150 x 220."""
    rgb, rgba = Image.fromarray(pixels(150, 220)), Image.fromarray(pixels(150, 220, 4))
    frames = [Image.fromarray(pixels(150, 220, seed=seed)) for seed in (1, 2)]
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "rgb": encoded(rgb),
        "grey": encoded(rgb.convert("L")),
        "bits": encoded(rgb.convert("1")),
        "palette": encoded(rgb.convert("P", palette=Image.Palette.ADAPTIVE)),
        "clear_palette": encoded(rgb.convert("P", palette=Image.Palette.ADAPTIVE), transparency=3),
        "alpha": encoded(rgba),
        "grey_alpha": encoded(rgba.convert("LA")),
        "gif": encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        "webp": encoded(rgba, "WEBP", lossless=True, exact=True),
        "animated_webp": encoded(frames[0], "WEBP", lossless=True, save_all=True, append_images=frames[1:]),
        "animated_png": encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        "turned": encoded(rgb, "PNG", exif=turned),
    }
