"""Copy a tokenizer into a model directory with random weights."""

from __future__ import annotations

import shutil
from importlib.resources import as_file, files
from pathlib import Path

_NAMES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


def copy_tokenizer(target: Path, source: Path | None = None) -> None:
    """Copy the tokenizer of the directory `source`, by default the demo model's, to the directory `target`."""
    with as_file(files("jaxserve") / "assets" / "demo") as demo:
        for path in (Path(source or demo) / name for name in _NAMES):
            if path.exists():
                shutil.copyfile(path, target / path.name)
