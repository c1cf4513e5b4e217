"""Reads files of a model's directory, which are untrusted: regular files inside it, of bounded size, as text or JSON.

`check_directory` runs before any file is read: reading a FIFO would block, and a link could expose a file of the
operator's.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError

MAX_BYTES = 256 << 20  # per text file; the index of a checkpoint with 100,000 tensors has 10 MB, a tokenizer 30 MB
MAX_TEMPLATE_BYTES = 256 << 10  # published templates have at most 20 kB; one of this size takes 2 s to compile
GGUF_FILES = "*.[gG][gG][uU][fF]"  # a pattern
# Files beside a model's weights that are not its weights: macOS writes ._NAME beside each file; adapters; the state of
# an optimizer; the authors' own format; the picture part of a GGUF file.
_NOT_WEIGHTS = re.compile(r"\.|adapter|lora|pytorch_lora|optimizer|consolidated|mmproj", re.IGNORECASE)
# sentence-transformers' names of one file, in the order in which it looks for them
_SENTENCE_FILES = tuple(
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_PART = re.compile(r"(.+-)\d{5}(-of-(\d{5})\.gguf)", re.IGNORECASE)
# every file that the server, the loader or the converter opens
_READ = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", GGUF_FILES),
    *("additional_chat_templates/*.jinja", "*_Pooling/config.json", "*_LogitScore/config.json", "arrays/*/*"),
)


def check_directory(directory: Path) -> None:
    """Raise ModelLoadError for a file that is not regular, or for a link that leads out of the directory.

    directory: a GGUF file stands for the directory that it is in.
    Links of the hub's cache are allowed: they lead from snapshots/REVISION to the blobs of the same model.
    """
    directory = directory.parent if directory.is_file() else directory
    root = directory.resolve()
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    for path in (path for pattern in _READ for path in sorted(directory.glob(pattern))):
        if not _is_inside(path, allowed):
            raise ModelLoadError(
                f"{path} is no regular file inside the model's directory", fix="put the file itself there, not a link"
            )


def gguf_file(path: Path) -> Path | None:
    """Return the GGUF file that a model is: `path`, or the only weights in the directory `path`; None: it is none.

    Of a file in parts it is the first, whichever `path` is. Raises ModelLoadError for a directory with several, or
    without the first part.
    """
    if path.is_file() and path.suffix.lower() != ".gguf":
        return None
    given = [path] if path.is_file() else weight_files(path, GGUF_FILES)
    files = sorted({gguf_parts(file)[0] for file in given})
    if not files or weight_files(path) or (path / "arrays").is_dir():
        return None
    if len(files) > 1:
        raise ModelLoadError(f"{path} has {len(files)} GGUF files", fix=f"name one of them, such as {files[0]}")
    if not files[0].is_file():
        raise ModelLoadError(f"{files[0]} does not exist", fix="download all parts of the file")
    return files[0]


def weight_files(directory: Path, pattern: str = "*.safetensors") -> list[Path]:
    """Return the files of a directory that may have the model's weights, by name. Adapters and the like are none."""
    return sorted(file for file in directory.glob(pattern) if not _NOT_WEIGHTS.match(file.name))


def sentence_settings(directory: Path) -> Path | None:
    """Return the file in which sentence-transformers keeps the longest text and whether texts are lower-cased."""
    return next((path for name in _SENTENCE_FILES if (path := directory / name).is_file()), None)


def gguf_parts(file: Path) -> list[Path]:
    """Return the paths of all parts of a file that is NAME-00001-of-00003.gguf or another part; else `file` alone.

    So llama.cpp names them. A part may be absent.
    """
    match = _PART.fullmatch(file.name)
    if match is None:
        return [file]
    name, rest, count = match.groups()
    return [file.with_name(f"{name}{number:05}{rest}") for number in range(1, int(count) + 1)] or [file]


def _is_inside(path: Path, allowed: list[Path]) -> bool:
    try:
        real = path.resolve(strict=True)
        return stat.S_ISREG(os.stat(real).st_mode) and any(real.is_relative_to(root) for root in allowed)
    except (OSError, RuntimeError):  # a broken link, or a circle of links
        return False


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return a file's text. Raises ModelLoadError if it is absent, not regular, too large or not UTF-8."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # a FIFO would block, a device has no end
            raise ModelLoadError(f"{path} is no regular file", fix="put the file itself there")
        if path.stat().st_size > max_bytes:
            raise ModelLoadError(f"{path} has more than {max_bytes} bytes")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ModelLoadError(f"{path} does not exist", fix="name a directory with a published checkpoint") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path} cannot be read as UTF-8 text: {error}") from error


def read_json(path: Path) -> Any:
    """Return the value of a JSON file. Raises ModelLoadError with the file's name."""
    try:
        return json.loads(read_text(path))
    except RecursionError:
        raise ModelLoadError(f"{path} cannot be read, it is nested too deep") from None
    except ValueError as error:
        fix = "download the checkpoint again"
        raise ModelLoadError(f"{path} cannot be read, it is not valid JSON: {error}", fix=fix) from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises ModelLoadError with the file's name."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def as_integer(value: Any) -> int | None:
    """Return a JSON number as an integer; None: it is none. 32768.0 is one, as some tools write 32768."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None
