"""The seam for faults of the device: a StepRunner around another that fails where it is told to, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.types.step import SampledTokens, SchedulerOutput, StepHandle, StepRunner

Plan = Callable[[SchedulerOutput], str | None]

MESSAGES = {
    "memory": "RESOURCE_EXHAUSTED: out of memory, on purpose",
    "rebuild": "a failure on purpose that leaves no device behind",
}


class FaultsByName:
    """A plan that clients write: the request that its client calls fault-KIND-STEPS befalls its STEPS-th step with
    KIND, once; the one called poison-KIND-STEPS that step and every later one.

    Bound to a request and its own steps, so that it comes at the same moment whatever the machine's load.
    client_id: of a request, by its engine id. happened: a directory that remembers the faults beyond this process.
    """

    def __init__(self, client_id: Callable[[str], str], happened: Path) -> None:
        self._client_id = client_id
        self._happened = happened
        self._steps: dict[str, int] = {}  # steps seen of each request that is a fault

    def __call__(self, output: SchedulerOutput) -> str | None:
        for row in output.rows:
            client_id = self._client_id(row.request_id)
            if client_id.startswith(("fault-", "poison-")):
                name, kind, at = client_id.split("-")
                self._steps[row.request_id] = count = self._steps.get(row.request_id, 0) + 1
                if count >= int(at) and (name == "poison" or self._is_first(client_id)):
                    return kind
        return None

    def _is_first(self, client_id: str) -> bool:
        try:
            (self._happened / client_id).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


class DeviceFault(Exception):
    """What the seam raises."""


class FaultyRunner:
    """plan: what befalls a step:

    before     it raises and nothing was dispatched
    after      it was dispatched, its donated arrays are gone, and then it raises
    sample     it raises when its masks are given to it
    read       it raises when its tokens are read, as a device does that computes asynchronously
    memory     as read, out of memory
    rebuild    as before, and the rebuild that follows fails too
    """

    def __init__(self, inner: StepRunner, plan: Plan) -> None:
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

    def close(self) -> None:
        self.inner.close()


class FailingStep:
    """A step that was dispatched and fails later: at its masks, or where it is read."""

    def __init__(self, handle: StepHandle, kind: str) -> None:
        self._handle = handle
        self._kind = kind

    def sample(self, bitmask: Any, late: Sequence[int] = ()) -> None:
        if self._kind == "sample":
            raise _fault(self._kind)
        self._handle.sample(bitmask, late)

    def result(self) -> SampledTokens:
        raise _fault(self._kind)


def _fault(kind: str) -> DeviceFault:
    return DeviceFault(MESSAGES.get(kind, f"a failure on purpose: {kind}"))
