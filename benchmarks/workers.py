"""Measure what the API processes cost a token with `server.workers` 1, 2 ..., over an engine that costs almost nothing.

    python -m benchmarks.workers --workers 1 2 --streams 64 --tokens 400 --rounds 3

Each round starts a server, reads --streams streams of --tokens tokens at once, --repeats times, and prints one JSON
line: tokens a second, and microseconds of CPU a token of the main process, of the workers and of the client. The CPU
figures hold on a busy machine; the rate only where each process has a core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import uvloop

from benchmarks.workers_engine import STEP_SECONDS
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.library.serving import launch_server

SERVER = "serve"  # the word after which this program is the server


def serve(workers: int) -> None:
    """Serve until stdin closes; print the port."""
    config = Config.of(None, port=0, workers=workers, random_seed=0)
    with launch_server(config=config, make_link=lambda config: ProcessLink(config, "benchmarks.workers_engine")) as it:
        print(it.url.rpartition(":")[2], flush=True)
        sys.stdin.read()


@contextmanager
def server(workers: int, step_seconds: float) -> Iterator[tuple[int, psutil.Process]]:
    """Start a server; yield its port and its main process."""
    process = psutil.Popen(
        [sys.executable, "-m", "benchmarks.workers", SERVER, str(workers)],
        env=os.environ | {STEP_SECONDS: str(step_seconds)},
        stdin=-1,
        stdout=-1,
    )
    try:
        yield int(process.stdout.readline()), process
    finally:
        process.stdin.close()
        process.wait()


def api_processes(main: psutil.Process) -> list[psutil.Process]:
    """The main process and the workers."""
    return [main, *(each for each in main.children() if "jaxserve.cli.worker" in each.cmdline())]


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


async def read_stream(port: int, body: bytes) -> int:
    """Read one stream to its end; return its number of chunks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ncontent-length: {len(body)}"
    writer.write(head.encode() + b"\r\nconnection: close\r\n\r\n" + body)
    count = 0
    while data := await reader.read(2**16):
        count += data.count(b'"text":')
    writer.close()
    return count


async def load(port: int, options: argparse.Namespace) -> int:
    body = json.dumps(
        {"model": "demo", "prompt": [7] * 32, "max_tokens": options.tokens, "ignore_eos": True, "stream": True}
    ).encode()
    return sum(await asyncio.gather(*(read_stream(port, body) for _ in range(options.streams))))


def measure(workers: int, options: argparse.Namespace) -> dict[str, Any]:
    with server(workers, options.step_seconds) as (port, main):
        uvloop.run(load(port, options))  # everything is loaded once
        processes = api_processes(main)
        before, own, began = [cpu(each) for each in processes], time.process_time(), time.perf_counter()
        tokens = sum(uvloop.run(load(port, options)) for _ in range(options.repeats))
        seconds = time.perf_counter() - began
        spent = [1e6 * (cpu(each) - old) / tokens for each, old in zip(processes, before, strict=True)]
    return {
        "workers": workers,
        "tokens": tokens,
        "tokens_a_second": round(tokens / seconds),
        "us_a_token_main": round(spent[0], 1),
        "us_a_token_each_worker": [round(each, 1) for each in spent[1:]],
        "us_a_token_all": round(sum(spent), 1),
        "us_a_token_client": round(1e6 * (time.process_time() - own) / tokens, 1),
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--step-seconds", type=float, default=0.01)
    options = parser.parse_args()
    for _ in range(options.rounds):
        for workers in options.workers:
            print(json.dumps(measure(workers, options)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == [SERVER]:
        serve(int(sys.argv[2]))
    else:
        main()
