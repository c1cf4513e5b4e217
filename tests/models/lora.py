"""Random adapters in peft's form, and what they make of a model's weights: no jax and no code of the package."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def random_pairs(shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, scale: float = 0.3) -> Pairs:
    """A [r, in] and B [out, r] for each module; shapes: [out, in]."""
    found: Pairs = {}
    for name, (out, size) in shapes.items():
        rng = np.random.default_rng([zlib.crc32(name.encode()), seed])
        a = rng.normal(0, scale, (rank, size)).astype(np.float32)
        found[name] = a, rng.normal(0, scale, (out, rank)).astype(np.float32)
    return found


def peft_tensors(pairs: Pairs) -> dict[str, np.ndarray]:
    """The tensors as peft's save_pretrained names them."""
    halves = {name: dict(zip("AB", pair, strict=True)) for name, pair in pairs.items()}
    return {
        f"base_model.model.{name}.lora_{half}.weight": array
        for name, both in halves.items()
        for half, array in both.items()
    }


def peft_config(rank: int, alpha: float = 8, **changes: Any) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "target_modules": ["q_proj"],
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        **changes,
    }


def write_adapter(directory: Path, pairs: Pairs, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(peft_tensors(pairs), directory / "adapter_model.safetensors")
    return directory


def merged(
    tensors: Mapping[str, np.ndarray], pairs: Pairs, scales: float | Mapping[str, float]
) -> dict[str, np.ndarray]:
    """The checkpoint with the adapter added, computed in float64."""
    found = dict(tensors)
    for name, (a, b) in pairs.items():
        scale = scales if isinstance(scales, int | float) else scales[name]
        weight = found[f"{name}.weight"].astype(np.float64)
        found[f"{name}.weight"] = (weight + scale * b.astype(np.float64) @ a.astype(np.float64)).astype(np.float32)
    return found


def only(shapes: Mapping[str, tuple[int, int]], ends: Iterable[str]) -> dict[str, tuple[int, int]]:
    return {name: shape for name, shape in shapes.items() if name.endswith(tuple(ends))}
