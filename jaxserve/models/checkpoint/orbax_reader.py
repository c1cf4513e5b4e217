"""Read converted checkpoints, see `orbax.convert`: the manifest, then each device's rectangle of each array.

The arrays are zarr 2 without compression, which is one raw file per chunk, so they are read directly. Orbax's own
reader copies every byte two more times, which is most of its time for weights in the page cache, and its import takes
0.3 s of every start.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.checkpoint.float_formats import FLOAT_METHODS, of_modules
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, copy_converted, empty_aligned, read_rows
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import ModelConfig
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import ParamSpec

BUFFER = 32 * 2**20  # bytes per read, if the file cannot be read into the result directly
FIX = "convert the checkpoint again with this version of jaxserve"
_PLAIN = {"zarr_format": 2, "compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
MAX_CHUNKS = 65536  # of an array; `convert` writes one per device
_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "<f4": np.dtype("<f4"), "<f2": np.dtype("<f2")}
_DTYPES |= {
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "|i1": np.dtype("i1"),
    "|u1": np.dtype("u1"),
    "<i4": np.dtype("<i4"),
}


@dataclass(frozen=True)
class ZarrArray:
    """An array of `shape`, in files of shape `chunks`. checksums: CRC-32 by file name; None: unknown."""

    directory: Path
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dtype: np.dtype
    checksums: Mapping[str, int] | None = None

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Read the rectangle `index` and convert it to `dtype`.

        Raises ModelLoadError if a file is missing, has the wrong size or fails its checksum.
        """
        bounds = [s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True)]
        out = empty_aligned(tuple(b - a for a, b in bounds), dtype)
        for cell in self._cells(bounds):
            overlap = [
                (max(a, i * size), min(b, (i + 1) * size))
                for (a, b), i, size in zip(bounds, cell, self.chunks, strict=True)
            ]
            target = out[tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, bounds, strict=True))]
            inside = [(a - i * size, b - i * size) for (a, b), i, size in zip(overlap, cell, self.chunks, strict=True)]
            self._read_chunk(self._chunk(cell), inside, target)
        return out

    def _cells(self, bounds: list[tuple[int, int]]) -> Iterator[tuple[int, ...]]:
        """Return the grid indices of the chunks that overlap a rectangle."""
        ranges = [range(a // size, -(-b // size)) for (a, b), size in zip(bounds, self.chunks, strict=True)]
        return itertools.product(*ranges)

    def _chunk(self, cell: tuple[int, ...]) -> TensorInfo:
        path = self.directory / (".".join(map(str, cell)) or "0")
        expected = math.prod(self.chunks) * self.dtype.itemsize
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ModelLoadError(f"{path} cannot be read: {error.strerror}", fix=FIX) from None
        if size != expected:
            raise ModelLoadError(f"{path} cannot be read: {size} bytes instead of {expected}", fix=FIX)
        return TensorInfo(path, self.dtype, self.chunks, 0)

    def _read_chunk(self, chunk: TensorInfo, inside: list[tuple[int, int]], target: np.ndarray) -> None:
        """Read the rectangle `inside` of a chunk to `target`, without a copy if the file's bytes are the target's."""
        (first, last), *rest = inside or [(0, 1)]
        row = math.prod(self.chunks[1:]) * self.dtype.itemsize
        whole_rows = all(b - a == size for (a, b), size in zip(rest, self.chunks[1:], strict=True))
        all_rows = (first, last) == (0, self.chunks[0] if self.chunks else 1)
        if whole_rows and target.dtype == self.dtype and target.flags.c_contiguous:
            raw = target.reshape(-1).view(np.uint8)
            read_rows(chunk, first, last - first, raw)
            self._check(chunk, zlib.crc32(raw.data) if all_rows else None)
            return
        step, found = max(1, BUFFER // row), 0
        for a in range(first, last, step):
            b = min(a + step, last)
            raw = np.empty((b - a) * row, np.uint8)
            rows = read_rows(chunk, a, b - a, raw)
            found = zlib.crc32(raw.data, found)
            copy_converted(rows[(slice(None), *(slice(*bounds) for bounds in rest))], target[a - first : b - first])
        self._check(chunk, found if all_rows else None)

    def _check(self, chunk: TensorInfo, found: int | None) -> None:
        """Raise ModelLoadError if the checksum is wrong. found: None if only part of the file was read; not checked."""
        if self.checksums is not None and found is not None and found != self.checksums.get(chunk.file.name):
            raise ModelLoadError(f"{chunk.file} cannot be read: its bytes are not those that were written", fix=FIX)


def open_array(directory: Path, checksums: Mapping[str, int] | None = None) -> ZarrArray:
    """Open an array. Raises ModelLoadError if it is missing or not in the format that `orbax.convert` writes."""
    path = directory / ".zarray"
    try:
        found = read_object(path)
        if any(found[key] != value for key, value in _PLAIN.items()):
            raise ValueError("the array is compressed or of another version of zarr")
        shape, chunks = _sizes(found, "shape"), _sizes(found, "chunks")
        if len(shape) != len(chunks) or any(size < 1 for size in chunks):
            raise ValueError("its chunks do not fit its shape")
        if math.prod(-(-n // size) for n, size in zip(shape, chunks, strict=True)) > MAX_CHUNKS:
            raise ValueError(f"it has more than {MAX_CHUNKS} chunks")
        return ZarrArray(directory, shape, chunks, _DTYPES[found["dtype"]], checksums)
    except (ValueError, KeyError, TypeError, ModelLoadError) as error:
        raise ModelLoadError(f"{path} cannot be read: {str(error)[:200]}", fix=FIX) from error


def _sizes(found: Mapping[str, object], key: str) -> tuple[int, ...]:
    value = found[key]
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 2**48 for size in value):
        raise ValueError(f"{key!r} is no list of sizes")
    return tuple(value)


MANIFEST_NAME = "jaxserve.json"
MANIFEST_FORMAT = 4  # version of the manifest; 3 added checksums, 4 the form of the weights
_READ = (3, MANIFEST_FORMAT)
_HELD = ("none", "stored", "int8", "fp8", "int4", "mxfp4", "nvfp4")
MAX_REPEAT = 1024  # copies of a kv head, at most one per device


def is_converted(directory: Path) -> bool:
    return (directory / MANIFEST_NAME).is_file()


def manifest_of(structure: ModelStructure) -> dict[str, Any]:
    """Return the manifest of a model without its checksums."""
    shapes, config = {spec.name: list(spec.shape) for spec in structure.specs}, structure.config
    form = {"quantization": config.quantization, "quantized_modules": _modules(config.stored_form)}
    form |= {"quantized_head": config.quantized_head}
    return {"format": MANIFEST_FORMAT, "kv_repeat": config.kv_repeat, "shapes": shapes} | form


def _modules(form: StoredForm | None) -> list[str] | dict[str, list[str]] | None:
    """Return the names of quantized modules: of FP8 a list, of other floating-point formats the lists of each."""
    found = {} if form is None else {one.method: sorted(one.found or ()) for one in form.forms or (form,)}
    if form is None or (form.found is None and not form.forms):
        return None
    return found["fp8"] if form.method == "fp8" else found


def as_converted(config: ModelConfig, directory: Path, manifest: Mapping[str, Any]) -> ModelConfig:
    """Return the config with the form of a converted checkpoint. Raises ModelLoadError if `config` asks for another."""
    held, modules = manifest["quantization"], manifest["quantized_modules"]
    if config.quantization not in ("none", "stored", held):
        raise ModelLoadError(
            f"{directory} is a converted checkpoint, which is not quantized at load",
            fix="name the original checkpoint, or set model.quantization: auto",
        )
    form = config.stored_form
    if held == "stored" and form is None:
        raise ModelLoadError(f"{directory}: config.json does not describe the quantized weights", fix=FIX)
    if form is not None and modules is not None:
        form = of_modules(form, modules if isinstance(modules, dict) else {"fp8": modules})
    tied = config.tie_word_embeddings
    if not (config.bidirectional or config.labels):
        tied = not any(name.startswith("lm_head.") for name in manifest["shapes"])
    return config.replace(
        quantization=held, quantized_head=manifest["quantized_head"], stored_form=form, tie_word_embeddings=tied
    )


def _are_modules(value: Any) -> bool:
    if isinstance(value, dict):
        return all(method in FLOAT_METHODS and isinstance(names, list) for method, names in value.items())
    return isinstance(value, list | None)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest of a converted checkpoint. Raises ModelLoadError."""
    path = directory / MANIFEST_NAME
    try:
        manifest = read_object(path)
        if manifest["format"] not in _READ:
            raise ValueError(f"it has format {str(manifest['format'])[:20]}, this version reads {_READ}")
        manifest = {"quantization": "none", "quantized_modules": None, "quantized_head": False} | manifest
        if manifest["quantization"] not in _HELD or not _are_modules(manifest["quantized_modules"]):
            raise ValueError(
                f"'quantization' must be one of {', '.join(_HELD)}, and 'quantized_modules' lists of names"
            )
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


ARRAYS = "arrays"
READERS = 4  # threads; numpy copies without holding the GIL

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


@dataclass(frozen=True)
class Converted:
    """The weights of a converted directory: a `loader.Format`."""

    directory: Path
    manifest: Mapping[str, Any]

    def complete(self, config: ModelConfig) -> ModelConfig:
        return as_converted(config, self.directory, self.manifest)

    def check(self, structure: ModelStructure) -> None:
        """Raise ModelLoadError if the arrays are not this model's, or an array cannot be read."""
        _arrays(structure, self.directory, self.manifest)

    def read(
        self, structure: ModelStructure, shardings: list[Sharding], progress: Progress | None = None
    ) -> tuple[tuple[jax.Array, ...], int]:
        return _read_leaves(structure, shardings, self.directory, self.manifest, progress)


def _arrays(structure: ModelStructure, directory: Path, manifest: Mapping[str, Any]) -> list[ZarrArray]:
    """Open the array of each leaf. Raises ModelLoadError if they belong to another model."""
    stored = _stored_shapes(structure, manifest, directory)
    sums = manifest["checksums"]
    arrays = [open_array(directory / ARRAYS / spec.name, sums.get(spec.name, {})) for spec in structure.specs]
    for array, spec in zip(arrays, structure.specs, strict=True):
        if array.shape != stored[spec.name]:
            raise ModelLoadError(f"{array.directory} cannot be read: its shape is {list(array.shape)}", fix=FIX)
        if spec.packing is not None and array.dtype != spec.dtype:
            raise ModelLoadError(f"{array.directory} cannot be read: it has {array.dtype}, not {spec.dtype}", fix=FIX)
    return arrays


def _read_leaves(
    structure: ModelStructure,
    shardings: list[Sharding],
    directory: Path,
    manifest: Mapping[str, Any],
    progress: Progress | None,
) -> tuple[tuple[jax.Array, ...], int]:
    """Read the parameters in the structure's dtypes. Returns them and the bytes read.

    Each device reads its own part of the files. Raises ModelLoadError if they belong to another model or are damaged.
    """
    arrays = _arrays(structure, directory, manifest)

    def read(spec: ParamSpec, sharding: Sharding, array: ZarrArray) -> jax.Array:
        if array.shape == spec.shape:
            return _placed(array, sharding, spec)
        # If the number of kv head copies differs, the shape differs: read such a leaf whole, then split it.
        whole = _placed(array, _whole(sharding), spec)
        return _with_repeat(whole, manifest["kv_repeat"], structure.config, spec, sharding)

    leaves, done, total = [], 0, sum(array.num_bytes for array in arrays)
    with ThreadPoolExecutor(READERS, thread_name_prefix="load") as pool:
        for leaf, array in zip(pool.map(read, structure.specs, shardings, arrays), arrays, strict=True):
            leaves.append(leaf)
            done += array.num_bytes
            if progress is not None:
                progress(done, total)
    return tuple(leaves), total


def _placed(array: ZarrArray, sharding: Sharding, spec: ParamSpec) -> jax.Array:
    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return array.read(index, np.dtype(spec.dtype))

    return jax.make_array_from_callback(array.shape, sharding, read, dtype=spec.dtype)


def _stored_shapes(
    structure: ModelStructure, manifest: Mapping[str, Any], directory: Path
) -> dict[str, tuple[int, ...]]:
    """Return the manifest's shapes. Raises ModelLoadError unless they fit this model, with the manifest's kv_repeat."""
    shapes = manifest["shapes"]
    expected = {spec.name: _shape_with(spec, structure.config, manifest["kv_repeat"]) for spec in structure.specs}
    different = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    if different:
        shown = ", ".join(different[:8]) + (", ..." if len(different) > 8 else "")
        raise ModelLoadError(f"{directory}: {len(different)} parameters are not this config's: {shown}", fix=FIX)
    return shapes


def _shape_with(spec: ParamSpec, config: ModelConfig, repeat: int) -> tuple[int, ...]:
    """Return the shape that a parameter would have with `repeat` copies of each kv head."""
    if "kv_heads" not in spec.axes or repeat == config.kv_repeat:
        return spec.shape
    heads = config.num_kv_heads // config.kv_repeat * repeat
    if config.num_heads % heads:
        return ()  # no model has so many heads
    return (heads, (config.num_heads // heads + 2) * config.head_dim, *spec.shape[2:])


def _with_repeat(array: jax.Array, stored: int, config: ModelConfig, spec: ParamSpec, sharding: Sharding) -> jax.Array:
    """Change a fused projection [KH, (G + 2) * H, ...] from `stored` copies of each kv head to config.kv_repeat."""
    heads, size = config.num_kv_heads, config.head_dim

    def change(w: jax.Array) -> jax.Array:
        """Change w [KH, (G + 2) * H, ...]."""
        group = w.shape[1] - 2 * size
        q, k, v = w[:, :group], w[:, group : group + size], w[:, group + size :]
        k, v = (jnp.repeat(x[::stored], config.kv_repeat, axis=0) for x in (k, v))
        return jnp.concatenate([q.reshape(heads, -1, *w.shape[2:]), k, v], axis=1)

    return jax.jit(change, out_shardings=sharding)(array)


def _whole(sharding: Sharding) -> Sharding:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding
