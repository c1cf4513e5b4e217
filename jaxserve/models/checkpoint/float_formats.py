"""Published floating-point formats of weights: the names and layouts of their tensors, and how they are read.

    format    values                                   scales
    fp8       weight E4M3 [O, I]                       weight_scale or weight_scale_inv: of the tensor, rows or blocks
    mxfp8     weight E4M3 [O, I]                       weight_scale E8M0 [O, I / 32]
    mxfp4     weight or weight_packed uint8 [O, I / 2] weight_scale E8M0 [O, I / 32]
    gpt-oss   NAME_blocks uint8 [.., I / 32, 16]       NAME_scales E8M0 [.., I / 32]: mxfp4 of all experts of a layer
    nvfp4     weight or weight_packed uint8 [O, I / 2] weight_scale E4M3 [O, I / 16], and one of the tensor

E8M0 is a byte e for 2^(e - 127). A byte of 4-bit values has two E2M1 values, the first in its low half. The scale of an
NVFP4 tensor is modelopt's weight_scale_2, which multiplies, or compressed-tensors' weight_global_scale, which divides.
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf has E2M1, E4M3 and E8M0.

Headers tell the format of each module (`found_form`). `FloatWeight` reads rows, dequantized or as the leaves of
`ops.quantized`, so that a part of a tensor takes little memory. A format is one entry of `_FORMATS`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import ml_dtypes
import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.checkpoint import HeldTensor, Shapes, Tensor
from jaxserve.models.checkpoint.gguf import BlockTensor
from jaxserve.models.stored_form import Method, StoredForm
from jaxserve.models.weights import Part

Block = tuple[int, int]  # rows and columns of a weight that share an FP8 scale
Tensors = Mapping[str, Tensor]
Read = Callable[[Tensor, int, int], np.ndarray]  # a tensor and rows -> these rows

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8 = (E4M3, np.dtype(ml_dtypes.float8_e5m2))
_E8M0, _BYTE_DTYPE = np.dtype(ml_dtypes.float8_e8m0fnu), np.dtype(np.uint8)
_EXPONENTS = (_BYTE_DTYPE, _E8M0)
_DAMAGED = "download the checkpoint again"
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)  # [256, 2]: the two values of each byte


@dataclass(frozen=True)
class FloatFormat:
    """The layout of a format.

    per_byte: values in a byte. values, scales: allowed dtypes. group: weights of a row that share a scale; None: the
    scales are FP8's. of_tensor: the tensor has a scale too
    """

    per_byte: int
    values: tuple[np.dtype, ...]
    scales: tuple[np.dtype, ...]
    group: int | None = None
    of_tensor: bool = False


_FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), _E8M0)
_FORMATS: Mapping[Method, FloatFormat] = MappingProxyType(
    {
        "fp8": FloatFormat(1, FP8, _FLOATS),
        "mxfp8": FloatFormat(1, (E4M3,), _EXPONENTS, 32),
        "mxfp4": FloatFormat(2, (_BYTE_DTYPE,), _EXPONENTS, 32),
        "gpt-oss": FloatFormat(2, (_BYTE_DTYPE,), _EXPONENTS, 32),
        "nvfp4": FloatFormat(2, (_BYTE_DTYPE,), (E4M3,), 16, of_tensor=True),
    }
)
FLOAT_METHODS = tuple(_FORMATS)


class FoundModules(frozenset[str]):
    """Names of modules. Its text is the same in every process, because configs as texts name programs and pages."""

    def __repr__(self) -> str:
        return repr(sorted(self))


def format_of(part: Part, tensors: Tensors) -> Method | None:
    """Return the floating-point format in which the files store a part; None: its values are stored as they are.

    Raises ModelLoadError for experts in one tensor whose axes are in another order.
    """
    if part.mxfp4:
        return "gpt-oss"
    module = part.name.removesuffix(".weight")
    method = _stored_format(module, tensors, tensors.get(part.name, tensors.get(f"{module}.weight_packed")))
    if method is not None and part.transpose is not None:
        raise ModelLoadError(
            f"{part.name}: one tensor of all experts in {method} is not read",
            fix="name a checkpoint with a tensor for each expert",
        )
    return method


def _stored_format(module: str, tensors: Tensors, values: Tensor | None) -> Method | None:
    if values is None or isinstance(values, BlockTensor):
        return None
    scales = tensors.get(f"{module}.weight_scale")
    kind = None if scales is None else scales.dtype
    if values.dtype == _BYTE_DTYPE and kind in (E4M3, *_EXPONENTS):
        return "nvfp4" if kind == E4M3 else "mxfp4"
    if values.dtype not in FP8:
        return None
    # FP8's scales of whole blocks may be exponents too, but they are fewer.
    if scales is None or kind not in _EXPONENTS or scales.shape[-1:] != (values.shape[-1] // 32,):
        return "fp8"
    return "mxfp8" if values.shape[:1] == scales.shape[:1] else "fp8"


def found_form(form: StoredForm, tensors: Tensors) -> StoredForm:
    """Return a floating-point form completed from the files: which modules have which format."""
    found: dict[Method, list[str]] = {}
    for name, values in tensors.items():
        module = name.removesuffix(".weight_packed").removesuffix(".weight")
        if values.dtype == E4M3 or (module != name and values.dtype == _BYTE_DTYPE):  # E5M2 is dequantized
            if method := _stored_format(module, tensors, values):
                found.setdefault(method, []).append(module)
    return of_modules(form, found)


def of_modules(form: StoredForm, found: Mapping[Method, list[str]]) -> StoredForm:
    """Return the form for the modules of each floating-point format. gpt-oss' experts are not among the modules."""
    given = {each.method: each for each in (form.forms or (form,))}

    def one(method: Method, modules: list[str]) -> StoredForm:
        like = given.get(method) or float_form(method, form)
        return dataclasses.replace(like, found=FoundModules(modules))

    forms = [one(method, modules) for method, modules in sorted(found.items())]
    if len(forms) > 1:
        rounds = any(each.rounds_activations for each in forms)
        return StoredForm("mixed", 4, None, False, forms=tuple(forms), rounds_activations=rounds)
    return forms[0] if forms else one(form.forms[0].method if form.forms else form.method, [])


def float_form(method: Method, like: StoredForm | None = None) -> StoredForm:
    """Return the form of a format without its modules. like: has the group of FP8's blocks"""
    layout = _FORMATS[method]
    group = layout.group or (like.group if like is not None and like.method == "fp8" else None)
    return StoredForm(method, 8 // layout.per_byte, group, False)


def float_tensors(part: Part, method: Method, tensors: Tensors, block: Block | None) -> dict[str, Shapes]:
    """Return {name: allowed shapes} of the tensors of a part: values, scales, and the tensor's scale if there is one.

    block: of FP8
    """
    *rows, depth = part.shape
    layout = _FORMATS[method]
    if method == "gpt-oss":
        groups = (*rows, depth // 32)
        return {f"{part.name}_blocks": ((*groups, 16),), f"{part.name}_scales": (groups,)}
    module = part.name.removesuffix(".weight")
    packed = f"{module}.weight_packed"
    values = packed if packed in tensors else part.name
    if layout.group is None:
        return {values: (part.shape,)} | _fp8_scale(part, block, tensors)
    found: dict[str, Shapes] = {
        values: ((*rows, depth // layout.per_byte),),
        f"{part.name}_scale": ((*rows, depth // layout.group),),
    }
    if layout.of_tensor:
        scale = "weight_global_scale" if f"{module}.weight_global_scale" in tensors else "weight_scale_2"
        found[f"{module}.{scale}"] = ((), (1,))
    return found


def _fp8_scale(part: Part, block: Block | None, tensors: Tensors) -> dict[str, Shapes]:
    *experts, rows, _ = part.shape
    name = f"{part.name}_scale"
    if block is None:
        one_each = ((*experts,), (*experts, 1, 1)) if experts else ()
        return {name: ((), (1,), *one_each, (*experts, rows), (*experts, rows, 1))}
    if name not in tensors:  # as compressed-tensors calls it
        name = f"{part.name}_scale_inv"
    return {name: (_blocks(part, block),)}


def _blocks(part: Part, block: Block) -> tuple[int, ...]:
    """Return the shape of the scales of FP8's blocks: [O / rows, I / columns], of experts [experts, ...]."""
    *experts, rows, depth = part.shape
    return *experts, -(-rows // block[0]), -(-depth // block[1])


def float_bytes(part: Part, method: Method, block: Block | None) -> int:
    """Return the bytes of a part's published tensors. FP8's scales have 4 bytes, of a tensor's scale there is one."""
    layout, count = _FORMATS[method], math.prod(part.shape)
    if layout.group is not None:
        return count // layout.per_byte + count // layout.group + 4 * layout.of_tensor
    return count + 4 * (1 if block is None else math.prod(_blocks(part, block)))


def check_float_dtypes(part: Part, method: Method, tensors: Tensors) -> None:
    """Raise ModelLoadError if a tensor of a part has not a dtype of its format."""
    layout = _FORMATS[method]
    names = list(float_tensors(part, method, tensors, None))
    for name, dtypes in zip(names, (layout.values, layout.scales, _FLOATS), strict=False):
        if name in tensors and tensors[name].dtype not in dtypes:
            raise ModelLoadError(
                f"{name} is {tensors[name].dtype}, expected {' or '.join(map(str, dtypes))}", fix=_DAMAGED
            )


def value_dtype(method: Method) -> np.dtype:
    """Return the dtype of the tensors of values that stay quantized."""
    return _FORMATS[method].values[0]


class FloatWeight:
    """A part's tensors, of which rows are read: [O, I], of gpt-oss [experts * O, I].

    Its scales are read at once, and checked. Raises ModelLoadError if they are not positive.
    """

    def __init__(self, part: Part, method: Method, block: Block | None, tensors: Tensors, read: Read) -> None:
        names = list(float_tensors(part, method, tensors, block))
        check_float_dtypes(part, method, tensors)
        self._layout, self._block, self._read = _FORMATS[method], block, read
        self.rows, self.depth = math.prod(part.shape[:-1]), part.shape[-1]
        self._name = names[0]
        self._values = _flat(tensors[names[0]], (self.rows, self.depth // self._layout.per_byte))
        scales = _whole(tensors[names[1]], read)
        check_scale(names[1], scales, zeros=self._layout.of_tensor)
        self._of_expert = part.shape[-2]  # rows
        if self._layout.group is None:
            self._scales = scales.astype(np.float32).reshape(-1, 1 if block is None else scales.shape[-1])
        else:
            self._scales = scales.reshape(self.rows, -1)
            self._scales = self._scales.view(np.uint8) if scales.dtype == _E8M0 else self._scales
        self.tensor_scale = np.float32(1)
        if self._layout.of_tensor:
            check_scale(names[2], scale := _whole(tensors[names[2]], read).astype(np.float32))
            given = scale.reshape(())[()]
            self.tensor_scale = np.float32(1) / given if names[2].endswith("_global_scale") else given

    def codes(self, first: int, last: int, group: int) -> dict[str, np.ndarray]:
        """Return the rows [first, last) as arrays of leaves by role: values and scales [rows, I / group].

        group: of FP8, it divides a block's columns
        """
        raw = self._raw(first, last)
        if self._layout.group is None:
            return {"values": raw, "scales": self._fp8_scales(first, last, group)}
        values = raw if self._layout.per_byte == 1 else _halved(raw, min(32, self._layout.group))
        return {"values": values, "scales": self._scales[first:last]}

    def wide(self, first: int, last: int) -> np.ndarray:
        """Return the rows [first, last) dequantized, float32 [rows, I]."""
        raw = self._raw(first, last)
        if self._layout.group is None:
            wide = raw.astype(np.float32)
            if self._block is None:
                return wide * self._fp8_scales(first, last, self.depth)
            rows = self._block_scales(first, last, self._block)
            return wide * rows[:, np.arange(self.depth) // self._block[1]]
        numbers = raw.astype(np.float32) if self._layout.per_byte == 1 else _PAIRS[raw].reshape(len(raw), -1)
        scales = self._scales[first:last]
        scales = np.ldexp(np.float32(1), scales.astype(np.int32) - 127) if scales.dtype == np.uint8 else scales
        grouped = numbers.reshape(*scales.shape, -1) * scales.astype(np.float32)[..., None]
        return grouped.reshape(len(raw), -1) * self.tensor_scale

    def _raw(self, first: int, last: int) -> np.ndarray:
        raw = self._read(self._values, first, last)
        if raw.dtype == E4M3 and ((raw.view(np.uint8) & 0x7F) == 0x7F).any():  # E5M2 is not checked
            raise ModelLoadError(f"{self._name}: not all numbers are finite", fix=_DAMAGED)
        return raw

    def _fp8_scales(self, first: int, last: int, group: int) -> np.ndarray:
        """Return FP8's scales of rows with one for each `group` weights, float32 [rows, I / group]."""
        if self._block is None:
            scales = self._scales[np.arange(first, last) // (self.rows // len(self._scales))]
            return np.repeat(scales, self.depth // group, axis=1)
        columns = np.arange(0, self.depth, group) // self._block[1]
        return self._block_scales(first, last, self._block)[:, columns]

    def _block_scales(self, first: int, last: int, block: Block) -> np.ndarray:
        """Return the scales of the blocks that rows lie in, [rows, I / columns]. An expert's rows begin a block."""
        expert, row = np.divmod(np.arange(first, last), self._of_expert)
        return self._scales[expert * -(-self._of_expert // block[0]) + row // block[0]]


def _flat(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a tensor with other dimensions, in the same order of its values."""
    assert not isinstance(tensor, BlockTensor)
    if isinstance(tensor, HeldTensor):
        return HeldTensor(tensor.array.reshape(shape))
    return dataclasses.replace(tensor, shape=shape)


def _whole(tensor: Tensor, read: Read) -> np.ndarray:
    rows = tensor.shape[0] if tensor.shape else 1
    return read(tensor, 0, rows).reshape(tensor.shape).copy()


def _halved(pairs: np.ndarray, block: int) -> np.ndarray:
    """Move bytes of successive values to the order of `Quantized.values`: uint8 [rows, I / 2] -> the same shape."""
    blocks = pairs.reshape(len(pairs), -1, block // 2)
    first, second = np.split(blocks, 2, axis=-1)  # values 2i and 2i + 1 of each half of a block are in one byte
    values = np.empty(blocks.shape, np.uint8)
    values[..., ::2] = (first & 15) | (second << 4)
    values[..., 1::2] = (first >> 4) | (second & 0xF0)
    return values.reshape(pairs.shape)


def check_scale(name: str, scale: np.ndarray, *, zeros: bool = False) -> None:
    """Raise ModelLoadError unless every scale [...] is positive and finite. In uint8 scales 255 is NaN.

    zeros: scales of E4M3 may be zero, for groups whose weights are all smaller than the format has
    """
    if scale.dtype in _EXPONENTS:
        bad = int((scale.view(np.uint8) == 255).sum())
    elif scale.dtype == E4M3:  # the bytes below 127 are the numbers that are not negative
        bits = scale.view(np.uint8)
        bad = int((bits > 126).sum()) + (0 if zeros else int((bits == 0).sum()))
    else:
        values = scale.astype(np.float32)
        bad = int((~np.isfinite(values) | (values <= 0)).sum())
    if bad:
        raise ModelLoadError(f"{name}: {bad} of {math.prod(scale.shape)} scales are no positive numbers", fix=_DAMAGED)
