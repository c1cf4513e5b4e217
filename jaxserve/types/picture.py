"""A picture as the engine gets it: patches of pixels, and the tokens of the prompt that stand for it. No jax.

The API process makes it (media), the engine's tower turns the patches into rows, one for each token of its run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np

from jaxserve.errors import InvalidValueError

DIGEST_BYTES = 32


class Picture(msgspec.Struct, frozen=True, array_like=True):
    """One picture of a prompt. It stands at positions [start, start + num_tokens), which are all placeholders.

    digest      SHA-256 of `patches`, `grid`, the processor's settings and `PictureInfo.kind`. Equal digests mean equal
                rows, so the prefix cache and the pool of rows are searched by it: leave nothing out that changes a row.
                Weights are left out, because both are emptied when weights are replaced
    patches     uint8 [P, W] in row-major order, in the tower's order of patches. W is channels x patch x patch for a
                still: the frames of a still are equal, so one is sent. Not normalized: the tower does that
    grid        frames, rows and columns of patches; their product is P
    """

    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]
    patches: bytes
    grid: tuple[int, int, int]
    start: int
    num_tokens: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + self.num_tokens

    @property
    def num_patches(self) -> int:
        frames, rows, columns = self.grid
        return frames * rows * columns


class PictureInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The pictures that the tower of a model takes.

    kind         names the processor and the placeholders, as `model_type` in config.json: "qwen3_vl", "qwen3_5",
                 "qwen2_5_vl"
    patch_size   side of a patch in pixels
    merge_size   a token is merge_size x merge_size patches
    width        bytes of a patch, W of `Picture.patches`
    token_id     the placeholder of one row
    max_tokens   of one picture
    mean, std    of each channel, by which the tower normalizes pixels of 0 to 1
    """

    kind: str
    patch_size: int
    merge_size: int
    width: int
    token_id: int
    max_tokens: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def check_pictures(pictures: Sequence[Picture], info: PictureInfo | None, prompt: Sequence[int]) -> None:
    """Raise InvalidValueError unless a model with `info` can read the pictures at their places in the prompt."""
    if not pictures:
        return
    if info is None:
        raise InvalidValueError("this model takes no pictures", param="messages")
    end = 0
    for picture in pictures:
        frames, rows, columns = picture.grid
        merged = info.merge_size
        whole = frames == 1 and rows > 0 and columns > 0 and rows % merged == 0 and columns % merged == 0
        if not whole or picture.num_tokens * merged * merged != picture.num_patches:
            raise InvalidValueError(f"a picture of {picture.grid} patches does not make {picture.num_tokens} tokens")
        if len(picture.patches) != picture.num_patches * info.width:
            raise InvalidValueError(f"a picture has {len(picture.patches)} bytes, not {info.width} for each patch")
        if picture.num_tokens > info.max_tokens:
            raise InvalidValueError(f"a picture of {picture.num_tokens} tokens; the most are {info.max_tokens}")
        if picture.start < end or picture.end > len(prompt):
            raise InvalidValueError("the pictures overlap, or end after the prompt")
        if any(token != info.token_id for token in prompt[picture.start : picture.end]):
            raise InvalidValueError("a picture stands at tokens that are not its placeholders")
        end = picture.end


def position_delta(pictures: Sequence[Picture], merge: int) -> int:
    """Return the rotary position minus the position of a token behind all pictures.

    A picture of h x w tokens takes max(h, w) positions (M-RoPE, arXiv:2409.12191).
    """
    return sum(_side(picture, merge) - picture.num_tokens for picture in pictures)


def position_shifts(pictures: Sequence[Picture], merge: int, start: int, end: int) -> np.ndarray:
    """Return what to add to the positions of tokens [start, end), after `position_delta`, int32 [3, end - start].

    The sums are the rotary positions by frame, row and column. The shifts are 0 behind all pictures, and in a prompt of
    text.
    """
    shifts = np.zeros((3, end - start), np.int32)
    after = 0  # what the pictures behind a token still take from it
    last = end
    for picture in reversed(pictures):
        _text(shifts, start, picture.end, last, after)
        after -= _side(picture, merge) - picture.num_tokens
        last = picture.start
        first, final = max(start, picture.start), min(end, picture.end)
        if first < final:
            offsets = np.arange(first - picture.start, final - picture.start)
            columns = picture.grid[2] // merge
            by_axis = np.stack([np.zeros_like(offsets), offsets // columns, offsets % columns])
            shifts[:, first - start : final - start] = by_axis - offsets + after
    _text(shifts, start, 0, last, after)
    return shifts


def _text(shifts: np.ndarray, start: int, first: int, last: int, after: int) -> None:
    """Write the shift of the text at positions [first, last) to the columns from `start` on."""
    low, high = max(0, first - start), max(0, last - start)
    shifts[:, low:high] = after


def _side(picture: Picture, merge: int) -> int:
    """Return how many rotary positions a picture takes."""
    return max(picture.grid[1], picture.grid[2]) // merge
