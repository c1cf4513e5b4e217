"""Load a checkpoint directory as a LoadedModel: the model's structure, and its weights as a flat tuple on the devices.

Owns reading parameters from checkpoint tensors, dtype conversion, placement and random weights. Each device reads only
its own rectangle of a parameter from the files.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
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

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.checkpoint import Checkpoint, Shapes, open_checkpoint, same_numbers
from jaxserve.models.loading.config.hf_config import read_config
from jaxserve.models.loading.converted import as_converted, is_converted
from jaxserve.models.loading.file_formats.gguf_blocks import BlockTensor
from jaxserve.models.loading.file_formats.safetensors_file import TensorInfo
from jaxserve.models.loading.orbax_reader import READERS, read_leaves
from jaxserve.models.loading.part_reader import PartReader
from jaxserve.models.loading.quantization import fp8_modules, stored_tensors
from jaxserve.models.loading.quantized.quantized_leaves import by_parameter, read_parameter
from jaxserve.models.loading.quantized.stored_codes import code_tensors
from jaxserve.models.loading.structure import LoadedModel, ModelStructure, build
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.models.weights import ParamSpec
from jaxserve.ops.quantized import MIDDLE

Progress = Callable[[int, int], None]  # bytes of the checkpoint read so far, bytes in all
LoadFormat = Literal["auto", "safetensors"]

# Buffers that old exports contain and that are computed here; scales and zeros of quantized activations and KV caches.
IGNORED = (
    re.compile(r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"),
    re.compile(r"\.(input|output|k|v)_(scale|zero_point)$"),
)
_HEAD = "lm_head.weight"
_OF_CODES = (".qweight", ".qzeros", ".weight_packed")
RANDOM_STDDEV = 0.02
RANDOM_INT8 = 32  # standard deviation of int8 codes; that of 4 random bits is 4.6, or 2.9 as E2M1
_RANDOM_SCALES = {
    "int8": RANDOM_STDDEV / RANDOM_INT8,
    "fp8": RANDOM_STDDEV,
    "int4": RANDOM_STDDEV / 4.6,
    "mxfp4": 127 - 7,
}


def load_model(
    directory: Path,
    *,
    dtype: jnp.dtype,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
) -> LoadedModel:
    """Load a checkpoint directory (see hub.resolve) in `dtype`, over `mesh` or on the first device.

    config: used instead of the directory's config.json, for example with another context length.
    load_format: "auto" detects a converted checkpoint (see orbax.convert). Anything else is read as published.
    Raises ModelLoadError if the model is not supported, a file is damaged, or tensors do not fit; it names them all.
    """
    start = time.perf_counter()
    config = _config(config, directory, mesh)
    if load_format == "auto" and is_converted(directory):
        structure = build(as_converted(config, directory), dtype)
        leaves, read = read_leaves(structure, _shardings(structure, mesh), directory, progress)
    else:
        checkpoint = open_checkpoint(directory)
        structure = build(_as_published(config, checkpoint), dtype)
        leaves, read = _read_leaves(structure, _shardings(structure, mesh), checkpoint, progress)
    jax.block_until_ready(leaves)
    return LoadedModel(structure, leaves, directory, read, time.perf_counter() - start)


def random_model(
    directory: Path, *, dtype: jnp.dtype, config: ModelConfig | None = None, mesh: Mesh | None = None, seed: int = 0
) -> LoadedModel:
    """Draw the weights of a model on the devices. The directory needs only config.json. See `load_model`.

    Raises ModelLoadError if the model is not supported.
    """
    start = time.perf_counter()
    structure = build(_config(config, directory, mesh), dtype)
    leaves = jax.block_until_ready(random_leaves(structure, _shardings(structure, mesh), seed))
    return LoadedModel(structure, leaves, directory, 0, time.perf_counter() - start)


def _config(config: ModelConfig | None, directory: Path, mesh: Mesh | None) -> ModelConfig:
    config = config or read_config(directory)
    return config if mesh is None else for_mesh(config, mesh)


def inspect(directory: Path, *, dtype: jnp.dtype, config: ModelConfig) -> ModelStructure:
    """Check the files of a checkpoint and return its structure. Raises ModelLoadError.

    Reads no weight but an output head beside a table of embeddings, see `_as_published`.
    """
    if is_converted(directory):
        return build(as_converted(config, directory), dtype)
    checkpoint = open_checkpoint(directory)
    structure = build(_as_published(config, checkpoint), dtype)
    check_complete(structure, checkpoint)
    return structure


def _as_published(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the config with what the files tell: which weights are FP8, and whether there is an output head.

    An embedding model may be published without one. One that differs from the table of embeddings is used, as in
    transformers, even if config.json ties them.
    """
    headless = checkpoint.bare and _HEAD not in checkpoint.tensors
    tied = headless or (config.tie_word_embeddings and not has_own_head(checkpoint))
    form = config.stored_form
    if form is not None and form.method == "fp8":
        form = dataclasses.replace(form, found=fp8_modules(checkpoint.tensors))
    if form is not None and form.method in ("gptq", "awq"):
        kinds = {name.rpartition(".")[2] for name in checkpoint.tensors}
        # inputs in order need no g_idx; without zeros the middle of the codes is 0
        form = dataclasses.replace(
            form, indexed=form.permuted or "g_idx" in kinds, zeros=not form.symmetric or "qzeros" in kinds
        )
    return config.replace(stored_form=form, tie_word_embeddings=tied)


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint has an output head that differs from its table of embeddings."""
    head, table = (checkpoint.tensors.get(name) for name in (_HEAD, "model.embed_tokens.weight"))
    if head is None or table is None or isinstance(head, BlockTensor) or isinstance(table, BlockTensor):
        return False
    return not same_numbers(head, table)


def _shardings(structure: ModelStructure, mesh: Mesh | None) -> list[Sharding]:
    return [_sharding(spec, mesh) for spec in structure.specs]


def _sharding(spec: ParamSpec, mesh: Mesh | None) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else param_sharding(spec, mesh)


# --- from a checkpoint -----------------------------------------------------------------------------------------


def _read_leaves(
    structure: ModelStructure, shardings: list[Sharding], checkpoint: Checkpoint, progress: Progress | None
) -> tuple[tuple[jax.Array, ...], int]:
    check_complete(structure, checkpoint)
    reader = PartReader(checkpoint, structure.config.weight_block, structure.config.stored_form)
    parameters, places = by_parameter(structure.specs), iter(shardings)
    placed = [list(itertools.islice(places, len(specs))) for specs in parameters]
    sizes = [reader.stored_bytes(specs[0]) for specs in parameters]
    leaves, done = [], 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="load") as pool:
        read = functools.partial(read_parameter, read=reader.read, codes=reader.read_codes, order=reader.read_order)
        for found, size in zip(pool.map(read, parameters, placed), sizes, strict=True):
            leaves += found
            done += size
            if progress is not None:
                progress(done, sum(sizes))
    return tuple(leaves), done


def check_complete(structure: ModelStructure, checkpoint: Checkpoint) -> None:
    """Raise one ModelLoadError that names every tensor that is unknown, missing, duplicate or of a wrong shape."""
    config = structure.config
    expected: dict[str, Shapes] = {}
    for spec in structure.specs:
        form = config.stored_form if spec.packing is not None and spec.packing.stored else None
        for part in spec.parts:
            if form is not None and form.is_integer:  # its codes, whatever the checkpoint has
                expected |= code_tensors(part, form)
            else:
                expected |= stored_tensors(part, checkpoint.tensors, config.weight_block, config.stored_form)
    ignored = [*IGNORED, *(re.compile(pattern) for pattern in config.ignored_tensors)]
    if config.tie_word_embeddings:
        ignored.append(re.compile(r"^lm_head\.weight$"))
    misfits = checkpoint.misfits(expected, ignored)
    misfits.unknown = [name for name in misfits.unknown if not checkpoint.is_zero_bias(name)]
    if config.stored_form is None and (codes := [name for name in misfits.unknown if name.endswith(_OF_CODES)]):
        raise ModelLoadError(
            f"{checkpoint.directory}: {codes[0]} and others are quantized, and config.json has no quantization_config",
            fix="download config.json again, or the quantize_config.json or quant_config.json beside it",
        )
    misfits.raise_if_any(checkpoint.directory, config.architecture, checkpoint.aside)
    if config.stored_form is None:
        _check_floats(set(expected), checkpoint)
    form, kept = config.stored_form, [spec for spec in structure.specs if spec.packing and spec.packing.stored]
    if form is not None and form.method == "gguf":
        names = {part.name for spec in kept for part in spec.parts}
        checkpoint.check_blocks({name: form.type_of[name.removesuffix(".weight")] for name in sorted(names)})


def _check_floats(names: set[str], checkpoint: Checkpoint) -> None:
    """Raise ModelLoadError for tensors of integers, which would be codes of a form that config.json does not name."""
    found = {name: info.dtype for name, info in checkpoint.tensors.items() if isinstance(info, TensorInfo)}
    wrong = [f"{name} is {found[name]}" for name in sorted(names & found.keys()) if found[name].kind in "iub"]
    if wrong:
        raise ModelLoadError(
            f"{checkpoint.directory}: {', '.join(wrong[:8])}, expected floating point",
            fix="check that config.json belongs to these weights: it names no quantization",
        )


# --- random ----------------------------------------------------------------------------------------------------


def random_leaves(structure: ModelStructure, shardings: list[Sharding], seed: int) -> tuple[jax.Array, ...]:
    """Draw random weights on their devices: normal with standard deviation 0.02, norms 1, biases 0."""
    key, places, leaves = jax.random.key(seed), iter(shardings), []
    for i, specs in enumerate(by_parameter(structure.specs)):
        placed, wide, drawn = list(itertools.islice(places, len(specs))), specs[0].wide(), jax.random.fold_in(key, i)
        packing = specs[0].packing
        if packing is None:
            leaves.append(_random_leaf(drawn, wide, placed[0]))
        elif packing.stored:
            leaves += [_random_codes(drawn, spec, place) for spec, place in zip(specs, placed, strict=True)]
        else:
            numbers = np.asarray(_draw(drawn, wide.shape, wide.dtype))
            leaves += read_parameter(specs, placed, lambda _, index, numbers=numbers: numbers[index])
    return tuple(leaves)


def _random_leaf(key: jax.Array, spec: ParamSpec, sharding: Sharding) -> jax.Array:
    match spec.init:
        case "normal":
            draw = jax.jit(_draw, static_argnums=(1, 2), out_shardings=sharding)
            return draw(key, spec.shape, spec.dtype)
        case "ones":
            return jnp.ones(spec.shape, spec.dtype, device=sharding)
        case "zeros":
            return jnp.zeros(spec.shape, spec.dtype, device=sharding)


def _random_codes(key: jax.Array, spec: ParamSpec, sharding: Sharding) -> jax.Array:
    """Draw a leaf of a weight that a checkpoint would store quantised, with the standard deviation of others."""
    assert spec.packing is not None
    kind, role = spec.packing.kind, spec.packing.role
    if role == "values":
        draw = jax.jit(_draw_codes, static_argnums=(1, 2), out_shardings=sharding)
        return draw(key, spec.shape, spec.dtype)
    if role == "order":
        return jnp.arange(spec.shape[0], dtype=spec.dtype, device=sharding)
    middle = MIDDLE if kind == "int4" else 0
    number = middle if role == "zeros" else _RANDOM_SCALES[kind]
    return jnp.full(spec.shape, number, spec.dtype, device=sharding)


def _draw_codes(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, dtype)
    spread = RANDOM_INT8 if dtype == jnp.int8 else 1
    return jnp.clip(jax.random.normal(key, shape, jnp.float32) * spread, -127, 127).astype(dtype)


def _draw(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return (jax.random.normal(key, shape, jnp.float32) * RANDOM_STDDEV).astype(dtype)
