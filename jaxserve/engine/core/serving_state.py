"""Whether steps run, and which weights they run with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxserve.types.step import FIRST_VERSION

# What becomes of running requests: they end; they return to the queue and are computed again; they keep their KV.
Mode = Literal["abort", "retract", "in_place"]
Tag = Literal["weights", "kv_cache"]


@dataclass
class ServingState:
    """What pauses, sleep and updates of the weights have made of an engine.

    paused: how; None: not. asleep: what is not on the devices. version: label of the weights, chosen by clients

    updated: time.monotonic() of the latest update of the weights; 0: there was none
    weights: number that the API process gave to that update, which is never given again; 0: it gave none
    """

    paused: Mode | None = None
    asleep: set[Tag] = field(default_factory=set)
    version: str = FIRST_VERSION
    num_updates: int = 0
    updated: float = 0.0
    weights: int = 0

    @property
    def halted(self) -> bool:
        """Whether no step may run. Requests are accepted and wait."""
        return self.paused is not None or bool(self.asleep)

    @property
    def labels(self) -> tuple[str, ...]:
        """See TokenOutput.weight_versions."""
        return () if self.version == FIRST_VERSION else (self.version,)
