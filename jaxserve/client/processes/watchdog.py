"""Measures how long an engine has made no progress, counting only time in which this process was running itself.

The counters are in shared memory, so no event loop is needed to receive them. If more than MAX_GAP passed between
two looks, this process was blocked or all processes were stopped. That time does not count, because a healthy engine
might not have run either.
"""

from __future__ import annotations

from jaxserve.transport.shared_state import Pulse

LOOK_INTERVAL = 0.5  # seconds; as often as an engine's heartbeat
MAX_GAP = 2 * LOOK_INTERVAL


class Watchdog:
    """The seconds without progress: `silent` and `stuck`. The owner calls `look` every LOOK_INTERVAL."""

    def __init__(self) -> None:
        self.silent = 0.0  # without a heartbeat
        self.stuck = 0.0  # in one iteration of the engine loop
        self._pulse = Pulse(0, 0)
        self._looked = 0.0

    def start(self, now: float) -> None:
        """Reset for a new engine, or to give the same one another chance."""
        self.silent = self.stuck = 0.0
        self._looked = now

    def look(self, pulse: Pulse, now: float) -> None:
        gap = now - self._looked
        if gap > MAX_GAP:
            gap = 0.0
        last, self._pulse, self._looked = self._pulse, pulse, now
        self.silent = self.silent + gap if pulse.beats == last.beats else 0.0
        self.stuck = self.stuck + gap if pulse.iterations == last.iterations else 0.0
