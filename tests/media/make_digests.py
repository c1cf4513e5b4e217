"""Write digests.json with transformers' own processors: the oracle of tests/media/test_processor.py.

    pip install transformers==5.24.0 torch pillow==12.3.0
    python -m tests.media.make_digests

Pillow is 12.3 here and not 13: 13 chooses the order of its two passes by their cost, which moves a few values in half
of all pictures. The server's two resizes of one axis give the bits of 12.3 under both.
"""

from __future__ import annotations

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import PIL
from PIL import Image, ImageOps
from transformers import __version__
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.media.pictures import PROCESSORS, SIZES, kinds, png

FILE = Path(__file__).parent / "digests.json"


def digest(data: bytes, kind: str) -> dict[str, object]:
    patch, merge, least, most, (mean, std) = PROCESSORS[kind]
    processor = Qwen2VLImageProcessorPil(
        patch_size=patch,
        merge_size=merge,
        size={"shortest_edge": least, "longest_edge": most},
        image_mean=mean,
        image_std=std,
    )
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    found = processor(images=[image], return_tensors="np")
    values = np.ascontiguousarray(found["pixel_values"], np.float32)
    return {"grid": found["image_grid_thw"][0].tolist(), "sha256": hashlib.sha256(values.tobytes()).hexdigest()}


def main() -> None:
    assert PIL.__version__.startswith("12.3"), PIL.__version__
    found = {}
    for kind in PROCESSORS:
        for name, (height, width) in SIZES.items():
            found[f"{kind} {name}"] = digest(png(height, width), kind)
        for name, data in kinds().items():
            found[f"{kind} {name}"] = digest(data, kind)
    about = {"transformers": __version__, "pillow": PIL.__version__, "numpy": np.__version__}
    FILE.write_text(json.dumps({"made_with": about, "pictures": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
