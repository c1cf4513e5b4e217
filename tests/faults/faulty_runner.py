"""The seam for faults of the device: a Runner around another that fails where it is told to, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxserve.engine.request import Runner, SampledTokens, SchedulerOutput, StepHandle

Plan = Callable[[SchedulerOutput], str | None]

MESSAGES = {
    "memory": "RESOURCE_EXHAUSTED: out of memory, on purpose",
    "rebuild": "a failure on purpose that leaves no device behind",
}


class FaultsByName:
    """A plan that clients write: the request named fault-KIND-STEPS befalls its STEPS-th step with KIND, once; the
    one named poison-KIND-STEPS that step and every later one.

    Bound to a request and its own steps, so that it comes at the same moment whatever the machine's load.
    """

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}  # steps seen of each request that is a fault

    def __call__(self, output: SchedulerOutput) -> str | None:
        for row in output.rows:
            if row.request_id.startswith(("fault-", "poison-")):
                name, kind, at = row.request_id.rpartition("-")[0].split("-")
                self._steps[row.request_id] = count = self._steps.get(row.request_id, 0) + 1
                if count == int(at) or (name == "poison" and count > int(at)):
                    return kind
        return None


class DeviceFault(Exception):
    """What the seam raises."""


class FaultyRunner:
    """plan: what befalls a step:

    before     it raises and nothing was dispatched
    after      it was dispatched, its donated arrays are gone, and then it raises
    read       it raises when its tokens are read, as a device does that computes asynchronously
    memory     as read, out of memory
    rebuild    as before, and the rebuild that follows fails too
    """

    def __init__(self, inner: Runner, plan: Plan) -> None:
        self.inner = inner
        self._plan = plan
        self._cannot_rebuild = False

    def execute(self, output: SchedulerOutput) -> StepHandle:
        kind = self._plan(output)
        if kind in ("before", "rebuild"):
            self._cannot_rebuild = kind == "rebuild"
            raise _fault(kind)
        handle = self.inner.execute(output)
        if kind == "after":
            raise _fault(kind)
        return FailingStep(handle, kind) if kind is not None else handle

    def rebuild(self) -> None:
        if self._cannot_rebuild:
            raise _fault("rebuild")
        self.inner.rebuild()

    def num_compiles(self) -> int:
        return self.inner.num_compiles()


class FailingStep:
    """A step that was dispatched and fails where it is read."""

    def __init__(self, handle: StepHandle, kind: str) -> None:
        self._handle = handle
        self._kind = kind

    def sample(self, bitmask: Any) -> None:
        self._handle.sample(bitmask)

    def result(self) -> SampledTokens:
        raise _fault(self._kind)


def _fault(kind: str) -> DeviceFault:
    return DeviceFault(MESSAGES.get(kind, f"a failure on purpose: {kind}"))
