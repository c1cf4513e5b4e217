"""`jaxserve compile [MODEL] --output DIR`: write a bundle of the compiled programs for a model, mesh and device.

`jaxserve launch ... --runtime.bundle DIR` then compiles nothing. --target compiles for devices that this machine lacks:
h200, tpu:TOPOLOGY (for example tpu:v5e:1x1), or a file with XLA's text of a GPU's properties. Without a device XLA
cannot measure which kernel is best for a matrix product. --save-autotuning FILE writes the measurements of a machine
with the device, and --autotuning FILE uses them.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxserve.cli.main import imported
from jaxserve.cli.options import load_config
from jaxserve.cli.start import check_model_paths
from jaxserve.errors import ConfigError
from jaxserve.log import configure_logging
from jaxserve.system import platform_of

_LOAD, _DUMP = "--xla_gpu_load_autotune_results_from", "--xla_gpu_dump_autotune_results_to"


def run(words: Sequence[str]) -> int:
    """Run the command `compile`. Raises ConfigError."""
    options, rest = _parser().parse_known_args(words)
    config = load_config(rest, os.environ)
    configure_logging(config.logging)
    check_model_paths(config)
    tuning = _prepare(options.target, options.autotuning, options.save_autotuning)
    if options.save_autotuning is not None and platform_of(config) != "gpu":
        raise ConfigError("--save-autotuning is for a GPU", fix="leave it out")
    began = time.monotonic()
    maker = imported("jaxserve.engine.bundle_maker")  # imports jax, which reads the environment
    made = maker.make_bundle(config, Path(options.output), target=options.target, tuning=tuning, progress=_progress)
    print(
        f"{made.directory}: {made.num_programs} programs for {made.device}, {made.num_bytes / 2**20:.1f} MiB, compiled "
        f"in {time.monotonic() - began:.1f} s {made.tuning}"
    )
    return 0


def _prepare(target: str | None, load: str | None, dump: str | None) -> str | None:
    """Set the environment that jax and XLA read at their import, and return the bundle's note on autotuning."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if target is not None:
        if dump is not None:
            raise ConfigError("--save-autotuning needs the device", fix="leave --target out, on a machine with one")
        os.environ["JAX_PLATFORMS"] = "cpu"  # a plugin without its device would fail
    tuning = None
    if load is not None:
        path = Path(load).absolute()
        if not path.is_file():
            raise ConfigError(f"there is no file {path} of autotuning results", fix="write it with --save-autotuning")
        flags.append(f"{_LOAD}={path}")
        tuning = f"with autotuning results {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
    if dump is not None:
        if not Path(dump).absolute().parent.is_dir() or Path(dump).is_dir():
            raise ConfigError(
                f"--save-autotuning: no file can be written at {dump}", fix="name a file in a directory that exists"
            )
        flags.append(f"{_DUMP}={Path(dump).absolute()}")
    if flags:
        os.environ["XLA_FLAGS"] = " ".join(flags)
    return tuning


def _progress(name: str, done: int, total: int) -> None:
    print(f"  {done}/{total} {name}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "jaxserve compile", description=__doc__, allow_abbrev=False, epilog="Other flags are those of jaxserve launch."
    )
    parser.add_argument("--output", "-o", required=True, help="directory of the bundle; an older one in it is replaced")
    parser.add_argument("--target", help="devices that are not there: h200, tpu:TOPOLOGY or a file")
    parser.add_argument("--autotuning", help="file of autotuning results to use (GPU)")
    parser.add_argument("--save-autotuning", help="file to write autotuning results to (GPU, on the device)")
    return parser
