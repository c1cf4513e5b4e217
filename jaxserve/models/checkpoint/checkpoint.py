"""Finds the tensors of a checkpoint by name, over all its files, and reports every tensor that does not fit a model.

It searches the files, reads the index file and checks that the checkpoint is complete. HeldTensor stands for a tensor
in memory. No jax: callers pass names and shapes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import gguf_file, gguf_parts, read_json, weight_files
from jaxserve.models.checkpoint.gguf import BlockTensor
from jaxserve.models.checkpoint.gguf_models import published_tensors
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, copy_converted, read_contents, read_rows
from jaxserve.models.tensor_names import Rules, renamed


@dataclass(frozen=True)
class HeldTensor:
    """An array with the methods of a tensor in a file.

    array: a numpy or jax array. It is read when it is needed, and never changed.
    """

    array: Any

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(self.array.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.array.shape)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def rows(self, first: int, last: int | None) -> np.ndarray:
        """Return the rows [first, last) of the first axis, or all rows if last is None. Do not change them."""
        whole = np.asarray(self.array)
        return whole if last is None or not whole.ndim else whole[first:last]


class FileState(NamedTuple):
    """The place of a file, its size and the time of its last change. If they are equal, so is the file."""

    device: int
    number: int
    size: int
    changed: int


def file_state(path: Path) -> FileState | None:
    """Return the state of a file; None: it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return FileState(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)


Shapes = tuple[tuple[int, ...], ...]
Tensor = TensorInfo | HeldTensor | BlockTensor
INDEX = "model.safetensors.index.json"
_COMPARED = 4 * 2**20  # bytes that are read at a time


@dataclass
class Misfits:
    """The tensor names that prevent loading. All are collected first, so that one error can report them."""

    missing: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    duplicate: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def raise_if_any(self, directory: Path, architecture: str, aside: Iterable[str] = ()) -> None:
        """Raise one ModelLoadError that lists every name, if there is any. aside: see `Checkpoint`"""
        kinds = {
            "missing": self.missing,
            "unknown": self.unknown,
            "in more than one place": self.duplicate,
            "of the wrong shape": self.misshapen,
        }
        found = [f"{kind}: {', '.join(_folded(names))}" for kind, names in kinds.items() if names]
        if found:
            count = sum(map(len, kinds.values()))
            raise ModelLoadError(
                f"{directory}: {count} tensors do not fit {architecture}; {'; '.join(found)}",
                fix="; ".join(
                    ("download the checkpoint again, or check that config.json belongs to these weights", *aside)
                ),
            )


@dataclass(frozen=True)
class Checkpoint:
    """Every tensor of a directory's safetensors files, of a GGUF file, or of an update, by full name.

    duplicate: names in more than one place, with values that differ.
    aside: texts about parts that are not read: files beside the weights, names of the index that no file has.
    bare: the names lack the leading "model.", as in published embedding models; lm_head may be missing too.
    files: the files with their sizes and times of change when their headers were read, see `check_unchanged`.
    """

    directory: Path
    tensors: Mapping[str, Tensor]
    duplicate: tuple[str, ...]
    bare: bool = False
    aside: tuple[str, ...] = ()
    files: tuple[tuple[Path, FileState], ...] = ()

    @classmethod
    def of(
        cls,
        directory: Path,
        tensors: Mapping[str, Tensor],
        duplicate: Iterable[str] = (),
        aside: Iterable[str] = (),
        files: Iterable[tuple[Path, FileState]] = (),
    ) -> Checkpoint:
        """Make a checkpoint of tensors by their names in the files. Bare names are completed."""
        bare = "embed_tokens.weight" in tensors
        names = {name: f"model.{name}" if bare and not name.startswith("lm_head.") else name for name in tensors}
        full = {names[name]: info for name, info in tensors.items()}
        return cls(directory, full, tuple(duplicate), bare, tuple(aside), tuple(files))

    def renamed(self, rules: Rules) -> Checkpoint:
        """Return the checkpoint with the names of the modules here, see `tensor_names`."""
        names = {name: renamed(name, rules) for name in self.tensors} if rules else {}
        if all(name == new for name, new in names.items()):
            return self
        count = Counter(names.values())
        twice = [new for new, number in count.items() if number > 1]
        tensors = {names[name]: info for name, info in self.tensors.items()}
        return dataclasses.replace(self, tensors=tensors, duplicate=(*self.duplicate, *twice))

    def unused(self, patterns: Iterable[str]) -> list[str]:
        """Return the beginnings of tensors' names that the expressions match, with the number of tensors of each."""
        found = [match[0] for name in self.tensors for each in patterns if (match := re.match(each, name))]
        return [f"{start} ({number} tensors)" for start, number in sorted(Counter(found).items())]

    def misfits(self, expected: Mapping[str, Shapes], ignored: Iterable[re.Pattern[str]]) -> Misfits:
        """Compare with `expected` {name: allowed shapes}. Unknown tensors that match an `ignored` pattern are fine."""
        patterns = tuple(ignored)
        extra = [name for name in self.tensors if name not in expected]
        return Misfits(
            missing=[name for name in expected if name not in self.tensors],
            unknown=[name for name in extra if not any(p.search(name) for p in patterns)],
            duplicate=list(self.duplicate),
            misshapen=[
                f"{name} is {list(self.tensors[name].shape)}, expected {' or '.join(str(list(s)) for s in shapes)}"
                for name, shapes in expected.items()
                if name in self.tensors and self.tensors[name].shape not in shapes
            ],
        )

    def is_zero_bias(self, name: str) -> bool:
        """Return whether a tensor is a bias that adds nothing, as some quantizers write for layers without one."""
        tensor = self.tensors[name]
        if not name.endswith(".bias") or isinstance(tensor, BlockTensor) or len(tensor.shape) != 1:
            return False
        return not _numbers(tensor, 0, tensor.shape[0]).any()

    def check_unchanged(self) -> None:
        """Raise ModelLoadError if a file has been changed or replaced since its header was read."""
        for path, state in self.files:
            if state != file_state(path):
                raise ModelLoadError(f"{path} was changed while it was read", fix="load it when nothing writes to it")

    def check_blocks(self, types: Mapping[str, str | None]) -> None:
        """Raise ModelLoadError if a tensor has not the GGUF type that `types` {name: type} gives."""
        for name, kind in types.items():
            tensor = self.tensors[name]
            found = tensor.block.name if isinstance(tensor, BlockTensor) else str(tensor.dtype)
            if found != kind:
                raise ModelLoadError(
                    f"{self.directory}: {name} is {found}, expected {kind} of GGUF",
                    fix="name a GGUF file of the same form, or set model.quantization: none",
                )


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read the headers of all shards, or of a GGUF file, which `directory` may be.

    Raises ModelLoadError if there are no weights or a file is damaged.
    """
    gguf = gguf_file(directory)
    if gguf is not None:
        parts = _states(gguf_parts(gguf))
        return Checkpoint.of(gguf, published_tensors(gguf), files=parts)
    files, named = _shards(directory)
    states = _states(directory / file for file in files)
    tensors: dict[str, TensorInfo] = {}
    duplicate = []
    for file in files:
        if not (directory / file).is_file():
            raise ModelLoadError(f"{directory}: the shard {file} is missing", fix="download the checkpoint again")
        for name, info in read_contents(directory / file):
            if name in tensors and (info.file == tensors[name].file or not same_numbers(info, tensors[name])):
                duplicate.append(name)
            tensors[name] = info
    aside = [f"{path.name} is not read" for path in sorted(directory.glob("*.safetensors")) if path.name not in files]
    if not named and (directory / INDEX).is_file():
        aside.append(f"{INDEX} is not read, because {files[0]} is a whole model")
    if lacking := sorted(named - tensors.keys()):
        aside.append(f"{INDEX} names tensors that no file has: {', '.join(_folded(lacking))}")
    return Checkpoint.of(directory, tensors, duplicate, aside, states)


def _states(files: Iterable[Path]) -> list[tuple[Path, FileState]]:
    """Return the state of each file that is there. It is read before the headers are."""
    states = ((path, file_state(path)) for path in files)
    return [(path, state) for path, state in states if state is not None]


def same_numbers(one: TensorInfo | HeldTensor, other: TensorInfo | HeldTensor) -> bool:
    """Return whether two tensors have the same shape and values, whatever their dtypes. Reads a few rows at a time."""
    if one.shape != other.shape:
        return False
    count = one.shape[0] if one.shape else 1
    rows = max(1, _COMPARED * count // max(1, one.num_bytes))
    pieces = [(first, min(rows, count - first)) for first in range(0, count, rows)]
    return all(np.array_equal(_numbers(one, *piece), _numbers(other, *piece), equal_nan=True) for piece in pieces)


def _numbers(tensor: TensorInfo | HeldTensor, first: int, count: int) -> np.ndarray:
    """Read `count` rows of a tensor from row `first` on, [count, ...], floating point in float32."""
    if isinstance(tensor, HeldTensor):
        found = tensor.rows(first, first + count)
    else:
        raw = np.empty(count * tensor.num_bytes // (tensor.shape[0] if tensor.shape else 1), np.uint8)
        found = read_rows(tensor, first, count, raw)
    if found.dtype.kind in "iub":
        return found
    copy_converted(found, wide := np.empty(found.shape, np.float32))
    return wide


def _shards(directory: Path) -> tuple[list[str], set[str]]:
    """Return the names of the files that have the weights, and the tensors that the index names if it is read.

    As in transformers, model.safetensors is the whole model if it exists and is not a shard of the index. The index
    chooses files; a tensor is read from whichever file has it.
    """
    whole = "model.safetensors"
    there = (directory / whole).is_file()
    try:
        weight_map = _read_index(directory)
    except ModelLoadError:
        if not there:
            raise
        weight_map = {}
    if there and whole not in weight_map.values():
        return [whole], set()
    if weight_map:
        return sorted(set(weight_map.values())), set(weight_map)
    return _files_without_index(directory), set()


def _read_index(directory: Path) -> dict[str, str]:
    """Read {tensor name: file name} from the index; empty if there is none. Raises ModelLoadError if it is damaged."""
    path = directory / INDEX
    if not path.is_file():
        return {}
    try:
        weight_map = read_json(path)["weight_map"]
        files = set(weight_map.values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path}: expected a JSON object with 'weight_map'") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelLoadError(f"{path}: {file!r} is no name of a safetensors file in this directory")
    return weight_map


def _files_without_index(directory: Path) -> list[str]:
    files = [path.name for path in weight_files(directory)]
    if files:
        return files
    others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if others:
        raise ModelLoadError(f"{directory} has weights only as {others[0]}", fix="convert them to safetensors")
    if adapters := sorted(path.name for path in directory.glob("adapter*.safetensors")):
        raise ModelLoadError(
            f"{directory} has only an adapter, {adapters[0]}", fix="merge it into its base model and name the result"
        )
    raise ModelLoadError(f"{directory} has no *.safetensors file", fix="name a directory with a published checkpoint")


def _folded(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in their first number: layers.{0-31}.mlp.up_proj.weight."""
    groups: dict[str, list[int]] = {}
    for name in names:
        number = re.search(r"(?<=\.)\d+(?=\.)", name)
        pattern = name if number is None else f"{name[: number.start()]}{{}}{name[number.end() :]}"
        groups.setdefault(pattern, []).extend([] if number is None else [int(number.group())])
    return [p.replace("{}", _ranges(n), 1) if n else p for p, n in groups.items()]


def _ranges(numbers: list[int]) -> str:
    """Format [0, 1, 2, 5] as "{0-2,5}". A single number has no braces."""
    runs: list[list[int]] = []
    for n in sorted(set(numbers)):
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return text if text.isdigit() else "{" + text + "}"
