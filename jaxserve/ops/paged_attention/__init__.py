"""Attention over a paged KV cache: one contract (`base`), one file a backend, chosen once by `get_backend`."""

from __future__ import annotations

import importlib
import logging

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, Backend

logger = logging.getLogger(__name__)

__all__ = ["AttentionMetadata", "AttentionSpec", "Backend", "get_backend"]

# Name: module, class, platforms (empty: any). Modules are imported when chosen: Pallas' GPU modules are not in every
# build of jax, and the Triton one is announced to go.
_BACKENDS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "reference": ("reference", "ReferenceBackend", ()),
    "xla": ("xla", "XlaBackend", ()),
    "native": ("native", "NativeBackend", ("cpu",)),
    "triton": ("triton", "TritonBackend", ("gpu",)),
    "mosaic_gpu": ("mosaic_gpu", "MosaicGpuBackend", ("gpu",)),
    "tpu": ("tpu", "TpuBackend", ("tpu",)),
}
_AUTO = {"cpu": ("native", "xla"), "gpu": ("triton", "xla"), "tpu": ("tpu", "xla")}


def get_backend(name: str, platform: str) -> Backend:
    """The backend of a configuration's name on a platform ("cpu", "gpu" or "tpu").

    "auto" takes the platform's best that this jax can build, and its choice is the result's `name`. Any other name is
    taken at its word: ConfigError with the reason when it cannot serve here. What a backend asks of the model (head
    sizes, dtypes) it checks itself, with a ConfigError from `cache_shape` or `attend`, so before anything is served.
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
