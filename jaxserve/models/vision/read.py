"""Reads the towers of config.json, and the rotation by picture positions of the language models that have one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxserve.model_files import picture_processor
from jaxserve.models.checkpoint.read_config import Json, integer, number, optional_integer, shown
from jaxserve.models.rope import RopeConfig
from jaxserve.models.vision.config import VisionConfig

_CLIP = {"mean": (0.48145466, 0.4578275, 0.40821073), "std": (0.26862954, 0.26130258, 0.27577711)}
_HALF = {"mean": (0.5,) * 3, "std": (0.5,) * 3}
_TOKEN_ID = 151655  # of Qwen2.5-VL and Qwen3-VL
_ACTIVATIONS: Mapping[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


def qwen3_vl(hf: Json, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Qwen3-VL's tower and of its interleaved rotation. Raises ValueError or KeyError."""
    vision = _with_table(hf, "qwen3_vl")
    deepstack = _indices(hf["vision_config"], "deepstack_visual_indexes", vision.depth, (8, 16, 24))
    if len(deepstack) > fields["num_layers"]:
        raise ValueError(f"{len(deepstack)} deepstack blocks are given for {fields['num_layers']} layers")
    vision = dataclasses.replace(vision, deepstack=deepstack)
    changes = {"vision": vision, "rope": _by_axis(fields["rope"], _sections(hf, (24, 20, 20)), interleaved=True)}
    if fields.get("moe") is not None:  # its gates are normalized, whether the file says so or not
        changes["moe"] = dataclasses.replace(fields["moe"], normalize=True)
    return changes


def qwen3_5(hf: Json, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Qwen3.5's tower, Qwen3-VL's without deepstack, and of its rotation in sections.

    Raises ValueError or KeyError.
    """
    vision = _with_table(hf, "qwen3_5", 248056)
    if found := hf["vision_config"].get("deepstack_visual_indexes"):
        raise ValueError(f"'deepstack_visual_indexes' must be empty, not {shown(found)}")
    return {"vision": vision, "rope": _by_axis(fields["rope"], _sections(hf, (11, 11, 10)), interleaved=True)}


def _with_table(hf: Json, kind: str, token_id: int = _TOKEN_ID) -> VisionConfig:
    """Return the tower of Qwen3-VL, with a table of positions and without deepstack."""
    activation = "gelu_pytorch_tanh"
    vision = _tower(hf, kind, token_id, depth=27, hidden=1152, ffn=4304, patch=16, activation=activation)
    table = optional_integer(hf["vision_config"], "num_position_embeddings", 2304)
    if round(table**0.5) ** 2 != table:
        raise ValueError(f"'num_position_embeddings' must be a square, not {table}")
    return dataclasses.replace(vision, **_HALF, norm="layer", patch_bias=True, table=round(table**0.5))


def qwen2_5_vl(hf: Json, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Qwen2.5-VL's tower and of its rotation in sections. Raises ValueError or KeyError."""
    vision = _tower(hf, "qwen2_5_vl", _TOKEN_ID, depth=32, hidden=1280, ffn=3420, patch=14, activation="silu")
    inside = hf["vision_config"]
    window = optional_integer(inside, "window_size", 112) // (vision.merge * vision.patch_size)
    if window == 0:
        raise ValueError("'window_size' is smaller than a token")
    vision = dataclasses.replace(
        vision,
        **_CLIP,
        gated=True,
        window=window,
        whole=_indices(inside, "fullatt_block_indexes", vision.depth, (7, 15, 23, 31)),
    )
    return {"vision": vision, "rope": _by_axis(fields["rope"], _sections(hf, (16, 24, 24)), interleaved=False)}


def _tower(
    hf: Json,
    kind: str,
    token_id: int,
    *,
    depth: int,
    hidden: int,
    ffn: int,
    patch: int,
    activation: str,
) -> VisionConfig:
    """Return the fields that all towers have. token_id and the arguments after it: values of keys that are not given"""
    inside = hf["vision_config"]
    if not isinstance(inside, dict):
        raise ValueError(f"'vision_config' must be an object, not {shown(inside)}")
    name = inside.get("hidden_act") or activation
    if name not in _ACTIVATIONS:
        raise ValueError(f"activation {shown(name)} of 'vision_config' is not supported")
    size, heads = optional_integer(inside, "hidden_size", hidden), optional_integer(inside, "num_heads", 16)
    if size % heads or size // heads % 4:
        raise ValueError(f"a tower of {size} with {heads} heads does not rotate by row and column")
    if optional_integer(inside, "in_channels", 3) != 3:
        raise ValueError("'in_channels' must be 3")
    out = optional_integer(inside, "out_hidden_size", integer(hf, "hidden_size"))
    if out != integer(hf, "hidden_size"):
        raise ValueError(f"'out_hidden_size' is {out}, and the language model's size {hf['hidden_size']}")
    rotation = inside.get("rope_parameters") or {}
    return VisionConfig(
        kind=kind,
        depth=optional_integer(inside, "depth", depth),
        hidden_size=size,
        num_heads=heads,
        intermediate_size=optional_integer(inside, "intermediate_size", ffn),
        out_size=out,
        patch_size=optional_integer(inside, "patch_size", patch),
        merge=optional_integer(inside, "spatial_merge_size", 2),
        frames=optional_integer(inside, "temporal_patch_size", 2),
        channels=3,
        norm="rms",
        gated=False,
        activation=_ACTIVATIONS[name],
        patch_bias=False,
        table=0,
        deepstack=(),
        window=0,
        whole=(),
        mean=(),
        std=(),
        token_id=optional_integer(hf, "image_token_id", token_id),
        theta=number(rotation, "rope_theta", 10000.0),
    )


def _indices(inside: Json, key: str, depth: int, default: tuple[int, ...]) -> tuple[int, ...]:
    """Return the key's list of blocks, ascending."""
    values = inside.get(key)
    found = default if values is None else values
    whole = isinstance(found, list | tuple) and all(type(i) is int and 0 <= i < depth for i in found)
    if not whole or list(found) != sorted(set(found)):
        raise ValueError(f"{key!r} must be ascending numbers of the {depth} blocks, not {shown(values)}")
    return tuple(found)


def _sections(hf: Json, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many frequencies turn by frame, row and column."""
    rotation = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    values = rotation.get("mrope_section")
    if values is None:
        return default
    if not isinstance(values, list) or len(values) != 3 or not all(type(v) is int and 0 <= v < 2**14 for v in values):
        raise ValueError(f"'mrope_section' must be three numbers, not {shown(values)}")
    return values[0], values[1], values[2]


def _by_axis(rope: RopeConfig, sections: tuple[int, int, int], *, interleaved: bool) -> RopeConfig:
    """Return the rotation with the axis of each frequency: 0 frame, 1 row, 2 column.

    interleaved: frequency 3k + 1 turns by the row and 3k + 2 by the column; else the sections follow each other
    """
    count = rope.rotary_dim // 2
    if sum(sections) != count:
        raise ValueError(f"'mrope_section' has {sum(sections)} frequencies, and the rotation {count}")
    if interleaved:
        axes = tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(count))
    else:
        axes = tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    return dataclasses.replace(rope, axes=axes)


def with_processor(vision: VisionConfig, directory: Path) -> VisionConfig:
    """Return the tower with the mean and deviation that the directory's processor names, if any. Raises ValueError."""
    found = picture_processor(directory) or {}
    mean, std = (_three(found, key) for key in ("image_mean", "image_std"))
    return dataclasses.replace(vision, mean=mean or vision.mean, std=std or vision.std)


def _three(found: Json, key: str) -> tuple[float, ...] | None:
    values = found.get(key)
    if values is None:
        return None
    if not isinstance(values, list) or len(values) != 3 or not all(type(v) in (int, float) for v in values):
        raise ValueError(f"{key!r} must be three numbers, not {shown(values)}")
    if key == "image_std" and not all(value > 0 for value in values):
        raise ValueError(f"{key!r} must be above 0, not {shown(values)}")
    return tuple(map(float, values))
