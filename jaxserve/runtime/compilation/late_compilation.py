"""Programs that are compiled while the engine already serves with others, in threads.

They have the priority of all other threads: one that the system lets wait while it holds Python's lock would stop the
engine.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import jax

from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.compiler import Program, ProgramStorage, obtain

logger = logging.getLogger(__name__)

# Tracing takes half of a compilation and holds Python's lock, which every step needs several times.
CORES_PER_THREAD, MOST_THREADS = 4, 4


def num_threads(cores: int) -> int:
    """Return in how many threads programs are compiled while requests are served. cores: that this process may use"""
    return max(1, min(MOST_THREADS, cores // CORES_PER_THREAD))


def compiles_programs() -> bool:
    """Return whether this thread compiles the programs of an engine: of this one, or of another in the process."""
    return threading.current_thread().name.startswith("compile")  # here, and in `compile_all`


class LateCompilation:
    """Compiles or loads programs in threads, in their order, and hands over each.

    total   how many there are; with `done` all are there
    error   why a thread ended early; the engine goes on with the programs that it has
    """

    def __init__(
        self,
        programs: Sequence[Program],
        store: ProgramStorage | None,
        take: Callable[[str, jax.stages.Compiled], None],
    ) -> None:
        """take: called with the name of a program and itself, in a thread, one call at a time"""
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
        """How many programs are there."""
        return self._done

    @property
    def is_complete(self) -> bool:
        """Whether all programs are there."""
        return self._done == self.total

    def start(self) -> None:
        """Begin, if there is anything to compile. A second call does nothing."""
        if self._threads and self._threads[0].ident is None:
            self._began = time.monotonic()
            for thread in self._threads:
                thread.start()

    def close(self) -> None:
        """Begin no more programs. Does not wait for those that are being compiled."""
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
