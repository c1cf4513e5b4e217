"""XLA's options for programs that a test compiles for itself and runs a few times.

Without LLVM's optimisation and XLA's newer emitters a step's program takes a quarter of the time to compile. Programs
that several modules share, and those that show which bits a user gets, have the options of a user. Single operations,
oracles and whatever else names no options are compiled by QUICK too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax._src import compiler

from jaxserve.runtime import encoder_runner, runner_setup
from jaxserve.runtime.compilation.compiler import compiler_options

QUICK: dict[str, bool | str | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,  # of 32 parts: with the line above, 40 % less for programs this small
}
if jax.__version_info__ < (0, 11):  # later ones have only the newer emitters
    QUICK["xla_cpu_use_fusion_emitters"] = False
OPTIMIZED: dict[str, bool | str | int] = {"xla_backend_optimization_level": 3}  # XLA's default, by name
QUICK_FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in QUICK.items())  # in XLA_FLAGS of a process


def quick_by_default() -> None:
    """Let this process compile by QUICK for a CPU whatever names no options.

    The programs of engines have options of their own (`compiler_options`) if this jaxlib needs any. If not, nothing
    changes.
    """
    if not compiler_options("cpu"):
        return
    given = compiler.get_compile_options

    def get_compile_options(*args: Any, backend: Any = None, env_options_overrides: Any = None, **keys: Any) -> Any:
        if backend is not None and backend.platform == "cpu" and not env_options_overrides:
            env_options_overrides = QUICK
        return given(*args, backend=backend, env_options_overrides=env_options_overrides, **keys)

    compiler.get_compile_options = get_compile_options


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
