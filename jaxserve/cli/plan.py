"""`jaxserve plan`: print how much memory a model needs on 1, 8 or 16 devices. Reads config.json and no weights.

Prints one row per mesh. Its columns, per device: the bytes of weights, and of those that every device holds whole; the
KV cache of one token and of one request of the full context; the tokens and the full contexts that fit; and with
--length the largest batch of requests of that length. If a model has sliding windows, the last column is the number of
tokens that would fit without them. A mesh over which the model cannot be split has the reason instead. Weights are
counted as they are held: in the bits of a quantised checkpoint, the others in --dtype. Its size is printed above.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp

from jaxserve.cli.options.arguments import at_least, positive
from jaxserve.cli.options.help import GIB
from jaxserve.errors import ConfigError
from jaxserve.model_files import gguf_file
from jaxserve.models.config import ModelConfig
from jaxserve.models.loading.chosen_form import QUANTIZATIONS, choose_head, choose_quantization
from jaxserve.models.loading.config.hf_config import read_config_file
from jaxserve.models.loading.converted import as_converted, is_converted
from jaxserve.models.loading.file_formats.gguf_model import config_file
from jaxserve.models.loading.hub import resolve
from jaxserve.models.loading.published_size import published_size
from jaxserve.models.loading.structure import build
from jaxserve.runtime.runner_config import context_length, resolve_cache_dtype
from jaxserve.runtime.shape_plan import ShapePlan, default_mesh, plan_by_shape

MESHES = ("1", "8", "16")
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8")
WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
_HEAD = ("devices", "tensor", "expert", "weights", "of them whole", "KV per token", "per full context")

Mesh = tuple[int, int]  # tensor, expert


def run(words: Sequence[str]) -> int:
    """Run the command `plan`. Raises ConfigError for an encoder, or if no mesh fits the model."""
    options = _parse(words)
    path = _config_file(options.model)
    config = read_config_file(path)
    if config.bidirectional:
        raise ConfigError(f"{config.architecture} is an encoder: it has no KV cache to plan")
    config = config.replace(quantization=choose_quantization(options.quantization, config, path.parent))
    if is_converted(path.parent):
        config = as_converted(config, path.parent)
    head = choose_head(options.quantize_head, config.quantization, path.parent)
    config = config.replace(quantized_head=head)
    dtype = jnp.dtype(options.dtype)
    context = context_length(options.max_model_len, config.max_position_embeddings)
    if options.length is not None and options.length > context:
        raise ConfigError(f"--length is {options.length}, and a full context has {context} tokens", fix="lower it")
    meshes = [_mesh(text, config) for text in options.mesh]
    cache_dtype = resolve_cache_dtype(options.cache_dtype, dtype)
    plans = [_plan(config, dtype, cache_dtype, mesh) for mesh in meshes]
    if all(isinstance(plan, ConfigError) for plan in plans):
        raise plans[0]  # type: ignore[misc]
    print(_head(config, dtype))
    print(f"each device has {options.memory:g} GiB; a full context is {context} tokens\n")
    columns = _Columns(int(options.memory * GIB), context, options.max_num_seqs, options.length)
    print(columns.table(meshes, plans))
    return 0


def _plan(config: ModelConfig, dtype: jnp.dtype, cache_dtype: jnp.dtype, mesh: Mesh) -> ShapePlan | ConfigError:
    try:
        return plan_by_shape(config, dtype, *mesh, cache_dtype=cache_dtype)
    except ConfigError as error:
        return error


def _head(config: ModelConfig, dtype: jnp.dtype) -> str:
    structure = build(config, dtype)
    form, bits = config.stored_form, ""
    if form is not None:
        bits = f"few bits ({form.description})" if form.method == "gguf" else f"{form.bits} bits"
    few = {"none": "", "stored": bits}.get(config.quantization, config.quantization)
    held = f"{few} and {dtype}" if few else str(dtype)
    lines = [f"{config.architecture}: {structure.num_parameters / 1e9:.3f} billion parameters, as {held}"]
    size = published_size(structure)
    if size.form:
        decoded = f"{structure.num_bytes / GIB:.2f} GiB as {held}"
        how = "held in" if config.quantization == "stored" else "decoded at load to"
        lines.append(f"the checkpoint is {size.num_bytes / GIB:.2f} GiB of {size.form}, {how} {decoded}")
    return "\n".join(lines)


class _Columns:
    """Makes the table. length: tokens per request of the batch column; None leaves the column out."""

    def __init__(self, device_bytes: int, context: int, max_num_seqs: int, length: int | None) -> None:
        self._device_bytes = device_bytes
        self._context = context
        self._max_num_seqs = max_num_seqs
        self._length = length

    def table(self, meshes: Sequence[Mesh], plans: Sequence[ShapePlan | ConfigError]) -> str:
        """Format one row per mesh."""
        windowed = any(isinstance(plan, ShapePlan) and plan.window is not None for plan in plans)
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
        tokens, contexts = plan.room(self._device_bytes, self._context, self._max_num_seqs)
        size = f"{plan.weight_bytes / GIB:.2f} GiB", f"{plan.whole_bytes / GIB:.3f} GiB", f"{plan.kv_token_bytes} B"
        request = f"{plan.request_bytes(self._context) / GIB:.3f} GiB"
        fits = (str(tokens), f"{contexts:.1f}") if tokens else ("does not fit", "-")
        batch = () if self._length is None else (str(plan.largest_batch(self._device_bytes, self._length)),)
        kept = (str(plan.kv_tokens(self._device_bytes)),) if windowed else ()
        return (*size, request, *fits, *batch, *kept)


def _config_file(model: str) -> Path:
    """Return the config.json or GGUF file of a hub id, a directory or a file."""
    path = Path(model).expanduser()
    return gguf_file(path) or path if path.is_file() else config_file(resolve(model))


def _mesh(text: str, config: ModelConfig) -> Mesh:
    """Parse "8", or "4x2" for tensor and expert. Raises ConfigError."""
    numbers = text.split("x")
    if not all(number.isdecimal() and int(number) for number in numbers) or len(numbers) > 2:
        raise ConfigError(f"--mesh {text} is neither a number of devices nor TENSORxEXPERT")
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else default_mesh(config, int(text))


def _parse(words: Sequence[str]) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(words)
    if options.model is None and len(options.mesh) > 1:  # plan --mesh 8 MODEL
        *options.mesh, options.model = options.mesh
    if options.model is None:
        parser.error("the model is missing: jaxserve plan MODEL")
    return options


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
    parser.add_argument("--max-model-len", type=at_least(8), help="tokens of a full context (the model's)")
    parser.add_argument(
        "--length", type=at_least(1), metavar="TOKENS", help="show the largest batch of requests of this many tokens"
    )
    return parser
