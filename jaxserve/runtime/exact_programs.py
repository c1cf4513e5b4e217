"""Programs that multiply float32 numbers as they are. By default XLA rounds them first: to TF32 on GPUs, to bfloat16 on
TPUs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.program_set import ProgramSet

Function = Callable[..., Any]


def is_rounded(platform: str, activations: jnp.dtype) -> bool:
    """Return whether XLA would round the activations of a product."""
    return platform != "cpu" and activations == jnp.float32


def exact(function: Function) -> Function:
    """Return the function, whose products without a `precision` are exact when it is traced."""

    @functools.wraps(function)
    def traced(*args: Any) -> Any:
        with jax.default_matmul_precision("highest"):
            return function(*args)

    return traced


@dataclass(frozen=True)
class ExactProgramSet(ProgramSet):
    """The programs of a model in float32 on an accelerator."""

    def _program(self, name: str, function: Function, *rest: Any, **named: Any) -> Program:
        return super()._program(name, exact(function), *rest, **named)
