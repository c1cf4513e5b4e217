"""The server part of the device suite: `jaxserve launch` with random weights, and its tokens over HTTP.

This process uses no device. Clients run in processes of their own, because one Python process reads fewer events a
second than the server sends.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.error import URLError

from benchmarks.device_suite.models import compile_cache, limits, model_directory
from benchmarks.device_suite.rows import ERROR_CHARS, Bench, Row
from jaxserve.bench.load import LoadRequest, LoadTarget, Timing, random_workload, run_load

START_LIMIT = 300.0  # seconds of a cold start, which compiles forty programs
CLIENTS = 8  # processes
_GRACE = 20.0  # seconds in which a server ends


@dataclass(frozen=True)
class Load:
    """`count` requests at once, of `prompt` and `tokens` tokens each. estimate: seconds"""

    count: int
    prompt: int
    tokens: int
    estimate: float
    optional: bool = False

    @property
    def name(self) -> str:
        return f"{self.count} x {self.prompt} + {self.tokens}"


# Prompts of 30 tokens and answers of 500 as in SGLang's published runs, and the first token of 32 longer prompts.
LOADS = (Load(1, 30, 500, 6), Load(100, 30, 500, 9), Load(500, 30, 500, 18), Load(32, 1000, 100, 6, optional=True))
_TINY = (Load(1, 8, 4, 2), Load(3, 8, 4, 2), Load(2, 20, 4, 2, optional=True))


class Server:
    """A server of one model that a cell starts, and the load that is put on it."""

    def __init__(self, bench: Bench, model: str) -> None:
        self._bench, self._model = bench, model
        self._process: subprocess.Popen[bytes] | None = None
        self._url = ""
        self._log = bench.options.work / f"{bench.section}-server.log"

    def start(self) -> Row:
        """Start the server, and wait until it accepts requests. Raises RuntimeError if it ends instead."""
        bench = self._bench
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        words = [f"--{name.replace('_', '-')}={value}" for name, value in limits(bench, self._model).items()]
        words = [word.replace("--num-pages", "--cache.num-pages") for word in words]
        cache = compile_cache(bench, self._model)
        cache.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jaxserve", "launch", "--model", str(model_directory(bench, self._model)),
                 "--load-format", "dummy", "--port", str(port), "--runtime.compile-cache", str(cache),
                 "--runtime.attention", bench.options.attention, "--store.path", str(bench.options.work / "store"),
                 *words],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        while self._health() != 200:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended: {self._log.read_text(errors='replace')[-ERROR_CHARS:]}")
            time.sleep(0.1)
        return {"seconds": time.perf_counter() - began, "phases": self._phases()}

    def run(self, load: Load) -> Row:
        """Put a load on the server. The prompts are random tokens, so that none is cached."""
        requests = random_workload(load.count, input_len=load.prompt, output_len=load.tokens, vocab_size=1000)
        target = LoadTarget(self._url, self._model, token_ids=True)
        timings = _from_several(target, requests, 1 if self._bench.tiny else min(CLIENTS, load.count))
        failed = [timing.error for timing in timings if timing.error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {load.count} requests failed: {failed[0]}")
        seconds = max(timing.ended for timing in timings) - min(timing.sent for timing in timings)
        tokens = sum(timing.output_tokens for timing in timings)
        row: Row = {"tok_s": tokens / seconds, "seconds": seconds, "output_tokens": tokens}
        row["ttft_ms"] = statistics.median(timing.ttft for timing in timings) * 1e3
        between = [timing.tpot for timing in timings if timing.tpot is not None]
        return row | {"tpot_ms": statistics.median(between) * 1e3 if between else None}

    def stop(self) -> None:
        """End the server."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _health(self) -> int:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as answer:
                return int(answer.status)
        except (URLError, ConnectionError, TimeoutError):
            return 0

    def _phases(self) -> str:
        """Return the line of the ready card with the phases of the start."""
        lines = self._log.read_text(errors="replace").splitlines()
        return next((" ".join(line.split()) for line in lines if line.strip().startswith("start ")), "")


def _from_several(target: LoadTarget, requests: list[LoadRequest], processes: int) -> list[Timing]:
    """Send the requests from so many processes at the same time. Returns the timings on one clock."""
    if processes == 1:
        return _part(target, requests, 0.0)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=context) as pool:
        list(pool.map(time.sleep, [0.2] * processes))  # until all have started
        at = time.monotonic() + 0.5
        parts = [pool.submit(_part, target, requests[part::processes], at) for part in range(processes)]
        return [timing for part in parts for timing in part.result()]


def _part(target: LoadTarget, requests: list[LoadRequest], at: float) -> list[Timing]:
    """Send the requests at `at` of time.monotonic(), which is one clock for all processes."""
    time.sleep(max(0.0, at - time.monotonic()))
    timings, _ = asyncio.run(run_load(target, requests, concurrency=None))
    return timings


def serve_cells(bench: Bench, model: str) -> None:
    """Start a server and measure loads."""
    loads = _TINY if bench.tiny else LOADS
    if all(bench.results.done(bench.section, load.name) for load in loads):
        return
    server = Server(bench, model)
    try:
        question = "How long from the command until requests are accepted, with the programs of the steps compiled?"
        if not bench.again("start", 120, server.start, limit=START_LIMIT, answers=question):
            return
        for load in loads:
            question = f"How many tokens a second get {load.count} at once, and how soon the first?"
            measure = partial(server.run, load)
            bench.cell(load.name, load.estimate, measure, answers=question, optional=load.optional)
    finally:
        server.stop()


def restart_cells(bench: Bench, model: str) -> None:
    """Measure a second start, with the programs of the first."""
    server = Server(bench, model)
    try:
        bench.cell("warm start", 45, server.start, limit=START_LIMIT, answers="How long is a start with all programs?")
    finally:
        server.stop()


SECTIONS: dict[str, Callable[[Bench, str], Any]] = {"serve": serve_cells, "serve_again": restart_cells}
