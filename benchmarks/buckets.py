"""What each program of a start costs and buys: seconds of compiling it, and of a step without it, in the next size.

    python -m benchmarks.buckets [--model DIR] [--threads N]

Compiles every program anew, one at a time unless --threads says otherwise, and then runs each on dummy input.
"""

from __future__ import annotations

import argparse
import threading
import time

import jax

from jaxserve.config import Config
from jaxserve.engine.factory import load, locate
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.runtime.compilation.compiler import Program, WarmUp
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.runner_config import RunnerConfig


class Timing:
    """A ProgramStorage that has nothing and times each compilation. seconds: wall time and processor time by program"""

    def __init__(self, threads: int) -> None:
        self.seconds: dict[str, tuple[float, float]] = {}
        self._free = threading.Semaphore(threads)

    def find(self, program: Program) -> jax.stages.Compiled:
        """Compile a program."""
        with self._free:
            began, spent = time.perf_counter(), time.process_time()
            compiled = program.compile()
            self.seconds[program.name] = time.perf_counter() - began, time.process_time() - spent
        return compiled

    def keep(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Do nothing."""

    def discard(self) -> list[str]:
        """Return no names: nothing was loaded."""
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    config = Config.of(options.model, compile_cache=None, wait_for_programs=True)
    mesh = make_mesh("cpu")
    loaded = load(config, ModelFiles.open(locate(config)), mesh, lambda message: None)
    resolved = RunnerConfig.resolve(config, loaded.config, mesh.platform, loaded.structure.activation_dtype)
    timing = Timing(options.threads)
    began, spent = time.perf_counter(), time.process_time()
    runner = ModelRunner(loaded, resolved, mesh, store=timing)
    print(f"{len(timing.seconds)} programs, {options.threads} at a time: ", end="")
    print(f"{time.perf_counter() - began:.1f} s, {time.process_time() - spent:.1f} processor seconds")
    milliseconds = times(runner)
    print("program, seconds to compile it alone, processor seconds, ms of a run, of the next size in its place")
    for name, (wall, processor) in timing.seconds.items():
        family, _, size = name.rstrip("]").partition("[")
        larger = [taken for (other, rows), taken in milliseconds.items() if other == family and rows > int(size or 0)]
        taken = milliseconds.get((family, int(size or 0)))
        run = "" if taken is None else f"{taken:.2f}"
        print(name, f"{wall:.2f}", f"{processor:.2f}", run, f"{larger[0]:.2f}" if run and larger else "", sep=", ")
    runner.close()


def times(runner: ModelRunner) -> dict[tuple[str, int], float]:
    """Return the milliseconds of the fastest of several runs of each program, by family and ascending size."""
    found: dict[tuple[str, int], float] = {}

    def run(family: str, size: int) -> float:
        seconds = runner.timed_run(family, size)
        found[family, size] = min(found.get((family, size), 1e9), 1e3 * seconds)
        return seconds

    for _ in WarmUp(runner.sizes(), run, limit=60.0).steps():
        pass
    return dict(sorted(found.items()))


if __name__ == "__main__":
    main()
