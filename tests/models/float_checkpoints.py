"""Random checkpoints in published floating-point formats, with a decoder of their own: numpy and loops, no jaxserve.

make_goldens.py gives the decoded weights to transformers; test_float_formats.py gives the stored ones to jaxserve.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.models.families import CASES

Tensors = dict[str, np.ndarray]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
LAYERS = range(CASES["llama3"]["num_hidden_layers"])

MODELOPT_MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "exclude_modules": ["lm_head"]}
MODELOPT_NVFP4 = {
    "quant_algo": "NVFP4",
    "quant_method": "modelopt",
    "kv_cache_quant_algo": "FP8",
    "group_size": 16,
    "exclude_modules": ["lm_head"],
}
MIXTURE = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "exclude_modules": ["lm_head", "*.mlp.gate"],
    "quantized_layers": {
        **{f"model.layers.{i}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16} for i in LAYERS},
        **{f"model.layers.{i}.self_attn.{name}_proj": {"quant_algo": "FP8"} for i in LAYERS for name in "qkvo"},
    },
}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """A compressed-tensors configuration of one group of layers."""
    group = {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 4, **weights}, "format": form}
    group["input_activations"] = {"num_bits": 4, "type": "float", "dynamic": "local", **weights}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"g": group}, "ignore": ["lm_head"]}


QUARK = {
    "quant_method": "quark",
    "global_quant_config": {
        "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
        "input_tensors": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "is_dynamic": True},
    },
    "layer_quant_config": {},
    "exclude": ["lm_head", "re:model\\.embed.*"],
}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4": ("llama3", MODELOPT_NVFP4),
    "nvfp4 compressed": ("llama3", compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16)),
    "mxfp4 compressed": ("llama3", compressed("mxfp4-pack-quantized", strategy="group", group_size=32)),
    "mxfp4": ("llama3", QUARK),
    "mxfp8": ("llama3", MODELOPT_MXFP8),
    "mixture": ("qwen3_moe", MIXTURE),
}
GOLDENS = ("nvfp4", "mxfp4", "mxfp8", "mixture")


def hf_of(model: str) -> dict[str, Any]:
    """The config.json of a model whose rows are whole groups, without the quantization."""
    more = {"moe_intermediate_size": 32} if model == "qwen3_moe" else {}
    return CASES[model] | SIZES | more


def e4m3(code: int) -> float:
    """The number of a byte: a sign, 4 bits of exponent biased by 7, 3 of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -magnitude if code & 128 else magnitude


E4M3 = np.array([np.nan if code & 127 == 127 else e4m3(code) for code in range(256)], np.float32)


def stored(form: str, plain: Tensors) -> tuple[Tensors, Tensors, set[str]]:
    """(tensors of the checkpoint, the same decoded to float32, names whose bytes are E4M3), drawn by name.

    plain: unquantized tensors, of which the projections get other values
    """
    kind, packed = form.split()[0], "compressed" in form
    found, wide, floats = dict(plain), dict(plain), set[str]()
    for name, weight in sorted(plain.items()):
        own = _kind(kind, name)
        if not name.endswith("_proj.weight") or own is None:
            continue
        rng = np.random.default_rng(sum(name.encode()))
        rows, depth = weight.shape
        module = name.removesuffix(".weight")
        del found[name]
        if own == "fp8":
            codes = _finite(rng.integers(0, 256, weight.shape, np.uint8) & 0xBF)  # up to 1.875
            scale = np.float32(rng.uniform(0.1, 0.2))
            wide[name] = E4M3[codes] * scale
            found |= {name: codes, f"{module}.weight_scale": np.array(scale), f"{module}.input_scale": np.array(scale)}
            floats |= {name}
            continue
        group = 16 if own == "nvfp4" else 32
        fine = rng.integers(40, 60, (rows, depth // group), np.uint8)  # of E4M3 from 0.25 to 1.375
        scales = E4M3[fine] if own == "nvfp4" else 2.0 ** (fine // 10 - 7.0)
        if own != "nvfp4":
            fine = (fine // 10 + 120).astype(np.uint8)
        if own == "mxfp8":
            codes = _finite(rng.integers(0, 256, weight.shape, np.uint8) & 0xBF)
            found |= {name: codes, f"{module}.weight_scale": fine}
            floats |= {name}
            numbers = E4M3[codes]
        else:
            codes = rng.integers(0, 16, weight.shape, np.uint8)
            bytes_ = codes[:, ::2] | codes[:, 1::2] << 4
            found |= {f"{module}.weight_packed" if packed else name: bytes_, f"{module}.weight_scale": fine}
            numbers = E2M1[codes]
        factor = np.float32(1)
        if own == "nvfp4":
            factor = np.float32(rng.uniform(0.1, 0.2))
            names = ("weight_global_scale", "input_global_scale") if packed else ("weight_scale_2", "input_scale")
            given = np.array([1 / factor] if packed else factor, np.float32)
            found |= {f"{module}.{each}": given for each in names}
            floats |= {f"{module}.weight_scale"}
        wide[name] = np.empty(weight.shape, np.float32)
        for k in range(depth):
            wide[name][:, k] = numbers[:, k] * scales[:, k // group].astype(np.float32) * factor
    if kind == "nvfp4":  # scales of a quantized cache, which are not read
        of_cache = [f"model.layers.{i}.self_attn.{name}_proj.{name}_scale" for i in LAYERS for name in "kv"]
        found |= {name: np.array(2, np.float32) for name in of_cache}
    return found, wide, floats


def _kind(form: str, name: str) -> str | None:
    """The format of a tensor's weight; None: it is not quantized."""
    if form != "mixture":
        return form
    return "nvfp4" if ".experts." in name else "fp8" if re.search(r"self_attn\.[qkvo]_proj", name) else None


def _finite(codes: np.ndarray) -> np.ndarray:
    return np.where(codes & 127 == 127, 0, codes).astype(np.uint8)
