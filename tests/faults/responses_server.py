"""A whole server with stored responses, to be killed: `python -m tests.faults.responses_server STORE`.

API process, store and HTTP are real; the engine is the process of fake_engine.py, which starts in a second. The first
line of the output is the URL.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from pathlib import Path

from jaxserve.api.app import create_app
from jaxserve.cli.http_server import Server, http_config
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.store import Store


async def serve(directory: Path) -> None:
    config = Config()
    engine = AsyncEngine(config, ProcessLink(config, module="tests.faults.fake_engine"))
    await engine.start()
    app = create_app(engine, config, store=Store(directory))
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(http_config(app, config.server))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    await task


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1])))
