"""Ahead-of-time compilation: every program that serves requests is compiled before the first request.

Owns the parallel compilation of programs and the count of XLA compilations. A compiled program has one shape: a call
with another shape is an error, never a compilation while serving.
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
from typing import Any, Protocol

import jax
from jax import monitoring

from jaxserve.runtime.compilation import program_cache

# YNNPACK computes each dot alone, without fusing a dot or a reduction with its neighbours.
_SINGLE_DOTS: Mapping[str, bool | str] = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# This jaxlib's fused reductions give wrong sums in the last rows (jax-ml/jax#39103). Avoiding them costs 7 % of a step.
_WRONG_SUMS = "0.10.2"

# A step is one CUDA graph only if its conditionals and loops are nodes of it. XLA's default leaves loops out, and CUB's
# sorts. The host then waits for the device several times a step.
_ONE_GRAPH: Mapping[str, bool | str] = {
    "xla_gpu_enable_command_buffer": (
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
    ),
    "xla_gpu_enable_cub_radix_sort": False,
}

# XLA would give each process of a group a part of the kernels to try, and wait for the results of the others. These may
# compile other programs first, or have them in their caches. So each host tries all kernels for itself.
_OWN_TUNING: Mapping[str, bool | str] = {"xla_gpu_shard_autotuning": False}

Progress = Callable[[str, int, int], None]  # (program just finished, how many are done, how many in all)
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
_HIT_EVENT = "/jax/compilation_cache/cache_hits"


def compiler_options(
    platform: str, *, deterministic: bool = False, version: str = metadata.version("jaxlib"), several: bool = False
) -> Mapping[str, bool | str]:
    """Return XLA's options for every program. version: of jaxlib. several: the devices belong to several hosts.

    deterministic: results must not depend on a program's shapes. Fused dots on a CPU depend on them, so dots are then
    not fused; with the jaxlib of _WRONG_SUMS they never are. If XLA_FLAGS names the command buffers, a GPU gets
    the operator's.
    """
    if platform == "gpu":
        graph = {} if "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", "") else _ONE_GRAPH
        return {**graph, **_OWN_TUNING} if several else graph
    return _SINGLE_DOTS if platform == "cpu" and (deterministic or version == _WRONG_SUMS) else {}


@dataclass(frozen=True)
class Program:
    """One program of fixed shapes.

    args: pytrees of jax.ShapeDtypeStruct, with shardings if they matter. weight: larger is compiled earlier.
    identity: a text that names all that `function` depends on beside its arguments; None: it is not kept in a store.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None  # a prefix of the result's tree; None leaves the choice to XLA
    weight: int = 0
    options: Mapping[str, bool | str] = field(default_factory=dict)
    identity: str | None = None

    def compile(self) -> jax.stages.Compiled:
        """Lower and compile the program for its shapes."""
        jitted = jax.jit(self.function, donate_argnums=self.donate, out_shardings=self.out_shardings)
        return jitted.lower(*self.args).compile(compiler_options=dict(self.options) or None)


class CompileCounter:
    """Counts the XLA compilations of this process from construction to `close`. Loads from the cache count too.

    A context manager: `with CompileCounter() as counter: ...; assert counter.count == 0`.
    leaves_out: asked in the thread that compiled whether it does not count
    """

    def __init__(self, leaves_out: Callable[[], bool] = lambda: False) -> None:
        self.count = 0
        self._leaves_out = leaves_out
        self.seconds = 0.0
        self._closed = False
        self._lock = threading.Lock()
        monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == _COMPILE_EVENT and not self._leaves_out():
            with self._lock:
                self.count += 1
                self.seconds += duration_secs

    def close(self) -> None:
        """Stop counting. A second call does nothing."""
        if not self._closed:
            self._closed = True
            monitoring.unregister_event_duration_listener(self._on_event)

    def __enter__(self) -> CompileCounter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ProgramStorage(Protocol):
    """A place of compiled programs."""

    def find(self, program: Program) -> jax.stages.Compiled | None:
        """Load a program; None: it is not there and must be compiled. Raises ConfigError if it must not be."""
        ...

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Store a program that was just compiled."""
        ...


class _CacheHits(threading.local):
    """Whether the last compilation of this thread came from JAX's own cache. XLA cannot serialise such a program."""

    found = False

    def listen(self, event: str, **kwargs: str | int) -> None:
        self.found = self.found or event == _HIT_EVENT


def obtain(program: Program, store: ProgramStorage | None) -> jax.stages.Compiled:
    """Load a program from the store, or compile it and keep it there."""
    if store is None or program.identity is None:
        return program.compile()
    if (found := store.find(program)) is not None:
        return found
    hits = _CacheHits()
    monitoring.register_event_listener(hits.listen)
    try:
        compiled = program.compile()
    finally:
        monitoring.unregister_event_listener(hits.listen)
    if not hits.found:
        store.keep(program, compiled)
    return compiled


def compile_all(
    programs: Sequence[Program],
    *,
    workers: int | None = None,
    progress: Progress | None = None,
    store: ProgramStorage | None = None,
) -> dict[str, jax.stages.Compiled]:
    """Compile in a thread pool, largest first, and share the results in the cache. The first error stops the rest.

    store: from which programs are loaded instead, and where new ones are kept
    """
    order = sorted(programs, key=lambda program: -program.weight)
    compiled: dict[str, jax.stages.Compiled] = {}
    pool = ThreadPoolExecutor(workers or os.cpu_count() or 1, thread_name_prefix="compile")
    try:
        names = {pool.submit(obtain, program, store): program.name for program in order}
        for done, future in enumerate(as_completed(names), start=1):
            compiled[names[future]] = future.result()
            if progress is not None:
                progress(names[future], done, len(order))
    finally:
        pool.shutdown(cancel_futures=True)
        program_cache.share()
    return compiled


def timed(compiled: jax.stages.Compiled, *args: Any) -> float:
    """Run a program once, wait for it, and return the seconds. Donated arguments are consumed. For measurements."""
    start = time.perf_counter()
    jax.block_until_ready(compiled(*args))
    return time.perf_counter() - start
