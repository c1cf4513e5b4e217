"""One model of the front: its state, and what its next load waits for after a failure."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxserve.api.openai.models import named_object
from jaxserve.errors import NotReadyError
from jaxserve.front.model_plan import ModelPlan
from jaxserve.front.model_process import ModelProcess

State = Literal["unloaded", "loading", "loaded", "unloading"]

# seconds after each consecutive failure before the next load; the last one repeats
DELAYS = (0.0, 2.0, 5.0, 15.0, 60.0)
FAILURES_FORGOTTEN_AFTER = 300.0  # seconds of service after which the count of failures is reset


@dataclass
class Resident:
    """A model and its process. process: None unless the model takes room

    work: the load or unload that runs. asked: whether the operator wants the load that runs
    in_flight: requests that it answers. waiting: requests that wait for it to load
    used: time.monotonic() of the last request's end. objects: of its /v1/models, known after the first load
    """

    plan: ModelPlan
    state: State = "unloaded"
    process: ModelProcess | None = None
    work: asyncio.Task[None] | None = None
    in_flight: int = 0
    waiting: int = 0
    asked: bool = False
    used: float = 0.0
    objects: list[dict[str, Any]] = field(default_factory=list)
    created: int = field(default_factory=lambda: int(time.time()))
    exit_status: int | None = None  # of the process that failed; None: it did not fail
    _failures: int = 0
    _next_load: float = 0.0  # time.monotonic() before which it is not loaded again

    @property
    def is_free(self) -> bool:
        """Whether it is loaded and no request of a client needs it."""
        return self.state == "loaded" and not self.in_flight and not self.waiting

    def failed(self, status: int, served: float) -> float:
        """Note that its process has ended by itself; return the seconds before the next load. served: seconds"""
        if served > FAILURES_FORGOTTEN_AFTER:
            self._failures = 0
        if not served:
            self._failures = max(1, self._failures)  # what did not load at all is not tried again at once
        delay = DELAYS[min(self._failures, len(DELAYS) - 1)]
        self._failures += 1
        self.exit_status, self._next_load = status, time.monotonic() + delay
        return delay

    def forgive(self) -> None:
        """Let the next load begin at once."""
        self._next_load = 0.0

    def check_may_load(self) -> None:
        """Raises NotReadyError before the time of the next load after a failure."""
        wait = self._next_load - time.monotonic()
        if wait > 0:
            error = NotReadyError(
                f"The process of the model {self.plan.name!r} ended with status {self.exit_status}, and it is not "
                "loaded again yet. The server's log says why."
            )
            error.retry_after = wait
            raise error

    def listed(self) -> list[dict[str, Any]]:
        """Return the entries of /v1/models, one for each name, with llama-server's `status`."""
        status: dict[str, Any] = {"value": self.state, "requests": self.in_flight}
        if self.state == "loading" and self.process is not None and self.process.progress:
            status["progress"] = self.process.progress
        if self.exit_status is not None:
            status |= {"failed": True, "exit_code": self.exit_status}
        entries = self.objects or [named_object(name, self.created) for name in self.plan.names]
        return [{**entry, "status": status} for entry in entries]
