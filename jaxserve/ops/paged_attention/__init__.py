"""Attention over a paged KV cache: one contract (`base`) and one file per backend. `get_backend` chooses at start."""

from __future__ import annotations

import importlib
import logging

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, Backend, Heads, ProjectedHeads

logger = logging.getLogger(__name__)

__all__ = ["AttentionMetadata", "AttentionSpec", "Backend", "Heads", "ProjectedHeads", "backend_names", "get_backend"]

# Name: module, class, platforms (empty: any). A module is imported only if chosen: not every build of jax has the
# GPU modules of Pallas, and the Triton one is deprecated.
_BACKENDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reference": ("reference", "ReferenceBackend", ()),
    "xla": ("xla", "XlaBackend", ()),
    "native": ("native", "NativeBackend", ("cpu",)),
    "triton": ("triton.backend", "TritonBackend", ("gpu",)),
    "mosaic_gpu": ("mosaic_gpu", "MosaicGpuBackend", ("gpu",)),
    "tpu": ("tpu", "TpuBackend", ("tpu",)),
}
_AUTO = {"cpu": ("native", "xla"), "gpu": ("triton", "xla"), "tpu": ("tpu", "xla")}


def get_backend(name: str, platform: str) -> Backend:
    """Return the backend that `runtime.attention` names, on a platform ("cpu", "gpu" or "tpu").

    "auto" takes the best one of the platform that this jax can build; the result's `name` tells which. For any other
    name, raises ConfigError with the reason if that backend cannot run here. A backend checks the model's head sizes
    and dtypes itself: `cache_shape` and `attend` raise ConfigError, both before any request is served.
    """
    if name != "auto":
        return _make(name, platform)
    *better, last = _AUTO[platform]
    for candidate in better:
        try:
            return _make(candidate, platform)
        except ConfigError as error:
            logger.warning("%s; %s serves instead", error, last)
    return _make(last, platform)


def backend_names(platform: str) -> list[str]:
    """Return the names of the backends that serve a platform."""
    return [name for name, (_, _, platforms) in _BACKENDS.items() if not platforms or platform in platforms]


def _make(name: str, platform: str) -> Backend:
    if name not in _BACKENDS:
        raise ConfigError(f"there is no attention backend {name!r}", fix=f"one of auto, {', '.join(_BACKENDS)}")
    module, kind, platforms = _BACKENDS[name]
    if platforms and platform not in platforms:
        raise ConfigError(
            f"attention backend {name!r} runs on {' and '.join(platforms)} only, and this is {platform}",
            fix="use runtime.attention: auto",
        )
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    except ImportError as error:
        raise ConfigError(
            f"attention backend {name!r} cannot be loaded with this jax: {error}", fix="use runtime.attention: auto"
        ) from error
