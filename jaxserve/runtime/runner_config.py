"""The runner's configuration, with every "auto" resolved for the platform and the model.

Owns the defaults that depend on platform and model.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxserve.cache_directory import CacheDirectoryError, opened, user_cache
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunnerConfig:
    """The runner's configuration.

    num_pages, num_window_pages: None means as many as memory_fraction leaves room for.
    shrink_context: max_model_len was not configured and may be lowered to fit the memory.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    cache_dtype: jnp.dtype
    attention: str = "auto"
    num_pages: int | None = None
    num_window_pages: int | None = None
    memory_fraction: float = 0.9
    shrink_context: bool = False
    deterministic: bool = False
    compile_cache: Path | None = None

    @classmethod
    def resolve(cls, config: Config, model: ModelConfig, platform: str, dtype: jnp.dtype) -> RunnerConfig:
        """Resolve the configuration. dtype: of the weights.

        Raises ConfigError if the configured context is longer than the model's.
        """
        tpu, deterministic = platform == "tpu", config.runtime.deterministic
        seqs, tokens = _default_sizes(platform, deterministic)
        scheduler, cache = config.scheduler, config.cache
        max_num_seqs = _or(scheduler.max_num_seqs, seqs)
        return cls(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_or(scheduler.max_num_batched_tokens, max(tokens, max_num_seqs)),
            max_model_len=_context(config.model.max_model_len, model.max_position_embeddings),
            page_size=_or(cache.page_size, 128 if tpu else 16),
            cache_dtype=dtype if cache.dtype == "auto" else jnp.dtype(cache.dtype),
            attention=config.runtime.attention,
            num_pages=None if cache.num_pages == "auto" else cache.num_pages,
            num_window_pages=None if cache.num_window_pages == "auto" else cache.num_window_pages,
            memory_fraction=cache.memory_fraction,
            shrink_context=config.model.max_model_len is None,
            deterministic=deterministic,
            compile_cache=_compile_cache(config.runtime.compile_cache),
        )


def resolve_dtype(name: str, platform: str) -> jnp.dtype:
    """Return the dtype of weights and activations.

    "auto" is float32 on a CPU, where bfloat16 is slower and less exact, and bfloat16 elsewhere.
    """
    if name == "auto":
        name = "float32" if platform == "cpu" else "bfloat16"
    return jnp.dtype(name)


def _default_sizes(platform: str, deterministic: bool) -> tuple[int, int]:
    """Return (max_num_seqs, max_num_batched_tokens)."""
    if platform == "cpu":
        return 64, 512
    if deterministic:  # every step has this shape; up to about 184 rows it takes no longer than reading the weights
        return 128, 128
    return 512, 8192


def _compile_cache(configured: Path | str | None) -> Path | None:
    """Return the directory of compiled programs, or None, with a warning, if the default directory is not safe.

    Raises ConfigError if a configured directory is not safe.
    """
    try:
        if configured is None:
            return None
        path = configured if isinstance(configured, Path) else user_cache("xla")
        with opened(path):
            return path
    except CacheDirectoryError as error:
        if configured == "auto":
            logger.warning("compiled programs are not kept, so every start compiles them: %s", error)
            return None
        raise ConfigError(f"runtime.compile_cache: {error}", fix="choose another directory, or null") from None


def _or(value: int | str, default: int) -> int:
    return value if isinstance(value, int) else default


def _context(asked: int | None, longest: int) -> int:
    if asked is not None and asked > longest:
        raise ConfigError(
            f"model.max_model_len is {asked}, and the model was made for {longest} tokens",
            fix=f"set it to at most {longest}",
        )
    return asked or longest
