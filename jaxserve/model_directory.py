"""Checks whether a model is a local directory and looks like a checkpoint, without a network and without JAX."""

from __future__ import annotations

import os
from pathlib import Path

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import check_directory, gguf_file


def local_directory(path_or_id: str | Path) -> Path | None:
    """Return the local directory or GGUF file; None for a hub id. Raises ModelLoadError for another path."""
    path = Path(path_or_id).expanduser()
    if path.is_dir() or (path.is_file() and gguf_file(path)):
        return path
    if path.exists():
        raise ModelLoadError(f"{path} is a file", fix="name the directory that holds config.json and the weights")
    if _is_path(str(path_or_id)):
        raise ModelLoadError(
            f"model directory {path} does not exist", fix="check the path, or give a hub id 'owner/name'"
        )
    return None


def check_local_model(path_or_id: str | Path) -> None:
    """Raise ModelLoadError if the model is a path that cannot be a published checkpoint."""
    directory = local_directory(path_or_id)
    if directory is not None:
        check_directory(directory)
    if directory is not None and not gguf_file(directory) and not (directory / "config.json").is_file():
        raise ModelLoadError(
            f"{directory / 'config.json'} does not exist", fix="name a directory with a published checkpoint"
        )


def _is_path(text: str) -> bool:
    return text.startswith((".", "~", os.sep)) or text.count("/") != 1
