"""The engine process of benchmarks.lag: the usual one, which also records the host time of each step."""

from __future__ import annotations

import os
import time
from pathlib import Path

from benchmarks.held import HeldLog, Iterations, watch_core
from jaxserve.config import Config
from jaxserve.engine.child import Send, main
from jaxserve.engine.factory import build_engine
from jaxserve.engine.server import BuiltEngine

DIRECTORY = "LAG_DIRECTORY"  # environment variable


def build(config: Config, send: Send) -> BuiltEngine:
    built = build_engine(config, send)
    log = HeldLog(Path(os.environ[DIRECTORY]), "engine")
    watch_core(built.core, Iterations(time.perf_counter, log.add))
    return built


if __name__ == "__main__":
    main(build)
