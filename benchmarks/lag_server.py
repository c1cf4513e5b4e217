"""The server of benchmarks.lag: `jaxserve launch`, which also records how long its loops are busy.

Prints its address when it is ready. Ends when its stdin is closed.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from pathlib import Path

import uvloop

from benchmarks.held import HeldLog
from benchmarks.lag_engine import DIRECTORY
from jaxserve.cli.http_server import bind
from jaxserve.cli.launch import Launch
from jaxserve.cli.options import load_config
from jaxserve.client.link import ProcessLink
from jaxserve.errors import JaxserveError

PAUSE = 0.001  # seconds between two samples


async def measure(log: HeldLog) -> None:
    """Record by how much the loop wakes a sleeping task too late."""
    while True:
        began = time.perf_counter()
        await asyncio.sleep(PAUSE)
        log.add(max(0.0, time.perf_counter() - began - PAUSE))


async def serve(words: list[str]) -> int:
    """Run the server and record its loop delays; return the exit code."""
    config = load_config(words, {})
    with bind(config.server) as listener:
        launch = Launch(
            config, listener, quiet=True, make_link=lambda config: ProcessLink(config, "benchmarks.lag_engine")
        )
        tasks: list[asyncio.Task[None]] = []

        def ready() -> None:
            gc.collect()
            gc.freeze()
            tasks.append(asyncio.create_task(measure(HeldLog(Path(os.environ[DIRECTORY]), "api"))))
            print(launch.url, flush=True)

        asyncio.get_running_loop().add_reader(sys.stdin.fileno(), launch.stop)
        return await launch.serve(on_ready=ready)


if __name__ == "__main__":
    try:
        sys.exit(uvloop.run(serve(sys.argv[1:])))
    except JaxserveError as error:
        sys.exit(f"jaxserve: {error}")
