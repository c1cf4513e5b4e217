"""Load a checkpoint directory as a LoadedModel: the model's structure, and its weights as a flat tuple on the devices.

Owns reading parameters from checkpoint tensors, dtype conversion, placement and random weights. Each device reads only
its own rectangle of a parameter from the files.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.checkpoint import Checkpoint, Shapes, open_checkpoint
from jaxserve.models.loading.hf_config import read_config
from jaxserve.models.loading.orbax import READERS, is_converted, read_leaves
from jaxserve.models.loading.part_reader import PartReader
from jaxserve.models.loading.quantization import stored_tensors
from jaxserve.models.loading.structure import LoadedModel, ModelStructure, build
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.models.weights import ParamSpec

Progress = Callable[[int, int], None]  # bytes of the checkpoint read so far, bytes in all
LoadFormat = Literal["auto", "safetensors", "orbax", "random"]

# Buffers that old exports contain and that are computed here; scales of quantized activations and KV caches.
IGNORED = (re.compile(r"rotary_emb\.inv_freq$"), re.compile(r"\.(input|output|k|v)_scale$"))
RANDOM_STDDEV = 0.02


def load_model(
    directory: Path,
    *,
    dtype: jnp.dtype,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
    seed: int = 0,
) -> LoadedModel:
    """Load a checkpoint directory (see hub.resolve) in `dtype`, over `mesh` or on the first device.

    config: used instead of the directory's config.json, for example with another context length.
    load_format: "random" needs only config.json and draws the weights on the devices from `seed`. "auto" detects a
      converted checkpoint (see orbax.convert); anything else is read as safetensors.
    Raises ModelLoadError if the model is not supported, a file is damaged, or tensors do not fit; it names them all.
    """
    start = time.perf_counter()
    config = config or read_config(directory)
    if mesh is not None:
        config = for_mesh(config, mesh)
    converted = load_format == "orbax" or (load_format == "auto" and is_converted(directory))
    if load_format == "random":
        structure = build(config, dtype)
        leaves, read = random_leaves(structure, _shardings(structure, mesh), seed), 0
    elif converted:
        structure = build(config, dtype)
        leaves, read = read_leaves(structure, _shardings(structure, mesh), directory, progress)
    else:
        checkpoint = open_checkpoint(directory)
        structure = build(_without_head(config, checkpoint), dtype)
        leaves, read = _read_leaves(structure, _shardings(structure, mesh), checkpoint, progress)
    jax.block_until_ready(leaves)
    return LoadedModel(structure, leaves, directory, read, time.perf_counter() - start)


def _without_head(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the config without an output head if the checkpoint is an embedding model published without one."""
    headless = checkpoint.bare and "lm_head.weight" not in checkpoint.tensors
    return config.replace(tie_word_embeddings=True) if headless else config


def _shardings(structure: ModelStructure, mesh: Mesh | None) -> list[Sharding]:
    return [_sharding(spec, mesh) for spec in structure.specs]


def _sharding(spec: ParamSpec, mesh: Mesh | None) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else param_sharding(spec, mesh)


# --- from a checkpoint -----------------------------------------------------------------------------------------


def _read_leaves(
    structure: ModelStructure, shardings: list[Sharding], checkpoint: Checkpoint, progress: Progress | None
) -> tuple[tuple[jax.Array, ...], int]:
    check_complete(structure, checkpoint)
    reader = PartReader(checkpoint, structure.config.weight_block)
    sizes = [reader.stored_bytes(spec) for spec in structure.specs]
    leaves, done = [], 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="load") as pool:
        read = functools.partial(_read_leaf, reader=reader)
        for leaf, size in zip(pool.map(read, structure.specs, shardings), sizes, strict=True):
            leaves.append(leaf)
            done += size
            if progress is not None:
                progress(done, sum(sizes))
    return tuple(leaves), done


def check_complete(structure: ModelStructure, checkpoint: Checkpoint) -> None:
    """Raise one ModelLoadError that names every tensor that is unknown, missing, duplicate or of a wrong shape."""
    config = structure.config
    expected: dict[str, Shapes] = {}
    for spec in structure.specs:
        for part in spec.parts:
            expected |= stored_tensors(part, checkpoint.tensors, config.weight_block)
    ignored = [*IGNORED, *(re.compile(pattern) for pattern in config.ignored_tensors)]
    if config.tie_word_embeddings:
        ignored.append(re.compile(r"^lm_head\.weight$"))
    misfits = checkpoint.misfits(expected, ignored)
    misfits.raise_if_any(checkpoint.directory, config.architecture)


def _read_leaf(spec: ParamSpec, sharding: Sharding, reader: PartReader) -> jax.Array:
    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return reader.read(spec, index)

    return jax.make_array_from_callback(spec.shape, sharding, read, dtype=spec.dtype)


# --- random ----------------------------------------------------------------------------------------------------


def random_leaves(structure: ModelStructure, shardings: list[Sharding], seed: int) -> tuple[jax.Array, ...]:
    """Draw random weights on their devices: normal with standard deviation 0.02, norms 1, biases 0."""
    key = jax.random.key(seed)
    return tuple(
        _random_leaf(jax.random.fold_in(key, i), spec, sharding)
        for i, (spec, sharding) in enumerate(zip(structure.specs, shardings, strict=True))
    )


def _random_leaf(key: jax.Array, spec: ParamSpec, sharding: Sharding) -> jax.Array:
    match spec.init:
        case "normal":
            draw = jax.jit(_draw, static_argnums=(1, 2), out_shardings=sharding)
            return draw(key, spec.shape, spec.dtype)
        case "ones":
            return jnp.ones(spec.shape, spec.dtype, device=sharding)
        case "zeros":
            return jnp.zeros(spec.shape, spec.dtype, device=sharding)


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * RANDOM_STDDEV).astype(dtype)
