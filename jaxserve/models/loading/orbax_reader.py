"""Reading converted checkpoints, see `orbax.convert`. Without Orbax, whose import takes 0.3 s of every start."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.converted import read_manifest
from jaxserve.models.loading.file_formats.zarr_array import FIX, ZarrArray, open_array
from jaxserve.models.loading.structure import ModelStructure
from jaxserve.models.weights import ParamSpec

ARRAYS = "arrays"
READERS = 4  # threads; numpy copies without holding the GIL

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def read_leaves(
    structure: ModelStructure, shardings: list[Sharding], directory: Path, progress: Progress | None = None
) -> tuple[tuple[jax.Array, ...], int]:
    """Read the parameters in the structure's dtypes. Returns them and the bytes read.

    Each device reads its own part of the files. Raises ModelLoadError if they belong to another model or are damaged.
    """
    manifest = read_manifest(directory)
    stored = _stored_shapes(structure, manifest, directory)
    sums = manifest["checksums"]
    arrays = [open_array(directory / ARRAYS / spec.name, sums.get(spec.name, {})) for spec in structure.specs]
    for array, spec in zip(arrays, structure.specs, strict=True):
        if array.shape != stored[spec.name]:
            raise ModelLoadError(f"{array.directory} cannot be read: its shape is {list(array.shape)}", fix=FIX)
        if spec.packing is not None and array.dtype != spec.dtype:
            raise ModelLoadError(f"{array.directory} cannot be read: it has {array.dtype}, not {spec.dtype}", fix=FIX)

    def read(spec: ParamSpec, sharding: Sharding, array: ZarrArray) -> jax.Array:
        if array.shape == spec.shape:
            return _placed(array, sharding, spec)
        # Another number of kv head copies changes the shape: read such a leaf whole, then split it.
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


def _stored_shapes(structure: ModelStructure, manifest: dict[str, Any], directory: Path) -> dict[str, tuple[int, ...]]:
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
