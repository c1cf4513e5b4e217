"""Pools hidden states to one embedding per text, as sentence-transformers directories describe it.

PoolingConfig is read from modules.json and the files that it names. `pool` is the computation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import as_integer, read_json, read_object, sentence_settings
from jaxserve.models.config import ModelConfig

Kind = Literal["mean", "cls", "last", "max", "mean_sqrt_len"]
LOGIT_SCORE = "LogitScore"  # the module of a reranker that answers with a word
# the values of `pooling_mode`, which newer sentence-transformers write, and the keys of its older files
_MODES: dict[str, Kind] = {
    "mean": "mean",
    "cls": "cls",
    "lasttoken": "last",
    "max": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_KEYS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}


@dataclass(frozen=True)
class PoolingConfig:
    """The computation of a text's embedding from its hidden states.

    normalize: scale it to length 1. max_tokens: longest text that the model accepts; None: no limit of its own.
    """

    kind: Kind
    normalize: bool = True
    max_tokens: int | None = None


def read_pooling(directory: Path, config: ModelConfig) -> PoolingConfig:
    """Read the pooling of a sentence-transformers directory.

    Any other directory gets the mean for an encoder and the last token for a decoder. Raises ModelLoadError for a
    damaged file or a pooling that is not supported.
    """
    file = directory / "modules.json"
    modules = sentence_modules(directory)
    if not modules or LOGIT_SCORE in modules or config.labels:
        return PoolingConfig("mean" if config.bidirectional else "last")
    unknown = modules.keys() - {"Transformer", "Pooling", "Normalize"}
    if unknown or "Pooling" not in modules:
        raise ModelLoadError(f"{file}: cannot serve the modules {', '.join(sorted(modules))[:200]}")
    if not re.fullmatch(r"\w+_Pooling", modules["Pooling"]):
        raise ModelLoadError(f"{file}: the path of Pooling must be a directory beside it, such as 1_Pooling")
    path = directory / modules["Pooling"] / "config.json"
    settings = read_object(path)
    kind = _kind(settings, path)
    limits = sentence_settings(directory) or directory
    given = read_object(limits).get("max_seq_length") if limits != directory else None
    longest = as_integer(given)
    if given is not None and (longest is None or not 0 < longest < 2**31):
        raise ModelLoadError(f"{limits}: 'max_seq_length' must be a positive integer")
    if kind != "last" and not config.bidirectional:
        raise ModelLoadError(f"{path}: a decoder's embedding is its last token's state, not {kind!r}")
    return PoolingConfig(kind, "Normalize" in modules, longest)


def _kind(settings: dict[str, Any], path: Path) -> Kind:
    """Return the pooling that its file names. Raises ModelLoadError if it is unknown."""
    modes = settings.get("pooling_mode", [mode for key, mode in _KEYS.items() if settings.get(key)])
    modes = modes if isinstance(modes, list) else [modes]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in _MODES:
        raise ModelLoadError(f"{path}: expected one pooling mode of {', '.join(_MODES)}, not {str(modes)[:200]}")
    return _MODES[modes[0]]


def sentence_modules(directory: Path) -> dict[str, str]:
    """Return {kind: path} of a sentence-transformers directory's modules; {} of any other directory.

    Raises ModelLoadError for a damaged file.
    """
    file = directory / "modules.json"
    if not file.is_file():
        return {}
    listed = read_json(file)
    if not isinstance(listed, list) or not all(isinstance(m, dict) and {"type", "path"} <= m.keys() for m in listed):
        raise ModelLoadError(f"{file}: expected a list of modules with type and path")
    modules = {str(m["type"]).rsplit(".", 1)[-1]: str(m["path"]) for m in listed}
    if not re.fullmatch(r"\w+_LogitScore", modules.get(LOGIT_SCORE, "1_LogitScore")):
        raise ModelLoadError(f"{file}: the path of LogitScore must be a directory beside it, such as 1_LogitScore")
    return modules


def is_embedder(directory: Path, config: ModelConfig) -> bool:
    """Return whether the model makes embeddings: an encoder, or a sentence-transformers directory.

    A model with a classification head makes none.
    """
    if config.labels:
        return False
    modules = sentence_modules(directory)
    return config.bidirectional or bool(modules and LOGIT_SCORE not in modules)


def pool(hidden: jax.Array, lengths: jax.Array, config: PoolingConfig) -> jax.Array:
    """Pool hidden [R, L, D], of which the first lengths[r] tokens count -> float32 [R, D].

    lengths: int32 [R]. An empty row gives zeros.
    """
    x = hidden.astype(jnp.float32)
    seen = (jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None])[:, :, None]
    size = jnp.maximum(lengths, 1).astype(jnp.float32)[:, None]
    match config.kind:
        case "last":
            out = jnp.take_along_axis(x, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)[:, 0]
        case "cls":
            out = x[:, 0]
        case "max":
            out = jnp.where(seen, x, -jnp.inf).max(axis=1)
        case "mean":
            out = jnp.where(seen, x, 0.0).sum(axis=1) / size
        case "mean_sqrt_len":
            out = jnp.where(seen, x, 0.0).sum(axis=1) / jnp.sqrt(size)
    out = jnp.where((lengths > 0)[:, None], out, 0.0)
    return normalized(out) if config.normalize else out


def normalized(x: jax.Array) -> jax.Array:
    """Scale each row of x [R, D] to length 1. A row of zeros is returned unchanged."""
    return x / jnp.maximum(jnp.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
