"""Whether an engine moves on, judged only by time that the judge saw pass itself.

The counters come through shared memory, so that no event loop has to take them in. Where more than MAX_GAP has passed
between two looks, the judge was held up or all processes were stopped: that time does not count, since the judge
cannot say what an engine that is well would have done in it.
"""

from __future__ import annotations

from jaxserve.transport.shared_state import Pulse

LOOK_INTERVAL = 0.5  # seconds; as often as an engine beats
MAX_GAP = 2 * LOOK_INTERVAL


class Watchdog:
    """Call `look` every LOOK_INTERVAL; `silent` and `stuck` are seconds."""

    def __init__(self) -> None:
        self.silent = 0.0  # without a beat
        self.stuck = 0.0  # in one turn of the engine's loop
        self._pulse = Pulse(0, 0)
        self._looked = 0.0

    def start(self, now: float) -> None:
        """A new engine, or a new chance for the same."""
        self.silent = self.stuck = 0.0
        self._looked = now

    def look(self, pulse: Pulse, now: float) -> None:
        gap = now - self._looked
        if gap > MAX_GAP:
            gap = 0.0
        last, self._pulse, self._looked = self._pulse, pulse, now
        self.silent = self.silent + gap if pulse.beats == last.beats else 0.0
        self.stuck = self.stuck + gap if pulse.turns == last.turns else 0.0
