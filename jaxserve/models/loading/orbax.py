"""Converted checkpoints: parameters as the model holds them, fused and decoded, in an Orbax directory.

Written by `convert`, found by `load_model` through jaxserve.json beside them. Read in parallel, each device its part,
on any mesh: kv heads that one mesh keeps in copies are merged or copied again for another.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.hub import DATA_FILES
from jaxserve.models.loading.structure import LoadedModel, ModelStructure
from jaxserve.models.loading.zarr_array import BUFFER, FIX, ZarrArray, open_array
from jaxserve.models.weights import ParamSpec

MANIFEST = "jaxserve.json"
ARRAYS = "arrays"
FORMAT = 3  # with checksums
MAX_REPEAT = 1024  # copies of a kv head: one a device
READERS = 4  # threads; the copies run outside the interpreter lock

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def is_converted(directory: Path) -> bool:
    return (directory / MANIFEST).is_file()


def convert(model: LoadedModel, target: Path) -> None:
    """Writes a loaded model, and the small files of its directory, to `target`, which must not exist or be empty."""
    check_target(target)
    target.mkdir(parents=True, exist_ok=True)
    for pattern in (*DATA_FILES, "*_Pooling/config.json"):
        for path in model.directory.glob(pattern):
            if path.suffix != ".safetensors" and not path.name.endswith(".safetensors.index.json"):
                copy = target / path.relative_to(model.directory)
                copy.parent.mkdir(exist_ok=True)
                shutil.copy(path, copy)
    names = [spec.name for spec in model.structure.specs]
    # a raw file a chunk, which zarr_array reads: no compression, no database of chunks
    with ocp.PyTreeCheckpointer(use_compression=False, use_ocdbt=False) as checkpointer:
        checkpointer.save((target / ARRAYS).absolute(), dict(zip(names, model.leaves, strict=True)))
    # last: a directory without it is not taken for a whole one
    manifest = _manifest(model.structure) | {"checksums": _checksums(target / ARRAYS, names)}
    (target / MANIFEST).write_text(json.dumps(manifest, indent=1))


def check_target(target: Path) -> None:
    """Raises ModelLoadError unless a converted checkpoint may be written there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ModelLoadError(f"{target} is not empty", fix="name a new directory")


def _manifest(structure: ModelStructure) -> dict[str, Any]:
    shapes = {spec.name: list(spec.shape) for spec in structure.specs}
    return {"format": FORMAT, "kv_repeat": structure.config.kv_repeat, "shapes": shapes}


def _checksums(arrays: Path, names: list[str]) -> dict[str, dict[str, int]]:
    """CRC-32 of each chunk's file, by the array's name and its own."""

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


def read_leaves(
    structure: ModelStructure, shardings: list[Sharding], directory: Path, progress: Progress | None = None
) -> tuple[tuple[jax.Array, ...], int]:
    """The parameters, in the structure's dtypes, and the bytes read. Each device reads its own part of the files.

    Raises ModelLoadError where they are another model's or damaged.
    """
    manifest = _read_manifest(directory)
    stored = _stored_shapes(structure, manifest, directory)
    sums = manifest["checksums"]
    arrays = [open_array(directory / ARRAYS / spec.name, sums.get(spec.name, {})) for spec in structure.specs]
    for array, spec in zip(arrays, structure.specs, strict=True):
        if array.shape != stored[spec.name]:
            raise ModelLoadError(f"{array.directory} cannot be read: its shape is {list(array.shape)}", fix=FIX)

    def read(spec: ParamSpec, sharding: Sharding, array: ZarrArray) -> jax.Array:
        if array.shape == spec.shape:
            return _placed(array, sharding, spec)
        # copied kv heads change the shape: such a leaf is read whole, and split afterwards
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


def _read_manifest(directory: Path) -> dict[str, Any]:
    path = directory / MANIFEST
    try:
        manifest = read_object(path)
        if manifest["format"] != FORMAT:
            raise ValueError(f"it has format {str(manifest['format'])[:20]}, this version reads {FORMAT}")
        manifest["shapes"] = {str(name): tuple(shape) for name, shape in manifest["shapes"].items()}
        if type(manifest["kv_repeat"]) is not int or not 1 <= manifest["kv_repeat"] <= MAX_REPEAT:
            raise ValueError(f"'kv_repeat' must be from 1 to {MAX_REPEAT}")
        if not all(isinstance(sums, dict) for sums in manifest["checksums"].values()):
            raise ValueError("'checksums' has the files of each array")
    except (ValueError, KeyError, TypeError, AttributeError, ModelLoadError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}", fix=FIX) from error
    return manifest


def _stored_shapes(structure: ModelStructure, manifest: dict[str, Any], directory: Path) -> dict[str, tuple[int, ...]]:
    """The manifest's shapes, once they are what this model's would be with the manifest's copies of kv heads."""
    shapes = manifest["shapes"]
    expected = {spec.name: _shape_with(spec, structure.config, manifest["kv_repeat"]) for spec in structure.specs}
    different = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
    if different:
        shown = ", ".join(different[:8]) + (", ..." if len(different) > 8 else "")
        raise ModelLoadError(f"{directory}: {len(different)} parameters are not this config's: {shown}", fix=FIX)
    return shapes


def _shape_with(spec: ParamSpec, config: ModelConfig, repeat: int) -> tuple[int, ...]:
    """A parameter's shape were its kv heads held `repeat` times."""
    if "kv_heads" not in spec.axes or repeat == config.kv_repeat:
        return spec.shape
    heads = config.num_kv_heads // config.kv_repeat * repeat
    if config.num_heads % heads:
        return ()  # such a model cannot be
    return (heads, (config.num_heads // heads + 2) * config.head_dim, *spec.shape[2:])


def _with_repeat(array: jax.Array, stored: int, config: ModelConfig, spec: ParamSpec, sharding: Sharding) -> jax.Array:
    """A fused projection [KH, (G + 2) * H, ...] whose kv heads are held `stored` times, for config.kv_repeat."""
    heads, size = config.num_kv_heads, config.head_dim

    def change(w: jax.Array) -> jax.Array:
        group = w.shape[1] - 2 * size
        q, k, v = w[:, :group], w[:, group : group + size], w[:, group + size :]
        k, v = (jnp.repeat(x[::stored], config.kv_repeat, axis=0) for x in (k, v))
        return jnp.concatenate([q.reshape(heads, -1, *w.shape[2:]), k, v], axis=1)

    return jax.jit(change, out_shardings=sharding)(array)


def _whole(sharding: Sharding) -> Sharding:
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding
