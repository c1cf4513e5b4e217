"""Writes converted checkpoints: Orbax directories with the parameters as the model has them in memory.

Parameters are fused, and quantized if the model's are. `load_model` recognizes the directory by its manifest
jaxserve.json. It loads on any mesh, and each device reads its own part: kv heads that were copied for one mesh are
merged or copied again for another.

An interrupted conversion leaves the file jaxserve.incomplete, and the next conversion replaces the directory's content.
The threads of the interrupted one may write until its process ends, so it cannot remove everything itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orbax.checkpoint as ocp

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import DATA_FILES
from jaxserve.models.checkpoint.orbax_reader import ARRAYS, BUFFER, MANIFEST_NAME, READERS, is_converted, manifest_of
from jaxserve.models.checkpoint.structure import LoadedModel

INCOMPLETE = "jaxserve.incomplete"


def convert(model: LoadedModel, target: Path) -> None:
    """Write a loaded model, and the small files of its directory, to `target`.

    Raises ModelLoadError unless `target` is missing, empty or incomplete, or if it cannot be written.
    """
    check_target(target)
    try:
        with _marked(target):
            _write(model, target)
    except (OSError, ValueError) as error:  # ValueError: of tensorstore, for a full disk
        fix = "make room on the disk and call again"
        raise ModelLoadError(f"{target} cannot be written: {error}", fix=fix) from None


@contextlib.contextmanager
def _marked(target: Path) -> Iterator[None]:
    """Keep `target` marked as incomplete, and locked, until all is written. Removes files of an earlier conversion.

    Raises ModelLoadError if another process writes to it.
    """
    target.mkdir(parents=True, exist_ok=True)
    mark = target / INCOMPLETE
    with mark.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelLoadError(f"another process converts to {target}", fix="name a new directory") from None
        try:
            _clear(target)
            yield
        except BaseException:
            _clear(target)
            raise
        mark.unlink()


def _clear(target: Path) -> None:
    """Remove everything except the mark, as far as possible."""
    for path in target.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != INCOMPLETE:
            path.unlink(missing_ok=True)


def _write(model: LoadedModel, target: Path) -> None:
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
    """Raise ModelLoadError unless `target` is missing, empty, or left by an interrupted conversion."""
    left = (target / INCOMPLETE).is_file() and not is_converted(target)
    if not left and target.exists() and (not target.is_dir() or any(target.iterdir())):
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
