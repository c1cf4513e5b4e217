"""`jaxserve plan`: how large a model is on 1, 8 or 16 devices, from its config.json alone; no weight is read or held.

Prints a line a mesh: bytes of weights a device, what of them is whole on every device, bytes of a token's K and V, and
how many tokens and full contexts fit beside the weights. Layers with a sliding window keep the window's pages only;
the last column is how many tokens would fit if they kept all.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import orjson

from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.models.hf_config import from_hf, read_config
from jaxserve.models.hub import resolve
from jaxserve.runtime.shape_plan import ShapePlan, default_mesh, plan_by_shape

GIB = 2**30
_HEAD = ("devices", "tensor", "expert", "weights", "of them whole", "K and V of a token", "tokens", "full contexts")


def run(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    config, dtype = _config(options.model), jnp.dtype(options.dtype)
    meshes = [_mesh(text, config) for text in options.mesh]
    plans = [plan_by_shape(config, dtype, *mesh) for mesh in meshes]
    context = options.max_model_len or config.max_position_embeddings
    print(f"{config.architecture}: {plans[0].num_parameters / 1e9:.3f} billion parameters, as {dtype}")
    print(f"each device has {options.memory:g} GiB; a full context is {context} tokens\n")
    print(table(plans, int(options.memory * GIB), context, options.max_num_seqs))
    return 0


def table(plans: Sequence[ShapePlan], device_bytes: int, context: int, max_num_seqs: int) -> str:
    windowed = any(plan.window is not None for plan in plans)
    rows: list[tuple[str, ...]] = [(*_HEAD, *(("all kept",) if windowed else ()))]
    for plan in plans:
        tokens, contexts = plan.room(device_bytes, context, max_num_seqs)
        size = f"{plan.weight_bytes / GIB:.2f} GiB", f"{plan.whole_bytes / GIB:.3f} GiB", f"{plan.kv_token_bytes} B"
        fits = (str(tokens), f"{contexts:.1f}") if tokens else ("does not fit", "-")
        kept = (str(plan.kv_tokens(device_bytes)),) if windowed else ()
        rows.append((str(plan.num_devices), str(plan.tensor), str(plan.expert), *size, *fits, *kept))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _config(model: str) -> ModelConfig:
    """Of a hub id, a directory or a config.json."""
    path = Path(model).expanduser()
    if not path.is_file():
        return read_config(resolve(model))
    try:
        return from_hf(orjson.loads(path.read_bytes()))
    except KeyError as error:
        raise ConfigError(f"{path}: {error.args[0]!r} is missing") from None
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _mesh(text: str, config: ModelConfig) -> tuple[int, int]:
    """ "8", or "4x2" for tensor and expert."""
    numbers = text.split("x")
    if not all(number.isdecimal() and int(number) for number in numbers) or len(numbers) > 2:
        raise ConfigError(f"--mesh {text} is neither a number of devices nor TENSORxEXPERT")
    return (int(numbers[0]), int(numbers[1])) if len(numbers) == 2 else default_mesh(config, int(text))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("jaxserve plan", description=__doc__, allow_abbrev=False)
    parser.add_argument("model", help="hub id, directory or config.json")
    parser.add_argument("--mesh", nargs="+", default=["1", "8", "16"], metavar="N", help="devices, or TENSORxEXPERT")
    parser.add_argument("--memory", type=float, default=80.0, metavar="GIB", help="of each device (80)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--max-num-seqs", type=int, default=512, help="requests at once (512): windows are set aside")
    parser.add_argument("--max-model-len", type=int, help="a full context (the model's own)")
    return parser
