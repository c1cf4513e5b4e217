"""Ahead-of-time compilation: every program that serves requests is compiled before the first request.

Programs are compiled in parallel, and XLA compilations are counted. A compiled program has one shape: a call with
another shape is an error, never a compilation while serving.

LateCompilation compiles the rest of the programs in threads while the engine already serves. These threads have the
normal priority: a thread that the system delays while it holds Python's lock would stop the engine. ProgramTable has a
runner's programs by family and size. A step runs the smallest one that is compiled and large enough; the largest of
each family is compiled at the start, so every step finds one. WarmUp makes the first runs, and measures how long a step
takes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib import metadata
from types import TracebackType
from typing import Any, Protocol

import jax
from jax import monitoring

from jaxserve.runtime.compilation import program_cache
from jaxserve.types.scheduling import StepTimes

logger = logging.getLogger(__name__)

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

    deterministic: results must not depend on a program's shapes. Fused dots on a CPU do, so dots are then not fused;
    with the jaxlib of _WRONG_SUMS they never are. If XLA_FLAGS sets the command buffers, the operator's value holds.
    """
    if platform == "gpu":
        graph = {} if "xla_gpu_enable_command_buffer" in os.environ.get("XLA_FLAGS", "") else _ONE_GRAPH
        return {**graph, **_OWN_TUNING} if several else graph
    return _SINGLE_DOTS if platform == "cpu" and (deterministic or version == _WRONG_SUMS) else {}


@dataclass(frozen=True)
class Program:
    """One program of fixed shapes.

    args: pytrees of jax.ShapeDtypeStruct, with shardings if they matter. weight: larger is compiled earlier.
    identity: a text that names everything that `function` depends on, except its arguments; None: it is not stored
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
    leaves_out: called in the thread that compiled; if it returns True, the compilation is not counted
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
    """A store of compiled programs."""

    def find(self, program: Program) -> jax.stages.Compiled | None:
        """Load a program; None: it is missing and must be compiled. Raises ConfigError if it must not be compiled."""
        ...

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Store a program that was just compiled."""
        ...

    def discard(self) -> list[str]:
        """Remove the programs that this process loaded, so that nothing loads them again. Returns their names.

        Raises ConfigError if they must not be compiled.
        """
        ...


class _CacheHits(threading.local):
    """Records whether this thread's last compilation came from JAX's own cache. XLA cannot serialize such a program."""

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
    # jax keeps executables in memory by their function. One that came from the cache is then found without a hit.
    program = dataclasses.replace(program, function=functools.partial(program.function))
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

    store: programs are loaded from it instead, and new ones are stored in it
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


# Tracing takes half of a compilation and holds Python's lock, which every step needs several times.
CORES_PER_THREAD, MOST_THREADS = 4, 4


def num_threads(cores: int) -> int:
    """Return the number of threads that compile programs while requests are served. cores: of this process"""
    return max(1, min(MOST_THREADS, cores // CORES_PER_THREAD))


def compiles_programs() -> bool:
    """Return whether this thread compiles the programs of an engine: of this one, or of another in the process."""
    return threading.current_thread().name.startswith("compile")  # here, and in `compile_all`


class LateCompilation:
    """Compiles or loads programs in threads, in their order, and hands over each.

    total   number of programs; when `done` equals it, all are compiled
    error   the error that ended a thread early; the engine goes on with the programs that it has
    """

    def __init__(
        self,
        programs: Sequence[Program],
        store: ProgramStorage | None,
        take: Callable[[str, jax.stages.Compiled], None],
    ) -> None:
        """Make it without starting it. take: called in a thread with a program's name and the program, one at a time"""
        self.total = len(programs)
        self.error: Exception | None = None
        self._done = 0
        self._left: Iterator[Program] = iter(programs)
        self._store, self._take = store, take
        self._lock = threading.Lock()
        self._stopped = False
        self._began = 0.0
        count = min(self.total, num_threads(len(os.sched_getaffinity(0))))
        self._threads = [threading.Thread(target=self._run, name="compile-late", daemon=True) for _ in range(count)]

    @property
    def done(self) -> int:
        """Return the number of programs that are compiled."""
        return self._done

    @property
    def is_complete(self) -> bool:
        """Return whether all programs are compiled."""
        return self._done == self.total

    def start(self) -> None:
        """Start the threads if there is anything to compile. A second call does nothing."""
        if self._threads and self._threads[0].ident is None:
            self._began = time.monotonic()
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """Begin no more programs. Does not wait for the programs that are being compiled."""
        self._stopped = True

    def wait(self) -> None:
        """Wait until nothing is being compiled. Raises the error that ended a thread early."""
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            while (program := self._next()) is not None:
                self._add(program.name, obtain(program, self._store))
        except Exception as error:
            self.error = error
            logger.exception("the other programs are not compiled; steps are padded to those that are there")

    def _next(self) -> Program | None:
        with self._lock:
            return None if self._stopped or self.error is not None else next(self._left, None)

    def _add(self, name: str, compiled: jax.stages.Compiled) -> None:
        with self._lock:
            self._take(name, compiled)
            self._done += 1
            if self.is_complete:
                program_cache.share()
                logger.info("after %.1f s all programs are there", time.monotonic() - self._began)
            logger.debug("%s: %d of %d late programs are there", name, self._done, self.total)


class ProgramTable:
    """Programs by family and size, ascending. One thread at a time may `add`; others may look for programs."""

    def __init__(self, families: Mapping[str, Sequence[int]], compiled: Mapping[str, jax.stages.Compiled]) -> None:
        self.by_size: dict[str, dict[int, jax.stages.Compiled]] = {family: {} for family in families}
        self._sizes: dict[str, tuple[int, ...]] = dict.fromkeys(families, ())
        for name, program in compiled.items():
            self.add(name, program)

    def add(self, name: str, program: jax.stages.Compiled) -> None:
        """Add the program `family[size]`. Any other name is ignored."""
        family, bracket, size = name.rstrip("]").partition("[")
        if bracket and family in self.by_size:
            by_size = self.by_size[family] | {int(size): program}
            self.by_size[family] = dict(sorted(by_size.items()))
            self._sizes[family] = tuple(self.by_size[family])  # last: another thread reads it

    def sizes(self, family: str) -> tuple[int, ...]:
        """Return the sizes that are compiled, ascending."""
        return self._sizes[family]

    def find(self, family: str, count: int) -> int | None:
        """Return the smallest compiled size of at least `count`; None: there is none."""
        sizes = self._sizes[family]
        index = bisect_left(sizes, count)
        return sizes[index] if index < len(sizes) else None

    def fit(self, family: str, count: int) -> int:
        """Return the smallest compiled size of at least `count`. Raises ValueError if there is none."""
        size = self.find(family, count)
        if size is None:
            largest = max(self._sizes[family], default=0)
            raise ValueError(f"{count} is above the largest bucket, {largest}, of the {family} programs")
        return size


# On a GPU every program is run: otherwise its first request waits for the CUDA graph.
WARM_UP_SECONDS = {"cpu": 5.0, "gpu": 60.0, "tpu": 5.0}
FIRST_RUN_SECONDS = 1.0  # a run this long is timed once: the overhead of a first run hardly matters
SHORT_RUN_SECONDS = 0.01  # a run this short is timed MAX_RUNS times
MAX_RUNS = 5

BeforeRun = Callable[[str, int], None]


class Runs(Protocol):
    """The part of a runner that its first runs need."""

    def sizes(self) -> list[tuple[str, int]]: ...
    def timed_run(self, family: str, size: int) -> float: ...


class WarmUp:
    """Runs programs, small ones first, until `limit` seconds of runs are spent and a step of `least` tokens has run.

    programs: (family, size) of each. run: runs one of them and returns the seconds
    """

    def __init__(
        self, programs: Sequence[tuple[str, int]], run: Callable[[str, int], float], limit: float, least: int = 0
    ) -> None:
        self._programs = sorted(programs, key=lambda program: program[1])
        self._run = run
        self._limit, self._least = limit, least
        self._seconds: dict[str, dict[int, float]] = {}

    def steps(self) -> Iterator[None]:
        """Run one program each time that the iterator is advanced."""
        spent = 0.0
        for family, size in self._programs:
            began = time.perf_counter()
            self._seconds.setdefault(family, {})[size] = _fastest(self._run, family, size)
            spent += time.perf_counter() - began
            yield
            if spent > self._limit and size > self._least:
                return

    def times(self) -> StepTimes:
        """Return the times of the steps that were measured."""
        hidden, verify = self._seconds.get("decode_hidden", {}), self._seconds.get("verify", {})
        verify = {size: hidden[size] + taken for size, taken in verify.items() if size in hidden}
        return StepTimes.of(
            self._seconds.get("decode", {}), self._seconds.get("extend", {}), verify, self._seconds.get("draft", {})
        )


def measured_times(runner: Runs, platform: str, max_drafts: int, before_run: BeforeRun | None = None) -> StepTimes:
    """Run every program, small ones first. Stops after WARM_UP_SECONDS of the platform and a step of drafts.

    before_run: called before each run; other hosts must make the same run, and measure no time
    """

    def run(family: str, size: int) -> float:
        if before_run is not None:
            before_run(family, size)
        return runner.timed_run(family, size)

    warm_up = WarmUp(runner.sizes(), run, WARM_UP_SECONDS[platform], max_drafts)
    for _ in warm_up.steps():
        pass
    return warm_up.times()


def _fastest(run: Callable[[str, int], float], family: str, size: int) -> float:
    """Return the seconds of the fastest of several runs. It runs only once if that took FIRST_RUN_SECONDS.

    On a CPU a first run takes up to 0.1 s longer than the next. On a GPU the second run records the CUDA graph.
    A short run takes several times as long if another process interrupts it, so short runs are repeated.
    """
    taken = run(family, size)
    if taken >= FIRST_RUN_SECONDS:
        return taken
    taken = min(taken, run(family, size))
    repeats = MAX_RUNS - 2 if taken < SHORT_RUN_SECONDS else 0
    return min([taken, *(run(family, size) for _ in range(repeats))])
