"""Whether steps run, and which weights they run with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from jaxserve.types.output import FIRST_VERSION

# What becomes of running requests: they end; they return to the queue and are computed again; they keep their KV.
Mode = Literal["abort", "retract", "in_place"]
Tag = Literal["weights", "kv_cache"]


@dataclass
class ServingState:
    """What pauses, sleep and updates of the weights have made of an engine.

    paused: how; None: not. asleep: what is not on the devices. version: label of the weights, chosen by clients

    updated: time.monotonic() of the latest update of the weights; 0: there was none
    weights: number that the API process gave to that update, which is never given again; 0: it gave none
    finishing: ids of the requests whose ends the next pause waits for; no other may start. None: no pause waits
    """

    paused: Mode | None = None
    finishing: frozenset[str] | None = None
    asleep: set[Tag] = field(default_factory=set)
    version: str = FIRST_VERSION
    num_updates: int = 0
    updated: float = 0.0
    weights: int = 0

    @property
    def halted(self) -> bool:
        """Whether no step may run. Requests are accepted and wait."""
        return self.paused is not None or bool(self.asleep)

    def pause_after(self, request_ids: Iterable[str]) -> None:
        """Start no other request, and pause when these have ended. While halted, pause at the next `pauses_now`."""
        self.finishing = frozenset(() if self.halted else request_ids)

    def pauses_now(self, live_ids: Iterable[str]) -> bool:
        """Pause if the requests that the pause waits for have ended; return whether it did.

        live_ids: ids of all requests that have not ended
        """
        if self.finishing is None or not self.finishing.isdisjoint(live_ids):
            return False
        self.finishing, self.paused = None, self.paused or "retract"
        return True

    @property
    def labels(self) -> tuple[str, ...]:
        """See TokenOutput.weight_versions."""
        return () if self.version == FIRST_VERSION else (self.version,)
