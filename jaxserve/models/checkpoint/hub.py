"""Resolve a hub id or a directory to a local directory. Downloads data files only; no code of a checkpoint is run."""

from __future__ import annotations

import importlib
from pathlib import Path

from jaxserve.model_files import check_directory, local_directory


def resolve(path_or_id: str | Path, *, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """Return the directory of a checkpoint, or its GGUF file. A hub id is downloaded unless it is cached.

    The hub's environment variables apply (HF_HOME, HF_HUB_OFFLINE, HF_TOKEN for gated models). Raises ModelLoadError
    with the cause: no such directory, model or revision, no access, hub not reachable, or a damaged file.
    """
    directory = local_directory(path_or_id)
    if directory is None:  # by name: the hub's client takes 0.1 s to import
        hub = importlib.import_module("jaxserve.models.checkpoint.download")
        directory = hub.download(str(path_or_id), revision, cache_dir)
    check_directory(directory)
    return directory


def resolve_config(path_or_id: str | Path, *, revision: str | None = None, cache_dir: Path | None = None) -> Path:
    """Return a directory that has config.json, or a GGUF file, as `resolve`. Of a hub id nothing else is downloaded.

    A repository without a config.json is downloaded whole.
    """
    if local_directory(path_or_id) is None:
        hub = importlib.import_module("jaxserve.models.checkpoint.download")
        directory = hub.download_config(str(path_or_id), revision, cache_dir)
        if (directory / "config.json").is_file():
            return directory
    return resolve(path_or_id, revision=revision, cache_dir=cache_dir)
