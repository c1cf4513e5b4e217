"""Which directories of this machine a client may name."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from jaxserve.errors import InvalidValueError
from jaxserve.model_files import GGUF_FILES

_REFUSED = "model_path is no directory that server.weights_directories allows"


def checked_directory(path: str, roots: Iterable[Path]) -> Path:
    """Return the directory without symbolic links. A relative path is relative to each of `roots`.

    Raises InvalidValueError unless it is in one of `roots`, and its safetensors and GGUF files are too. The message is
    the same whether something is there or not.
    """
    allowed = [Path(os.path.realpath(root.expanduser())) for root in roots]
    for root in allowed:
        try:
            found = (root / path).resolve(strict=True)
            weights = (*found.glob("*.safetensors"), *found.glob(GGUF_FILES))
            if found.is_dir() and all(_is_within(each, allowed) for each in (found, *weights)):
                return found
        except (OSError, ValueError, RuntimeError):  # nothing there, a zero byte in it, a loop of links
            continue
    raise InvalidValueError(_REFUSED, param="model_path")


def _is_within(path: Path, allowed: list[Path]) -> bool:
    real = path.resolve(strict=True)
    return any(real.is_relative_to(root) for root in allowed)
