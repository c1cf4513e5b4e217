"""`jaxserve plan`: print how much memory a model needs on 1, 8 or 16 devices. It reads config.json and no weights.

The table has a row for each mesh. A number of devices has a row for every split over tensor and expert that the model
allows, the split with the most tokens first. A dense model is split only over tensor if it can be. If the model cannot
be split over a mesh, its row has the reason.

The columns are, for each device: the bytes of weights, and of the weights that every device has whole; the KV cache of
one token, and of one request of the full context; the tokens and the full contexts that fit; and with --length the
largest batch of requests of that length. If the model has sliding windows, the last column is the number of tokens that
would fit without them.

The size of the weights is printed above the table. Quantized weights count in the bits of the checkpoint, the others in
--dtype. If a mesh has no room for a full context, the fewest devices that have room are also named there.

A draft model or head (speculation.method) is not counted: its weights, and its KV of every token, are on devices too.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from rich.console import Console
from rich.status import Status

from jaxserve.cli.options import GIB, at_least, positive
from jaxserve.errors import ConfigError
from jaxserve.model_files import gguf_file
from jaxserve.models.checkpoint.chosen_form import QUANTIZATIONS, choose_head, choose_quantization
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.hub import resolve_config
from jaxserve.models.checkpoint.orbax_reader import as_converted
from jaxserve.models.checkpoint.published_size import published_size
from jaxserve.runtime.runner_config import context_length, resolve_cache_dtype, room_for_adapters
from jaxserve.runtime.shape_plan import DeviceSize, Mesh, ShapePlan, ShapePlanner, SplitSearch

MESHES = ("1", "8", "16")
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
_MESH = re.compile(r"([1-9]\d{0,5})(?:x([1-9]\d{0,5}))?", re.ASCII)
_HEAD = ("devices", "tensor", "expert", "weights", "of them whole", "KV per token", "per full context")

_QUIET = 3.0  # seconds between lines of progress if stderr is not a terminal

Row = tuple[Mesh, ShapePlan | ConfigError]


def run(words: Sequence[str]) -> int:
    """Run the command `plan`. Raises ConfigError for an encoder, or if no mesh fits the model.

    Raises ModelLoadError for tensors that would not be read.
    """
    options = _parse(words)
    files = _files(options.model)
    config = read_config(files)
    if config.bidirectional:
        raise ConfigError(f"{config.architecture} is an encoder: it has no KV cache to plan")
    config = config.replace(quantization=choose_quantization(options.quantization, config, files))
    if files.format == "orbax":
        config = as_converted(config, files.directory, files.manifest)
    quantized_head = choose_head(options.quantize_head, config.quantization, files)
    config = config.replace(quantized_head=quantized_head)
    dtype = jnp.dtype(options.dtype)
    context = context_length(options.max_model_len, config)
    if options.length is not None and options.length > context:
        raise ConfigError(f"--length is {options.length}, and a full context has {context} tokens", fix="lower it")
    asked = [_mesh(text) for text in options.mesh]
    cache_dtype = resolve_cache_dtype(options.cache_dtype, dtype)
    lora = room_for_adapters(options.lora_slots, options.lora_max_rank)
    device = DeviceSize(int(options.memory * GIB), context, options.max_num_seqs)
    with _Progress() as progress:
        progress.show(f"shapes of {config.architecture}")
        planner = ShapePlanner(config, dtype, cache_dtype=cache_dtype, lora=lora)
        head = _head(planner, dtype)  # names what would not be read, before meshes are tried for it
        search = SplitSearch(planner, device, progress.show_mesh)
        rows = [row for mesh in asked for row in search.rows(mesh)]
        held = all(device.holds(plan) for _, plan in rows)
        fewest = None if held else search.fewest()
    plans = [plan for _, plan in rows]
    if all(isinstance(plan, ConfigError) for plan in plans):
        raise _with_fix(plans[0], fewest)  # type: ignore[arg-type]
    print(head)
    would = "" if fewest is None else f", for which {_devices(fewest)} would do"
    print(f"each device has {options.memory:g} GiB; a full context is {context} tokens{would}\n")
    print(_Columns(device, options.length).table(rows))
    return 0


def _with_fix(error: ConfigError, fewest: ShapePlan | None) -> ConfigError:
    """Return the error of the first mesh, with a mesh that would fit in its fix."""
    return error if fewest is None else type(error)(str(error), fix=f"use {_devices(fewest)}")


def _devices(plan: ShapePlan) -> str:
    return f"{plan.num_devices} device{'s' * (plan.num_devices > 1)} (--mesh {plan.tensor}x{plan.expert})"


class _Progress:
    """Show the current step on stderr: a line that changes on a terminal, else a line every few seconds."""

    def __init__(self) -> None:
        console = Console(stderr=True, highlight=False, markup=False)
        self._status = Status("", console=console) if console.is_terminal else None
        self._told = time.monotonic()

    def __enter__(self) -> _Progress:
        if self._status is not None:
            self._status.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, step: str) -> None:
        """Show the step that begins."""
        if self._status is not None:
            self._status.update(f"planning: {step}")
        elif (now := time.monotonic()) >= self._told + _QUIET:
            self._told = now
            print(f"jaxserve: planning: {step}", file=sys.stderr, flush=True)

    def show_mesh(self, mesh: Mesh) -> None:
        """Show the mesh that is planned next."""
        self.show("tensor {}, expert {}".format(*mesh))


def _head(planner: ShapePlanner, dtype: jnp.dtype) -> str:
    config = planner.config
    structure = planner.published
    form = config.stored_form
    bits = ""
    if form is not None:
        bits = f"quantized ({form.description})" if form.method == "gguf" else f"{form.bits} bits"
    quantized = {"none": "", "stored": bits}.get(config.quantization, config.quantization)
    weights = f"{quantized} and {dtype}" if quantized else str(dtype)
    lines = [f"{config.architecture}: {structure.num_parameters / 1e9:.3f} billion parameters, as {weights}"]
    size = published_size(structure)
    if size.form:
        decoded = f"{structure.num_bytes / GIB:.2f} GiB as {weights}"
        how = "held in" if config.quantization == "stored" else "decoded at load to"
        lines.append(f"the checkpoint is {size.num_bytes / GIB:.2f} GiB of {size.form}, {how} {decoded}")
    return "\n".join(lines)


class _Columns:
    """Make the table. length: tokens of a request in the batch column; None leaves the column out"""

    def __init__(self, device: DeviceSize, length: int | None) -> None:
        self._device = device
        self._length = length

    def table(self, planned: Sequence[Row]) -> str:
        """Format one row per mesh."""
        meshes = [mesh for mesh, _ in planned]
        plans = [plan for _, plan in planned]
        windowed = any(isinstance(plan, ShapePlan) and plan.reaches for plan in plans)
        batch = () if self._length is None else (f"batch of {self._length}",)
        head = (*_HEAD, "tokens", "full contexts", *batch, *(("all kept",) if windowed else ()))
        rows = [self._row(plan, windowed) if isinstance(plan, ShapePlan) else () for plan in plans]
        starts = [(str(tensor * expert), str(tensor), str(expert)) for tensor, expert in meshes]
        whole = [head, *((*start, *row) for start, row in zip(starts, rows, strict=True))]
        widths = [max(len(row[n]) for row in whole if n < len(row)) for n in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in whole]
        for number, plan in enumerate(plans, 1):
            lines[number] += f"  {plan}" if isinstance(plan, ConfigError) else ""
        return "\n".join(lines)

    def _row(self, plan: ShapePlan, windowed: bool) -> tuple[str, ...]:
        tokens, contexts = self._device.room(plan)
        size = f"{plan.weight_bytes / GIB:.2f} GiB", f"{plan.whole_bytes / GIB:.3f} GiB", f"{plan.kv_token_bytes} B"
        request = f"{plan.request_bytes(self._device.context) / GIB:.3f} GiB"
        fits = (str(tokens), f"{contexts:.1f}") if tokens else ("does not fit", "-")
        batch = () if self._length is None else (str(plan.largest_batch(self._device.num_bytes, self._length)),)
        kept = (str(plan.kv_tokens(self._device.num_bytes)),) if windowed else ()
        return (*size, request, *fits, *batch, *kept)


def _files(model: str) -> ModelFiles:
    """Open a hub id, of which only config.json is downloaded, a directory, a GGUF file or a config.json of any name."""
    path = Path(model).expanduser()
    if not path.is_file():
        return ModelFiles.open(resolve_config(model))
    return ModelFiles.of_config(path) if gguf_file(path) is None else ModelFiles.open(path)


def _mesh(text: str) -> int | Mesh:
    """Parse "8", a number of devices, or "4x2" for tensor and expert. Raises ConfigError."""
    found = _MESH.fullmatch(text)
    if found is None:
        raise ConfigError(f"--mesh {text} is neither a number of devices nor TENSORxEXPERT")
    return int(text) if found[2] is None else (int(found[1]), int(found[2]))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(words)
    if options.model is None and len(options.mesh) > 1 and not _is_mesh(options.mesh[-1]):  # plan --mesh 8 MODEL
        *options.mesh, options.model = options.mesh
    if options.model is None:
        parser.error("the model is missing: jaxserve plan MODEL")
    return options


def _is_mesh(word: str) -> bool:
    return _MESH.fullmatch(word) is not None and not Path(word).exists()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxserve plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", nargs="?", help="hub id, directory, config.json or GGUF file")
    parser.add_argument("--mesh", nargs="+", default=MESHES, metavar="N", help="devices, or TENSORxEXPERT (1 8 16)")
    parser.add_argument("--memory", type=positive, default=80.0, metavar="GIB", help="memory per device (80)")
    parser.add_argument("--dtype", choices=WEIGHT_DTYPES, default="bfloat16")
    parser.add_argument("--quantization", choices=QUANTIZATIONS, default="auto", help="as model.quantization")
    parser.add_argument("--quantize-head", action="store_true", help="as model.quantize_head")
    parser.add_argument("--cache-dtype", choices=CACHE_DTYPES, default="auto", help="as cache.dtype")
    parser.add_argument(
        "--max-num-seqs",
        type=at_least(1, 4096),  # as scheduler.max_num_seqs
        default=512,
        help="number of requests that run at once: no more pages than for twice as many full contexts (512)",
    )
    parser.add_argument("--lora-slots", type=at_least(0, 1024), default=0, metavar="N", help="as lora.slots (0)")
    parser.add_argument("--lora-max-rank", type=at_least(1, 512), default=16, metavar="R", help="as lora.max_rank (16)")
    parser.add_argument("--max-model-len", type=at_least(8), help="tokens of a full context (the model's)")
    parser.add_argument(
        "--length", type=at_least(1), metavar="TOKENS", help="show the largest batch of requests of this many tokens"
    )
    return parser
