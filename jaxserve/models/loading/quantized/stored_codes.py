"""The tensors of integer weights, as codes, scales and zeros. Owns their names and how codes are packed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.file_formats.gguf_unpack import Unpacked
from jaxserve.models.loading.quantized.encode import pack
from jaxserve.models.stored_form import StoredForm
from jaxserve.models.weights import Packing, Part
from jaxserve.ops.quantized import MIDDLE

Shapes = dict[str, tuple[tuple[int, ...], ...]]
Read = Callable[[str], np.ndarray]


class HasDtype(Protocol):
    """An array, or a tensor of a file."""

    @property
    def dtype(self) -> np.dtype: ...


_MARKS = {
    "int-quantized": "weight",
    "gguf": "weight",
    "pack-quantized": "weight_packed",
    "gptq": "qweight",
    "awq": "qweight",
}
_G_IDX = "weight_g_idx"
_PLACES = ("g_idx", _G_IDX)  # the group of each input, by GPTQ and by compressed-tensors
_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
# The dtype of tensors that hold codes. Any other tensor has floating-point numbers if it has scales, else integers.
_DTYPES = MappingProxyType({"weight": _INT8, "weight_packed": _INT32, "qweight": _INT32, "qzeros": _INT32})
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # in an int32, of the codes of eight successive outputs


@dataclass(frozen=True)
class Codes:
    """A weight [O, I]: values int8, E4M3 or, of 4 bits, uint8 [O, I]; scales and zeros float32 [O, groups].

    places: the group of each of the I inputs, int32 [I]; None: groups are successive inputs, all of one size.
    """

    values: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    places: np.ndarray | None = None

    def in_order(self) -> Codes:
        """Return the weight with its inputs sorted by group, see `input_order`."""
        if self.places is None:
            return self
        return Codes(self.values[:, input_order(self.places)], self.scales, self.zeros)

    @classmethod
    def of_blocks(cls, blocks: Unpacked) -> Codes:
        """Return rows of a GGUF tensor. With minima the numbers are nearly the same, because a zero is rounded."""
        if blocks.minima is None:
            return cls(blocks.values, blocks.scales, None)
        values, empty = blocks.values, blocks.scales == 0  # such a group has one number, -minimum
        if empty.any():
            values = np.where(np.repeat(empty, values.shape[1] // empty.shape[1], axis=1), 0, values)
        scales = np.where(empty, blocks.minima, blocks.scales)
        with np.errstate(invalid="ignore"):  # as in `Layout.read`
            zeros = blocks.minima / np.where(empty, 1, blocks.scales)
        return cls(values, scales, np.where(empty, 1, zeros))

    def leaves(self, packing: Packing) -> dict[str, np.ndarray]:
        """Return the arrays of leaves by role, with a scale and a zero for each group of the leaves.

        Only for groups of successive inputs. The leaves may have more bits than the values, and zeros that they lack.
        """
        assert self.places is None
        times = self.values.shape[1] // packing.group // self.scales.shape[1]
        values, zeros = self.values, self.zeros
        halved = values.dtype == np.uint8
        if zeros is None and packing.zeros:
            zeros = np.full_like(self.scales, MIDDLE if halved else 0)
        if halved and packing.kind == "int8":
            values = values.view(np.int8) - np.int8(MIDDLE if zeros is None else 0)
        elif halved:
            values = pack(values)
        found = {"values": values, "scales": np.repeat(self.scales, times, axis=1)}
        return found if zeros is None else found | {"zeros": np.repeat(zeros, times, axis=1)}

    def wide(self) -> np.ndarray:
        """Return the numbers, float32 [O, I]."""
        depth, count = self.values.shape[1], self.scales.shape[1]
        places = np.arange(depth) // (depth // count) if self.places is None else self.places
        middle = 8 if self.values.dtype == np.uint8 else 0
        zeros = middle if self.zeros is None else self.zeros[:, places]
        return (self.values.astype(np.float32) - zeros) * self.scales[:, places]


def is_stored(part: Part, form: StoredForm | None, names: Mapping[str, object]) -> bool:
    """Return whether the checkpoint has the part as integers."""
    if form is None or not form.is_integer:
        return False
    if len(part.shape) != 2 or not part.name.endswith(".weight") or "embed_tokens" in part.name:
        return False
    return not form.is_wide(_module(part)) and f"{_module(part)}.{_MARKS[form.method]}" in names


def code_tensors(part: Part, form: StoredForm) -> Shapes:
    """Return {name: allowed shapes} of the tensors of a part."""
    rows, depth = part.shape
    count, per = form.num_groups(depth), 32 // form.bits
    match form.method:
        case "gguf":
            found: Shapes = {"weight": ((rows, depth),)}
        case "int-quantized":
            found = {"weight": ((rows, depth),), "weight_scale": ((rows, count),)}
            found |= {"weight_zero_point": ((rows, count),)} if form.zeros else {}
            found |= {_G_IDX: ((depth,),)} if form.permuted else {}
        case "pack-quantized":
            found = {"weight_packed": ((rows, -(-depth // per)),), "weight_scale": ((rows, count),)}
            found |= {"weight_shape": ((2,),)}
            found |= {"weight_zero_point": ((-(-rows // per), count),)} if form.zeros else {}
            found |= {_G_IDX: ((depth,),)} if form.permuted else {}
        case "gptq":
            found = {"qweight": ((depth // per, rows),), "scales": ((count, rows),)}
            found |= {"qzeros": ((count, rows // per),)} if form.zeros else {}
            found |= {"g_idx": ((depth,),)} if form.indexed else {}
        case _:  # awq
            found = {"qweight": ((depth, rows // per),), "scales": ((count, rows),)}
            found |= {"qzeros": ((count, rows // per),)} if form.zeros else {}
    return {f"{_module(part)}.{name}": shapes for name, shapes in found.items()}


def code_bytes(part: Part, form: StoredForm) -> int:
    """Return the bytes of a part's tensors as they are published: scales have 2 bytes, codes are packed in int32."""
    sizes: dict[str, float] = {"weight": 1, "weight_scale": 2, "scales": 2, "weight_shape": 8}
    sizes |= {"weight_zero_point": 1} if form.method == "int-quantized" else {}
    shapes = code_tensors(part, form).items()
    return int(sum(math.prod(shape) * sizes.get(name.rpartition(".")[2], 4) for name, (shape,) in shapes))


def read_codes(part: Part, form: StoredForm, read: Read) -> Codes:
    """Read a part of any format but GGUF.

    Raises ModelLoadError if scales are not finite, an input has no group, or a tensor has another dtype than its kind.
    """
    names = {name.rpartition(".")[2]: name for name in code_tensors(part, form)}
    tensors = {kind: read(name) for kind, name in names.items() if kind not in _PLACES}
    for kind, tensor in tensors.items():
        _check_dtype(names[kind], tensor, form)
    rows, depth = part.shape
    zeros, places = None, read_places(part, form, read)
    match form.method:
        case "int-quantized":
            values, scales = tensors["weight"], tensors["weight_scale"]
            zeros = tensors.get("weight_zero_point")
        case "pack-quantized":
            values, scales = _unpack(tensors["weight_packed"], form.bits)[:, :depth], tensors["weight_scale"]
            if form.zeros:
                zeros = _unpack(tensors["weight_zero_point"].T, form.bits)[:, :rows].T
        case "gptq":
            values, scales = _unpack(tensors["qweight"].T, form.bits), tensors["scales"].T
            zeros = _unpack(tensors["qzeros"], form.bits).T if form.zeros else None
        case _:  # awq
            values, scales = _unpack_awq(tensors["qweight"]).T, tensors["scales"].T
            zeros = _unpack_awq(tensors["qzeros"]).T if form.zeros else None
    if places is None and depth % (form.group or depth):  # the last group of a row is shorter
        places = np.arange(depth) // (form.group or depth)
    scales = scales.astype(np.float32)
    if not np.isfinite(scales).all():
        raise ModelLoadError(f"{part.name}: not all scales are numbers", fix="download the checkpoint again")
    values, zeros = _centred(values, None if zeros is None else zeros.astype(np.float32) + form.zero_offset, form)
    return Codes(values, scales, zeros, places)


def check_dtypes(parts: Iterable[Part], form: StoredForm, tensors: Mapping[str, HasDtype]) -> None:
    """Raise ModelLoadError for a tensor of these parts that would be read as other codes than it has."""
    for part in parts:
        for name in code_tensors(part, form):
            if name in tensors:
                _check_dtype(name, tensors[name], form)


def _check_dtype(name: str, tensor: HasDtype, form: StoredForm) -> None:
    """Raise ModelLoadError for a tensor that would be read as other codes than it has."""
    kind = name.rpartition(".")[2]
    packed_zeros = kind == "weight_zero_point" and form.method == "pack-quantized"
    expected = _INT32 if packed_zeros else _DTYPES.get(kind)
    is_integer = np.issubdtype(tensor.dtype, np.integer)
    if tensor.dtype != expected if expected is not None else is_integer == kind.endswith(("scale", "scales")):
        wanted = ("numbers" if is_integer else "integers") if expected is None else expected
        raise ModelLoadError(f"{name} is {tensor.dtype}, expected {wanted}", fix="download the checkpoint again")


def _centred(values: np.ndarray, zeros: np.ndarray | None, form: StoredForm) -> tuple[np.ndarray, np.ndarray | None]:
    """Return codes of 8 bits as int8, and their zeros moved as far."""
    if form.bits == 4 or values.dtype == np.int8:
        return values, zeros
    return (values ^ 128).view(np.int8), None if zeros is None else zeros - 128


def _module(part: Part) -> str:
    return part.name.removesuffix(".weight")


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack int32 [N, W] -> uint8 [N, W * 32 / bits], the lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = np.ascontiguousarray(words).view(np.uint32)[..., None] >> shifts & np.uint32(2**bits - 1)
    return codes.astype(np.uint8).reshape(len(words), -1)


def _unpack_awq(words: np.ndarray) -> np.ndarray:
    codes = _unpack(words, 4).reshape(len(words), -1, 8)
    return codes[..., _AWQ_PLACES].reshape(len(words), -1)


def input_order(places: np.ndarray) -> np.ndarray:
    """Return the inputs sorted by group, in their order within a group: int32 [I]. places: see `Codes`."""
    return np.argsort(places, kind="stable").astype(np.int32)


def read_places(part: Part, form: StoredForm, read: Read) -> np.ndarray | None:
    """Return the group of each input, None if groups are successive inputs; others are act-order's.

    Raises ModelLoadError if an input has no group.
    """
    depth = part.shape[1]
    name = next((name for name in code_tensors(part, form) if name.rpartition(".")[2] in _PLACES), None)
    if name is None:
        return None
    _check_dtype(name, found := read(name), form)
    g_idx = found.astype(np.int32)
    unused = name.endswith(_G_IDX) and (g_idx == -1).all()  # as compressed-tensors writes groups in order
    if unused or np.array_equal(g_idx, np.arange(depth) // (form.group or depth)):
        return None
    if g_idx.min() < 0 or g_idx.max() >= form.num_groups(depth):
        raise ModelLoadError(f"{part.name}: g_idx names a group that is not there", fix="download the checkpoint again")
    return g_idx
