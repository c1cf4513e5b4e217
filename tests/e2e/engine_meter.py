"""An engine in a thread whose loop is measured: CPU time of its thread for each iteration, without device calls."""

import time

from benchmarks.held import Iterations, watch_core
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.engine.factory import build_engine
from jaxserve.engine.server import BuiltEngine, Channel
from tests.api.conftest import LiveServer
from tests.thread_link import ThreadLink


class RealServer(LiveServer):
    """As LiveServer, with the demo model behind it."""

    longest_iteration = 0.0  # CPU seconds of the engine's host work

    def make_engine(self) -> AsyncEngine:
        return AsyncEngine(self.config, ThreadLink(self.config, self._build))

    def _build(self, channel: Channel) -> BuiltEngine:
        built = build_engine(self.config, channel.send)
        watch_core(built.core, Iterations(time.thread_time, self._note))
        return built

    def _note(self, seconds: float) -> None:
        self.longest_iteration = max(self.longest_iteration, seconds)

    def held(self) -> list[int]:
        """What the engine at rest holds nothing of."""
        stats = self.engine.stats()
        return [stats.num_running, stats.num_waiting, stats.num_compiling, stats.num_pages_used]
