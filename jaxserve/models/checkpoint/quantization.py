"""Quantized weights of checkpoints: their description in config.json, their tensors, and quantization at load.

Contents, in order:

1. `read_stored_form`: the `quantization_config` of a checkpoint, as a StoredForm. Integers
   (compressed-tensors, GPTQ, AWQ, GGUF), FP8, MXFP8, MXFP4 and NVFP4 are supported; other forms are refused. The files'
   headers tell which weights have which floating-point format; for a plan without files the configuration does.
2. `encode`: float32 weights to quantized values and scales (see `ops.quantized`).
3. `read_parameter`: the leaves of a quantized parameter, from any reader of unquantized weights. Each rectangle is read
   and encoded once, a few rows at a time, so that loading takes little more memory than the result.
4. `Codes`, `read_codes`: integer weights as quantized values, scales and zeros; the names of their tensors, and how
   values are packed. `float_formats` has the same of floating-point weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer
from jaxserve.models.checkpoint.float_formats import E4M3, Block, Tensors, float_form, float_tensors, format_of
from jaxserve.models.checkpoint.gguf import Unpacked
from jaxserve.models.checkpoint.read_config import Json, shown
from jaxserve.models.checkpoint.safetensors_file import empty_aligned
from jaxserve.models.stored_form import Method, ModuleNames, StoredForm, linear_pattern
from jaxserve.models.weights import Packing, ParamSpec, Part
from jaxserve.ops.quantized import BLOCK, MIDDLE
from jaxserve.text.stop import check_pattern

_INTEGER_FORMATS = ("int-quantized", "pack-quantized")
_FLOAT_FORMATS = (None, "float-quantized", "naive-quantized", "dense", "mixed-precision", "mxfp8-quantized")
_FP4_FORMATS = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")
# modelopt's names of formats; W4A16 means that activations are not quantized
_ALGORITHMS: Mapping[str, Method] = MappingProxyType(
    {"FP8": "fp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4", "W4A16_NVFP4": "nvfp4"}
)
_MIXED = "MIXED_PRECISION"
_IGNORED = ("ignore", "exclude_modules")
_PERMUTED = ("group", "dynamic")  # the words of `actorder` for groups that are not successive inputs
_HEAD = "lm_head"
_GLOB = re.compile(r"\[!?[\w.-]+\]|.", re.DOTALL)
_BY = re.compile(r"\d{1,7}x\d{1,7}")


def read_stored_form(quantization: Json, block: tuple[int, int] | None = None) -> StoredForm | None:
    """Translate a configuration; None: its weights are dequantized at load. Raises ValueError if it is not supported.

    block: rows and columns of an FP8 weight that share a scale.
    """
    match quantization.get("quant_method"):
        case "compressed-tensors":
            return _compressed(quantization, block)
        case "fp8" if quantization.get("fmt", "e4m3") in ("e4m3", "float8_e4m3fn"):
            _only(quantization, "quant_algo", None, "FP8")
            return _fp8(quantization, block)
        case "fbgemm_fp8":
            _check_bound(quantization)
            return _fp8(quantization, None)
        case "modelopt":
            return _modelopt(quantization, block)
        case None if quantization.get("quant_algo") is not None:  # as older versions of modelopt write it
            return _modelopt(quantization, block)
        case "quark":
            return _quark(quantization)
        case "mxfp4":
            return float_form("gpt-oss")
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
    schemes = [scheme for scheme in schemes if scheme.get("group_size") is None]  # FP8's
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
    floats = not any(scheme.get("type") == "int" for _, scheme in schemes)
    if form in (*_FLOAT_FORMATS, *_FP4_FORMATS) and floats:
        if form in (None, "dense"):
            for _, scheme in schemes:
                _scheme_method(scheme)
            return None
        return _groups(found, schemes, block)
    if form not in _INTEGER_FORMATS:
        raise ValueError(
            f"compressed-tensors {shown(form)} is not supported (supported: "
            f"{', '.join((*_INTEGER_FORMATS, *_FP4_FORMATS, *filter(None, _FLOAT_FORMATS)))})"
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


def _groups(found: Json, schemes: list[tuple[Json, Json]], block: tuple[int, int] | None) -> StoredForm:
    """Return the form of groups of layers with floating-point weights, of one format or of several."""
    targets: list[tuple[Method, ModuleNames | None]] = [
        (_scheme_method(scheme), _targets(group)) for group, scheme in schemes
    ]
    return _form_of(found, targets or [("fp8", None)], block)


def _scheme_method(scheme: Json) -> Method:
    """Return the format of a group's weights. Raises ValueError if it is not supported."""
    _only(scheme, "type", None, "float")
    _only(scheme, "num_bits", None, 4, 8)
    size = as_integer(scheme.get("group_size"))
    if scheme.get("num_bits") == 4:
        _only(scheme, "group_size", 16, 32)
        _only(scheme, "strategy", None, "tensor_group" if size == 16 else "group")
        return "nvfp4" if size == 16 else "mxfp4"
    if size == BLOCK and scheme.get("strategy") in (None, "group"):
        return "mxfp8"
    _only(scheme, "strategy", None, "tensor", "channel", "block")
    return "fp8"


def _targets(group: Json) -> ModuleNames | None:
    """Return the modules of a group of layers. None: all linear layers that no other group names"""
    names = _names(group, "targets")
    return None if not names or "Linear" in names else _within(names)


def _within(entries: Iterable[str]) -> ModuleNames:
    """Return the names of modules, or of modules that have them inside, such as `mlp.experts`. re: an expression"""
    entries = list(entries)
    plain = tuple(entry for entry in entries if not entry.startswith("re:") and not _is_glob(entry))
    others = _module_names([entry for entry in entries if entry not in set(plain)])
    return dataclasses.replace(others, parts=plain)


def _form_of(
    found: Json, targets: Iterable[tuple[Method, ModuleNames | None]], block: tuple[int, int] | None
) -> StoredForm:
    """Return the form of a checkpoint whose layers have these formats: a mixture if they are several.

    The output head is unquantized unless it is named.
    """
    whole = _fp8(found, block)

    def one(method: Method, modules: ModuleNames | None) -> StoredForm:
        form = whole if method == "fp8" else float_form(method)
        names = whole.unquantized
        if modules is not None:
            names = dataclasses.replace(names, names=tuple(name for name in names.names if name != _HEAD))
        return dataclasses.replace(form, unquantized=names, targets=modules)

    forms = sorted((one(*each) for each in targets), key=lambda form: form.targets is None)
    if len(forms) == 1:
        return forms[0]
    rounds = any(form.rounds_activations for form in forms)
    return StoredForm("mixed", 4, None, False, forms=tuple(forms), rounds_activations=rounds)


def _modelopt(found: Json, block: tuple[int, int] | None) -> StoredForm:
    """Read modelopt's `quant_algo`. Raises ValueError for one that is not supported."""
    algorithm = found.get("quant_algo", "FP8")
    if algorithm != _MIXED:
        return _form_of(found, [(_algorithm(found), None)], block)
    layers: Any = found.get("quantized_layers")
    if layers is None:
        return _groups(found, _schemes(found), block)
    if not isinstance(layers, dict) or not all(isinstance(layer, dict) for layer in layers.values()):
        raise ValueError(f"'quantized_layers' must be an object of objects, not {shown(layers)}")
    named: dict[Method, list[str]] = {}
    for name, layer in layers.items():
        named.setdefault(_algorithm(layer), []).append(name)
    return _form_of(found, [(method, _within(names)) for method, names in sorted(named.items())], block)


def _algorithm(found: Json) -> Method:
    """Return the format of modelopt's name of it, with its group. Raises ValueError if it is not supported."""
    name = found.get("quant_algo", "FP8")
    if name not in _ALGORITHMS:
        names = ", ".join((*_ALGORITHMS, _MIXED))
        raise ValueError(f"quantization {shown(name)} is not supported (supported: {names})")
    if _ALGORITHMS[name] == "nvfp4":
        _only(found, "group_size", None, 16)
    return _ALGORITHMS[name]


def _quark(found: Json) -> StoredForm:
    """Read quark's configuration of MXFP4. Raises ValueError for another one, also of single layers."""
    _only(found, "layer_quant_config", None, {})
    _only(found, "layer_type_quant_config", None, {})
    whole = found.get("global_quant_config") or {}
    weight = whole.get("weight") if isinstance(whole, dict) else None
    if not isinstance(weight, dict):
        raise ValueError(f"'global_quant_config' must have an object 'weight', not {shown(weight)}")
    _only(weight, "dtype", "fp4")
    _only(weight, "qscheme", "per_group")
    _only(weight, "group_size", BLOCK)
    _only(weight, "scale_format", "e8m0")
    return dataclasses.replace(float_form("mxfp4"), unquantized=_module_names([_HEAD, *_names(found, "exclude")]))


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
            if any(scheme.get("type") == "float" and scheme.get("num_bits") == 4 for _, scheme in _schemes(found)):
                return False  # activations of 4 bits are not computed, and its scales of them are not read
            for each in activations:
                if each is not None and not (isinstance(each, dict) and each.get("num_bits") == 8):
                    raise ValueError(
                        f"'input_activations' of a quantized checkpoint is {shown(each)} (supported: 8 bits)"
                    )
            return any(activations)
        case "fbgemm_fp8":
            return True
        case "modelopt" | None:
            return found.get("quant_algo", "FP8") == "FP8"
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
        raise ValueError(f"{key!r} of a quantized checkpoint is {shown(found.get(key))} (supported: {names})")


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


# The factors of an octave that are tried for a scale of E4M3. They halve the squared error of a single one.
_FACTORS = 2.0 ** np.linspace(0, 1, 16, endpoint=False, dtype=np.float32)
_FOUR_BITS = np.float32(2**20 + 1)  # see T. J. Dekker, "A floating-point technique for extending the precision", 1971
TILE = 2**14  # weights that fit the cache, with their copies
_LARGEST = {"int8": 127.0, "fp8": 448.0}


def encode(wide: np.ndarray, kind: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Return quantized values and scales of float32 weights [..., K], of NVFP4 divided by the scale of their tensor.

    kind: int8, fp8, int4, mxfp4 or nvfp4. If a group has NaN or infinity, its scale is not finite, so its products are
    not finite either.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        return _encode_e2m1(wide, kind, group) if kind in ("mxfp4", "nvfp4") else _encode(wide, kind, group)


_NUMBER_CODES = np.array([0, 1, 2, 3, 4, 0, 5, 0, 6, 0, 0, 0, 7], np.uint8)  # of twice a magnitude of E2M1
_LARGEST_E4M3 = 448.0
# The scales of E4M3 that are tried for a group of NVFP4, from the one that makes its largest weight 7.5 upwards: an
# octave and a bit. The least squared error is 12 % below that of 6 alone. Those of MXFP4 are powers of 2.
_TRIED = 10


def _encode_e2m1(wide: np.ndarray, kind: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    groups = wide.reshape(*wide.shape[:-1], -1, group)
    largest = np.abs(groups).max(axis=-1, keepdims=True)
    best, scales, least = np.zeros_like(groups), np.zeros_like(largest), np.full_like(largest, np.inf)
    for tried in scales_of_mxfp4(largest) if kind == "mxfp4" else scales_of_nvfp4(largest):
        numbers = rounded_to_e2m1(groups / tried)
        off = numbers * tried - groups
        squares = np.einsum("...gk,...gk->...g", off, off)[..., None]
        better = squares < least
        np.copyto(best, numbers, where=better)
        np.copyto(scales, tried, where=better)
        np.copyto(least, squares, where=better)
    bad = ~np.isfinite(largest)
    codes = _NUMBER_CODES[(np.abs(best) * 2).astype(np.uint8)] | np.signbit(best).astype(np.uint8) << 3
    values = pack(codes.reshape(wide.shape), min(BLOCK, group))
    if kind == "mxfp4":
        exponents = np.where(bad, 255, np.frexp(scales)[1] + 126)
        return values, exponents[..., 0].astype(np.uint8)
    return values, np.where(bad, np.nan, scales)[..., 0].astype(E4M3)


def scales_of_mxfp4(largest: np.ndarray) -> list[np.ndarray]:
    """Return the two powers of 2 that may be the best scale of a group with this magnitude: [..., 1]."""
    exponent = np.clip(np.frexp(largest)[1] - 3, -126, 125)  # the magnitude is from 4 to 8 times the smaller scale
    return [np.ldexp(np.float32(1), exponent + more) for more in (0, 1)]


def scales_of_nvfp4(largest: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the scales of E4M3, as float32, that may be the best of a group with this magnitude: [..., 1]."""
    least = np.minimum(largest / np.float32(7.5), _LARGEST_E4M3).astype(E4M3).view(np.uint8).astype(np.int32)
    for more in range(_TRIED):
        yield np.clip(least + more, 1, 126).astype(np.uint8).view(E4M3).astype(np.float32)


def rounded_to_e2m1(numbers: np.ndarray) -> np.ndarray:
    """Round float32 numbers to the nearest of E2M1, ties to even, and those beyond 6 to 6."""
    magnitude = np.abs(numbers)
    step = np.where(magnitude < 2, np.float32(0.5), np.where(magnitude < 4, np.float32(1), np.float32(2)))
    return np.copysign(np.minimum(np.rint(magnitude / step) * step, np.float32(6)), numbers)


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


def pack(values: np.ndarray, block: int = BLOCK) -> np.ndarray:
    """Pack 4-bit values uint8 [..., K] in blocks -> uint8 [..., K / 2], see `Quantized.values`."""
    blocks = values.reshape(*values.shape[:-1], -1, 2, block // 2)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*values.shape[:-1], -1)


Bounds = tuple[tuple[int, int], ...]
Read = Callable[[ParamSpec, tuple[slice, ...]], np.ndarray]  # a parameter and a rectangle -> its weights
ReadCodes = Callable[[ParamSpec, tuple[slice, ...], Packing], dict[str, np.ndarray]]  # -> {role: array}
ReadOrder = Callable[[ParamSpec], np.ndarray]  # a parameter -> its inputs sorted by group
ReadScale = Callable[[Part], np.ndarray | np.float32]  # a part -> the scale of its tensor
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
    scale: ReadScale | None = None,
) -> tuple[jax.Array, ...]:
    """Make the leaves of one parameter, placed by `shardings`.

    codes, order, scale: read quantized values, the order of inputs and the scales of tensors from the checkpoint
    """
    encoded: dict[Bounds, dict[str, np.ndarray]] = {}
    of_tensors = _tensor_scales(specs, read, scale)

    def part(spec: ParamSpec, index: tuple[slice, ...] | None) -> np.ndarray:
        """Return the values of one leaf at `index`. Leaves of the same rectangle share the work."""
        assert index is not None
        if spec.packing is None:
            return read(spec, index)
        if spec.packing.role == "order":
            assert order is not None
            return order(spec.wide())[index]
        if spec.packing.role == "tensor_scale":
            assert of_tensors is not None
            return of_tensors[index]
        bounds = _wide_bounds(spec, index)
        if spec.shape[-1] == 1:  # a row's only scale was read with some of its values
            bounds = next((each for each in encoded if each[:-1] == bounds[:-1]), bounds)
        if bounds not in encoded:
            index = tuple(slice(*bound) for bound in bounds)
            if spec.packing.stored:
                assert codes is not None
                encoded[bounds] = codes(spec.wide(), index, spec.packing)
            else:
                encoded[bounds] = _encoded(specs, bounds, read, of_tensors)
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


def _tensor_scales(specs: Sequence[ParamSpec], read: Read, stored: ReadScale | None) -> np.ndarray | None:
    """Return the leaf of the scales of a parameter's tensors, which are read or chosen; None: it has none.

    A chosen one makes the largest weight of a tensor the largest number of E2M1 times that of E4M3.
    """
    spec = next((each for each in specs if each.packing is not None and each.packing.role == "tensor_scale"), None)
    if spec is None or spec.packing is None:
        return None
    out = empty_aligned(spec.shape, np.dtype(np.float32))
    for part in spec.parts:
        corner = zip(part.start, part.view, spec.shape, strict=True)
        place = tuple(slice(None) if size == 1 else slice(first, first + view) for first, view, size in corner)
        if spec.packing.stored:
            assert stored is not None
            out[place] = stored(part)
        else:
            out[place] = _no_zeros(np.asarray(_largest(spec.wide(), part, read) / np.float32(6 * _LARGEST_E4M3)))
    return out


def _largest(wide: ParamSpec, part: Part, read: Read) -> np.float32:
    """Return the largest magnitude of a part's weights, which are read some at a time. NaN if there is one."""
    axis = next((i for i, size in enumerate(part.view) if size > 1), 0)
    step = max(1, ENCODED_BYTES // (4 * math.prod(part.view) // part.view[axis]))
    found = np.float32(0)
    for first in range(0, part.view[axis], step):
        last = min(first + step, part.view[axis])
        bounds = ((first, last) if i == axis else (0, size) for i, size in enumerate(part.view))
        index = tuple(slice(start + a, start + b) for start, (a, b) in zip(part.start, bounds, strict=True))
        found = np.maximum(found, np.abs(read(wide, index)).max())
    return found


def _encoded(
    specs: Sequence[ParamSpec], bounds: Bounds, read: Read, of_tensors: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Read and encode a rectangle, some indices of its first axis at a time: {role: part of the leaf}."""
    (first, last), *rest = bounds
    wide, packing = specs[0].wide(), specs[0].packing
    assert packing is not None
    roles = ("values", "scales")
    sizes = {spec.packing.role: spec for spec in specs if spec.packing is not None and spec.packing.role in roles}
    *inner, depth = [b - a for a, b in bounds]
    out = {
        role: empty_aligned((*inner, depth * spec.shape[-1] // wide.shape[-1]), np.dtype(spec.dtype))
        for role, spec in sizes.items()
    }
    step = max(1, ENCODED_BYTES // (4 * math.prod(b - a for a, b in rest)))
    for a in range(first, last, step):
        b = min(a + step, last)
        index = (slice(a, b), *(slice(*bound) for bound in rest))
        numbers = read(wide, index)
        if of_tensors is not None:
            shared = zip(index, of_tensors.shape, strict=True)
            numbers = numbers / of_tensors[tuple(slice(None) if size == 1 else one for one, size in shared)]
        values, scales = encode(numbers, packing.kind, packing.group)
        out["values"][a - first : b - first], out["scales"][a - first : b - first] = values, scales
    return out


Shapes = dict[str, tuple[tuple[int, ...], ...]]  # of the tensors of a part
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


def stored_tensors(part: Part, tensors: Tensors, block: Block | None, form: StoredForm | None = None) -> Shapes:
    """Return {name: allowed shapes} of the checkpoint tensors that store a part, whatever its format."""
    if form is not None and is_stored(part, form, tensors):
        return code_tensors(part, form)
    method = format_of(part, tensors)
    return {part.name: (part.shape,)} if method is None else float_tensors(part, method, tensors, block)
