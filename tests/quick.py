"""XLA's options for programs that a test compiles for itself and runs a few times.

Without LLVM's optimisation and XLA's newer emitters a step's program takes a quarter of the time to compile. Programs
that several modules share, and those that show which bits a user gets, have the options of a user.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import pytest

from jaxserve.runtime import encoder_runner, runner_setup
from jaxserve.runtime.compilation.compiler import compiler_options

QUICK: dict[str, bool | str | int] = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones have only the newer emitters
    QUICK["xla_cpu_use_fusion_emitters"] = False
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())  # in XLA_FLAGS of a process


def quick_options(platform: str, *, deterministic: bool = False, **keys: Any) -> Mapping[str, bool | str | int]:
    """`compiler_options`, and QUICK unless the engine is deterministic."""
    options = compiler_options(platform, deterministic=deterministic, **keys)
    return options if deterministic else {**QUICK, **options}


@contextmanager
def quick_processes() -> Iterator[None]:
    """Let the processes that are started in the body compile all programs by QUICK."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", QUICK_FLAGS)
        yield


@contextmanager
def quick_programs() -> Iterator[None]:
    """Let the engines and runners that are made in the body compile by `quick_options`."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (runner_setup, encoder_runner):
            patch.setattr(module, "compiler_options", quick_options)
        yield
