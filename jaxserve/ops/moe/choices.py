"""Which experts the tokens chose, in the order in which the kernels take them; and which kernels these are."""

from __future__ import annotations

import importlib
import logging
from typing import Literal, NamedTuple

import jax

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)
_AUTO = "use runtime.experts: auto"


class Chosen(NamedTuple):
    """The experts of each token, and what their results are multiplied by."""

    ids: jax.Array  # int32 [T, K]
    weights: jax.Array  # float32 [T, K]


class Choices(NamedTuple):
    """M choices of tokens, K of each. Choice c is of token c // K."""

    order: jax.Array  # int32 [M]  the choice of each row, where rows are sorted by expert
    sizes: jax.Array  # int32 [E]  rows of each expert; the rows behind them are of no expert
    weights: jax.Array  # float32 [M]  of each choice
    per_token: int  # K


def kernels_of(name: str, platform: str) -> Literal["auto", "xla", "triton", "tpu"]:
    """Return the kernels that `runtime.experts` names, on a platform ("cpu", "gpu" or "tpu"). See `Products.experts`.

    "auto" takes Triton's on a GPU, if this jax has them, and the kernel of a TPU there. Raises ConfigError if
    "triton" cannot run here.
    """
    if name == "auto" and platform == "tpu":
        return "tpu"
    if name == "xla" or (name == "auto" and platform != "gpu"):
        return name  # type: ignore[return-value]
    if platform != "gpu":
        raise ConfigError(f"runtime.experts {name!r} runs on gpu only, and this is {platform}", fix=_AUTO)
    try:
        importlib.import_module("jaxserve.ops.moe.triton")
    except ImportError as error:
        if name == "auto":
            logger.warning("runtime.experts 'triton' cannot be loaded with this jax: %s; xla serves instead", error)
            return "xla"
        raise ConfigError(f"runtime.experts {name!r} cannot be loaded with this jax: {error}", fix=_AUTO) from error
    return "triton"
