"""Record in files how long a process's loop is busy, for another process to read."""

from __future__ import annotations

import array
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SLOW = 0.02  # seconds; a longer sample is recorded with its time
FLUSH = 0.5  # seconds between two writes


class Slow(NamedTuple):
    """A long sample. at: time.monotonic() of its end, the same clock in all processes of a machine."""

    at: float
    seconds: float


class HeldLog:
    """Appends all samples in seconds to NAME.f32, and those over SLOW to NAME.jsonl. The process may be killed."""

    def __init__(self, directory: Path, name: str) -> None:
        self._samples = (directory / f"{name}.f32").open("ab", buffering=0)
        self._slow = (directory / f"{name}.jsonl").open("a", buffering=1)
        self._kept = array.array("f")
        self._written = time.monotonic()

    def add(self, seconds: float) -> None:
        """Record one sample in seconds."""
        self._kept.append(seconds)
        now = time.monotonic()
        if seconds > SLOW:
            self._slow.write(json.dumps([now, seconds]) + "\n")
        if now - self._written > FLUSH:
            self._samples.write(self._kept.tobytes())
            self._kept, self._written = array.array("f"), now

    def close(self) -> None:
        self._samples.write(self._kept.tobytes())
        self._samples.close()
        self._slow.close()


class Iterations:
    """Measures the host seconds of each iteration of an engine's loop, without the calls to the device.

    An iteration ends with `step`. It begins where the previous one ended, or with the first message after a pause.
    """

    def __init__(self, clock: Callable[[], float], add: Callable[[float], None]) -> None:
        self._clock, self._add = clock, add
        self._began: float | None = None
        self._device = 0.0

    def message(self) -> None:
        self._began = self._clock() if self._began is None else self._began

    def end(self, busy: bool) -> None:
        now = self._clock()
        if self._began is not None:
            self._add(now - self._began - self._device)
        self._began, self._device = (now if busy else None), 0.0

    def on_device(self, call: Callable[..., Any], *args: Any) -> Any:
        began = self._clock()
        try:
            return call(*args)
        finally:
            self._device += self._clock() - began


class TimedRunner:
    """A StepRunner whose calls count as device time."""

    def __init__(self, inner: Any, iterations: Iterations) -> None:
        self._inner, self._iterations = inner, iterations

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def execute(self, output: Any) -> TimedStep:
        return TimedStep(self._iterations.on_device(self._inner.execute, output), self._iterations)


class TimedStep:
    """A step whose calls count as device time."""

    def __init__(self, inner: Any, iterations: Iterations) -> None:
        self._inner, self._iterations = inner, iterations

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Call the inner step's `sample`, as device time. bitmask: uint32 [rows, words]."""
        self._iterations.on_device(self._inner.sample, bitmask, late)

    def result(self) -> Any:
        return self._iterations.on_device(self._inner.result)


def watch_core(core: Any, iterations: Iterations) -> None:
    """Measure the iterations of the loop that calls `add`, `abort` and `step` of an EngineCore."""

    def before(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keys: Any) -> Any:
            iterations.message()
            return method(*args, **keys)

        return call

    def step() -> Any:
        iterations.message()
        try:
            return inner()
        finally:
            iterations.end(core.has_work)

    inner = core.step
    core.runner = TimedRunner(core.runner, iterations)
    core.add, core.abort, core.step = before(core.add), before(core.abort), step


def read_samples(directory: Path, name: str) -> np.ndarray:
    """Return all samples, float32 [N] in seconds."""
    path = directory / f"{name}.f32"
    return np.fromfile(path, np.float32, count=path.stat().st_size // 4) if path.exists() else np.zeros(0, np.float32)


def read_slow(directory: Path, name: str) -> list[Slow]:
    path = directory / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Slow(*json.loads(line)) for line in lines if line.endswith("]")]
