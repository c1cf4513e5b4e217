"""Load a checkpoint directory as a LoadedModel: the model's structure, and its weights as a flat tuple on the devices.

PartReader reads a rectangle of a parameter from the checkpoint tensors that it is made of, dequantizes it if needed and
converts its dtype. Each device reads only its own rectangle. A part is read a few rows at a time into a buffer per
thread: only the weights take fresh memory, because page faults on first use cost more than all copies. `random_model`
draws weights instead of reading them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.checkpoint import Checkpoint, Shapes, Tensor, open_checkpoint, same_numbers
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.float_formats import Block, FloatWeight, format_of, found_form
from jaxserve.models.checkpoint.gguf import BlockTensor
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.orbax_reader import READERS, Converted
from jaxserve.models.checkpoint.quantization import (
    Codes,
    by_parameter,
    code_tensors,
    input_order,
    is_stored,
    read_codes,
    read_parameter,
    read_places,
    stored_tensors,
)
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, copy_converted, empty_aligned, read_rows
from jaxserve.models.checkpoint.structure import LoadedModel, ModelStructure, build
from jaxserve.models.config import ModelConfig, PackedExperts
from jaxserve.models.sharding import for_mesh, param_sharding
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import Packing, ParamSpec, Part
from jaxserve.ops.quantized import MIDDLE

logger = logging.getLogger(__name__)

Region = tuple[slice, ...]
_WIDE = "set model.quantization: none"
CHUNK = 4 * 2**20  # bytes per read, by each of four threads
PIECE = 2**18  # quantized weights that are unpacked at a time, by each of four threads


class PartReader:
    """Reads parameters of one checkpoint. Thread-safe.

    block: rows and columns per FP8 scale (weight_block). form: of quantized weights
    """

    def __init__(self, checkpoint: Checkpoint, block: Block | None, form: StoredForm | None = None) -> None:
        self._tensors = checkpoint.tensors
        self._block = block
        self._form = form
        self._buffers = threading.local()

    def read(self, spec: ParamSpec, index: Region) -> np.ndarray:
        """Read the rectangle `index` of a parameter, in the parameter's dtype."""
        out = empty_aligned(
            tuple(len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True)), np.dtype(spec.dtype)
        )
        for part, place, region in _regions(spec, index):
            self._fill(out[place], part, region)
        return out

    def read_codes(self, spec: ParamSpec, index: Region, packing: Packing) -> dict[str, np.ndarray]:
        """Read the rectangle `index` of a parameter without dequantizing it: values, scales, maybe zeros, as leaves.

        packing: of the leaves. If the checkpoint's groups are larger, their scales and zeros are repeated. Permuted
        inputs are sorted by group. Raises ModelLoadError for permuted inputs of experts, or if the configuration says
        that there are none.
        """
        *rows, depth = (len(range(*s.indices(n))) for s, n in zip(index, spec.shape, strict=True))
        out: dict[str, np.ndarray] = {}
        sorts = self._form is not None and self._form.permuted and "expert" not in spec.axes
        for part, place, region in _regions(spec, index):
            for piece, leaves in self._pieces(part, region[:-1], packing, sorts):
                for role, array in leaves.items():
                    per = part.shape[-1] // array.shape[-1]
                    if role not in out:
                        out[role] = empty_aligned((*rows, max(1, depth // per)), array.dtype)
                    out[role][_shrunk(place, per)][piece] = array[..., _shrunk(region, per)[-1]]
        return out

    def _pieces(
        self, part: Part, rows: Region, packing: Packing, sorts: bool
    ) -> Iterator[tuple[Region, dict[str, np.ndarray]]]:
        """Yield rows of a part's view piece by piece: their slice of `rows`, and the arrays of leaves by role."""
        assert self._form is not None
        tensor = self._tensors.get(part.name)
        if (weight := self._float(part)) is not None:
            for piece, some, first, last in _row_pieces_of(part, rows):
                leaves = weight.codes(first, last, packing.group)
                yield piece, {role: _chosen(array, some - first) for role, array in leaves.items()}
        elif isinstance(tensor, BlockTensor):
            for piece, some, first, last in _row_pieces_of(part, rows):
                codes = Codes.of_blocks(tensor.unpacked(first, last))
                if not np.isfinite(codes.scales).all() or not (codes.zeros is None or np.isfinite(codes.zeros).all()):
                    fix = "download the checkpoint again"
                    raise ModelLoadError(f"{part.name}: not all scales are numbers", fix=fix)
                yield piece, {role: _chosen(array, some - first) for role, array in codes.leaves(packing).items()}
        else:
            yield (), self._codes(part, rows, packing, sorts)

    def read_order(self, spec: ParamSpec) -> np.ndarray:
        """Return the inputs of a parameter sorted by group, int32 [K].

        Raises ModelLoadError if the order of its parts differs, or groups have different sizes.
        """
        assert self._form is not None
        found = [_order(part, read_places(part, self._form, self._whole), self._form) for part in spec.parts]
        for part, order in zip(spec.parts, found, strict=True):
            if not np.array_equal(order, found[0]):
                why = f"{spec.parts[0].name} and {part.name} have inputs in different orders, and are computed as one"
                raise ModelLoadError(why, fix=_WIDE)
        return found[0]

    def read_tensor_scale(self, part: Part) -> np.float32:
        """Return the scale of a part's tensor; 1 if its format has none."""
        weight = self._float(part)
        assert weight is not None
        return weight.tensor_scale  # pyright: ignore[reportReturnType]  a scalar of float32

    def _float(self, part: Part) -> FloatWeight | None:
        """Return the reader of a part that is stored in a floating-point format; None: it is not."""
        method = format_of(part, self._tensors)
        return None if method is None else FloatWeight(part, method, self._block, self._tensors, self._read)

    def _codes(self, part: Part, rows: Region, packing: Packing, sorts: bool) -> dict[str, np.ndarray]:
        """Return the arrays of leaves by role for rows of integers of a part's view. sorts: sort permuted inputs"""
        assert self._form is not None
        codes = read_codes(part, self._form, self._whole)
        if codes.places is not None and not sorts:
            of = "experts" if self._form.permuted else "a checkpoint whose configuration does not say so"
            why = f"{part.name}: its inputs are permuted (act-order), which is not computed packed for {of}"
            raise ModelLoadError(why, fix=_WIDE)
        codes = codes.in_order()
        return {role: _view(array, part)[rows] for role, array in codes.leaves(packing).items()}

    def stored_bytes(self, spec: ParamSpec) -> int:
        """Return the bytes that a parameter takes in the checkpoint."""
        names = {name for part in spec.parts for name in stored_tensors(part, self._tensors, self._block, self._form)}
        return sum(self._tensors[name].num_bytes for name in names)

    def _whole(self, name: str) -> np.ndarray:
        return self._read(self._tensors[name])

    def _fill(self, target: np.ndarray, part: Part, region: Region) -> None:
        """Write the rectangle `region` of a part's view to `target`."""
        form = self._form
        if form is not None and form.method != "gguf" and is_stored(part, form, self._tensors):
            target[...] = _view(read_codes(part, form, self._whole).wide(), part)[region]
            return
        if (weight := self._float(part)) is not None:
            *rows, columns = region
            for piece, some, first, last in _row_pieces_of(part, tuple(rows)):
                target[piece] = _chosen(weight.wide(first, last), some - first)[..., columns]
            return
        stored = self._tensors[part.name]
        if part.repeat > 1:
            self._fill_repeated(target, part, region)
        elif part.transpose is not None:
            self._fill_turned(target, part, region, stored)
        else:
            self._fill_rows(target, part, region, stored)

    def _fill_turned(self, target: np.ndarray, part: Part, region: Region, info: Tensor) -> None:
        """Fill a view whose axes are in another order: one expert at a time, and what is not of experts at once."""
        assert part.transpose is not None
        if part.transpose[0] or part.rows or part.view[0] != part.shape[0]:
            whole = self._read(info)[slice(*part.rows) if part.rows else ...]
            whole = whole.reshape(part.split or whole.shape)
            copy_converted(whole.transpose(part.transpose).reshape(part.view)[region], target)
            return
        for place, index in enumerate(range(region[0].start, region[0].stop)):
            one = self._read(info, index, index + 1).reshape(1, *(part.split or part.shape)[1:])
            view = one.transpose(part.transpose).reshape(1, *part.view[1:])
            copy_converted(view[(slice(None), *region[1:])], target[place : place + 1])

    def _fill_repeated(self, target: np.ndarray, part: Part, region: Region) -> None:
        """Fill a view whose first axis has copies: [h0, h0, h1, h1, ...]."""
        once = dataclasses.replace(part, repeat=1, view=(part.view[0] // part.repeat, *part.view[1:]))
        for i, copy in enumerate(range(region[0].start, region[0].stop)):
            source = copy // part.repeat
            self._fill(target[i : i + 1], once, (slice(source, source + 1), *region[1:]))

    def _fill_rows(self, target: np.ndarray, part: Part, region: Region, info: Tensor) -> None:
        """Read the part in chunks along the first axis of its view that is longer than 1.

        One index of this axis is `per` rows of the tensor.
        """
        first, last = part.rows or (0, info.shape[0] if info.shape else 1)
        axis = next((i for i, size in enumerate(part.view) if size > 1), 0) if last - first > 1 else 0
        per = (last - first) // part.view[axis]
        step = max(1, CHUNK // max(1, per * math.prod(info.shape[1:]) * info.dtype.itemsize))
        begin, end = region[axis].start, region[axis].stop
        for a in range(begin, end, step):
            b = min(a + step, end)
            rows = self._read(info, first + a * per, first + b * per)
            inner = tuple(slice(None) if i == axis else s for i, s in enumerate(region))
            view = rows.reshape(*part.view[:axis], b - a, *part.view[axis + 1 :])[inner]
            copy_converted(view, target[(slice(None),) * axis + (slice(a - begin, b - begin),)])

    def _read(self, info: Tensor, first: int = 0, last: int | None = None) -> np.ndarray:
        """Read rows of a tensor. If they fit into the thread's buffer, they are valid until the thread's next read."""
        if not isinstance(info, TensorInfo):
            return info.rows(first, last)
        rows = (info.shape[0] if info.shape else 1) if last is None else last - first
        size = rows * (info.num_bytes // max(1, info.shape[0] if info.shape else 1))
        if size > CHUNK or last is None:
            return read_rows(info, first, rows, np.empty(size, np.uint8))
        if not hasattr(self._buffers, "raw"):
            self._buffers.raw = np.empty(CHUNK, np.uint8)
        return read_rows(info, first, rows, self._buffers.raw[:size])


def _regions(spec: ParamSpec, index: Region) -> Iterator[tuple[Part, Region, Region]]:
    """Yield each part that a rectangle overlaps, with its region in the rectangle and the region of its view."""
    bounds = [s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True)]
    for part in spec.parts:
        overlap = list(_overlaps(bounds, part))
        if all(a < b for a, b in overlap):
            place = tuple(slice(a - o, b - o) for (a, b), (o, _) in zip(overlap, bounds, strict=True))
            yield part, place, tuple(slice(a - s, b - s) for (a, b), s in zip(overlap, part.start, strict=True))


def _order(part: Part, places: np.ndarray | None, form: StoredForm) -> np.ndarray:
    """Return the inputs of a part sorted by group."""
    depth = part.shape[1]
    if places is None:
        return np.arange(depth, dtype=np.int32)
    if (np.bincount(places, minlength=form.num_groups(depth)) != form.group).any():
        raise ModelLoadError(f"{part.name}: its groups of permuted inputs differ in size", fix=_WIDE)
    return input_order(places)


def _view(array: np.ndarray, part: Part) -> np.ndarray:
    """Return a tensor's values, or its scales, [O, n] as the part's view, copies of heads included."""
    first, last = part.rows or (0, len(array))
    once = (part.view[0] // part.repeat, *part.view[1:-1], -1)
    return np.repeat(array[first:last].reshape(once), part.repeat, axis=0)


def _row_pieces_of(part: Part, rows: Region) -> Iterator[tuple[Region, np.ndarray, int, int]]:
    """Yield each piece of rows of a part's view: its slices, the tensor's rows in it, the first of them and their end.

    A tensor of more dimensions has one row for each of its last.
    """
    assert part.transpose is None, part.name
    numbers = _view(np.arange(math.prod(part.shape[:-1]))[:, None], part)[..., 0][rows]
    for piece in _row_pieces(numbers.shape, max(1, PIECE // part.shape[-1])):
        some = numbers[piece]
        yield piece, some, int(some.min()), int(some.max()) + 1


def _chosen(array: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return rows of an array [n, ..] as [*rows.shape, ..], without a copy if they are all in order."""
    if rows.size == len(array) and np.array_equal(rows.reshape(-1), np.arange(rows.size)):
        return array.reshape(*rows.shape, *array.shape[1:])
    return array[rows]


def _row_pieces(shape: tuple[int, ...], most: int) -> Iterator[Region]:
    """Yield slices of rows of a view that cover `shape`, each of at most `most` rows."""
    count, *rest = shape
    step = max(1, most // max(1, math.prod(rest)))
    for first in range(0, count, step):
        outer = slice(first, min(first + step, count))
        if step > 1 or not rest:
            yield (outer,)
        else:
            yield from ((outer, *inner) for inner in _row_pieces(tuple(rest), most))


def _shrunk(region: Region, per: int) -> Region:
    """Return the region of the array that has one entry for each `per` weights of a row, or one for a whole row."""
    *rows, last = region
    return (*rows, slice(last.start // per, -(-last.stop // per)))


def _overlaps(bounds: list[tuple[int, int]], part: Part) -> Iterator[tuple[int, int]]:
    for (a, b), start, size in zip(bounds, part.start, part.view, strict=True):
        yield max(a, start), min(b, start + size)


Progress = Callable[[int, int], None]  # bytes of the checkpoint read so far, bytes in all
LoadFormat = Literal["auto", "safetensors"]

# Buffers that old exports contain and that are computed here; scales and zeros of quantized activations and KV caches.
IGNORED = (
    re.compile(r"rotary_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"),
    re.compile(r"\.(input|output|q|k|v)_(scale|global_scale|zero_point)$"),
)
_HEAD = "lm_head.weight"
_OF_CODES = (".qweight", ".qzeros", ".weight_packed")
RANDOM_STDDEV = 0.02
RANDOM_INT8 = 32  # standard deviation of int8 values; 4 random bits have 4.6, or 2.9 as E2M1
_RANDOM_SCALES = {
    "int8": RANDOM_STDDEV / RANDOM_INT8,
    "fp8": RANDOM_STDDEV,
    "int4": RANDOM_STDDEV / 4.6,
    "mxfp8": 127 - 6,
    "mxfp4": 127 - 7,
    "nvfp4": 1.0,
}


def load_model(
    model: Path | ModelFiles,
    *,
    dtype: jnp.dtype,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    progress: Progress | None = None,
    load_format: LoadFormat = "auto",
) -> LoadedModel:
    """Load a model in `dtype`, over `mesh` or on the first device.

    model: a directory (see hub.resolve), a GGUF file, or its opened files
    config: used instead of the directory's config.json, for example with another context length.
    load_format: "auto" detects a converted checkpoint (see orbax.convert). Anything else is read as published.
    Raises ModelLoadError if the model is not supported, a file is damaged, or tensors do not fit; it names them all.
    """
    start = time.perf_counter()
    files = ModelFiles.open(model)
    config = _config(config, files, mesh)
    weights = open_weights(files, config, load_format)
    structure = build(weights.complete(config), dtype)
    leaves, read = weights.read(structure, _shardings(structure, mesh), progress)
    jax.block_until_ready(leaves)
    return LoadedModel(structure, leaves, files.directory, read, time.perf_counter() - start)


def random_model(
    model: Path | ModelFiles,
    *,
    dtype: jnp.dtype,
    config: ModelConfig | None = None,
    mesh: Mesh | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Draw the weights of a model on the devices. The directory needs only config.json. See `load_model`.

    Raises ModelLoadError if the model is not supported.
    """
    start = time.perf_counter()
    files = ModelFiles.open(model)
    structure = build(_config(config, files, mesh), dtype)
    leaves = jax.block_until_ready(random_leaves(structure, _shardings(structure, mesh), seed))
    return LoadedModel(structure, leaves, files.directory, 0, time.perf_counter() - start)


def _config(config: ModelConfig | None, files: ModelFiles, mesh: Mesh | None) -> ModelConfig:
    config = config or read_config(files)
    return config if mesh is None else for_mesh(config, mesh)


def inspect(model: Path | ModelFiles, *, dtype: jnp.dtype, config: ModelConfig) -> ModelStructure:
    """Check the files of a checkpoint and return its structure. Raises ModelLoadError.

    It reads no weight except an output head beside a table of embeddings, see `_as_published`.
    """
    weights = open_weights(ModelFiles.open(model), config)
    structure = build(weights.complete(config), dtype)
    weights.check(structure)
    return structure


class Format(Protocol):
    """The weights of a model's files in one format."""

    def complete(self, config: ModelConfig) -> ModelConfig:
        """Return the config with the fields that the weights decide: their quantization, whether there is a head."""
        ...

    def check(self, structure: ModelStructure) -> None:
        """Raise ModelLoadError if the tensors do not fit the model. Reads no values of weights."""
        ...

    def read(
        self, structure: ModelStructure, shardings: list[Sharding], progress: Progress | None = None
    ) -> tuple[tuple[jax.Array, ...], int]:
        """Return the leaves, each device's own part on it, and the bytes read. Raises ModelLoadError."""
        ...


def open_weights(files: ModelFiles, config: ModelConfig, load_format: LoadFormat = "auto") -> Format:
    """Open the weights of a model's files. load_format: see `load_model`. Raises ModelLoadError."""
    if load_format == "auto" and files.format == "orbax":
        return Converted(files.directory, files.manifest)
    return Published(open_checkpoint(files.directory).renamed(config.tensor_names))


@dataclass(frozen=True)
class Published:
    """The tensors of safetensors files or of a GGUF file, by the names of the modules here: a Format."""

    checkpoint: Checkpoint

    def complete(self, config: ModelConfig) -> ModelConfig:
        return _as_published(config, self.checkpoint)

    def check(self, structure: ModelStructure) -> None:
        check_complete(structure, self.checkpoint)

    def read(
        self, structure: ModelStructure, shardings: list[Sharding], progress: Progress | None = None
    ) -> tuple[tuple[jax.Array, ...], int]:
        if unused := self.checkpoint.unused(structure.config.ignored_tensors):
            logger.info("%s: tensors that are not used: %s", self.checkpoint.directory, ", ".join(unused))
        return _read_leaves(structure, shardings, self.checkpoint, progress)


def _as_published(config: ModelConfig, checkpoint: Checkpoint) -> ModelConfig:
    """Return the config completed from the files: which weights are FP8, the form of experts, whether there is a head.

    An embedding model may be published without an output head. As in transformers, a head that differs from the table
    of embeddings is used even if config.json ties them.
    """
    headless = checkpoint.bare and _HEAD not in checkpoint.tensors
    tied = headless or (config.tie_word_embeddings and not has_own_head(checkpoint))
    form = config.stored_form
    if form is not None and not form.is_integer and form.method != "gpt-oss":
        form = found_form(form, checkpoint.tensors)
    if form is not None and form.method in ("gptq", "awq"):
        kinds = {name.rpartition(".")[2] for name in checkpoint.tensors}
        # inputs in order need no g_idx; without zeros the middle of the quantized values is 0
        form = dataclasses.replace(
            form, indexed=form.permuted or "g_idx" in kinds, zeros=not form.symmetric or "qzeros" in kinds
        )
    experts = _form_of_experts(config, checkpoint)
    has_tower = any(name.startswith("visual.") for name in checkpoint.tensors)
    vision = config.vision if has_tower else None  # a language model that was saved alone
    return config.replace(stored_form=form, tie_word_embeddings=tied, packed_experts=experts, vision=vision)


def _form_of_experts(config: ModelConfig, checkpoint: Checkpoint) -> PackedExperts:
    """Return ModelConfig.packed_experts by the files: the hub's form of a family and transformers' own may differ."""
    if config.moe is None or config.packed_experts not in ("none", "rows", "columns"):
        return config.packed_experts
    packed = next((each for name, each in checkpoint.tensors.items() if name.endswith(".experts.gate_up_proj")), None)
    if packed is None:
        each = any(name.endswith(f".experts.0.{config.moe.names.experts[0]}.weight") for name in checkpoint.tensors)
        return "none" if each else config.packed_experts
    rows = packed.shape == (config.moe.num_experts, 2 * config.moe.ffn, config.hidden_size)
    columns = packed.shape == (config.moe.num_experts, config.hidden_size, 2 * config.moe.ffn)
    if rows == columns:
        return config.packed_experts
    return "rows" if rows else "columns"


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
        read = functools.partial(
            read_parameter,
            read=reader.read,
            codes=reader.read_codes,
            order=reader.read_order,
            scale=reader.read_tensor_scale,
        )
        for found, size in zip(pool.map(read, parameters, placed), sizes, strict=True):
            leaves += found
            done += size
            if progress is not None:
                progress(done, sum(sizes))
    checkpoint.check_unchanged()
    return tuple(leaves), done


def check_complete(structure: ModelStructure, checkpoint: Checkpoint) -> None:
    """Raise one ModelLoadError that names every tensor that is unknown, missing, duplicate or of a wrong shape."""
    config = structure.config
    expected: dict[str, Shapes] = {}
    for spec in structure.specs:
        form = config.stored_form if spec.packing is not None and spec.packing.stored else None
        for part in spec.parts:
            if form is not None and form.is_integer:  # quantized values, whatever the checkpoint has
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
        numbers = [spec for spec in structure.specs if jnp.issubdtype(spec.dtype, jnp.floating)]
        _check_floats({part.name for spec in numbers for part in spec.parts}, checkpoint)
    form, kept = config.stored_form, [spec for spec in structure.specs if spec.packing and spec.packing.stored]
    if form is not None and form.method == "gguf":
        names = {part.name for spec in kept for part in spec.parts}
        checkpoint.check_blocks({name: form.type_of(name.removesuffix(".weight")) for name in sorted(names)})


def _check_floats(names: set[str], checkpoint: Checkpoint) -> None:
    """Raise ModelLoadError for integer tensors: they would be quantized values of a form that config.json lacks."""
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
    """Draw a leaf of a quantized weight, so that the weight has the standard deviation of unquantized ones."""
    assert spec.packing is not None
    kind, role = spec.packing.kind, spec.packing.role
    if role == "values":
        draw = jax.jit(_draw_codes, static_argnums=(1, 2), out_shardings=sharding)
        return draw(key, spec.shape, spec.dtype)
    if role == "order":
        return jnp.arange(spec.shape[0], dtype=spec.dtype, device=sharding)
    if role == "tensor_scale":
        return jnp.full(spec.shape, RANDOM_STDDEV / 2.9, spec.dtype, device=sharding)
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
