"""Size of a published checkpoint in bytes, quantised or not, from its configuration and the shapes of its tensors.

A quantised checkpoint leaves some tensors unquantised. Its configuration lists them; the others are known by name.
"""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.loading.quantization import MXFP4_GROUP
from jaxserve.models.loading.structure import ModelStructure
from jaxserve.models.weights import Part

_NEVER = ("embed_tokens", "lm_head", "norm", ".gate.")  # embeddings, head, norms and routers are not quantised
_SCALE_BYTES = 4
_HALF_BYTES = 2  # bytes of a number that is not quantised in a quantised checkpoint; gpt-oss does not state it
_EXCLUDED = ("modules_to_not_convert", "ignore", "exclude_modules")


@dataclass(frozen=True)
class PublishedSize:
    """num_bytes: of all tensors that the model reads. form: format of the quantised tensors, "" if none is."""

    num_bytes: int
    form: str


def published_size(structure: ModelStructure, quantization: dict[str, Any]) -> PublishedSize:
    """Compute the size. quantization: from `read_quantization`."""
    parts = {part.name: part for spec in structure.specs for part in spec.parts}
    form = _form(quantization, structure, any(part.mxfp4 for part in parts.values()))
    plain = _HALF_BYTES if form else jnp.dtype(structure.config.dtype).itemsize
    fp8 = form.startswith("FP8")
    excluded = [pattern for key in _EXCLUDED for pattern in quantization.get(key) or ()]
    total = 0
    for part in parts.values():
        if part.mxfp4:
            total += math.prod(part.shape) // 2 + math.prod(part.shape) // MXFP4_GROUP
        elif fp8 and _is_quantised(part, excluded):
            total += math.prod(part.shape) + _SCALE_BYTES * _num_scales(part, structure.config.weight_block)
        else:
            total += math.prod(part.shape) * plain
    return PublishedSize(total, form)


def read_quantization(path: Path) -> dict[str, Any]:
    """Read the quantization entry of a config.json, or of the hf_quant_config.json beside it; {} if there is none.

    Raises ModelLoadError for a quantization that is not supported.
    """
    inside = read_object(path).get("quantization_config")
    beside = path.with_name("hf_quant_config.json")
    if inside is None and beside.is_file():
        inside = read_object(beside).get("quantization")
    found = inside or {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: 'quantization_config' must be an object")
    if found.get("quant_algo") not in (None, "FP8"):
        raise ModelLoadError(
            f"quantization {found['quant_algo']!r} is not supported (supported: FP8, MXFP4 of gpt-oss)"
        )
    return found


def _form(quantization: dict[str, Any], structure: ModelStructure, mxfp4: bool) -> str:
    if mxfp4:
        return "MXFP4"
    if not quantization:
        return ""
    block = structure.config.weight_block
    return "FP8" if block is None else f"FP8 in blocks of {block[0]} x {block[1]}"


def _is_quantised(part: Part, excluded: list[str]) -> bool:
    if len(part.shape) < 2 or any(word in part.name for word in _NEVER):
        return False
    module = part.name.rpartition(".")[0]
    return not any(module == name or fnmatch.fnmatchcase(module, name) for name in excluded)


def _num_scales(part: Part, block: tuple[int, int] | None) -> int:
    return 1 if block is None else math.prod(-(-n // b) for n, b in zip(part.shape, block, strict=True))
