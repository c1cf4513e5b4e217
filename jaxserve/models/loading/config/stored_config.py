"""Read the `quantization_config` of quantised checkpoints: integers, FP8 and MXFP4. Some others are refused.

Integers are compressed-tensors', GPTQ's, AWQ's and GGUF's. Which weights are E4M3 is known from the files' headers; a
configuration of FP8 tells it for a plan without files.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer, read_object
from jaxserve.models.hf_keys import Json, shown
from jaxserve.models.loading.file_formats.gguf_model import published_config
from jaxserve.models.stored_form import ModuleNames, StoredForm, linear_pattern
from jaxserve.ops.quantized import BLOCK
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
    """Read the quantization entry of a config.json, the hf_quant_config.json beside it, or a GGUF file; {}: none.

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
    """Read the file beside a config.json in which modelopt, AutoGPTQ or AutoAWQ describes the weights; {}: none.

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
    """Translate a configuration; None: its weights are decoded at load. Raises ValueError for what is not supported.

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

    Raises ValueError if layers differ in it.
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
    bits = 8 if form == "int-quantized" else bits  # a byte has one number, of 4 bits too
    return StoredForm(form, bits, _group(size), zeros, ignored, permuted=permuted, rounds_activations=rounds)


def _check_transforms(found: Json) -> None:
    """Raise ValueError if activations are transformed (QuIP, SpinQuant). What is done to weights alone is in them."""
    groups = (found.get("transform_config") or {}).get("config_groups") or {}
    for applied in (each for scheme in groups.values() for each in scheme.get("apply") or ()):
        _only(applied, "location", "weight_input", "weight_output")


def _rounds_activations(found: Json) -> bool:
    """Return whether the checkpoint was made for activations of 8 bits. Raises ValueError for fewer."""
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
    """Raise ValueError for what is no bound. It bounds scales of activations, of which there are none here."""
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

    * and ? of a name stand for any characters, as in modelopt's entries. Raises ValueError for an expression that is
    damaged, or that is slow on some names: RE2 is never slow, but lacks look-around.
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
