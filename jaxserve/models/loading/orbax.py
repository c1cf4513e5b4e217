"""Converted checkpoints: an Orbax directory with the parameters as the model holds them, fused, wide or quantised.

`convert` writes them, with a manifest jaxserve.json by which `load_model` recognizes them. They load on any mesh, each
device reading its own part: kv heads that were copied for one mesh are merged or copied again for another.
"""

from __future__ import annotations

import json
import shutil
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orbax.checkpoint as ocp

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.converted import MANIFEST_NAME, manifest_of
from jaxserve.models.loading.file_formats.zarr_array import BUFFER
from jaxserve.models.loading.hub import DATA_FILES
from jaxserve.models.loading.orbax_reader import ARRAYS, READERS
from jaxserve.models.loading.structure import LoadedModel


def convert(model: LoadedModel, target: Path) -> None:
    """Write a loaded model, and the small files of its directory, to `target`.

    Raises ModelLoadError unless `target` is missing or empty, or if it cannot be written.
    """
    check_target(target)
    try:
        _write(model, target)
    except (OSError, ValueError) as error:  # ValueError: of tensorstore, for a full disk
        fix = "make room on the disk, remove the directory and call again"
        raise ModelLoadError(f"{target} cannot be written: {error}", fix=fix) from None


def _write(model: LoadedModel, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for pattern in (*DATA_FILES, "*_Pooling/config.json"):
        for path in model.directory.glob(pattern):
            if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
                copy = target / path.relative_to(model.directory)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)
    names = [spec.name for spec in model.structure.specs]
    # One raw file per chunk, so that zarr_array can read it: no compression, no database of chunks.
    with ocp.PyTreeCheckpointer(use_compression=False, use_ocdbt=False) as checkpointer:
        checkpointer.save((target / ARRAYS).absolute(), dict(zip(names, model.leaves, strict=True)))
    # Written last: a directory without a manifest counts as incomplete.
    manifest = manifest_of(model.structure) | {"checksums": _checksums(target / ARRAYS, names)}
    (target / MANIFEST_NAME).write_text(json.dumps(manifest, indent=1))


def check_target(target: Path) -> None:
    """Raise ModelLoadError unless `target` is missing or an empty directory."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelLoadError(f"{target} is not empty", fix="name a new directory")


def _checksums(arrays: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """Return the CRC-32 of each chunk file, by the array's name and the file's name."""

    def of_array(name: str) -> dict[str, int]:
        files = sorted(path for path in (arrays / name).iterdir() if not path.name.startswith("."))
        return {path.name: _crc32(path) for path in files}

    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(names, pool.map(of_array, names), strict=True))


def _crc32(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while piece := file.read(BUFFER):
            found = zlib.crc32(piece, found)
    return found
