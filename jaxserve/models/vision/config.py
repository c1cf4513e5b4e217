"""The configuration of a tower, and where the patches of a picture lie. No jax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from jaxserve.types.picture import PictureInfo

PieceKind = Literal["attend", "project", "queries", "mlp", "deep", "end"]


class TowerPiece(NamedTuple):
    """A part of a tower that runs at once.

    attend     the first half of a block
    project    its queries, keys and values, if it runs in parts
    queries    one of these parts: the attention of some of the patches
    mlp        the second half
    deep       the merger of a deepstack block
    end        the merger of the last block

    number     of the block, or of the deepstack merger
    part       of `queries`, from 0 on
    """

    kind: PieceKind
    number: int
    part: int = 0


@dataclass(frozen=True)
class VisionConfig:
    """One tower. Every field is static and hashable.

    kind          the processor and the placeholders, see `PictureInfo.kind`
    out_size      hidden size of the language model
    merge         a token is made of merge x merge patches
    frames        frames that the patch projection takes; a still has equal ones
    deepstack     blocks after which the hidden states are merged too, and added after the first text layers
    table         sides of the square table of learned positions; 0: there is none
    window        side in tokens of the windows that blocks attend in, except the blocks of `whole`; 0: no block does
    mean, std     of each channel, by which pixels of 0 to 1 are normalized
    token_id      the placeholder of one row
    """

    kind: str
    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_size: int
    patch_size: int
    merge: int
    frames: int
    channels: int
    norm: Literal["layer", "rms"]
    gated: bool
    activation: Literal["silu", "gelu_tanh"]
    patch_bias: bool
    table: int
    deepstack: tuple[int, ...]
    window: int
    whole: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    token_id: int
    theta: float = 10000.0
    norm_eps: float = 1e-6

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def width(self) -> int:
        """Pixel values of a patch."""
        return self.channels * self.patch_size**2

    @property
    def row_parts(self) -> int:
        """Parts of a row, each of out_size numbers: of the last block, and of each deepstack block."""
        return 1 + len(self.deepstack)

    def pieces(self, parts: int) -> tuple[TowerPiece, ...]:
        """Return the pieces of a picture in their order. parts: of the first half of a block"""
        found: list[TowerPiece] = []
        for block in range(self.depth):
            if parts == 1:
                found.append(TowerPiece("attend", block))
            else:
                found.append(TowerPiece("project", block))
                found.extend(TowerPiece("queries", block, part) for part in range(parts))
            found.append(TowerPiece("mlp", block))
            if block in self.deepstack:
                found.append(TowerPiece("deep", self.deepstack.index(block)))
        return (*found, TowerPiece("end", 0))

    def info(self, max_tokens: int) -> PictureInfo:
        """Describe the tower to the API process. max_tokens: of a picture"""
        return PictureInfo(
            kind=self.kind,
            patch_size=self.patch_size,
            merge_size=self.merge,
            width=self.width,
            token_id=self.token_id,
            max_tokens=max_tokens,
            mean=self.mean,
            std=self.std,
        )


class PatchLayout(NamedTuple):
    """Where the P patches of pictures lie, and which of them see each other; patches from the n-th on are padding.

    places      int32 [P, 6]: row and column of the patch, and four entries of the table of positions
    weights     float32 [P, 4] of the four entries
    segments    int32 [2, P]: a patch sees the patches of its segment, in blocks that attend whole and in windows
    """

    places: np.ndarray
    weights: np.ndarray
    segments: np.ndarray


def patch_layout(config: VisionConfig, grids: Sequence[tuple[int, int, int]], size: int) -> PatchLayout:
    """Lay out the patches of stills, each grid (1, rows, columns), one after the other and padded to `size`.

    The order is that of Qwen's processors: the merge x merge patches of a token follow each other. The table of
    positions is stretched over each picture, bilinear with aligned corners. Padding sees padding only.
    """
    places, weights = np.zeros((size, 6), np.int32), np.zeros((size, 4), np.float32)
    segments = np.full((2, size), -1, np.int32)
    m, side = config.merge, config.window * config.merge
    first = 0
    for number, (_, rows, columns) in enumerate(grids):
        mine = slice(first, first + rows * columns)
        row, column = (
            axis.reshape(rows // m, m, columns // m, m).swapaxes(1, 2).reshape(-1)
            for axis in np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij")
        )
        places[mine, 0], places[mine, 1] = row, column
        segments[0, mine] = number
        if config.table:
            above, below, down = _between(row, rows, config.table)
            left, right, along = _between(column, columns, config.table)
            entries = [y * config.table + x for y in (above, below) for x in (left, right)]
            places[mine, 2:] = np.stack(entries, axis=1)
            shares = [y * x for y in (1 - down, down) for x in (1 - along, along)]
            weights[mine] = np.stack(shares, axis=1)
        if side:
            segments[1, mine] = segments[1].max() + 1 + row // side * -(-columns // side) + column // side
        first = mine.stop
    return PatchLayout(places, weights, segments)


def _between(index: np.ndarray, count: int, side: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the entries of a table of `side` entries around each index of `count`, and the share of the second."""
    position = index * ((side - 1) / (count - 1)) if count > 1 else np.zeros(len(index))
    first = np.minimum(position.astype(np.int64), side - 1)
    return first, np.minimum(first + 1, side - 1), position - first
