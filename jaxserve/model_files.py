"""Reads files of a model's directory, which are untrusted, without a network and without JAX.

    check_directory     runs before any file is read, because reading a FIFO would block, and a link could expose a file
                        of the operator's
    read_text, read_json, read_object    read regular files inside the directory, of bounded size
    Header, open_header                  read the header of a GGUF file: its metadata and its number of tensors
    local_directory, check_local_model   check whether a model is a local directory that looks like a checkpoint

A GGUF file (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md) is little-endian: "GGUF", the version, the
numbers of tensors and of values; the values by key; name, sizes, type and offset of each tensor; the tensors, each
aligned.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ModelLoadError

DATA_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "*.model")

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
_SPECIAL_FLOATS = MappingProxyType({"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan})
# every file that the server, the loader or the converter opens
_READ = (
    *("*.json", "*.jinja", "*.txt", "*.model", "*.safetensors", GGUF_FILES),
    *("additional_chat_templates/*.jinja", "*_Pooling/config.json", "*_LogitScore/config.json", "arrays/*/*"),
)


def check_directory(directory: Path) -> None:
    """Raise ModelLoadError for a file that is not regular, or for a link that leads out of the directory.

    directory: a GGUF file stands for its directory

    Links of the hub's cache are allowed. They lead from snapshots/REVISION to the blobs of the same model.
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
    """Return the GGUF file of a model: `path`, or the only weights in the directory `path`; None if it has none.

    If the file has parts, the first is returned, whichever part `path` is. Raises ModelLoadError for a directory with
    several files, or without the first part.
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
    """Return the files of a directory that may have the model's weights, by name, without adapters and the like."""
    return sorted(file for file in directory.glob(pattern) if not _NOT_WEIGHTS.match(file.name))


def sentence_settings(directory: Path) -> Path | None:
    """Return the file in which sentence-transformers keeps the longest text and whether texts are lower-cased."""
    return next((path for name in _SENTENCE_FILES if (path := directory / name).is_file()), None)


def picture_processor(directory: Path) -> dict[str, Any] | None:
    """Return how pictures are processed: preprocessor_config.json, or a part of processor_config.json. None: no file.

    Newer repositories have the second one only. Raises ModelLoadError for a damaged file.
    """
    own, whole = directory / "preprocessor_config.json", directory / "processor_config.json"
    if own.is_file():
        return read_object(own)
    part = read_object(whole).get("image_processor") if whole.is_file() else None
    return part if isinstance(part, dict) else None


def gguf_parts(file: Path) -> list[Path]:
    """Return the paths of all parts of a file named as by llama.cpp, NAME-00001-of-00003.gguf; else `file` alone.

    A part may be absent.
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
        return json.loads(read_text(path), object_hook=_special_float)
    except RecursionError:
        raise ModelLoadError(f"{path} cannot be read, it is nested too deep") from None
    except ValueError as error:
        fix = "download the checkpoint again"
        raise ModelLoadError(f"{path} cannot be read, it is not valid JSON: {error}", fix=fix) from error


def _special_float(found: dict[str, Any]) -> Any:
    """Return the number that transformers writes as {"__float__": "Infinity"}, and any other object as it is."""
    if len(found) != 1 or not isinstance(name := found.get("__float__"), str):
        return found
    return _SPECIAL_FLOATS.get(name, found)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file. Raises ModelLoadError with the file's name."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} does not hold a JSON object")
    return value


def as_integer(value: Any) -> int | None:
    """Return a JSON number as an integer; None if it is not one. Some tools write 32768 as 32768.0."""
    if type(value) is float and value.is_integer():
        return int(value)
    return value if type(value) is int else None


_NUMBERS = MappingProxyType({0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"})
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_SMALLEST = 24  # bytes of a file without tensors and values
_LARGEST_HEADER = 100_000_000  # bytes; a vocabulary of 260,000 tokens with its merges has 10 million
_LONGEST_TEXT = 2**20  # bytes; published templates have at most 20 kB
_MAX_VALUES, _MAX_TENSORS = 2**16, 2**14  # the largest published models have 1,200 tensors
_MAX_ITEMS = 2**21  # entries of all arrays; 260,000 tokens with scores, types and as many merges have 1.1 million


class Omitted(str):
    """Stands for a value that is not kept. The text says how large the value is."""

    __slots__ = ()


class Header:
    """Reads a header in order. Raises ValueError or struct.error for values that are damaged or beyond its end."""

    def __init__(self, data: mmap.mmap, end: int) -> None:
        self._data = data
        self._end = end
        self._items = 0  # entries of the arrays that are texts or kept
        self.position = 4

    def counts(self) -> tuple[int, int]:
        """Read the version, and return how many tensors and values there are. Raises ValueError if too many."""
        version, num_tensors, num_values = self.number("I"), self.number("Q"), self.number("Q")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} of GGUF is not supported (supported: 2 and 3, little-endian)")
        if num_tensors > _MAX_TENSORS or num_values > _MAX_VALUES:
            raise ValueError(f"it says that it has {num_tensors} tensors and {num_values} values")
        return num_tensors, num_values

    def values(self, count: int, arrays: Container[str] = ()) -> dict[str, Any]:
        """Read `count` values by their keys.

        arrays: keys whose arrays are returned as lists. Other arrays, and texts of more than 1 MiB, become Omitted.
        Raises ValueError for a key that comes twice.
        """
        values: dict[str, Any] = {}
        for _ in range(count):
            key = self.text()
            if key in values:
                raise ValueError(f"it has the value {key[:100]} twice")
            values[key] = self._value(key in arrays)
        return values

    def number(self, form: str) -> Any:
        """Read one number. form: a format character of `struct`"""
        return self.numbers(form, 1)[0]

    def numbers(self, form: str, count: int) -> tuple[Any, ...]:
        begin = self._skip(count * struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{count}{form}", self._data, begin)

    def text(self) -> str:
        begin = self._skip(size := self.number("Q"))
        if size > _LONGEST_TEXT:
            return Omitted(f"a text of {size} bytes")
        return self._data[begin : self.position].decode()

    def _value(self, keep: bool) -> Any:
        """Read a value after its type. Raises ValueError if arrays have too many texts, or too many items to keep."""
        kind = self.number("I")
        if kind != _ARRAY:
            return self.text() if kind == _STRING else self.number(_number_form(kind))
        kind, count = self.number("I"), self.number("Q")
        if kind == _STRING or keep:
            self._items += count
            if self._items > _MAX_ITEMS:
                raise ValueError(f"its arrays have more than {_MAX_ITEMS} texts or numbers")
        if kind == _STRING:
            if keep:
                return [self.text() for _ in range(count)]
            for _ in range(count):
                self._skip(self.number("Q"))
        elif keep:
            return list(self.numbers(_number_form(kind), count))
        else:
            self._skip(count * struct.calcsize(f"<{_number_form(kind)}"))
        return Omitted(f"an array of {count}")

    def _skip(self, count: int) -> int:
        """Skip bytes and return where they begin."""
        begin, self.position = self.position, self.position + count
        if self.position > self._end:
            raise ValueError("its header is cut off, or names more than it has")
        return begin


@contextmanager
def open_header(path: Path) -> Iterator[Header]:
    """Open a GGUF file, whose header the `with` block reads.

    Raises ModelLoadError if it is not a GGUF file. Errors of the block that damaged bytes cause become ModelLoadError.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if size < _SMALLEST or file.read(4) != b"GGUF":
            raise ModelLoadError(f"{path} is no GGUF file", fix="download it again")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                yield Header(data, min(size, _LARGEST_HEADER))
            except (ValueError, OverflowError, struct.error) as error:
                raise ModelLoadError(f"{path}: {str(error)[:300]}", fix="download the file again") from error
            except ModelLoadError as error:
                raise ModelLoadError(f"{path}: {error}", fix=error.fix) from error


def _number_form(kind: int) -> str:
    if kind not in _NUMBERS:
        raise ValueError(f"it has a value of the unknown type {kind}")
    return _NUMBERS[kind]


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
