"""The manifest of a converted checkpoint, see `orbax`: its shapes, its checksums, and the form of its weights."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.file_formats.zarr_array import FIX
from jaxserve.models.loading.quantization import ModuleNames
from jaxserve.models.loading.structure import ModelStructure

MANIFEST_NAME = "jaxserve.json"
MANIFEST_FORMAT = 4  # version of the manifest; 3 added checksums, 4 the form of the weights
_READ = (3, MANIFEST_FORMAT)
_HELD = ("none", "stored", "int8", "fp8", "int4")
MAX_REPEAT = 1024  # copies of a kv head, at most one per device


def is_converted(directory: Path) -> bool:
    return (directory / MANIFEST_NAME).is_file()


def manifest_of(structure: ModelStructure) -> dict[str, Any]:
    """Return the manifest of a model without its checksums."""
    shapes, config = {spec.name: list(spec.shape) for spec in structure.specs}, structure.config
    found = None if config.stored_form is None else config.stored_form.found
    form = {"quantization": config.quantization, "quantized_modules": None if found is None else sorted(found)}
    form |= {"quantized_head": config.quantized_head}
    return {"format": MANIFEST_FORMAT, "kv_repeat": config.kv_repeat, "shapes": shapes} | form


def held_quantization(directory: Path) -> str:
    """Return the ModelConfig.quantization that a converted checkpoint was written with. Raises ModelLoadError."""
    return read_manifest(directory)["quantization"]


def as_converted(config: ModelConfig, directory: Path) -> ModelConfig:
    """Return the config with the form of a converted checkpoint. Raises ModelLoadError if it asks for another."""
    manifest = read_manifest(directory)
    held, modules = manifest["quantization"], manifest["quantized_modules"]
    if config.quantization not in ("none", "stored", held):
        raise ModelLoadError(
            f"{directory} is a converted checkpoint, which is not quantised at load",
            fix="name the original checkpoint, or set model.quantization: auto",
        )
    form = config.stored_form
    if held == "stored" and form is None:
        raise ModelLoadError(f"{directory}: config.json does not describe the quantised weights", fix=FIX)
    if form is not None and modules is not None:
        form = dataclasses.replace(form, found=ModuleNames(modules))
    tied = config.tie_word_embeddings
    if not (config.bidirectional or config.labels):
        tied = not any(name.startswith("lm_head.") for name in manifest["shapes"])
    return config.replace(
        quantization=held, quantized_head=manifest["quantized_head"], stored_form=form, tie_word_embeddings=tied
    )


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a converted checkpoint. Raises ModelLoadError."""
    path = directory / MANIFEST_NAME
    try:
        manifest = read_object(path)
        if manifest["format"] not in _READ:
            raise ValueError(f"it has format {str(manifest['format'])[:20]}, this version reads {_READ}")
        manifest = {"quantization": "none", "quantized_modules": None, "quantized_head": False} | manifest
        if manifest["quantization"] not in _HELD or not isinstance(manifest["quantized_modules"], list | None):
            raise ValueError(f"'quantization' must be one of {', '.join(_HELD)}, and 'quantized_modules' a list")
        if not isinstance(manifest["quantized_head"], bool):
            raise ValueError("'quantized_head' must be true or false")
        manifest["shapes"] = {str(name): tuple(shape) for name, shape in manifest["shapes"].items()}
        if type(manifest["kv_repeat"]) is not int or not 1 <= manifest["kv_repeat"] <= MAX_REPEAT:
            raise ValueError(f"'kv_repeat' must be from 1 to {MAX_REPEAT}")
        if not all(isinstance(sums, dict) for sums in manifest["checksums"].values()):
            raise ValueError("'checksums' has the files of each array")
    except (ValueError, KeyError, TypeError, AttributeError, ModelLoadError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", fix=FIX) from error
    return manifest
