"""Loading a 2 GB checkpoint from the page cache: its speed beside the machine's own, and the peak of memory.

Long form only: `pytest -m slow tests/models/test_load_speed.py -s` prints the figures. What runs under __main__ loads
in a process of its own, whose memory is nobody else's.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import psutil
import pytest

from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import build, load_model
from tests.models.checkpoints import TINY_LLAMA, write_sharded

BFLOAT16 = jnp.dtype("bfloat16")
HF = TINY_LLAMA | {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 20,  # 2 GB
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "torch_dtype": "bfloat16",
}


def write(directory: Path) -> None:
    rng = np.random.default_rng(0)
    parts = [part for spec in build(from_hf(HF), BFLOAT16).specs for part in spec.parts]
    small = {p.name: rng.integers(0x3C00, 0x3D00, p.shape, np.uint16).view(ml_dtypes.bfloat16) for p in parts}
    write_sharded(directory, HF, small, 3)


def write_fp8(directory: Path) -> None:
    """The same model with its projections in FP8, a scale for each block of 128 x 128."""
    rng, e4m3 = np.random.default_rng(0), np.dtype(ml_dtypes.float8_e4m3fn)
    tensors: dict[str, np.ndarray] = {}
    for part in (part for spec in build(from_hf(HF), BFLOAT16).specs for part in spec.parts):
        bits = rng.integers(0, 0x7F, part.shape, np.uint8)
        if "_proj" in part.name:
            scales = rng.uniform(0.5, 1, [-(-size // 128) for size in part.shape]).astype(np.float32)
            tensors |= {part.name: bits.view(e4m3), f"{part.name}_scale_inv": scales}
        else:
            tensors[part.name] = bits.astype(BFLOAT16)
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    write_sharded(directory, HF | {"quantization_config": quantization}, tensors, 3)


def machine_seconds(directory: Path) -> float:
    """To read the files into memory that was never touched: what loading cannot undercut."""
    start = time.perf_counter()
    kept = []
    for path in sorted(directory.glob("*.safetensors")):
        buffer = np.empty(path.stat().st_size, np.uint8)
        with path.open("rb", buffering=0) as file:
            file.readinto(buffer.data)
        kept.append(buffer)
    return time.perf_counter() - start


def measure(directory: Path, what: str) -> dict[str, Any]:
    if what == "machine":
        return {"seconds": machine_seconds(directory)}
    if what == "convert":
        orbax.convert(load_model(directory, dtype=BFLOAT16), directory / "converted")
        return {}
    directory = directory / "converted" if what == "orbax" else directory
    before = psutil.Process().memory_info().rss
    model = load_model(directory, dtype=BFLOAT16)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    weights = sum(leaf.nbytes for leaf in model.leaves)
    return {"seconds": model.seconds, "bytes": model.checkpoint_bytes, "peak": peak / weights}


def run(directory: Path, what: str) -> dict[str, Any]:
    """Figures of one load, in a process of its own; of three loads the fastest, on a machine that has other work."""
    command = [sys.executable, "-m", "tests.models.test_load_speed", str(directory), what]
    root = Path(__file__).parent.parent.parent
    times = 1 if what == "convert" else 3
    done = [subprocess.run(command, cwd=root, capture_output=True, text=True, check=True) for _ in range(times)]
    return min((json.loads(each.stdout) for each in done), key=lambda figures: figures.get("seconds", 0.0))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_speed_and_peak(tmp_path: Path) -> None:
    write(tmp_path)
    machine, loaded, _, converted = (run(tmp_path, what) for what in ("machine", "load", "convert", "orbax"))
    size = loaded["bytes"] / 1e9
    print(f"{size:.2f} GB: the machine reads into new memory at {size / machine['seconds']:.2f} GB/s")
    for name, figures in {"safetensors": loaded, "converted": converted}.items():
        print(f"{name}: {size / figures['seconds']:.2f} GB/s, peak {figures['peak']:.2f} x the weights")
        assert figures["peak"] < 1.3
        assert figures["seconds"] < 3 * machine["seconds"] + 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_converted_checkpoint_loads_faster_than_a_quantized_one(tmp_path: Path) -> None:
    write_fp8(tmp_path)
    quantized, _, converted = (run(tmp_path, what) for what in ("load", "convert", "orbax"))
    print(
        f"FP8: {quantized['seconds']:.2f} s, peak {quantized['peak']:.2f} x the weights; converted: "
        f"{converted['seconds']:.2f} s, peak {converted['peak']:.2f}: "
        f"{quantized['seconds'] / converted['seconds']:.1f} times faster"
    )
    assert converted["seconds"] < quantized["seconds"] and quantized["peak"] < 1.3


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
