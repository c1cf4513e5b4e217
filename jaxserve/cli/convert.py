"""`jaxserve convert`: write a published checkpoint in the form that this server loads fastest.

The converted directory can be loaded on any mesh: `jaxserve launch --model TARGET`.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from jaxserve.cli.options import at_least
from jaxserve.cli.plan import WEIGHT_DTYPES
from jaxserve.errors import ConfigError
from jaxserve.models.adapters import AdapterShape, adapt
from jaxserve.models.checkpoint import orbax
from jaxserve.models.checkpoint.adapter import highest_rank, read_adapter
from jaxserve.models.checkpoint.chosen_form import QUANTIZATIONS, choose_head, choose_quantization
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.hub import resolve
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.runtime.mesh import make_mesh


def run(words: Sequence[str]) -> int:
    """Run the command `convert`. Raises ConfigError or ModelLoadError."""
    options = _parser().parse_args(words)
    source, target = resolve(options.model, revision=options.revision), Path(options.target)
    files = ModelFiles.open(source)
    if files.format == "gguf":
        raise ConfigError(f"{source} holds GGUF, which is not converted", fix=f"serve it: jaxserve launch {source}")
    config = read_config(files)
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # hides Orbax's notices, and tracebacks of what it raises
    orbax.check_target(target)  # before the checkpoint is read
    dtype = jnp.dtype(config.dtype if options.dtype == "auto" else options.dtype)
    quantization = choose_quantization(options.quantization, config, files)
    head = choose_head(options.quantize_head, quantization, files)
    config = config.replace(quantization=quantization, quantized_head=head)
    mesh = make_mesh(options.device, tensor=options.tensor, expert=options.expert)
    loaded = load_model(files, dtype=dtype, config=config, mesh=mesh.mesh)
    if options.merge is not None:
        loaded = _with_adapter(loaded, options.merge)
    started = time.perf_counter()
    orbax.convert(loaded, target)
    held = loaded.config.quantization
    form = str(dtype) if held == "none" else f"{'published' if held == 'stored' else held} weights and {dtype}"
    size = loaded.structure.num_bytes / 1e9
    print(
        f"{target}: {config.architecture}, {size:.2f} GB as {form}; "
        f"read in {loaded.seconds:.1f} s, written in {time.perf_counter() - started:.1f} s"
    )
    return 0


def _with_adapter(loaded: LoadedModel, directory: Path) -> LoadedModel:
    """Return the model with an adapter added to its weights. Raises ModelLoadError."""
    adapted = adapt(loaded.structure, AdapterShape(1, highest_rank(directory)))
    adapter = read_adapter(directory, adapted)
    return dataclasses.replace(loaded, leaves=adapted.merge(loaded.leaves, adapter.updates))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxserve convert", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="hub id or directory")
    parser.add_argument("target", help="directory to create")
    parser.add_argument("--dtype", choices=("auto", *WEIGHT_DTYPES), default="auto", help="auto: the checkpoint's")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto", help="as model.quantization")
    parser.add_argument("--quantize-head", action="store_true", help="as model.quantize_head")
    parser.add_argument("--merge", type=Path, metavar="DIR", help="add the adapter (LoRA) of this directory")
    parser.add_argument("--revision", help="branch, tag or commit on the hub")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu", "tpu"), default="auto")
    parser.add_argument("--tensor", type=at_least(1), default=1, help="devices that hold the weights during conversion")
    parser.add_argument("--expert", type=at_least(1), default=1)
    return parser
