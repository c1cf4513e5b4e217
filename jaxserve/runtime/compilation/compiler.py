"""Ahead-of-time compilation: every program the server will ever run is compiled before the first request.

Owns the list of programs, their parallel compilation and the count of XLA compilations. What is
handed out is compiled for one shape: a call with another is an error, never a compilation on the serving path.
Knows nothing of what the programs compute.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from types import TracebackType
from typing import Any

import jax
from jax import monitoring

from jaxserve.runtime.compilation import program_cache

# YNNPACK computes dots one by one, and no fusion of a dot or a reduction with its neighbours.
_SINGLE_DOTS: Mapping[str, bool | str] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# jaxlib whose fused reductions give wrong sums in the last rows (jax-ml/jax#39103). It costs 7 % of a decode step.
_WRONG_SUMS = "0.10.2"

Progress = Callable[[str, int, int], None]  # (program just finished, how many are done, how many in all)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def compiler_options(
    platform: str, *, deterministic: bool = False, version: str = metadata.version("jaxlib")
) -> Mapping[str, bool | str]:
    """XLA's options for every program. version: jaxlib's.

    deterministic: bits may not depend on a program's shapes; how XLA fuses a dot with its neighbours on a CPU does.
    """
    return _SINGLE_DOTS if platform == "cpu" and (deterministic or version == _WRONG_SUMS) else {}


@dataclass(frozen=True)
class Program:
    """One program of fixed shapes.

    args: pytrees of jax.ShapeDtypeStruct, with shardings where they matter. weight: larger is compiled earlier.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None  # a prefix of the result's tree; None leaves the choice to XLA
    weight: int = 0
    options: Mapping[str, bool | str] = field(default_factory=dict)

    def compile(self) -> jax.stages.Compiled:
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out_shardings)
        return jitted.lower(*self.args).compile(compiler_options=dict(self.options) or None)


class CompileCounter:
    """Counts XLA compilations of this process, loads from the persistent cache included, from its making to `close`.

    Usable as a context manager: `with CompileCounter() as counter: ...; assert counter.count == 0`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        self._lock = threading.Lock()
        monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.count += 1
                self.seconds += duration_secs

    def close(self) -> None:
        monitoring.unregister_event_duration_listener(self._on_event)

    def __enter__(self) -> CompileCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def compile_all(
    programs: Sequence[Program], *, workers: int | None = None, progress: Progress | None = None
) -> dict[str, jax.stages.Compiled]:
    """Compile in a thread pool, largest first, and share what was compiled. The first error stops the rest."""
    order = sorted(programs, key=lambda program: -program.weight)
    compiled: dict[str, jax.stages.Compiled] = {}
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="compile")
    try:
        names = {pool.submit(program.compile): program.name for program in order}
        for done, future in enumerate(as_completed(names), start=1):
            compiled[names[future]] = future.result()
            if progress is not None:
                progress(names[future], done, len(order))
    finally:
        pool.shutdown(cancel_futures=True)
        program_cache.share()
    return compiled


def timed(compiled: jax.stages.Compiled, *args: Any) -> float:
    """Seconds of one call, waited for. For measurements; the arguments that the program donates are consumed."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start
