"""Present a GGUF file as the safetensors checkpoint that it was made of: the keys of its config.json, and its tensors.

The header, its metadata and its table of tensors are read and checked first. GGUF's names are mapped to those of a
safetensors checkpoint with the names of the modules here. A tensor is read by rows, dequantized or as quantized values.

A weight of a quantized type is value * scale - minimum in float32. A block of a K-quant (Q4_K, Q5_K, Q6_K) has 256
weights in groups of 32 or 16, whose scales and minima are integers times a scale of the block. A block of another type
is one group. The layouts follow ggml's ggml-quants.h.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import Header, Omitted, gguf_parts, open_header, read_object
from jaxserve.models.checkpoint.read_config import Json, shown
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, read_rows
from jaxserve.models.stored_form import HELD_BLOCKS
from jaxserve.ops.quantized import BLOCK, MIDDLE
from jaxserve.system import install_command

_K_BLOCK = 256  # weights of a block of K-quants
_Fields = tuple[np.ndarray, ...]


class Unpacked(NamedTuple):
    """values [N, K]: int8, or uint8 if they have 4 bits. scales, minima: float32 [N, K / group].

    If minima is None, the minimum is 8 times the scale for 4-bit values and 0 for others.
    """

    values: np.ndarray
    scales: np.ndarray
    minima: np.ndarray | None

    def numbers(self) -> np.ndarray:
        """Return the dequantized weights, float32 [N, K]."""
        groups = self.values.reshape(*self.scales.shape, -1).astype(np.float32)
        if self.minima is None and self.values.dtype == np.uint8:
            groups -= MIDDLE
        groups *= self.scales[..., None]
        if self.minima is not None:
            groups -= self.minima[..., None]
        return groups.reshape(self.values.shape)


@dataclass(frozen=True)
class Layout:
    """The layout of a type's blocks in a file.

    count: weights of a block. sizes: bytes of its fields. unpack: turns the fields, uint8 [N, B, size], into `Unpacked`
    """

    count: int
    sizes: tuple[int, ...]
    unpack: Callable[[_Fields], Unpacked]

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    def read(self, raw: np.ndarray) -> Unpacked:
        """Unpack rows of blocks, uint8 [N, bytes of a row]."""
        blocks = raw.reshape(len(raw), -1, self.num_bytes)
        ends = np.cumsum(self.sizes)
        with np.errstate(invalid="ignore"):  # the caller names a tensor whose scales are not finite
            values, scales, minima = self.unpack(tuple(np.split(blocks, ends[:-1], axis=-1)))
        rows = len(raw), -1
        return Unpacked(values.reshape(rows), scales.reshape(rows), None if minima is None else minima.reshape(rows))


def _halves(field: np.ndarray) -> np.ndarray:
    """Return the float16 values of a field as float32."""
    return np.ascontiguousarray(field).view(np.float16).astype(np.float32)


def _nibbles(field: np.ndarray, together: int) -> np.ndarray:
    """Return the low halves of each `together` bytes before the high ones: uint8 [N, B, S] -> [N, B, 2 S]."""
    pieces = field.reshape(*field.shape[:-1], -1, 1, together)
    return np.concatenate([pieces & 15, pieces >> 4], axis=-2).reshape(*field.shape[:-1], -1)


def _bits(field: np.ndarray, width: int) -> np.ndarray:
    """Return the lowest `width` bits of all bytes, then the next ones: uint8 [N, B, S] -> [N, B, 8 S / width]."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return (field[..., None, :] >> shifts & (2**width - 1)).reshape(*field.shape[:-1], -1)


def _fifth_bits(field: np.ndarray) -> np.ndarray:
    """Return the bits of a field of four bytes in order, the lowest first: [N, B, 4] -> [N, B, 32]."""
    return np.unpackbits(field, axis=-1, bitorder="little")


def _signed(values: np.ndarray, middle: int) -> np.ndarray:
    return values.view(np.int8) - np.int8(middle)


def _q4_0(fields: _Fields) -> Unpacked:
    scale, codes = fields
    return Unpacked(_nibbles(codes, BLOCK // 2), _halves(scale), None)


def _q4_1(fields: _Fields) -> Unpacked:
    scale, least, codes = fields
    return Unpacked(_nibbles(codes, BLOCK // 2), _halves(scale), -_halves(least))


def _q5_0(fields: _Fields) -> Unpacked:
    scale, high, codes = fields
    return Unpacked(_signed(_nibbles(codes, BLOCK // 2) | _fifth_bits(high) << 4, 16), _halves(scale), None)


def _q5_1(fields: _Fields) -> Unpacked:
    scale, least, high, codes = fields
    values = _nibbles(codes, BLOCK // 2) | _fifth_bits(high) << 4
    return Unpacked(values.view(np.int8), _halves(scale), -_halves(least))


def _q8_0(fields: _Fields) -> Unpacked:
    scale, codes = fields
    return Unpacked(codes.view(np.int8), _halves(scale), None)


def _k_scales(scale: np.ndarray, least: np.ndarray, packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return scales and minima, float32 [N, B, 8]: 6-bit integers, packed in 12 bytes, times the block's own."""
    low, middle, high = np.split(packed, 3, axis=-1)
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], axis=-1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], axis=-1)
    return _halves(scale) * scales.astype(np.float32), _halves(least) * minima.astype(np.float32)


def _q4_k(fields: _Fields) -> Unpacked:
    *shared, codes = fields
    return Unpacked(_nibbles(codes, BLOCK), *_k_scales(*shared))


def _q5_k(fields: _Fields) -> Unpacked:
    *shared, high, codes = fields
    return Unpacked((_nibbles(codes, BLOCK) | _bits(high, 1) << 4).view(np.int8), *_k_scales(*shared))


def _q6_k(fields: _Fields) -> Unpacked:
    codes, high, scales, scale = fields
    halves = high.reshape(*high.shape[:-1], 2, -1)  # of the block, each with 32 bytes
    values = _nibbles(codes, 64) | _bits(halves, 2).reshape(*codes.shape[:-1], -1) << 4
    return Unpacked(_signed(values, 32), _halves(scale) * scales.view(np.int8).astype(np.float32), None)


LAYOUTS: MappingProxyType[str, Layout] = MappingProxyType(
    {
        "Q4_0": Layout(BLOCK, (2, 16), _q4_0),
        "Q4_1": Layout(BLOCK, (2, 2, 16), _q4_1),
        "Q5_0": Layout(BLOCK, (2, 4, 16), _q5_0),
        "Q5_1": Layout(BLOCK, (2, 2, 4, 16), _q5_1),
        "Q8_0": Layout(BLOCK, (2, 32), _q8_0),
        "Q4_K": Layout(_K_BLOCK, (2, 2, 12, 128), _q4_k),
        "Q5_K": Layout(_K_BLOCK, (2, 2, 12, 32, 128), _q5_k),
        "Q6_K": Layout(_K_BLOCK, (128, 64, 16, 2), _q6_k),
    }
)


_FLOAT32 = np.dtype(np.float32)


@dataclass(frozen=True)
class BlockType:
    """A type: `count` weights take `num_bytes` bytes. dtype: of the dequantized weights

    layout: set for types that stay quantized. decode: set for the other types; uint8 [N, B] -> float32 [N, K]
    """

    name: str
    count: int
    num_bytes: int
    dtype: np.dtype = _FLOAT32
    layout: Layout | None = None
    decode: Callable[[np.ndarray], np.ndarray] | None = None

    def numbers(self, raw: np.ndarray) -> np.ndarray:
        """Dequantize the bytes of rows, uint8 [N, B] -> [N, K] in `dtype`."""
        if self.layout is not None:
            return self.layout.read(raw).numbers()
        return raw.view(self.dtype) if self.decode is None else self.decode(raw)


def _kept(name: str) -> BlockType:
    return BlockType(name, LAYOUTS[name].count, LAYOUTS[name].num_bytes, layout=LAYOUTS[name])


_KNOWN = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2, np.dtype(np.float16)),
        2: _kept("Q4_0"),
        3: _kept("Q4_1"),
        6: _kept("Q5_0"),
        7: _kept("Q5_1"),
        8: _kept("Q8_0"),
        12: _kept("Q4_K"),
        13: _kept("Q5_K"),
        14: _kept("Q6_K"),
        30: BlockType("BF16", 1, 2, np.dtype(ml_dtypes.bfloat16)),
    }
)


def block_type(number: int) -> BlockType:
    """Return the type that has this number in GGUF.

    Raises ValueError if it is unknown or cannot be decoded, ModelLoadError if that needs a package that is missing.
    """
    return _KNOWN[number] if number in _KNOWN else _decoded(number)


@functools.cache  # a file may have many tensors of a type
def _decoded(number: int) -> BlockType:
    """Return a type that the gguf package decodes."""
    try:
        import gguf  # noqa: PLC0415  # optional, and 0.2 s to import
    except ImportError:
        raise ModelLoadError(
            f"tensors of GGUF's type {number} are decoded by the package gguf", fix=install_command("gguf")
        ) from None
    kind = gguf.GGMLQuantizationType(number)
    count, num_bytes = gguf.GGML_QUANT_SIZES[kind]

    def decode(raw: np.ndarray) -> np.ndarray:
        """Decode the blocks uint8 [N, B] -> float32 [N, K]."""
        return gguf.quants.dequantize(raw, kind)

    try:
        decode(np.zeros((1, num_bytes), np.uint8))
    except NotImplementedError:
        raise ValueError(f"{kind.name} cannot be decoded") from None
    return BlockType(kind.name, count, num_bytes, decode=decode)


@dataclass(frozen=True)
class BlockTensor:
    """A tensor. It is read from the file when it is needed.

    raw: its bytes, uint8 [rows, bytes of a row]. shape: of the tensor, rows first
    head_rows: rows of a head if the file interleaves the head's two halves; 0: the rows are in order
    """

    raw: TensorInfo
    block: BlockType
    shape: tuple[int, ...]
    head_rows: int = 0

    @property
    def dtype(self) -> np.dtype:
        """Return the dtype of `rows`."""
        return self.block.dtype

    @property
    def num_bytes(self) -> int:
        """Return the tensor's size in the file, in bytes."""
        return self.raw.num_bytes

    def rows(self, first: int, last: int | None) -> np.ndarray:
        """Return the dequantized rows [first, last) of the first axis; if last is None, all from `first` on."""
        last = self.raw.shape[0] if last is None else last
        return self.block.numbers(self._raw_rows(first, last)).reshape(-1, *self.shape[1:])

    def unpacked(self, first: int, last: int) -> Unpacked:
        """Return the rows [first, last) of a matrix as quantized values and scales. Its type must have a layout."""
        assert self.block.layout is not None
        return self.block.layout.read(self._raw_rows(first, last))

    def _raw_rows(self, first: int, last: int) -> np.ndarray:
        size = self.head_rows or 1
        begin, end = first // size * size, -(-last // size) * size
        raw = read_rows(self.raw, begin, end - begin, np.empty((end - begin) * self.raw.shape[1], np.uint8))
        if self.head_rows:
            raw = raw.reshape(-1, size // 2, 2, raw.shape[1]).swapaxes(1, 2).reshape(raw.shape)
        return raw[first - begin : last - begin]


_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 2**16


@dataclass(frozen=True)
class GgufFile:
    """The header of a file.

    values: metadata by key. An array of a key that is in _BY_LAYER is a list. Another array, and a text above 1 MB, is
      replaced by a text that gives its length
    tensors: by their names in the file
    """

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, BlockTensor]


def read_gguf(path: Path) -> GgufFile:
    """Read the header. If `path` is the first of several parts, read the headers of all parts.

    Raises ModelLoadError if a header is damaged, names bytes beyond the file's end or an unknown type, or if a part is
    missing or belongs to another file.
    """
    first = _read_part(path)
    count = first.values.get("split.count", 1) or 1
    if count == 1:
        return first
    paths = gguf_parts(path)
    if len(paths) != count:
        raise ModelLoadError(f"{path} is one of {count} parts", fix="name them NAME-00001-of-0000N.gguf and so on")
    tensors: dict[str, BlockTensor] = {}
    for number, part in enumerate(paths):
        if not part.is_file():
            raise ModelLoadError(f"{part} is missing, which is a part of {path.name}", fix="download all its parts")
        found = _read_part(part) if number else first
        says = found.values.get("split.no", 0), found.values.get("split.count")
        if says != (number, count) or not tensors.keys().isdisjoint(found.tensors):
            raise ModelLoadError(f"{part} is no part {number + 1} of {path.name}", fix="download all parts again")
        tensors |= found.tensors
    if first.values.get("split.tensors.count", len(tensors)) != len(tensors):
        raise ModelLoadError(f"the parts of {path} have {len(tensors)} tensors", fix="download all parts again")
    return GgufFile(path, first.values, tensors)


def _read_part(path: Path) -> GgufFile:
    with open_header(path) as header:
        num_tensors, num_values = header.counts()
        values = header.values(num_values, _BY_LAYER)
        entries = [_Entry.read(header) for _ in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
            raise ValueError(f"'general.alignment' is {alignment!r}")
        start = -(-header.position // alignment) * alignment
        return GgufFile(path, values, _located(path, entries, start, path.stat().st_size))


def _one_number(value: Any) -> Any:
    """Return the common entry of a list whose entries are equal. Other lists become Omitted; other values stay."""
    if not isinstance(value, list):
        return value
    return value[0] if value and value.count(value[0]) == len(value) else Omitted(f"{len(value)} different numbers")


@dataclass(frozen=True)
class _Entry:
    """A tensor as the header names it. sizes: the last dimension first. offset: from the first tensor byte."""

    name: str
    sizes: tuple[int, ...]
    kind: int
    offset: int

    @classmethod
    def read(cls, header: Header) -> _Entry:
        """Read the next one. Raises ValueError or struct.error if it is damaged."""
        name, count = header.text(), header.number("I")
        if not 0 < count <= _MAX_DIMENSIONS:
            raise ValueError(f"{name[:100]} has {count} dimensions")
        return cls(name, header.numbers("Q", count), header.number("I"), header.number("Q"))

    def tensor(self, path: Path, start: int) -> BlockTensor:
        """Return the tensor over its bytes in the file. start: offset of the first tensor byte

        Raises ValueError if the type is unknown or does not fit the sizes.
        """
        block = block_type(self.kind)
        depth, rest = self.sizes[0], self.sizes[1:]
        if not all(self.sizes) or depth % block.count or (not rest and block.count > 1):
            raise ValueError(f"{self.name[:100]} of sizes {list(self.sizes)} cannot have the type {block.name}")
        if not rest:  # a vector has one value a row
            depth, rest = 1, self.sizes
        row = depth // block.count * block.num_bytes
        raw = TensorInfo(path, np.dtype(np.uint8), (math.prod(rest), row), start + self.offset)
        return BlockTensor(raw, block, self.sizes[::-1])


def _located(path: Path, entries: list[_Entry], start: int, size: int) -> dict[str, BlockTensor]:
    """Return the tensors by name. Raises ValueError if two share a name or bytes, or one ends beyond the file."""
    found: dict[str, BlockTensor] = {}
    end = start
    for entry in sorted(entries, key=lambda entry: entry.offset):
        tensor = entry.tensor(path, start)
        if entry.name in found or tensor.raw.begin < end:
            raise ValueError(f"{entry.name[:100]} is there twice, or overlaps another tensor")
        end = tensor.raw.begin + tensor.raw.num_bytes
        if end > size:
            raise ValueError(f"{entry.name[:100]} ends at byte {end} of {size}: the file is cut off")
        found[entry.name] = tensor
    return found


_EPSILON = "attention.layer_norm_rms_epsilon"
_KEYS = MappingProxyType(
    {
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "context_length": "max_position_embeddings",
        "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads",
        "attention.key_length": "head_dim",
        _EPSILON: "rms_norm_eps",
        "rope.freq_base": "rope_theta",
    }
)
_SCALING_KEYS = MappingProxyType(
    {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
)
# Keys that change nothing here, or that are read below; any other is refused unless it is 0.
_OTHER_KEYS = ("vocab_size", "rope.dimension_count", "attention.value_length", "attention.causal")
_OTHER_KEYS += ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned")
# Values of other keys that are computed: llama.cpp's defaults, and notes of converters.
_DEFAULTS = MappingProxyType(
    {
        **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"), (1,)),
        **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), (1,)),
        "attention.max_alibi_bias": (0,),
        "attention.layer_norm_epsilon": (1e-5, 1e-6),
        "pooling_type": (3,),  # the last token's state, as here
        "tensor_data_layout": ("Meta AI original pth", "reference"),
    }
)
_NAMES = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    | {f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"}
    | {"attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
    | {f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")}
    | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
)


@dataclass(frozen=True)
class Architecture:
    """An architecture, which `general.architecture` names.

    published: its name in config.json. keys: of the metadata -> of config.json. needed: those that a file must have
    names: of tensors -> of modules, as in Llama's safetensors checkpoint or as here
    changes: (file, its metadata below the architecture's name) -> keys of config.json to add or replace
    """

    published: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: _KEYS)
    needed: tuple[str, ...] = (_EPSILON,)
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: _NAMES)
    changes: Callable[[GgufFile, Json], dict[str, Any]] = lambda file, given: {}


def _lfm2(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the kinds of LFM2's layers, of which those without kv heads are convolutions, and the MLP's width.

    The width is that of the tensors: files of Ollama give block_ff_dim, of which the model computes the width.
    """
    config: dict[str, Any] = {"block_auto_adjust_ff_dim": False}
    if "blk.0.ffn_gate.weight" in file.tensors:
        config["intermediate_size"] = file.tensors["blk.0.ffn_gate.weight"].shape[0]
    counts, layers = given.get("attention.head_count_kv"), given.get("block_count")
    if not isinstance(counts, list):  # one number for all layers
        return config
    heads = {*counts} - {0}
    if len(counts) != layers or len(heads) != 1:
        raise ModelLoadError(
            f"{file.path}: attention.head_count_kv must have 0 or one number for each of {shown(layers)} layers",
            fix="download the file again",
        )
    kinds = ["full_attention" if count else "conv" for count in counts]
    return config | {"layer_types": kinds, "num_key_value_heads": heads.pop()}


_L_CACHE = "shortconv.l_cache"
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    MappingProxyType(_KEYS | {_EPSILON: "norm_eps", _L_CACHE: "conv_L_cache"}),
    (_EPSILON, _L_CACHE),
    MappingProxyType(
        _NAMES
        | {"token_embd_norm": "model.norm"}  # in llama.cpp's files; Ollama's have output_norm
        | {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")}
    ),
    _lfm2,
)
ARCHITECTURES = MappingProxyType(
    {
        "llama": Architecture("LlamaForCausalLM"),
        "qwen2": Architecture("Qwen2ForCausalLM"),
        "qwen3": Architecture("Qwen3ForCausalLM"),
        "lfm2": _LFM2,
    }
)
# values that a file may have for each layer
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
_PER_LAYER += ("attention.sliding_window", "feed_forward_length", "rope.dimension_count", "rope.freq_base")
_BY_LAYER = frozenset(f"{name}.{key}" for name in ARCHITECTURES for key in _PER_LAYER)
_SHORT_KERNEL = ".shortconv.conv."  # always float32 in llama.cpp's files, and without the axis of 1 before the taps
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_ROTATED = re.compile(r"\.[qk]_proj\.")  # a llama's rows of these are interleaved in the file
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = MappingProxyType({"F32": "float32", "F16": "float16"})


def published_config(file: Path) -> dict[str, Any]:
    """Return the object of a config.json, or make it from a GGUF file's header. Raises ModelLoadError."""
    return _as_published(read_gguf(file)) if file.suffix.lower() == ".gguf" else read_object(file)


def published_tensors(path: Path) -> dict[str, TensorInfo | BlockTensor]:
    """Return the tensors of a GGUF file by the names of the modules here, in the shapes of a safetensors checkpoint.

    Raises ModelLoadError if the file is damaged or its architecture is not supported.
    """
    file = read_gguf(path)
    config = _as_published(file)
    interleaved = config["architectures"] == ["LlamaForCausalLM"]
    names = _architecture(file).names
    found: dict[str, TensorInfo | BlockTensor] = {}
    for name, tensor in file.tensors.items():
        if name == _ROPE_FACTORS:
            continue
        full = _full_name(name, names)
        if full in found:
            raise ModelLoadError(f"{path} has {full} twice, one of them as {name[:100]}", fix="download it again")
        if _SHORT_KERNEL in name:
            tensor = dataclasses.replace(tensor, shape=(tensor.shape[0], 1, *tensor.shape[1:]))
        if interleaved and _ROTATED.search(full):
            tensor = dataclasses.replace(tensor, head_rows=_head_dim(config))
        found[full] = _plain(tensor)
    return found


def _plain(tensor: BlockTensor) -> TensorInfo | BlockTensor:
    """Return an unquantized tensor in the form that is read without a copy."""
    if tensor.block.count > 1 or tensor.head_rows:
        return tensor
    return TensorInfo(tensor.raw.file, tensor.block.dtype, tensor.shape, tensor.raw.begin)


def _full_name(name: str, names: Mapping[str, str]) -> str:
    """Return the name of a tensor here. An unknown name is returned unchanged, and is later reported as a misfit."""
    layer = _LAYER.fullmatch(name)
    base, _, kind = (layer.group(2) if layer else name).rpartition(".")
    if base not in names:
        return name
    return f"model.layers.{layer.group(1)}.{names[base]}.{kind}" if layer else f"{names[base]}.{kind}"


def _quantized_types(file: GgufFile) -> dict[str, str]:
    """Return the types of the quantized modules; none if no layer is quantized.

    Embeddings are not among them, nor a head of a type that does not stay quantized: they are dequantized at load.
    """
    names = _architecture(file).names
    found: dict[str, str] = {}
    for name, tensor in file.tensors.items():
        quantized = tensor.block.count > 1 and len(tensor.shape) == 2
        if quantized and (_LAYER.match(name) or tensor.block.name in HELD_BLOCKS):
            found[_full_name(name, names).removesuffix(".weight")] = tensor.block.name
    return found if any(name.startswith("model.layers.") for name in found) else {}


def _head_dim(config: Json) -> int:
    """Return the size of a head. Raises ValueError if the header gives no possible one."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    sizes = (config.get("head_dim", 0), hidden, heads)
    if not all(type(size) is int and size >= 0 for size in sizes) or not heads:
        raise ValueError(f"heads of {shown(sizes)} cannot be")
    return config.get("head_dim") or hidden // heads


def _architecture(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raises ModelLoadError if it is not supported."""
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        if name == "clip":
            raise ModelLoadError(
                f"{file.path} has a tower for pictures and no language model (mmproj)",
                fix="serve the model's safetensors checkpoint, which has both; no tower is read from GGUF files",
            )
        supported = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{file.path}: {shown(name)} of GGUF is not supported", fix=f"serve one of: {supported}, or safetensors"
        )
    return ARCHITECTURES[name]


def _as_published(file: GgufFile) -> dict[str, Any]:
    architecture, prefix = _architecture(file), f"{file.values['general.architecture']}."
    given = {key.removeprefix(prefix): value for key, value in file.values.items() if key.startswith(prefix)}
    own = {key: _one_number(value) for key, value in given.items()}
    _refuse_others(file.path, own, architecture)
    config: dict[str, Any] = {"architectures": [architecture.published]}
    config |= {key: own[name] for name, key in architecture.keys.items() if name in own}
    config |= {"head_dim": _head_dim(config)} | _token_ids(file) | architecture.changes(file, given)
    tensors = file.tensors
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = "blk.0.attn_output.bias" in tensors
    config["mlp_bias"] = "blk.0.ffn_down.bias" in tensors
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    if own.get("rope.dimension_count") not in (None, config["head_dim"]):
        raise ModelLoadError(f"{file.path}: partly rotated heads are not supported")
    return config | _scaling(file, own) | _numbers(file)


def _refuse_others(path: Path, own: Json, architecture: Architecture) -> None:
    known = {*architecture.keys, *_OTHER_KEYS, *(f"rope.scaling.{key}" for key in _SCALING_KEYS)}
    others = sorted(key for key, value in own.items() if value and key not in known and not _is_default(own, key))
    if others:
        raise ModelLoadError(f"{path} has values that are not supported: {', '.join(others)[:200]}")
    if own.get("attention.causal", True) is not True:
        raise ModelLoadError(f"{path}: attention to later tokens (attention.causal) is not supported")
    for key in architecture.needed:
        if key not in own:
            raise ModelLoadError(f"{path}: {key} is missing", fix="download the file again")


def _is_default(own: Json, key: str) -> bool:
    """Return whether a key has llama.cpp's default, or a value that changes nothing."""
    value = own[key]
    match key:
        case "attention.scale":
            size = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
            return math.isclose(value, size**-0.5, rel_tol=1e-5)
        case "attention.sliding_window":
            return isinstance(value, int) and value >= own.get("context_length", math.inf)
        case "expert_used_count" | "expert_shared_count" | "expert_weights_scale" | "expert_weights_norm":
            return not own.get("expert_count")
        case "rope.dimension_count_swa" | "attention.key_length_swa" | "attention.value_length_swa":
            return not own.get("attention.sliding_window")
    return key in _DEFAULTS and value in _DEFAULTS[key]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    bos, *ends = (file.values.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom"))
    return {"bos_token_id": bos, "eos_token_id": sorted({*ends} - {None}, key=str)}


def _numbers(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a config.json that describe the form of its weights."""
    types = _quantized_types(file)
    if types:
        return {"dtype": "float16", "quantization_config": {"quant_method": "gguf", "types": types}}
    matrices = {name: each for name, each in file.tensors.items() if _LAYER.match(name) and len(each.shape) > 1}
    kinds = {tensor.block.name for name, tensor in matrices.items() if _SHORT_KERNEL not in name}
    return {"dtype": _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"}


def _scaling(file: GgufFile, own: Json) -> dict[str, Any]:
    """Return `rope_scaling`. As in llama.cpp, the type is linear if the file gives none, and a factor of 0 means 1."""
    kind, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor") or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{file.path}: rope scaling {shown(kind)} of GGUF is not supported")
    plain = kind == "none" or (kind == "linear" and factor == 1)
    if _ROPE_FACTORS in file.tensors:
        if not plain:
            raise ModelLoadError(f"{file.path}: {_ROPE_FACTORS} beside rope scaling {shown(kind)} is not supported")
        return {"rope_scaling": _divided(file.path, file.tensors[_ROPE_FACTORS])}
    if plain:
        return {}
    given = {key: own.get(f"rope.scaling.{name}") for name, key in _SCALING_KEYS.items()}
    return {"rope_scaling": {"rope_type": kind, "factor": factor} | given}


def _divided(path: Path, tensor: BlockTensor) -> dict[str, Any]:
    """Return Llama 3's scaling, a divisor for each frequency, as LongRoPE's keys express it."""
    if tensor.block.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**12:
        raise ModelLoadError(f"{path}: {_ROPE_FACTORS} is no vector of float32", fix="download the file again")
    factors = read_rows(tensor.raw, 0, tensor.shape[0], np.empty(tensor.raw.num_bytes, np.uint8)).view(np.float32)
    divisors = [float(factor) for factor in factors[:, 0]]
    return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
