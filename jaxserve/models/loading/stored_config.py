"""Read the `quantization_config` of quantised checkpoints: integers, FP8 and MXFP4. Some others are refused.

Integers are compressed-tensors', GPTQ's, AWQ's and GGUF's. Which weights are E4M3 is known from the files' headers; a
configuration of FP8 tells it for a plan without files.
"""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path
from typing import Any

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models.hf_keys import Json, shown
from jaxserve.models.loading.file_formats.gguf_model import published_config
from jaxserve.models.stored_form import StoredForm
from jaxserve.ops.quantized import BLOCK
from jaxserve.text.regex_guard import check_pattern

_INTEGER_FORMATS = ("int-quantized", "pack-quantized")
_FLOAT_FORMATS = (None, "float-quantized", "naive-quantized", "dense")
_EXCLUDED = ("modules_to_not_convert", "ignore", "exclude_modules")


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
    """Read modelopt's hf_quant_config.json beside a config.json; {}: there is none. Raises ModelLoadError."""
    file = path.with_name("hf_quant_config.json")
    found = read_object(file).get("quantization") or {} if file.is_file() else {}
    if not isinstance(found, dict):
        raise ModelLoadError(f"{file}: 'quantization' must be an object")
    return found


def read_stored_form(quantization: Json, block: tuple[int, int] | None = None) -> StoredForm | None:
    """Translate a configuration; None: its weights are decoded at load. Raises ValueError for what is not supported.

    block: rows and columns of an FP8 weight that share a scale.
    """
    match quantization.get("quant_method"):
        case "compressed-tensors":
            return _compressed(quantization)
        case "fp8" if quantization.get("fmt", "e4m3") == "e4m3":
            return _fp8(quantization, block)
        case "modelopt" if quantization.get("quant_algo", "FP8") == "FP8":
            return _fp8(quantization, block)
        case "mxfp4":
            return StoredForm("mxfp4", 4, BLOCK, False, ())
        case "gptq":
            return _gptq(quantization)
        case "awq":
            return _awq(quantization)
        case "gguf":
            wide = tuple(re.escape(name) for name in _names(quantization, "modules_to_not_convert"))
            return StoredForm("gguf", _bits(quantization, "bits"), BLOCK, False, wide)
    return None


def _compressed(found: Json) -> StoredForm | None:
    form, groups = found.get("format"), found.get("config_groups") or {}
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()):
        raise ValueError(f"'config_groups' must be an object of objects, not {shown(groups)}")
    weights = [group.get("weights") or {} for group in groups.values()]
    integers = any(isinstance(each, dict) and each.get("type") == "int" for each in weights)
    if form in _FLOAT_FORMATS and not integers:
        return _fp8(found, None) if form in ("float-quantized", "naive-quantized") else None
    if form not in _INTEGER_FORMATS:
        raise ValueError(
            f"compressed-tensors {shown(form)} is not supported (supported: {', '.join(_INTEGER_FORMATS)})"
        )
    if len(groups) != 1 or not isinstance(weights[0], dict):
        raise ValueError(f"'config_groups' has {len(groups)} groups, and only one form for all layers is supported")
    [group], [scheme] = groups.values(), weights
    _only(group, "targets", ["Linear"])
    _only(group, "input_activations", None)
    _only(group, "output_activations", None)
    _only(scheme, "type", "int")
    _only(scheme, "actorder", None, "weight", "static")
    _only(scheme, "strategy", "channel", "group")
    _only(scheme, "symmetric", None, True, False)
    _only(found, "sparsity_config", None, {})
    size = scheme.get("group_size") if scheme["strategy"] == "group" else None
    ignored = tuple(_pattern(name) for name in _names(found, "ignore"))
    return StoredForm(form, _bits(scheme, "num_bits"), _group(size), scheme.get("symmetric") is False, ignored)


def _fp8(found: Json, block: tuple[int, int] | None) -> StoredForm:
    ignored = [_pattern(name) for key in _EXCLUDED for name in _names(found, key)]
    return StoredForm("fp8", 8, None if block is None else block[1], False, (r"^lm_head$", *ignored))


def _gptq(found: Json) -> StoredForm:
    _only(found, "desc_act", None, False)
    _only(found, "dynamic", None, {})
    _only(found, "lm_head", None, False)
    _only(found, "checkpoint_format", None, "gptq", "gptq_v2")
    offset = 0 if found.get("checkpoint_format") == "gptq_v2" else 1
    ignored = (r"^lm_head$", *(re.escape(name) for name in _names(found, "modules_to_not_convert")))
    return StoredForm("gptq", _bits(found, "bits"), _group(found.get("group_size")), True, ignored, offset)


def _awq(found: Json) -> StoredForm:
    _only(found, "version", None, "gemm", "GEMM")
    _only(found, "bits", 4)
    ignored = (r"^lm_head$", *(re.escape(name) for name in _names(found, "modules_to_not_convert")))
    return StoredForm("awq", 4, _group(found.get("group_size")), True, ignored)


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
    if type(size) is not int or size % 32 or not 0 < size < 2**20:
        raise ValueError(f"'group_size' is {shown(size)} (supported: -1 and multiples of 32)")
    return size


def _names(found: Json, key: str) -> list[str]:
    names = found.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{key!r} must be a list of names, not {shown(names)}")
    return names


def _pattern(name: str) -> str:
    """Return a regular expression of an entry of compressed-tensors' `ignore`: a name, or re: and an expression.

    * and ? of a name stand for any characters, as in modelopt's entries.
    """
    if not name.startswith("re:"):
        return f"^{fnmatch.translate(name)}"
    try:
        check_pattern(name[3:])
        return re.compile(f"^(?:{name[3:]})").pattern
    except (re.error, ValueError) as error:
        raise ValueError(f"'ignore' has no regular expression in {shown(name)}: {error}") from None
