"""Hidden states of tokens -> one embedding a row, as sentence-transformers directories describe it.

Owns PoolingConfig, its files (modules.json and what it names), and the arithmetic. Knows no model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.errors import ModelLoadError
from jaxserve.models.config import ModelConfig

Kind = Literal["mean", "cls", "last", "max", "mean_sqrt_len"]
_KEYS: dict[str, Kind] = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}


@dataclass(frozen=True)
class PoolingConfig:
    """How the tokens of a row become its embedding; `normalize` to length one. `max_tokens`: of a row, if limited."""

    kind: Kind
    normalize: bool = True
    max_tokens: int | None = None


def read_pooling(directory: Path, config: ModelConfig) -> PoolingConfig:
    """A sentence-transformers directory's own; of any other, an encoder's mean or a decoder's last token."""
    if not (directory / "modules.json").is_file():
        return PoolingConfig("mean" if config.bidirectional else "last")
    modules = {str(m["type"]).rsplit(".", 1)[-1]: str(m["path"]) for m in _read(directory / "modules.json")}
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown or "Pooling" not in modules or ".." in modules["Pooling"]:
        raise ModelLoadError(f"{directory / 'modules.json'}: cannot serve the modules {', '.join(sorted(modules))}")
    path = directory / modules["Pooling"] / "config.json"
    settings = _read(path)
    kinds: list[Kind] = [kind for key, kind in _KEYS.items() if settings.get(key)]
    if len(kinds) != 1:
        raise ModelLoadError(f"{path}: expected one pooling mode, not {kinds}")
    limits = directory / "sentence_bert_config.json"
    longest = _read(limits).get("max_seq_length") if limits.is_file() else None
    return PoolingConfig(kinds[0], "Normalize" in modules, longest)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error


def pool(hidden: jax.Array, rows: jax.Array, num_rows: int, config: PoolingConfig) -> jax.Array:
    """hidden [T, D] of packed tokens -> float32 [R, D]. A row without tokens gives zeros.

    rows: int32 [T], the row of each token, ascending; num_rows and above are padding.
    """
    x = hidden.astype(jnp.float32)
    counts = jax.ops.segment_sum(jnp.ones(rows.shape, jnp.int32), rows, num_rows)
    ends = jnp.cumsum(counts)
    match config.kind:
        case "last":
            out = x.at[ends - 1].get(mode="clip")
        case "cls":
            out = x.at[ends - counts].get(mode="clip")
        case "max":
            out = jax.ops.segment_max(x, rows, num_rows)
        case "mean" | "mean_sqrt_len":
            size = jnp.maximum(counts, 1).astype(jnp.float32)
            size = size if config.kind == "mean" else jnp.sqrt(size)
            out = jax.ops.segment_sum(x, rows, num_rows) / size[:, None]
    out = jnp.where((counts > 0)[:, None], out, 0.0)
    if config.normalize:
        out = out / jnp.maximum(jnp.linalg.norm(out, axis=-1, keepdims=True), 1e-12)
    return out
