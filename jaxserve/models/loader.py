"""A checkpoint directory -> a LoadedModel: the model's structure, and its weights as a flat tuple on the devices.

Owns reading parameters from checkpoint tensors, dtype conversion, placement and random weights. Knows no family.
Every device gets only its own rectangle of a parameter, straight from the memory-mapped files.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxserve.models.checkpoint import Checkpoint, Shapes, open_checkpoint
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import CausalLM
from jaxserve.models.hf_config import read_config
from jaxserve.models.quantization import Block, check_scale, decode_fp8, decode_mxfp4, stored_tensors
from jaxserve.models.registry import model_class
from jaxserve.models.safetensors_file import open_tensor
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.models.weights import ParamSpec, Part, param_specs

Progress = Callable[[int, int], None]  # bytes of the checkpoint read so far, bytes in all
LoadFormat = Literal["auto", "safetensors", "random"]

# buffers that older exports saved and are computed here; scales of quantized activations and KV caches
IGNORED = (re.compile(r"rotary_emb\.inv_freq$"), re.compile(r"\.(input|output|k|v)_scale$"))
RANDOM_STDDEV = 0.02


@dataclass(frozen=True)
class ModelStructure:
    """A model without its weights. Static: a jitted function closes over it and takes the leaves as arguments."""

    config: ModelConfig
    graphdef: nnx.GraphDef
    treedef: Any  # a jax PyTreeDef
    specs: tuple[ParamSpec, ...]  # of the leaves, in order

    def bind(self, leaves: tuple[jax.Array, ...]) -> CausalLM:
        """The module with these weights; costs only tracing time inside a jitted function."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    @property
    def num_parameters(self) -> int:
        return sum(int(np.prod(spec.shape)) for spec in self.specs)

    @property
    def num_bytes(self) -> int:
        """Of one whole copy of the weights."""
        return sum(int(np.prod(spec.shape)) * np.dtype(spec.dtype).itemsize for spec in self.specs)


@dataclass(frozen=True)
class LoadedModel:
    """A model and its weights. `leaves` are jit arguments, in `structure.specs`' order."""

    structure: ModelStructure
    leaves: tuple[jax.Array, ...]
    directory: Path
    checkpoint_bytes: int  # read; 0 for random weights
    seconds: float

    @property
    def config(self) -> ModelConfig:
        return self.structure.config

    def bind(self, leaves: tuple[jax.Array, ...]) -> CausalLM:
        """`structure.bind`."""
        return self.structure.bind(leaves)


def build(config: ModelConfig, dtype: jnp.dtype) -> ModelStructure:
    """The structure of a model, by shape evaluation alone: no memory is used, whatever the size."""
    cls = model_class(config.architecture)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: cls(config, jnp.dtype(dtype))))
    return ModelStructure(config, graphdef, jax.tree.structure(state), tuple(param_specs(state)))


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
    """Loads a checkpoint directory (see hub.resolve) in `dtype`, over `mesh`, or on the first device.

    `config` replaces the directory's own (a changed context length, say). `load_format` "random" needs config.json
    only and draws the weights on the devices from `seed`.
    Raises ModelLoadError: unsupported, damaged, or with tensors that do not fit, all of them named.
    """
    start = time.perf_counter()
    config = config or read_config(directory)
    structure = build(config if mesh is None else for_mesh(config, mesh), dtype)
    shardings = [_sharding(spec, mesh) for spec in structure.specs]
    if load_format == "random":
        leaves, read = random_leaves(structure, shardings, seed), 0
    else:
        leaves, read = _read_leaves(structure, shardings, open_checkpoint(directory), progress)
    jax.block_until_ready(leaves)
    return LoadedModel(structure, leaves, directory, read, time.perf_counter() - start)


def _sharding(spec: ParamSpec, mesh: Mesh | None) -> Sharding:
    return SingleDeviceSharding(jax.devices()[0]) if mesh is None else param_sharding(spec, mesh)


# --- from a checkpoint -----------------------------------------------------------------------------------------


def _read_leaves(
    structure: ModelStructure, shardings: list[Sharding], checkpoint: Checkpoint, progress: Progress | None
) -> tuple[tuple[jax.Array, ...], int]:
    check_complete(structure, checkpoint)
    block = structure.config.weight_block
    sizes = [_stored_bytes(spec, checkpoint, block) for spec in structure.specs]
    leaves, done = [], 0
    for spec, sharding, size in zip(structure.specs, shardings, sizes, strict=True):
        leaves.append(_read_leaf(spec, sharding, checkpoint, block))
        done += size
        if progress is not None:
            progress(done, sum(sizes))
    return tuple(leaves), done


def _stored_bytes(spec: ParamSpec, checkpoint: Checkpoint, block: Block | None) -> int:
    names = {name for part in spec.parts for name in stored_tensors(part, checkpoint.tensors, block)}
    return sum(checkpoint.tensors[name].num_bytes for name in names)


def check_complete(structure: ModelStructure, checkpoint: Checkpoint) -> None:
    """Raises one ModelLoadError that names every tensor that is unknown, missing, duplicate or misshapen."""
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


def _read_leaf(spec: ParamSpec, sharding: Sharding, checkpoint: Checkpoint, block: Block | None) -> jax.Array:
    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        return read_region(spec, index, checkpoint, block)

    return jax.make_array_from_callback(spec.shape, sharding, read, dtype=spec.dtype)


def read_region(
    spec: ParamSpec, index: tuple[slice, ...], checkpoint: Checkpoint, block: Block | None = None
) -> np.ndarray:
    """The rectangle `index` of a parameter, in its dtype, from the parts that touch it."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True)]
    out = np.empty([b - a for a, b in bounds], spec.dtype)
    for part in spec.parts:
        overlap = tuple(_overlaps(bounds, part))
        if all(a < b for a, b in overlap):
            target = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, bounds, strict=True))
            source = tuple(slice(a - s, b - s) for (a, b), s in zip(overlap, part.start, strict=True))
            out[target] = _read_part(part, source, checkpoint, block)
    return out


def _overlaps(bounds: list[tuple[int, int]], part: Part) -> Iterator[tuple[int, int]]:
    for (a, b), start, size in zip(bounds, part.start, part.view, strict=True):
        yield max(a, start), min(b, start + size)


def _read_part(part: Part, region: tuple[slice, ...], checkpoint: Checkpoint, block: Block | None) -> np.ndarray:
    """The rectangle `region` of a part's view: of the file itself, where nothing is to be decoded."""
    if part.repeat > 1:
        return _read_repeated(part, region, checkpoint, block)
    names = tuple(stored_tensors(part, checkpoint.tensors, block))
    stored = [open_tensor(checkpoint.tensors[name]) for name in names]
    if len(names) == 2:
        check_scale(names[1], stored[1])
        if part.mxfp4:
            return decode_mxfp4(stored[0], stored[1], part, region)
        return decode_fp8(stored[0], stored[1].astype(np.float32), block, part, region)
    tensor = stored[0] if part.rows is None else stored[0][slice(*part.rows)]
    if part.transpose is not None:
        tensor = tensor.transpose(part.transpose)
    return tensor.reshape(part.view)[region]


def _read_repeated(part: Part, region: tuple[slice, ...], checkpoint: Checkpoint, block: Block | None) -> np.ndarray:
    """_read_part where the first axis holds copies: [h0, h0, h1, h1, ...]."""
    sources = np.arange(region[0].start, region[0].stop) // part.repeat
    first, last = int(sources[0]), int(sources[-1]) + 1
    once = dataclasses.replace(part, repeat=1, view=(part.view[0] // part.repeat, *part.view[1:]))
    return _read_part(once, (slice(first, last), *region[1:]), checkpoint, block)[sources - first]


# --- random ----------------------------------------------------------------------------------------------------


def random_leaves(structure: ModelStructure, shardings: list[Sharding], seed: int) -> tuple[jax.Array, ...]:
    """Weights drawn where they will live: normal with deviation 0.02, norms one, biases zero."""
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
