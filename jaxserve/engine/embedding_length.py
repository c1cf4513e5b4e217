"""The lengths that the files of sentence-transformers give: of texts in tokens, and of their embeddings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from jaxserve.model_files import read_object
from jaxserve.models.pooling import PoolingConfig, sentence_modules
from jaxserve.runtime.runner_config import RunnerConfig


def for_embeddings(config: RunnerConfig, pooling: PoolingConfig, directory: Path) -> RunnerConfig:
    """Return the configuration for the embeddings of a directory. A context that was configured stays.

    Raises ModelLoadError for a damaged file.
    """
    limit = _text_limit(directory, pooling) if config.shrink_context else None
    longest = config.max_model_len if limit is None else min(config.max_model_len, limit)
    return dataclasses.replace(config, normalize_embeddings=pooling.normalize, max_model_len=longest)


def _text_limit(directory: Path, pooling: PoolingConfig) -> int | None:
    """Return after how many tokens sentence-transformers cuts a text; without a limit of its own by the tokenizer's."""
    file = directory / "tokenizer_config.json"
    if "Pooling" not in sentence_modules(directory):
        return None
    if pooling.max_tokens is not None or not file.is_file():
        return pooling.max_tokens
    longest = read_object(file).get("model_max_length")
    return longest if type(longest) is int and longest > 0 else None
