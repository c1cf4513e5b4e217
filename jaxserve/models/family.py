"""The declaration of a model family: its name in config.json, its module class, the meaning of its config keys.

Each module of `families` declares its architectures in a tuple FAMILIES; `families.registry` collects them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json
from jaxserve.models.config import ModelConfig

Fields = dict[str, Any]  # fields of ModelConfig by name


def no_changes(hf: Json, fields: Fields) -> Fields:
    """Return no fields: the common keys describe the whole config."""
    return {}


@dataclass(frozen=True)
class Family:
    """One architecture that can be served.

    architecture  its name in config.json
    model         the module's class
    changes       (parsed config.json, fields read from the common keys) -> ModelConfig fields to add or replace.
                  Applies the family's own keys and the defaults that published files leave out. Raises ValueError for
                  a value that is not supported
    rope_theta    base of the rotation if config.json has none
    """

    architecture: str
    model: Callable[[ModelConfig, jnp.dtype], nnx.Module]
    changes: Callable[[Json, Fields], Fields] = no_changes
    rope_theta: float = 10000.0
