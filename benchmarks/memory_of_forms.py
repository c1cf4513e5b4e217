"""Measure the bytes of weights and KV cache in each form: as planned, as held, and the most while loading.

    python -m benchmarks.memory_of_forms MODEL [GGUF ...]

Each form is loaded in a process of its own. The peak is of all memory that the process got while it loaded, beyond what
it had before, relative to the weights that it holds afterwards. MODEL: a safetensors checkpoint. The weights' plan is
what `jaxserve plan` computes from shapes, that of the KV cache what the engine reports.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil

from jaxserve import Engine
from jaxserve.config import Config
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.models.checkpoint.structure import build

MIB = 2**20
FORMS = {  # the dtype of what is not quantized, and ModelConfig.quantization
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "int8": ("bfloat16", "int8"),
    "fp8": ("bfloat16", "fp8"),
    "int4": ("bfloat16", "int4"),
}
CACHES = ("float32", "bfloat16", "int8", "fp8")


def weights(path: Path, dtype: str, quantization: str) -> dict[str, float]:
    """Load a model, and return its bytes as planned and as held, and the peak relative to them."""
    config = read_config(path).replace(quantization=quantization)
    planned = build(config, jnp.dtype(dtype)).num_bytes
    before = psutil.Process().memory_info().rss
    model = load_model(path, dtype=jnp.dtype(dtype), config=config)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    held = sum(shard.data.nbytes for leaf in model.leaves for shard in leaf.addressable_shards)
    return {"planned": planned, "held": held, "peak": peak / held}


def cache(path: Path, dtype: str) -> dict[str, float]:
    """Return the bytes of an engine's KV cache as planned and as held."""
    sizes = {"model": {"path": str(path)}, "cache": {"dtype": dtype}, "scheduler": {"max_num_seqs": 8}}
    with Engine(config=Config.parse(sizes)) as engine:
        leaves = jax.tree.leaves(engine.runner.caches)
        held = sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)
        return {"planned": engine.runner.plan.kv_bytes, "held": held}


def _child(*words: str) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.memory_of_forms", *words]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("gguf", type=Path, nargs="*", help="files that are held as they are")
    parser.add_argument("--weights", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.weights:
        print(json.dumps(weights(options.model, *options.weights)))
        return
    if options.cache:
        print(json.dumps(cache(options.model, options.cache)))
        return
    cases = [(form, options.model, *FORMS[form]) for form in FORMS]
    cases += [(file.stem, file, "bfloat16", "stored") for file in options.gguf]
    for name, path, dtype, quantization in cases:
        found = _child(str(path), "--weights", dtype, quantization)
        sizes = f"planned {found['planned'] / MIB:9.2f} MiB, held {found['held'] / MIB:9.2f}"
        print(f"{name:12} {sizes}, peak of loading {found['peak']:.2f}", flush=True)
    for dtype in CACHES:
        found = _child(str(options.model), "--cache", dtype)
        print(f"KV {dtype:9} planned {found['planned'] / MIB:9.2f} MiB, held {found['held'] / MIB:9.2f}", flush=True)


if __name__ == "__main__":
    main()
