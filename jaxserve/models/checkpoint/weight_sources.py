"""The sources of new weights for a served model: a tree of arrays, arrays by checkpoint name, or a directory.

A source checks names, shapes and dtypes when it is made. It then makes the leaves of one parameter at a time. They
never share memory with the caller's arrays.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Sharding

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.checkpoint import Checkpoint, HeldTensor, Misfits, open_checkpoint
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.float_formats import format_of, value_dtype
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import PartReader, check_complete, has_own_head
from jaxserve.models.checkpoint.quantization import (
    by_parameter,
    check_dtypes,
    is_stored,
    read_parameter,
    stored_tensors,
)
from jaxserve.models.checkpoint.safetensors_file import copy_converted, empty_aligned
from jaxserve.models.checkpoint.sentence_files import read_pooling
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import ModelConfig
from jaxserve.models.pooling import PoolingConfig
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import ParamSpec

Specs = tuple[ParamSpec, ...]  # the leaves of one parameter
_PLACE = Path("the update")  # stands for a directory in messages
_FIX = "send all tensors in the model's shapes"
# fields that may differ between the configurations of a checkpoint and of the served model
_FREE = {"dtype", "generation", "eos_token_ids", "max_position_embeddings"}


class WeightSource(Protocol):
    """New weights, whose names, shapes and dtypes fit the model."""

    @property
    def parameters(self) -> frozenset[str]:
        """Return the names of the parameters that the source has."""
        ...

    @property
    def arrays(self) -> Sequence[Any]:
        """Return the caller's arrays, if there are any."""
        ...

    def make(self, specs: Specs, shardings: Sequence[Sharding]) -> tuple[jax.Array, ...]:
        """Make the leaves of one parameter, placed by `shardings`. Nothing else may hold their memory."""
        ...


def source_of(given: Any, structure: ModelStructure, *, partial: bool = False) -> WeightSource:
    """Return a checked source for `given`. Raises ModelLoadError that names the misfits.

    given: a tree of arrays with one array a leaf of the structure, by position or by the leaves' names; or (checkpoint
    name, array) pairs, or a mapping of them.
    partial: some parameters may be missing.
    """
    if isinstance(given, Mapping) and not _has_leaf_names(given, structure):
        given = given.items() if all(isinstance(name, str) for name in given) else given
    pairs = given if isinstance(given, Iterable) and not isinstance(given, Mapping | tuple | str) else None
    if pairs is not None:
        pairs = list(pairs)
        if pairs and all(isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str) for pair in pairs):
            return NamedTensors(structure, held_checkpoint(pairs), partial=partial)
    return LeafTree(structure, given if pairs is None else pairs, partial=partial)


def _has_leaf_names(given: Mapping[Any, Any], structure: ModelStructure) -> bool:
    """Return whether a mapping is a tree of leaves: it is nested, or every key is the name of a leaf.

    A mapping with the names and shapes of a checkpoint is not one, because its dtypes may differ.
    """
    shapes = {part.name: part.shape for spec in structure.specs for part in spec.parts}
    if given and all(name in shapes and np.shape(value) == shapes[name] for name, value in given.items()):
        return False
    names = {spec.name for spec in structure.specs} | {spec.wide().name for spec in structure.specs}
    return all(name in names or isinstance(value, Mapping) for name, value in given.items())


def held_checkpoint(pairs: Iterable[tuple[str, Any]]) -> Checkpoint:
    """Return the checkpoint of (name, array) pairs. Raises ModelLoadError if a value is not an array."""
    pairs = list(pairs)
    for name, array in pairs:
        _check_array(name, array)
    counts = Counter(name for name, _ in pairs)
    tensors = {name: HeldTensor(array) for name, array in pairs}
    return Checkpoint.of(_PLACE, tensors, duplicate=[name for name, count in counts.items() if count > 1])


def directory_source(directory: Path, structure: ModelStructure, served: ModelFiles) -> NamedTensors:
    """Return the weights of a checkpoint directory. served: the files of the model that is served.

    Raises ModelLoadError if its config.json describes another model, or its tensors do not fit.
    """
    files = ModelFiles.open(directory)
    if files.config_file.is_file():
        new, old = read_config(files), read_config(served)
        names = [field.name for field in dataclasses.fields(new) if field.name not in _FREE]
        different = [name for name in names if getattr(new, name) != getattr(old, name)]
        if files.modules and _pooling(files, new) != _pooling(served, old):
            different.append("pooling")
        if different:
            raise ModelLoadError(
                f"{directory} has another model than the served one: {', '.join(different)} differ",
                fix="start a server with it",
            )
    return NamedTensors(structure, open_checkpoint(directory))


def _pooling(files: ModelFiles, config: ModelConfig) -> PoolingConfig:
    return dataclasses.replace(read_pooling(files, config), max_tokens=None)


class NamedTensors:
    """Tensors by checkpoint name. They are converted, fused and quantized as when a checkpoint is loaded."""

    def __init__(self, structure: ModelStructure, checkpoint: Checkpoint, *, partial: bool = False) -> None:
        config = structure.config
        checkpoint = checkpoint.renamed(config.tensor_names)
        tensors = checkpoint.tensors
        block, form = config.weight_block, config.stored_form
        chosen = structure.specs
        if partial:
            chosen = tuple(
                spec
                for spec in chosen
                if any(name in tensors for part in spec.parts for name in stored_tensors(part, tensors, block, form))
            )
        check_complete(dataclasses.replace(structure, specs=chosen), checkpoint)
        _check_some(chosen)
        _check_numbers(structure.specs, checkpoint, form)
        if config.tie_word_embeddings and has_own_head(checkpoint):
            raise ModelLoadError(
                f"{checkpoint.directory}: lm_head.weight differs from the embeddings, which are the head here",
                fix="start a server with it",
            )
        self.parameters = frozenset(spec.wide().name for spec in chosen)
        self._held = [info.array for info in tensors.values() if isinstance(info, HeldTensor)]
        self._reader = PartReader(checkpoint, block, form)
        self._checkpoint = checkpoint

    @property
    def arrays(self) -> Sequence[Any]:
        return self._held

    def make(self, specs: Specs, shardings: Sequence[Sharding]) -> tuple[jax.Array, ...]:
        reader = self._reader
        read = reader.read, reader.read_codes, reader.read_order, reader.read_tensor_scale
        leaves = read_parameter(specs, shardings, *read)
        self._checkpoint.check_unchanged()
        return leaves


def _check_numbers(specs: Sequence[ParamSpec], checkpoint: Checkpoint, form: StoredForm | None) -> None:
    """Raise ModelLoadError if a tensor's dtype does not suit its parameter.

    An unquantized parameter takes floating point, or a floating-point format; others take the dtypes of their format.
    """
    if form is not None and form.method == "gguf":
        return  # its types are checked with its shapes
    parts = [part for spec in specs for part in spec.parts if not part.mxfp4]
    if form is not None:
        check_dtypes([part for part in parts if is_stored(part, form, checkpoint.tensors)], form, checkpoint.tensors)
    plain = {part.name: part for part in parts if not is_stored(part, form, checkpoint.tensors)}
    kept = {part.name for spec in specs if spec.packing and spec.packing.stored for part in spec.parts} & plain.keys()
    wrong: dict[str, list[str]] = {}
    for name in [name for name in checkpoint.tensors if name in plain]:
        dtype, method = checkpoint.tensors[name].dtype, format_of(plain[name], checkpoint.tensors)
        own = None if form is None or name not in kept else form.of(name.removesuffix(".weight"))
        if own is not None and dtype != value_dtype(own.method):
            wrong.setdefault(str(value_dtype(own.method)), []).append(f"{name} is {dtype}")
        elif method is None and not jnp.issubdtype(dtype, jnp.floating):
            wrong.setdefault("floating point", []).append(f"{name} is {dtype}")
    for expected, names in wrong.items():
        raise ModelLoadError(f"{checkpoint.directory}: {', '.join(names[:8])}, expected {expected}", fix=_FIX)


class LeafTree:
    """New weights with one array for each leaf.

    A quantized parameter may be one unquantized float32 array instead; it is then quantized as at load.
    """

    def __init__(self, structure: ModelStructure, tree: Any, *, partial: bool = False) -> None:
        groups = by_parameter(structure.specs)
        given = _by_position(tree, structure) if isinstance(tree, list | tuple) else _by_name(tree)
        wanted: list[ParamSpec] = []
        for specs in groups:
            wide = specs[0].wide()
            quantizes = specs[0].packing is not None and not specs[0].packing.stored and wide.name in given
            found = [wide] if quantizes else list(specs)
            if not partial or any(spec.name in given for spec in found):
                wanted += found
        _check_leaves(wanted, given, structure.config.architecture)
        _check_some(wanted)
        self._given = given
        self.parameters = frozenset(spec.wide().name for spec in wanted)

    @property
    def arrays(self) -> Sequence[Any]:
        return list(self._given.values())

    def make(self, specs: Specs, shardings: Sequence[Sharding]) -> tuple[jax.Array, ...]:
        wide = specs[0].wide().name
        if specs[0].packing is not None and wide in self._given:
            numbers = np.asarray(self._given[wide])
            return read_parameter(specs, shardings, lambda _, index: numbers[index])
        return tuple(_placed(self._given[spec.name], place) for spec, place in zip(specs, shardings, strict=True))


def _by_position(tree: Sequence[Any], structure: ModelStructure) -> dict[str, Any]:
    leaves = jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
    names = [spec.name for spec in structure.specs]
    wide = [specs[0].wide().name for specs in by_parameter(structure.specs)]
    for known in (names, wide):
        if len(leaves) == len(known):
            return dict(zip(known, leaves, strict=True))
    raise ModelLoadError(f"{len(leaves)} leaves given, the model has {len(names)}", fix=_FIX)


def _by_name(tree: Any) -> dict[str, Any]:
    """Flatten a tree. A leaf's name is its path, without the attribute of a variable that holds the array."""
    found: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None):
        names = [jax.tree_util.keystr((key,), simple=True) for key in path]
        found[".".join(names[:-1] if names and names[-1] == "value" else names)] = leaf
    return found


def _check_leaves(wanted: Sequence[ParamSpec], given: Mapping[str, Any], architecture: str) -> None:
    known = {spec.name for spec in wanted}
    misfits = Misfits(
        missing=[spec.name for spec in wanted if spec.name not in given],
        unknown=[name for name in given if name not in known],
    )
    for spec in wanted:
        if spec.name not in given:
            continue
        array = given[spec.name]
        _check_array(spec.name, array)
        if tuple(array.shape) != spec.shape or array.dtype != spec.dtype:
            shapes = f"{array.dtype}{list(array.shape)}, expected {spec.dtype}{list(spec.shape)}"
            misfits.misshapen.append(f"{spec.name} is {shapes}")
    misfits.raise_if_any(_PLACE, architecture)


def _check_some(chosen: Sequence[ParamSpec]) -> None:
    if not chosen:
        raise ModelLoadError(f"{_PLACE} has no tensors")


def _check_array(name: str, array: Any) -> None:
    if isinstance(array, Tracer) or not isinstance(array, np.ndarray | jax.Array):
        kind = type(array).__name__
        raise ModelLoadError(f"{name}: expected a numpy or jax array, and {kind} was given", fix=_FIX)
    if isinstance(array, jax.Array) and array.is_deleted():
        raise ModelLoadError(f"{name}: the array has been deleted", fix=_FIX)


def _placed(array: Any, sharding: Sharding) -> jax.Array:
    """Copy an array to the devices. If it is placed there already, it does not go through the host's memory."""
    if isinstance(array, jax.Array) and array.sharding.is_equivalent_to(sharding, array.ndim):
        return jax.device_put(array, sharding, may_alias=False)
    host = np.asarray(array)
    return jax.make_array_from_callback(host.shape, sharding, lambda index: _own(host[index]), dtype=host.dtype)


def _own(source: np.ndarray) -> np.ndarray:
    out = empty_aligned(source.shape, source.dtype)
    if math.prod(source.shape):
        copy_converted(source, out)
    return out
