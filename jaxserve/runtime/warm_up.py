"""The first runs of a runner's programs, which also measure how long a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from jaxserve.types.step_times import StepTimes

# On a GPU every program is worth it: the first request of one that did not run waits for its CUDA graph.
WARM_UP_SECONDS = {"cpu": 5.0, "gpu": 60.0, "tpu": 5.0}
FIRST_RUN_SECONDS = 1.0  # a run this long is timed once: the overhead of a first run hardly matters
SHORT_RUN_SECONDS = 0.01  # a run this short is timed MAX_RUNS times
MAX_RUNS = 5

BeforeRun = Callable[[str, int], None]


class Runs(Protocol):
    """A runner, as far as its first runs go."""

    def sizes(self) -> list[tuple[str, int]]: ...
    def timed_run(self, family: str, size: int) -> float: ...


def measured_times(runner: Runs, platform: str, max_drafts: int, before_run: BeforeRun | None = None) -> StepTimes:
    """Run every program, small ones first. Stops after WARM_UP_SECONDS of the platform and a step of drafts.

    before_run: called before each run; other hosts must make the same run, and know no time
    """

    def run(family: str, size: int) -> float:
        if before_run is not None:
            before_run(family, size)
        return runner.timed_run(family, size)

    began = time.perf_counter()
    seconds: dict[str, dict[int, float]] = {}
    for family, size in sorted(runner.sizes(), key=lambda program: program[1]):
        seconds.setdefault(family, {})[size] = _fastest(run, family, size)
        late = time.perf_counter() - began > WARM_UP_SECONDS[platform]
        if late and size > max_drafts:
            break
    hidden, verify = seconds.get("decode_hidden", {}), seconds.get("verify", {})
    verify = {size: hidden[size] + taken for size, taken in verify.items() if size in hidden}
    return StepTimes.of(seconds.get("decode", {}), seconds.get("extend", {}), verify)


def _fastest(run: Callable[[str, int], float], family: str, size: int) -> float:
    """Return the seconds of the fastest of several runs. Runs once only if that took FIRST_RUN_SECONDS.

    On a CPU a first run takes up to 0.1 s longer than the next. On a GPU the second run records the CUDA graph.
    A short run takes several times as long if another process interrupts it, so that short runs are repeated.
    """
    taken = run(family, size)
    if taken >= FIRST_RUN_SECONDS:
        return taken
    taken = min(taken, run(family, size))
    repeats = MAX_RUNS - 2 if taken < SHORT_RUN_SECONDS else 0
    return min([taken, *(run(family, size) for _ in range(repeats))])
