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

from jaxserve.models import orbax
from jaxserve.models.hf_config import from_hf
from jaxserve.models.loader import build, load_model
from tests.models.checkpoints import TINY_LLAMA, write_sharded

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
    parts = [part for spec in build(from_hf(HF), jnp.dtype("bfloat16")).specs for part in spec.parts]
    small = {p.name: rng.integers(0x3C00, 0x3D00, p.shape, np.uint16).view(ml_dtypes.bfloat16) for p in parts}
    write_sharded(directory, HF, small, 3)


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
        orbax.convert(load_model(directory, dtype=jnp.dtype("bfloat16")), directory / "converted")
        return {}
    directory = directory / "converted" if what == "orbax" else directory
    before = psutil.Process().memory_info().rss
    model = load_model(directory, dtype=jnp.dtype("bfloat16"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    weights = sum(leaf.nbytes for leaf in model.leaves)
    return {"seconds": model.seconds, "bytes": model.checkpoint_bytes, "peak": peak / weights}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_speed_and_peak(tmp_path: Path) -> None:
    write(tmp_path)

    def run(what: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "tests.models.test_load_speed", str(tmp_path), what]
        root = Path(__file__).parent.parent.parent
        return json.loads(subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout)

    machine, loaded, _, converted = (run(what) for what in ("machine", "load", "convert", "orbax"))
    gigabytes = loaded["bytes"] / 1e9
    print(
        f"{gigabytes:.2f} GB: loaded at {gigabytes / loaded['seconds']:.2f} GB/s, the machine reads into new memory at "
        f"{gigabytes / machine['seconds']:.2f} GB/s; peak {loaded['peak']:.2f} x the weights; converted: "
        f"{gigabytes / converted['seconds']:.2f} GB/s, peak {converted['peak']:.2f}"
    )
    assert loaded["peak"] < 1.3
    assert loaded["seconds"] < 3 * machine["seconds"] + 2


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), sys.argv[2])))
