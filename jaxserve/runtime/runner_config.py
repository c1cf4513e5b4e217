"""The runner's configuration, with every "auto" resolved for the platform and the model.

The defaults that depend on platform and model are here.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.models.adapters import AdapterShape
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.sentence_files import text_limit
from jaxserve.models.config import ModelConfig
from jaxserve.models.pooling import PoolingConfig
from jaxserve.models.rope import YarnScaling
from jaxserve.ops.state import CHUNK
from jaxserve.runtime.page_file import PageFileConfig
from jaxserve.system import CacheDirectoryError, opened, user_cache

logger = logging.getLogger(__name__)

LEAST_RANK = 16  # lanes of a vector of float32


@dataclass(frozen=True)
class RunnerConfig:
    """The runner's configuration.

    num_pages, num_window_pages: None means as many as memory_fraction leaves room for. num_window_pages: of the layer
    group with the farthest reach, or of each group from 1 on.
    shrink_context: max_model_len was not configured and may be lowered to fit the memory.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    cache_dtype: jnp.dtype
    attention: str = "auto"
    experts: str = "auto"
    activations: str = "auto"
    num_pages: int | None = None
    num_window_pages: int | tuple[int, ...] | None = None
    num_state_pages: int | None = None  # None: see `memory.plan_states`
    state_interval: int = 0  # tokens between two states that are kept for the prefix cache, see StateSizes
    state_border: int = 0  # tokens; a model without recurrent states has 0 of both
    host_memory: int | None = None  # bytes for copies of evicted pages
    passes_pages: bool = False  # to other engines, or takes theirs
    page_file: PageFileConfig | None = None  # None: the copies end with the process
    memory_fraction: float = 0.9
    shrink_context: bool = False
    deterministic: bool = False
    normalize_embeddings: bool = True  # to length 1
    max_drafts: int = 0  # of a row; 0: no speculation
    lora: AdapterShape | None = None  # the room for adapters
    compile_cache: Path | None = None
    early: bool = False  # ready with the programs that serve every step; the others are compiled in threads

    @property
    def moves_pages(self) -> bool:
        """Return whether pages leave the device and come back."""
        return self.passes_pages or self.host_memory is not None

    @classmethod
    def resolve(cls, config: Config, model: ModelConfig, platform: str, dtype: jnp.dtype) -> RunnerConfig:
        """Resolve the configuration. dtype: of activations.

        Raises ConfigError if the configured context is longer than the model's, or if settings exclude each other.
        """
        tpu, deterministic = platform == "tpu", config.runtime.deterministic
        seqs, tokens = _default_sizes(platform, deterministic)
        scheduler, cache = config.scheduler, config.cache
        max_num_seqs = _or(scheduler.max_num_seqs, seqs)
        if deterministic and platform != "cpu" and config.speculation.max_drafts:
            # one shape only, see `make_buckets`; its head has another number of rows than a step with drafts has
            raise ConfigError(
                "speculation.method and runtime.deterministic work together on a CPU only", fix="leave one of them out"
            )
        page_size = _or(cache.page_size, 128 if tpu else 16)
        interval, border = _state_borders(config, model, platform, page_size)
        return cls(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=_or(scheduler.max_num_batched_tokens, max(tokens, max_num_seqs)),
            max_model_len=context_length(config.model.max_model_len, model),
            page_size=page_size,
            cache_dtype=resolve_cache_dtype(cache.dtype, dtype),
            attention=config.runtime.attention,
            experts=config.runtime.experts,
            activations=config.runtime.activations,
            num_pages=None if cache.num_pages == "auto" else cache.num_pages,
            num_window_pages=None if cache.num_window_pages == "auto" else cache.num_window_pages,
            num_state_pages=None if cache.num_state_pages == "auto" else cache.num_state_pages,
            state_interval=interval,
            state_border=border,
            host_memory=cache.host_memory,
            passes_pages=config.mesh.prefill_replicas > 0,
            memory_fraction=cache.memory_fraction,
            shrink_context=config.model.max_model_len is None,
            deterministic=deterministic,
            max_drafts=config.speculation.max_drafts,
            lora=_room_for_adapters(config, model),
            compile_cache=_compile_cache(config.runtime.compile_cache),
            early=platform == "cpu" and not _waits(config),
        )

    def for_embeddings(self, pooling: PoolingConfig, files: ModelFiles) -> RunnerConfig:
        """Return the configuration for the embeddings of a model. A context that was configured stays.

        Raises ModelLoadError for a damaged file.
        """
        limit = text_limit(files, pooling) if self.shrink_context else None
        longest = self.max_model_len if limit is None else min(self.max_model_len, limit)
        return dataclasses.replace(self, normalize_embeddings=pooling.normalize, max_model_len=longest)


def _state_borders(config: Config, model: ModelConfig, platform: str, page_size: int) -> tuple[int, int]:
    """Return (interval, border) of the recurrent states that are kept, in tokens; (0, 0) for a model without.

    Raises ConfigError for a key that does not work with them yet.
    """
    states = [state for state in model.layer_states if state is not None]
    if not states:
        return 0, 0
    refused = {
        "cache.host_memory": config.cache.host_memory is not None,
        "mesh.hosts": config.mesh.hosts > 1,
        "runtime.bundle": config.runtime.bundle is not None,
    }
    for name, is_asked in refused.items():
        if is_asked:
            raise ConfigError(
                f"{name} does not work yet with a model whose layers have a recurrent state", fix=f"leave {name} out"
            )
    small = all(state.kind == "convolution" for state in states)  # a few KiB a layer, which any position may end
    border = page_size if small else math.lcm(page_size, CHUNK)
    auto = 128 if small else 512 if platform == "cpu" else 2048
    return -(-_or(config.cache.state_interval, auto) // border) * border, border


def _room_for_adapters(config: Config, model: ModelConfig) -> AdapterShape | None:
    """Return the room for adapters; None if there are to be none. Raises ConfigError where they are not served."""
    lora = config.lora
    if not lora.slots:
        return None
    if model.bidirectional:
        raise ConfigError("adapters are not served with an encoder yet", fix="leave lora.slots out")
    return room_for_adapters(lora.slots, lora.max_rank)


def room_for_adapters(slots: int, max_rank: int) -> AdapterShape | None:
    """Return the room for `slots` adapters; None if there are to be none.

    The rank is a power of two and at least LEAST_RANK, so that a product sums the columns of each slot alike.
    """
    return AdapterShape(slots, max(LEAST_RANK, 1 << (max_rank - 1).bit_length())) if slots else None


def resolve_dtypes(name: str, platform: str, *, keeps_bfloat16: bool = False) -> tuple[jnp.dtype, jnp.dtype]:
    """Return the dtypes of weights and activations.

    On a CPU activations are float32 also with bfloat16 weights, because it computes float32 faster.
    keeps_bfloat16: "auto" is bfloat16 on a CPU too: the checkpoint has bfloat16 weights, and a kernel reads them.
    """
    cpu = platform == "cpu"
    if name == "auto":
        name = "float32" if cpu and not keeps_bfloat16 else "bfloat16"
    return jnp.dtype(name), jnp.dtype("float32" if cpu and name == "bfloat16" else name)


def resolve_cache_dtype(name: str, activations: jnp.dtype) -> jnp.dtype:
    """Return the dtype that `cache.dtype` names."""
    return activations if name == "auto" else jnp.dtype(jnp.float8_e4m3fn if name == "fp8" else name)


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


def _waits(config: Config) -> bool:
    """Return whether an engine is ready only with all programs: a bundle is loaded whole, and hosts run in step."""
    runtime = config.runtime
    modes = runtime.deterministic, config.speculation.max_drafts, config.cache.host_memory
    return runtime.wait_for_programs or runtime.bundle is not None or config.mesh.hosts > 1 or any(modes)


def _or(value: int | str, default: int) -> int:
    return value if isinstance(value, int) else default


def context_length(asked: int | None, model: ModelConfig) -> int:
    """Return the context in tokens. asked: model.max_model_len, in tokens

    With YaRN the limit is the original context times its factor, even if max_position_embeddings is less: model cards
    tell users to add YaRN to config.json without changing it. Raises ConfigError if `asked` is above the limit.
    """
    longest, scaling = model.max_position_embeddings, None if model.rope is None else model.rope.scaling
    scaled = int(scaling.original_max_position * scaling.factor) if isinstance(scaling, YarnScaling) else longest
    most = max(longest, scaled)
    if asked is not None and asked > most:
        keys = "rope_scaling" if model.rope is not None else "max_position_embeddings"
        raise ConfigError(
            f"model.max_model_len is {asked}, and the model was made for {most} tokens",
            fix=f"set it to at most {most}, or {keys} in config.json as the model's card says",
        )
    return asked or longest
