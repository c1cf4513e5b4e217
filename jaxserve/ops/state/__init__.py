"""Layers with a recurrent state: one contract (`base`) and one file per backend. `get_state_backend` chooses one."""

from __future__ import annotations

import importlib
import logging

from jaxserve.errors import ConfigError
from jaxserve.ops.state.base import (
    CHUNK,
    StateArrays,
    StateBackend,
    StateRows,
    StateSpec,
    StateWeights,
    ring_length,
    state_shapes,
)
from jaxserve.ops.state.xla import XlaStates

logger = logging.getLogger(__name__)
_OWN = {"cpu": ("native", "NativeStates"), "gpu": ("triton", "TritonStates")}  # module, class

__all__ = [
    "CHUNK",
    "StateArrays",
    "StateBackend",
    "StateRows",
    "StateSpec",
    "StateWeights",
    "get_state_backend",
    "ring_length",
    "state_shapes",
]


def get_state_backend(platform: str) -> StateBackend:
    """Return the backend for a platform ("cpu", "gpu" or "tpu"): its own kernel if it can be built, else XLA's."""
    module, kind = _OWN.get(platform, ("xla", "XlaStates"))
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    except (ConfigError, ImportError) as error:
        logger.warning("%s; XLA advances recurrent states instead", error)
    return XlaStates()
