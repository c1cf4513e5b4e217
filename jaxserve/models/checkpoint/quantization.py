"""Quantized weights of checkpoints: their description in config.json, their tensors, and quantization at load.

Contents, in order:

1. `read_quantization`, `read_stored_form`: the `quantization_config` of a checkpoint, as a StoredForm. Integers
   (compressed-tensors, GPTQ, AWQ, GGUF), FP8 and MXFP4 are supported; other forms are refused. The files' headers tell
   which weights are E4M3; for a plan without files the configuration does.
2. `encode`: float32 weights to quantized values and scales (see `ops.quantized`).
3. `read_parameter`: the leaves of a quantized parameter, from any reader of unquantized weights. Each rectangle is read
   and encoded once, a few rows at a time, so that loading takes little more memory than the result.
4. `Codes`, `read_codes`: integer weights as quantized values, scales and zeros; the names of their tensors, and how
   values are packed.
5. `decode_fp8`, `fp8_codes`, `decode_mxfp4`, `mxfp4_codes`: published FP8 (block, channel or tensor scales) and MXFP4
   weights, dequantized while they are read or kept quantized. Only the rectangle that a device needs is read.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer, read_object
from jaxserve.models.checkpoint.checkpoint import Tensor
from jaxserve.models.checkpoint.gguf import Unpacked, published_config
from jaxserve.models.checkpoint.read_config import Json, shown
from jaxserve.models.checkpoint.safetensors_file import empty_aligned
from jaxserve.models.stored_form import ModuleNames, StoredForm, linear_pattern
from jaxserve.models.weights import Packing, ParamSpec, Part
from jaxserve.ops.quantized import BLOCK, MIDDLE
from jaxserve.text.stop import check_pattern

_INTEGER_FORMATS = ("int-quantized", "pack-quantized")
_FLOAT_FORMATS = (None, "float-quantized", "naive-quantized", "dense")
_BESIDE = MappingProxyType(
    {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
)
_IGNORED = ("ignore", "exclude_modules")
_PERMUTED = ("group", "dynamic")  # the words of `actorder` for groups that are not successive inputs
_HEAD = "lm_head"
_GLOB = re.compile(r"\[!?[\w.-]+\]|.", re.DOTALL)
_BY = re.compile(r"\d{1,7}x\d{1,7}")


def read_quantization(path: Path) -> dict[str, Any]:
    """Return the quantization entry of a config.json, the hf_quant_config.json beside it, or a GGUF file; {}: none.

    Raises ModelLoadError for a quantization that is not supported.
    """
    inside = published_config(path).get("quantization_config")
    found = read_quantization_beside(path) if inside is None else inside or {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{path}: 'quantization_config' must be an object")
    if found.get("quant_algo") not in (None, "FP8"):
        raise ModelLoadError(
            f"quantization {found['quant_algo']!r} is not supported (supported: FP8, MXFP4 of gpt-oss)"
        )
    return found


def read_quantization_beside(path: Path) -> dict[str, Any]:
    """Return the file beside a config.json in which modelopt, AutoGPTQ or AutoAWQ describes the weights; {}: none.

    Raises ModelLoadError.
    """
    for name, method in _BESIDE.items():
        file = path.with_name(name)
        if not file.is_file():
            continue
        found = read_object(file)
        found = found.get("quantization") or {} if method == "modelopt" else found
        if not isinstance(found, dict):
            raise ModelLoadError(f"{file}: 'quantization' must be an object")
        return {"quant_method": method} | found if found else {}
    return {}


def read_stored_form(quantization: Json, block: tuple[int, int] | None = None) -> StoredForm | None:
    """Translate a configuration; None: its weights are dequantized at load. Raises ValueError if it is not supported.

    block: rows and columns of an FP8 weight that share a scale.
    """
    match quantization.get("quant_method"):
        case "compressed-tensors":
            return _compressed(quantization, block)
        case "fp8" if quantization.get("fmt", "e4m3") == "e4m3":
            return _fp8(quantization, block)
        case "fbgemm_fp8":
            _check_bound(quantization)
            return _fp8(quantization, None)
        case "modelopt" if quantization.get("quant_algo", "FP8") == "FP8":
            return _fp8(quantization, block)
        case "mxfp4":
            return StoredForm("mxfp4", 4, BLOCK, False)
        case "gptq":
            return _gptq(quantization)
        case "awq":
            return _awq(quantization)
        case "gguf":
            return StoredForm.of_gguf(_types(quantization))
    return None


def compressed_block(quantization: Json) -> Any:
    """Return compressed-tensors' rows and columns that share an FP8 scale, unchecked; None: scales of other kinds.

    Raises ValueError if they differ between layers.
    """
    if quantization.get("quant_method") != "compressed-tensors":
        return None
    schemes = [scheme for _, scheme in _schemes(quantization) if scheme.get("type") == "float"]
    sizes = [each.get("block_structure") if each.get("strategy") == "block" else None for each in schemes]
    if any(size != sizes[0] for size in sizes):
        raise ValueError(f"'block_structure' differs between groups of layers: {shown(sizes)}")
    size = sizes[0] if sizes else None
    return [int(word) for word in size.split("x")] if isinstance(size, str) and _BY.fullmatch(size) else size


def _schemes(found: Json) -> list[tuple[Json, Json]]:
    """Return each group of layers with the scheme of its weights."""
    groups: Any = found.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"'config_groups' must be an object of objects, not {shown(groups)}")
    schemes: list[tuple[Any, Any]] = [(group, group.get("weights") or {}) for group in groups.values()]
    if not all(isinstance(scheme, dict) for _, scheme in schemes):
        raise ValueError(f"'weights' must be an object, not {shown([scheme for _, scheme in schemes])}")
    return schemes


def _compressed(found: Json, block: tuple[int, int] | None) -> StoredForm | None:
    form, schemes = found.get("format"), _schemes(found)
    _check_transforms(found)
    if form in _FLOAT_FORMATS and not any(scheme.get("type") == "int" for _, scheme in schemes):
        for _, scheme in schemes:
            _only(scheme, "type", None, "float")
            _only(scheme, "num_bits", None, 8)
            _only(scheme, "strategy", None, "tensor", "channel", "block")
        return _fp8(found, block) if form in ("float-quantized", "naive-quantized") else None
    if form not in _INTEGER_FORMATS:
        raise ValueError(
            f"compressed-tensors {shown(form)} is not supported (supported: {', '.join(_INTEGER_FORMATS)})"
        )
    if len(schemes) != 1:
        raise ValueError(f"'config_groups' has {len(schemes)} groups, and only one form for all layers is supported")
    [(group, scheme)] = schemes
    _only(group, "targets", ["Linear"])
    _only(group, "output_activations", None)
    _only(scheme, "type", "int")
    _only(scheme, "actorder", None, "weight", "static", *_PERMUTED)
    _only(scheme, "strategy", "channel", "group")
    _only(scheme, "symmetric", None, True, False)
    sparse = found.get("sparsity_config") or {}
    if sparse:
        _only(sparse, "format", "dense")
    size = scheme.get("group_size") if scheme["strategy"] == "group" else None
    ignored = _module_names(_names(found, "ignore"))
    zeros = scheme.get("symmetric") is False
    permuted = size is not None and scheme.get("actorder") in _PERMUTED
    rounds, bits = _rounds_activations(found), _bits(scheme, "num_bits")
    bits = 8 if form == "int-quantized" else bits  # a byte has one value, even a 4-bit one
    return StoredForm(form, bits, _group(size), zeros, ignored, permuted=permuted, rounds_activations=rounds)


def _check_transforms(found: Json) -> None:
    """Raise ValueError if activations are transformed (QuIP, SpinQuant). Stored weights include their transforms."""
    groups = (found.get("transform_config") or {}).get("config_groups") or {}
    for applied in (each for scheme in groups.values() for each in scheme.get("apply") or ()):
        _only(applied, "location", "weight_input", "weight_output")


def _rounds_activations(found: Json) -> bool:
    """Return whether the checkpoint was made for 8-bit activations. Raises ValueError for fewer bits."""
    match found.get("quant_method"):
        case "compressed-tensors":
            activations = [group.get("input_activations") for group, _ in _schemes(found)]
            for each in activations:
                if each is not None and not (isinstance(each, dict) and each.get("num_bits") == 8):
                    raise ValueError(
                        f"'input_activations' of a quantised checkpoint is {shown(each)} (supported: 8 bits)"
                    )
            return any(activations)
        case "fbgemm_fp8" | "modelopt":
            return True
    return found.get("activation_scheme") in ("dynamic", "static")


def _fp8(found: Json, block: tuple[int, int] | None) -> StoredForm:
    ignored = _module_names([_HEAD, *(name for key in _IGNORED for name in _names(found, key))])
    parts = tuple(name.strip(".") for name in _names(found, "modules_to_not_convert"))
    ignored = dataclasses.replace(ignored, parts=parts)
    group = None if block is None else block[1]
    return StoredForm("fp8", 8, group, False, ignored, rounds_activations=_rounds_activations(found))


def _check_bound(found: Json) -> None:
    """Raise ValueError for an invalid bound. It bounds stored scales of activations, which are not used here."""
    bound = found.get("activation_scale_ub")
    if bound is not None and not (type(bound) in (int, float) and 0 < bound < float("inf")):
        raise ValueError(f"'activation_scale_ub' must be a positive number, not {shown(bound)}")


def _gptq(found: Json) -> StoredForm:
    _only(found, "desc_act", None, False, True)
    _only(found, "static_groups", None, False, True)
    _only(found, "dynamic", None, {})
    _only(found, "lm_head", None, False)
    _only(found, "checkpoint_format", None, "gptq", "gptq_v2")
    offset = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
    ignored = ModuleNames((_HEAD,), substrings=tuple(_names(found, "modules_to_not_convert")))
    group = _group(found.get("group_size"))
    permuted = bool(found.get("desc_act")) and not found.get("static_groups") and group is not None
    return StoredForm(
        "gptq", _bits(found, "bits"), group, True, ignored, offset, permuted, symmetric=found.get("sym") is not False
    )


def _awq(found: Json) -> StoredForm:
    for key, old in (("bits", "w_bit"), ("group_size", "q_group_size")):  # the names of llm-awq
        if found.get(key) is None and old in found:
            found = {**found, key: found[old]}
    _only(found, "version", None, "gemm", "GEMM")
    _only(found, "bits", 4)
    _only(found, "zero_point", None, False, True)
    ignored = ModuleNames((_HEAD,), substrings=tuple(_names(found, "modules_to_not_convert")))
    zeros, group = found.get("zero_point"), _group(found.get("group_size"))
    return StoredForm("awq", 4, group, zeros is not False, ignored, symmetric=zeros is not True)


def _only(found: Json, key: str, *supported: Any) -> None:
    if found.get(key) not in supported:
        names = ", ".join(shown(each) for each in supported)
        raise ValueError(f"{key!r} of a quantised checkpoint is {shown(found.get(key))} (supported: {names})")


def _bits(found: Json, key: str) -> int:
    _only(found, key, 4, 8)
    return int(found[key])


def _group(size: Any) -> int | None:
    if size in (None, -1):
        return None
    number = as_integer(size)
    if number is None or number % 32 or not 0 < number < 2**20:
        raise ValueError(f"'group_size' is {shown(size)} (supported: -1 and multiples of 32)")
    return number


def _names(found: Json, key: str) -> list[str]:
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key!r} must be a list of names, not {shown(names)}")
    return names


def _types(found: Json) -> dict[str, str]:
    types = found.get("types")
    if not isinstance(types, dict) or not all(isinstance(kind, str) for kind in types.values()):
        raise ValueError(f"'types' must be an object of names, not {shown(types)}")
    return types


def _module_names(entries: list[str]) -> ModuleNames:
    """Translate entries of compressed-tensors' `ignore`: a name, or re: and an expression from a name's start.

    * and ? of a name stand for any characters, as in modelopt's entries. Raises ValueError if an expression is damaged,
    or if it is slow on some names. RE2 is never slow, but cannot read an expression with look-around.
    """
    names, prefixes, expressions = list[str](), list[str](), list[str]()
    for entry in entries:
        if entry.startswith("re:"):
            expressions.append(_expression(entry))
        elif not _is_glob(entry):
            names.append(entry)
        elif entry.endswith("*") and not _is_glob(entry[:-1]):
            prefixes.append(entry[:-1])
        else:
            expressions.append(f"^{_GLOB.sub(_of_glob, entry)}$")
    return ModuleNames(tuple(names), prefixes=tuple(prefixes), expressions=tuple(expressions))


def _expression(entry: str) -> str:
    source = f"^(?:{entry[3:]})"
    if linear_pattern(source) is not None:
        return source
    try:
        check_pattern(entry[3:])
        return re.compile(source).pattern
    except (re.error, ValueError) as error:
        raise ValueError(f"'ignore' has no regular expression in {shown(entry)}: {error}") from None


def _is_glob(name: str) -> bool:
    return any(sign in name for sign in "*?[")


def _of_glob(match: re.Match[str]) -> str:
    """Return the regular expression of a character or a set of characters of a glob."""
    text = match[0]
    if len(text) > 1:
        return f"[^{text[2:]}" if text[1] == "!" else text
    return {"*": ".*", "?": "."}.get(text, re.escape(text))


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
# The factors of an octave that are tried for a scale of E4M3. They halve the squared error of a single one.
_FACTORS = 2.0 ** np.linspace(0, 1, 16, endpoint=False, dtype=np.float32)
_FOUR_BITS = np.float32(2**20 + 1)  # see T. J. Dekker, "A floating-point technique for extending the precision", 1971
TILE = 2**14  # weights that fit the cache, with their copies
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def encode(wide: np.ndarray, kind: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return quantized values and scales of float32 weights [..., K]. kind: int8, fp8 or int4

    If a group has NaN or infinity, its scale is not finite, so its products are not finite either.
    """
    with np.errstate(invalid="ignore"):
        return _encode(wide, kind, group)


def _encode(wide: np.ndarray, kind: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    groups = wide.reshape(*wide.shape[:-1], -1, group)
    if kind == "int4":
        # The weight that is farthest from 0 becomes exactly 0 - MIDDLE, as in llama.cpp's Q4_0.
        farthest = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1, keepdims=True), axis=-1)
        scales = _no_zeros(farthest / -MIDDLE)
        values = pack(np.clip(np.rint(groups / scales) + MIDDLE, 0, 15).astype(np.uint8).reshape(wide.shape))
    else:
        largest = _LARGEST[kind]
        scales = _no_zeros(np.abs(groups).max(axis=-1, keepdims=True) / largest)
        scales = scales if kind == "int8" else scales * _best_factors(groups, scales)
        scaled = np.clip(groups / scales, -largest, largest)  # E4M3 has no infinity: beyond 464 is NaN
        values = (scaled.astype(E4M3) if kind == "fp8" else np.rint(scaled).astype(np.int8)).reshape(wide.shape)
    return values, scales[..., 0]


def _best_factors(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the factor of each scale, from 1 to 2, with the least squared error in E4M3: float32 [..., 1].

    groups: [..., group]. scales: the smallest possible ones, [..., 1]. A factor of 2 rounds all weights as 1 does,
    because E4M3 is floating point; a factor between them moves the large weights to other E4M3 values.
    """
    numbers, least = groups.reshape(-1, groups.shape[-1]), scales.reshape(-1, 1)
    best = np.ones_like(least)
    step = max(1, TILE // groups.shape[-1])
    for first in range(0, len(numbers), step):
        tile = slice(first, first + step)
        best[tile] = _best_of_tile(numbers[tile] / least[tile])
    return best.reshape(scales.shape)


def _best_of_tile(numbers: np.ndarray) -> np.ndarray:
    """Return the factors of groups of values up to 448, [groups, group] -> [groups, 1]."""
    best, least = np.ones((len(numbers), 1), np.float32), np.full(len(numbers), np.inf, np.float32)
    scaled, high = np.empty_like(numbers), np.empty_like(numbers)
    for factor in _FACTORS:
        np.divide(numbers, factor, out=scaled)
        np.multiply(scaled, _FOUR_BITS, out=high)
        off = high - scaled
        np.subtract(high, off, out=high)  # scaled, rounded to the four bits of E4M3's normal values
        np.subtract(high, scaled, out=off)
        squares = np.einsum("gk,gk->g", off, off) * factor**2
        better = squares < least
        least[better], best[better] = squares[better], factor
    return best


def _no_zeros(scales: np.ndarray) -> np.ndarray:
    return np.where(scales == 0, 1, scales).astype(np.float32)


def pack(values: np.ndarray) -> np.ndarray:
    """Pack 4-bit values uint8 [..., K] in blocks of 32 -> uint8 [..., K / 2], see `Quantized.values`."""
    blocks = values.reshape(*values.shape[:-1], -1, 2, BLOCK // 2)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*values.shape[:-1], -1)


Bounds = tuple[tuple[int, int], ...]
Read = Callable[[ParamSpec, tuple[slice, ...]], np.ndarray]  # a parameter and a rectangle -> its weights
ReadCodes = Callable[[ParamSpec, tuple[slice, ...], Packing], dict[str, np.ndarray]]  # -> {role: array}
ReadOrder = Callable[[ParamSpec], np.ndarray]  # a parameter -> its inputs sorted by group
ENCODED_BYTES = 2**20  # bytes of float32 that are encoded at a time, by each of four threads


def by_parameter(specs: Sequence[ParamSpec]) -> list[tuple[ParamSpec, ...]]:
    """Group the leaves of each parameter, in order."""
    groups = itertools.groupby(specs, lambda spec: spec.wide().name)
    return [tuple(leaves) for _, leaves in groups]


def read_parameter(
    specs: Sequence[ParamSpec],
    shardings: Sequence[Sharding],
    read: Read,
    codes: ReadCodes | None = None,
    order: ReadOrder | None = None,
) -> tuple[jax.Array, ...]:
    """Make the leaves of one parameter, placed by `shardings`.

    codes, order: read quantized values and the order of inputs from the checkpoint
    """
    encoded: dict[Bounds, dict[str, np.ndarray]] = {}

    def part(spec: ParamSpec, index: tuple[slice, ...] | None) -> np.ndarray:
        """Return the values of one leaf at `index`. Leaves of the same rectangle share the work."""
        assert index is not None
        if spec.packing is None:
            return read(spec, index)
        if spec.packing.role == "order":
            assert order is not None
            return order(spec.wide())[index]
        bounds = _wide_bounds(spec, index)
        if spec.shape[-1] == 1:  # a row's only scale was read with some of its values
            bounds = next((each for each in encoded if each[:-1] == bounds[:-1]), bounds)
        if bounds not in encoded:
            index = tuple(slice(*bound) for bound in bounds)
            if spec.packing.stored:
                assert codes is not None
                encoded[bounds] = codes(spec.wide(), index, spec.packing)
            else:
                encoded[bounds] = _encoded(specs, bounds, read)
        return encoded[bounds][spec.packing.role]

    def leaf(spec: ParamSpec, sharding: Sharding) -> jax.Array:
        return jax.make_array_from_callback(spec.shape, sharding, lambda i: part(spec, i), dtype=spec.dtype)

    last = sorted(zip(specs, shardings, strict=True), key=lambda pair: pair[0].shape[-1] == 1)
    made = {spec.name: leaf(spec, sharding) for spec, sharding in last}
    return tuple(made[spec.name] for spec in specs)


def _wide_bounds(spec: ParamSpec, index: tuple[slice, ...]) -> Bounds:
    """Return the rectangle of the unquantized parameter that a rectangle of a leaf stands for."""
    assert spec.packing is not None
    *rows, (first, last) = (s.indices(n)[:2] for s, n in zip(index, spec.shape, strict=True))
    numbers = spec.packing.wide[-1] // spec.shape[-1]
    return (*rows, (first * numbers, last * numbers))


def _encoded(specs: Sequence[ParamSpec], bounds: Bounds, read: Read) -> dict[str, np.ndarray]:
    """Read and encode a rectangle, some indices of its first axis at a time: {role: part of the leaf}."""
    (first, last), *rest = bounds
    wide, packing = specs[0].wide(), specs[0].packing
    assert packing is not None
    sizes = {spec.packing.role: spec for spec in specs if spec.packing is not None}
    *inner, depth = [b - a for a, b in bounds]
    out = {
        role: empty_aligned((*inner, depth * spec.shape[-1] // wide.shape[-1]), np.dtype(spec.dtype))
        for role, spec in sizes.items()
    }
    step = max(1, ENCODED_BYTES // (4 * math.prod(b - a for a, b in rest)))
    for a in range(first, last, step):
        b = min(a + step, last)
        numbers = read(wide, (slice(a, b), *(slice(*bound) for bound in rest)))
        values, scales = encode(numbers, packing.kind, packing.group)
        out["values"][a - first : b - first], out["scales"][a - first : b - first] = values, scales
    return out


Shapes = dict[str, tuple[tuple[int, ...], ...]]
ReadStored = Callable[[str], np.ndarray]


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
_PLACES = ("g_idx", _G_IDX)  # the group index of each input, by GPTQ and by compressed-tensors
_INT8, _INT32 = np.dtype(np.int8), np.dtype(np.int32)
# The dtype of tensors of quantized values. Any other tensor has floating-point values if it has scales, else integers.
_DTYPES = MappingProxyType({"weight": _INT8, "weight_packed": _INT32, "qweight": _INT32, "qzeros": _INT32})
_AWQ_PLACES = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # positions in an int32 of the values of eight successive outputs


@dataclass(frozen=True)
class Codes:
    """A weight [O, I]: values int8, E4M3 or, of 4 bits, uint8 [O, I]; scales and zeros float32 [O, groups].

    places: the group index of each input, int32 [I]; None: groups are successive inputs, all of one size.
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
        """Return rows of a GGUF tensor. With minima the weights are nearly the same, because a zero is rounded."""
        if blocks.minima is None:
            return cls(blocks.values, blocks.scales, None)
        values, empty = blocks.values, blocks.scales == 0  # all weights of such a group are -minimum
        if empty.any():
            values = np.where(np.repeat(empty, values.shape[1] // empty.shape[1], axis=1), 0, values)
        scales = np.where(empty, blocks.minima, blocks.scales)
        with np.errstate(invalid="ignore"):  # as in `Layout.read`
            zeros = blocks.minima / np.where(empty, 1, blocks.scales)
        return cls(values, scales, np.where(empty, 1, zeros))

    def leaves(self, packing: Packing) -> dict[str, np.ndarray]:
        """Return the arrays of leaves by role, with a scale and a zero for each group of the leaves.

        Groups must be successive inputs. The leaves may have more bits than the values, and zeros that these lack.
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
        """Return the dequantized weight, float32 [O, I]."""
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
    """Return the bytes of a part's published tensors: scales have 2 bytes, quantized values are packed in int32."""
    sizes: dict[str, float] = {"weight": 1, "weight_scale": 2, "scales": 2, "weight_shape": 8}
    sizes |= {"weight_zero_point": 1} if form.method == "int-quantized" else {}
    shapes = code_tensors(part, form).items()
    return int(sum(math.prod(shape) * sizes.get(name.rpartition(".")[2], 4) for name, (shape,) in shapes))


def read_codes(part: Part, form: StoredForm, read: ReadStored) -> Codes:
    """Read a part of any format but GGUF.

    Raises ModelLoadError if scales are not finite, an input has no group, or a tensor's dtype is not its kind's.
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
    """Raise ModelLoadError if a tensor of these parts has another dtype than the form's quantized values."""
    for part in parts:
        for name in code_tensors(part, form):
            if name in tensors:
                _check_dtype(name, tensors[name], form)


def _check_dtype(name: str, tensor: HasDtype, form: StoredForm) -> None:
    """Raise ModelLoadError if a tensor has another dtype than the form's quantized values."""
    kind = name.rpartition(".")[2]
    packed_zeros = kind == "weight_zero_point" and form.method == "pack-quantized"
    expected = _INT32 if packed_zeros else _DTYPES.get(kind)
    is_integer = np.issubdtype(tensor.dtype, np.integer)
    if tensor.dtype != expected if expected is not None else is_integer == kind.endswith(("scale", "scales")):
        wanted = ("numbers" if is_integer else "integers") if expected is None else expected
        raise ModelLoadError(f"{name} is {tensor.dtype}, expected {wanted}", fix="download the checkpoint again")


def _centred(values: np.ndarray, zeros: np.ndarray | None, form: StoredForm) -> tuple[np.ndarray, np.ndarray | None]:
    """Return 8-bit values as int8, and their zeros moved by the same amount."""
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


def read_places(part: Part, form: StoredForm, read: ReadStored) -> np.ndarray | None:
    """Return the group index of each input (act-order); None if groups are successive inputs.

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


Block = tuple[int, int]

FP8 = (E4M3, np.dtype(ml_dtypes.float8_e5m2))
_DAMAGED = "download the checkpoint again"
MXFP4_GROUP = 32  # values that share a scale, two to a byte
# E2M1, the low nibble first: https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_BYTE = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)  # [256, 2]


def stored_tensors(
    part: Part, tensors: Mapping[str, Tensor], block: Block | None, form: StoredForm | None = None
) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return {name: allowed shapes} of the checkpoint tensors that store a part."""
    if form is not None and is_stored(part, form, tensors):
        return code_tensors(part, form)
    if part.mxfp4:
        *lead, last = part.shape
        groups = (*lead, last // MXFP4_GROUP)
        return {f"{part.name}_blocks": ((*groups, MXFP4_GROUP // 2),), f"{part.name}_scales": (groups,)}
    found = {part.name: (part.shape,)}
    if part.name in tensors and tensors[part.name].dtype in FP8:
        found |= _scale_tensor(part, block, tensors)
    return found


class FoundModules(frozenset[str]):
    """Names of modules. Its text is the same in every process, because configs as texts name programs and pages."""

    def __repr__(self) -> str:
        return repr(sorted(self))


def fp8_modules(tensors: Mapping[str, Tensor]) -> FoundModules:
    """Return the names of the modules whose weights are E4M3."""
    return FoundModules(name.removesuffix(".weight") for name, info in tensors.items() if info.dtype == E4M3)


def _scale_tensor(
    part: Part, block: Block | None, tensors: Mapping[str, Tensor]
) -> dict[str, tuple[tuple[int, ...], ...]]:
    rows, name = part.shape[0], f"{part.name}_scale"
    if block is None:
        return {name: ((), (1,), (rows,), (rows, 1))}
    if name not in tensors:  # as compressed-tensors calls it
        name = f"{part.name}_scale_inv"
    return {name: (tuple(-(-n // b) for n, b in zip(part.shape, block, strict=True)),)}


def decode_fp8(
    weight: np.ndarray, scale: np.ndarray, block: Block | None, part: Part, region: tuple[slice, ...]
) -> np.ndarray:
    """Dequantize the rectangle `region` of a part's view to float32: weight [O, I] times its scale.

    scale: [O / block rows, I / block columns], or per channel [O] or [O, 1], or one for the tensor.
    """
    assert part.transpose is None
    first, last = part.rows or (0, weight.shape[0])
    rows = np.arange(first, last).reshape(part.view[:-1])[region[:-1]]
    values = weight[first:last].reshape(part.view)[region].astype(np.float32)
    if block is None:
        return values * np.broadcast_to(scale.reshape(-1), weight.shape[:1])[rows][..., None]
    columns = np.arange(weight.shape[1])[region[-1]]
    return values * scale[rows // block[0]][..., columns // block[1]]


def fp8_codes(weight: np.ndarray, scale: np.ndarray, block: Block | None, group: int) -> Codes:
    """Return a weight [O, I] as values and scales float32 [O, I / group], see `decode_fp8`. group: divides a block."""
    rows, depth = weight.shape
    if block is None:
        return Codes(weight, np.repeat(np.broadcast_to(scale.reshape(-1), rows)[:, None], depth // group, axis=1), None)
    columns = np.arange(0, depth, group) // block[1]
    return Codes(weight, scale[np.arange(rows) // block[0]][:, columns], None)


def decode_mxfp4(blocks: np.ndarray, scales: np.ndarray, part: Part, region: tuple[slice, ...]) -> np.ndarray:
    """Dequantize the rectangle `region` of a part's view to float32: E2M1 values times 2^(scale - 127).

    blocks: uint8 [..., I / 32, 16], two values per byte. scales: uint8 [..., I / 32].
    """
    groups = (*part.view[:-1], part.shape[-1] // MXFP4_GROUP)
    chosen = blocks.reshape(*groups, MXFP4_GROUP // 2)[region[:-1]]
    powers = np.ldexp(np.float32(1), scales.reshape(groups)[region[:-1]].astype(np.int32) - 127)
    values = _BYTE[chosen].reshape(*powers.shape, MXFP4_GROUP) * powers[..., None]
    return values.reshape(*powers.shape[:-1], -1)[..., region[-1]]


def mxfp4_codes(blocks: np.ndarray, scales: np.ndarray, part: Part, rows: tuple[slice, ...]) -> dict[str, np.ndarray]:
    """Return the arrays of leaves by role, of `rows` of a part's view: see `ops.quantized`.

    blocks: uint8 [..., I / 32, 16], scales: uint8 [..., I / 32] -> values uint8 [..., I / 2], scales [..., I / 32].
    """
    groups = (*part.view[:-1], part.shape[-1] // MXFP4_GROUP)
    pairs = blocks.reshape(*groups, MXFP4_GROUP // 2)[rows]
    first, second = np.split(pairs, 2, axis=-1)  # values 2i and 2i + 1 of each half of a group are in one byte
    values = np.empty(pairs.shape, np.uint8)
    values[..., ::2] = (first & 15) | (second << 4)
    values[..., 1::2] = (first >> 4) | (second & 0xF0)
    return {"values": values.reshape(*values.shape[:-2], -1), "scales": scales.reshape(groups)[rows]}


def check_codes(name: str, weight: np.ndarray) -> None:
    """Raise ModelLoadError if an FP8 weight E4M3 [O, I] has NaN. E5M2 is not checked."""
    if weight.dtype == E4M3 and ((weight.view(np.uint8) & 0x7F) == 0x7F).any():
        raise ModelLoadError(f"{name}: not all numbers are finite", fix=_DAMAGED)


def check_scale(name: str, scale: np.ndarray) -> None:
    """Raise ModelLoadError unless every scale [...] is positive and finite. In uint8 scales 255 is NaN."""
    if scale.dtype == np.uint8:
        bad = int((scale == 255).sum())
    else:
        values = scale.astype(np.float32)
        bad = int((~np.isfinite(values) | (values <= 0)).sum())
    if bad:
        raise ModelLoadError(
            f"{name}: {bad} of {math.prod(scale.shape)} scales are no positive numbers",
            fix=_DAMAGED,
        )
