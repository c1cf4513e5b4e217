"""The first runs of a runner's programs, which also measure how long a step takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from jaxserve.types.scheduling import StepTimes

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
        """Return the times of steps, as far as they were measured."""
        hidden, verify = self._seconds.get("decode_hidden", {}), self._seconds.get("verify", {})
        verify = {size: hidden[size] + taken for size, taken in verify.items() if size in hidden}
        return StepTimes.of(self._seconds.get("decode", {}), self._seconds.get("extend", {}), verify)


def measured_times(runner: Runs, platform: str, max_drafts: int, before_run: BeforeRun | None = None) -> StepTimes:
    """Run every program, small ones first. Stops after WARM_UP_SECONDS of the platform and a step of drafts.

    before_run: called before each run; other hosts must make the same run, and know no time
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
