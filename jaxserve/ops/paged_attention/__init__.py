"""Attention over a paged KV cache: one contract (`base`), one file a backend, chosen once by `get_backend`."""

from __future__ import annotations

from jaxserve.errors import ConfigError
from jaxserve.ops.paged_attention.base import AttentionMetadata, AttentionSpec, Backend
from jaxserve.ops.paged_attention.reference import ReferenceBackend
from jaxserve.ops.paged_attention.xla import XlaBackend

__all__ = ["AttentionMetadata", "AttentionSpec", "Backend", "get_backend"]


def get_backend(name: str, platform: str) -> Backend:
    """The backend of a configuration's name on a platform ("cpu", "gpu" or "tpu").

    "auto" takes the platform's best, and its choice is the result's `name`. Any other name is taken at its word:
    ConfigError with the reason when it cannot serve here.
    """
    if name == "reference":
        return ReferenceBackend()
    if name in ("xla", "auto"):
        return XlaBackend()
    raise ConfigError(f"attention backend {name!r} is not available on {platform}", fix="use runtime.attention: auto")
