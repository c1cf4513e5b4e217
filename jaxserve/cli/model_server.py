"""Serve one of several models: `python -m jaxserve.cli.model_server`, which front/model_process.py starts.

The process reads its configuration as one line of JSON from stdin and serves on the socket that it inherits, as
`jaxserve launch` does. It drains on SIGTERM, and exits at once when stdin closes, which means that the front has ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys

import msgspec
import uvloop

from jaxserve.cli.http_server import keep_heap_small
from jaxserve.cli.launch import Launch, freeze
from jaxserve.cli.main import tell_error
from jaxserve.config import Config
from jaxserve.errors import ConfigError, UnexpectedEndError
from jaxserve.front.model_process import ModelServerStart
from jaxserve.log import configure_logging
from jaxserve.transport.child import end_with_parent

_START = msgspec.json.Decoder(ModelServerStart)


async def _serve(config: Config, listener: socket.socket) -> int:
    launch = Launch(config, listener, quiet=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, launch.stop)
    return await launch.serve(on_ready=freeze)


def main() -> int:
    """Serve until SIGTERM or the front's end, and return the exit code as `jaxserve launch` does."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the front handles them
    start = _START.decode(sys.stdin.buffer.readline())
    end_with_parent()
    config = Config.parse(json.loads(start.config))
    configure_logging(config.logging)
    keep_heap_small()
    try:
        with socket.socket(fileno=start.listener) as listener:
            return uvloop.run(_serve(config, listener))
    except (ConfigError, UnexpectedEndError) as error:
        tell_error(error, of=config.model.served_name[0])
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # threads of the template and grammar workers may still wait
