"""Models with towers against transformers: the rows of a tower, and logits of prompts with 0, 1, 2 and 5 pictures.

The pictures are of unequal sizes, at the start, in the middle and at the end of a prompt.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.decoder import PictureRows
from jaxserve.models.vision.config import patch_layout
from jaxserve.types.picture import Picture, position_delta, position_shifts
from tests.models.checkpoints import write_checkpoint
from tests.models.families import GOLDENS, golden_tensors
from tests.models.picture_cases import CASES, MERGE, PROMPTS, prompt, prompts_of
from tests.quick import QUICK

TOLERANCE = 1e-4
PATCHES = 96  # of the program of all towers: those of the largest picture, or of several
FLOAT32 = jnp.dtype("float32")
LONG_CASES = ("qwen3_5_moe_pictures",)  # its tower is that of qwen3_5_pictures, its text that of qwen3_5_moe


def pictures_of(name: str) -> tuple[list[int], tuple[Picture, ...]]:
    """The token ids of a prompt and its pictures."""
    ids, pixels = prompt(name)
    return ids, tuple(Picture(hashlib.sha256(each.patches + bytes(each.grid)).digest(), *each) for each in pixels)


def write_case(case: str, directory: Path) -> Path:
    """Write the checkpoint of a case."""
    tensors = golden_tensors(case)
    return write_checkpoint(directory, CASES[case], tensors)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    @functools.cache
    def model(case: str) -> LoadedModel:
        return load_model(write_case(case, tmp_path_factory.mktemp(case)), dtype=FLOAT32)

    return model


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def rows(structure, leaves, patches, layout):
    return structure.bind(leaves).visual(patches, *layout, FLOAT32)


def encoded(model: LoadedModel, *pictures: Picture, size: int = PATCHES) -> np.ndarray:
    """The rows of pictures that one program encodes [parts, tokens, D], padded to `size` patches."""
    vision = model.config.vision
    assert vision is not None
    patches = np.zeros((size, vision.width), np.uint8)
    given = np.frombuffer(b"".join(each.patches for each in pictures), np.uint8).reshape(-1, vision.width)
    patches[: len(given)] = given
    layout = patch_layout(vision, [each.grid for each in pictures], size)
    found = rows(model.structure, model.leaves, patches, layout)
    return np.asarray(found)[:, : sum(each.num_tokens for each in pictures)]


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def logits(structure, leaves, ids, positions, index, pool):
    model, attend = structure.bind(leaves), dense_attend(structure.config)
    caches = (None,) * structure.config.num_layers
    hidden, _ = model(ids, positions, caches, attend, pictures=PictureRows(index, pool))
    return model.logits(hidden)


def forward(model: LoadedModel, name: str, length: int = 160) -> np.ndarray:
    """Logits [T, V] of a prompt of pictures. All prompts are computed by one program."""
    ids, pictures = pictures_of(name)
    vision = model.config.vision
    assert vision is not None
    index, parts = np.full(length, -1, np.int32), [np.zeros((vision.row_parts, 1, vision.out_size), np.float32)]
    done = 1
    for picture in pictures:
        parts.append(encoded(model, picture))
        index[picture.start : picture.end] = np.arange(done, done + picture.num_tokens)
        done += picture.num_tokens
    pool = np.zeros((*parts[0].shape[:1], 96, parts[0].shape[2]), np.float32)
    pool[:, :done] = np.concatenate(parts, axis=1)
    positions = np.tile(np.arange(length, dtype=np.int32), (3, 1)) + position_delta(pictures, MERGE)
    positions[:, : len(ids)] += position_shifts(pictures, MERGE, 0, len(ids))
    padded = np.zeros(length, np.int32)
    padded[: len(ids)] = ids
    return np.asarray(logits(model.structure, model.leaves, padded, positions, index, pool))[: len(ids)]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] * (c in LONG_CASES)) for c in CASES])
def test_rows_and_logits_are_those_of_transformers(case: str, models: Callable[[str], LoadedModel]):
    model, arrays = models(case), np.load(GOLDENS / f"{case}.npz")
    for name in prompts_of(case):
        _, pictures = pictures_of(name)
        if pictures:
            fits = sum(each.num_patches for each in pictures) <= PATCHES
            programs = [encoded(model, *pictures)] if fits else [encoded(model, each) for each in pictures]
            found = np.concatenate(programs, axis=1)
            expected = arrays[f"{name}_rows"]
            by_token = found.transpose(1, 0, 2).reshape(len(expected), -1)
            assert np.abs(by_token - expected).max() <= TOLERANCE * np.abs(expected).max(), name
        expected = arrays[f"{name}_logits"]
        assert np.abs(forward(model, name) - expected).max() <= TOLERANCE * np.abs(expected).max(), name


@pytest.mark.parametrize("name", PROMPTS)
def test_shifts_of_a_part_are_those_of_the_whole(name: str):
    ids, pictures = pictures_of(name)
    whole = position_shifts(pictures, MERGE, 0, len(ids) + 30)
    assert not whole[:, len(ids) :].any()
    for start, end in ((0, 1), (3, 9), (8, 30), (len(ids) - 1, len(ids) + 5)):
        np.testing.assert_array_equal(position_shifts(pictures, MERGE, start, end), whole[:, start:end])


def test_a_tower_of_qwen3_5_has_no_deepstack():
    config = CASES["qwen3_5_pictures"]
    assert from_hf(config).vision is not None
    with pytest.raises(ValueError, match=r"'deepstack_visual_indexes' must be empty, not \[1\]"):
        from_hf(config | {"vision_config": config["vision_config"] | {"deepstack_visual_indexes": [1]}})


def test_a_language_model_that_was_saved_alone_takes_no_pictures(tmp_path: Path):
    case = "qwen3_vl_pictures"
    text = {name: tensor for name, tensor in golden_tensors(case).items() if ".visual." not in name}
    model = load_model(write_checkpoint(tmp_path, CASES[case], text), dtype=FLOAT32)
    assert model.config.vision is None
