"""Measure how long requests with stretched fields block the loops that all tenants share.

    python -m benchmarks.lag --seconds 3600 --json lag.json [--launch "--scheduler.max-num-seqs 16"]
    python -m benchmarks.lag --seed 0 --only 4711,4712            # repeat requests of a report

Starts a server with the demo model and sends it requests, --clients at a time, while another tenant streams. The report
has, in milliseconds, how late the event loop of the API process wakes a task, and how long the engine's loop works
between two steps without the device. It names the requests during which either was longest. The exit code is 1 after an
exceeded limit (50 ms at the 99.9th percentile, 250 ms at most), a status 5xx, a missing answer, a restart, or a changed
text of the other tenant. Ends early if the server does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from benchmarks.held import read_samples, read_slow
from benchmarks.lag_engine import DIRECTORY
from benchmarks.stretched import Stretched, stretched
from jaxserve.bench.load import environment

P999, MOST = 50.0, 250.0  # milliseconds
ROOT = Path(__file__).parent.parent  # import path of this folder, also for the server's processes
LOOPS = ("api", "engine")
TIMEOUT = 120.0  # seconds for an answer
AFTERMATH = 2.0  # seconds after its answer in which a request may still block a loop
CONTROL = {"model": "demo", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 48}
START_TIMEOUT = 900.0


@dataclass
class Sent:
    """One request, and the longest time in milliseconds that each loop was blocked meanwhile."""

    number: int
    path: str
    changed: tuple[str, ...]
    bytes: int
    began: float
    ended: float = 0.0
    status: int = 0
    error: str = ""
    held_ms: dict[str, float] = field(default_factory=dict)


@contextlib.contextmanager
def started(directory: Path, flags: Sequence[str]) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start a server that measures itself; yield its address and process. Raises SystemExit if it does not start."""
    words = [sys.executable, "-P", "-m", "benchmarks.lag_server", "--port", "0", "--store.path", "null", *flags]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environ = os.environ | {DIRECTORY: str(directory), "PYTHONPATH": path}
    log = (directory / "server.log").open("wb")
    with log, subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environ, text=True
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        timer = threading.Timer(START_TIMEOUT, process.kill)
        timer.start()
        try:
            url = process.stdout.readline().strip()
            timer.cancel()
            if not url:
                raise SystemExit(f"the server did not start: {(directory / 'server.log').read_text()[-2000:]}")
            yield url, process
        finally:
            timer.cancel()
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


class Tenant(threading.Thread):
    """Another tenant, which streams the same greedy text repeatedly."""

    def __init__(self, url: str) -> None:
        super().__init__(name="tenant", daemon=True)
        self._url, self.over = url, threading.Event()
        self.texts, self.errors = Counter[str](), Counter[str]()

    def run(self) -> None:
        """Stream the same text until the test is over, and count the different answers."""
        with httpx2.Client(base_url=self._url, timeout=TIMEOUT) as http:
            while not self.over.is_set():
                try:
                    self.texts[self._text(http)] += 1
                except (httpx2.HTTPError, KeyError, ValueError) as error:
                    self.errors[f"{type(error).__name__}: {error}"[:200]] += 1
                    self.over.wait(1.0)

    def _text(self, http: httpx2.Client) -> str:
        text = ""
        with http.stream("POST", "/v1/completions", json=CONTROL | {"stream": True}) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    text += json.loads(line[6:])["choices"][0]["text"]
        return text


class Clients:
    """Sends numbered requests until the time is over, from several threads."""

    def __init__(self, url: str, process: subprocess.Popen[str], options: argparse.Namespace) -> None:
        self._url, self._process, self._options = url, process, options
        self._numbers = iter(options.only or range(10**9))
        self._lock, self._over = threading.Lock(), threading.Event()
        self.sent: list[Sent] = []
        self.restarts: float | None = None

    def run(self) -> None:
        """Send requests from all client threads until the time is over."""
        end = time.monotonic() + self._options.seconds
        threads = [
            threading.Thread(target=self._client, args=(end,), daemon=True) for _ in range(self._options.clients)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:  # report the measurements so far
            self._over.set()
        self.restarts = self._restarts()

    def _restarts(self) -> float | None:
        """Return the server's count of engine restarts; None if it does not answer."""
        with contextlib.suppress(httpx2.HTTPError):
            if found := re.search(
                r"^jaxserve:engine_restarts_total(?:{.*})? (\S+)", httpx2.get(f"{self._url}/metrics").text, re.M
            ):
                return float(found[1])
        return None

    def _client(self, end: float) -> None:
        with httpx2.Client(base_url=self._url, timeout=TIMEOUT) as http:
            while time.monotonic() < end and self._process.poll() is None and not self._over.is_set():
                with self._lock:
                    number = next(self._numbers, None)
                if number is None:
                    return
                self._send(http, number, stretched(random.Random(f"{self._options.seed}-{number}")))

    def _send(self, http: httpx2.Client, number: int, request: Stretched) -> None:
        sent = Sent(number, request.path, request.changed, len(request.body), time.monotonic())
        self.sent.append(sent)
        try:
            reply = http.post(request.path, content=request.body, headers={"content-type": "application/json"})
            sent.status = reply.status_code
            sent.error = "" if reply.status_code < 400 else reply.text[:200]
        except httpx2.HTTPError as error:
            sent.error = f"{type(error).__name__}: {error}"[:200]
        sent.ended = time.monotonic()


def spread(samples: np.ndarray) -> dict[str, Any]:
    """Summarize float32 [N] seconds as percentiles in milliseconds."""
    if not len(samples):
        return {"samples": 0}
    points = [*np.percentile(samples, [50, 99, 99.9]), samples.max()]
    named = dict(zip(("p50", "p99", "p99_9", "max"), points, strict=True))
    return {"samples": len(samples)} | {name: round(float(value) * 1e3, 3) for name, value in named.items()}


def blame(sent: Sequence[Sent], directory: Path) -> None:
    """Set the longest overlapping samples of each request. Concurrent requests share a sample."""
    for loop in LOOPS:
        for slow in read_slow(directory, loop):
            for each in sent:
                if each.began < slow.at and slow.at - slow.seconds < (each.ended or slow.at) + AFTERMATH:
                    near = slow.at - slow.seconds < (each.ended or slow.at)
                    name = loop if near else f"{loop}_after"
                    each.held_ms[name] = max(each.held_ms.get(name, 0.0), round(slow.seconds * 1e3, 1))


def worst(sent: Sequence[Sent], loop: str, count: int) -> list[dict[str, Any]]:
    found = sorted((each for each in sent if loop in each.held_ms), key=lambda each: -each.held_ms[loop])
    return [summary(each) for each in found[:count]]


def summary(sent: Sent) -> dict[str, Any]:
    shown = asdict(sent)
    seconds = max(0.0, shown.pop("ended") - shown.pop("began"))
    return shown | {"seconds": round(seconds, 3)}


def report(clients: Clients, tenant: Tenant, directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Build the report and list the limits that were exceeded."""
    sent = clients.sent
    blame(sent, directory)
    loops = {loop: spread(read_samples(directory, loop)) for loop in LOOPS}
    failed = [summary(each) for each in sent if each.status >= 500 or not each.status]
    over = [
        f"{loop}: {point} {numbers[point]} ms is over {limit:.0f}"
        for loop, numbers in loops.items()
        for point, limit in (("p99_9", P999), ("max", MOST))
        if numbers.get(point, 0.0) > limit
    ]
    over += [f"{len(failed)} requests failed"] if failed else []
    over += [f"{clients.restarts} restarts of the engine"] if clients.restarts else []
    over += [f"the other tenant saw {len(tenant.texts)} texts, {dict(tenant.errors)}"] if (
        len(tenant.texts) > 1 or tenant.errors
    ) else []  # fmt: skip
    return {
        "environment": environment(),
        "seed": options.seed,
        "clients": options.clients,
        "requests": len(sent),
        "statuses": dict(sorted(Counter(each.status for each in sent).items())),
        "seconds": round(
            max((each.ended for each in sent), default=0.0) - min((each.began for each in sent), default=0.0)
        ),
        "held_ms": loops,
        "other_tenant": {"texts": len(tenant.texts), "streams": tenant.texts.total(), "errors": dict(tenant.errors)},
        "restarts": clients.restarts,
        "over": over,
        "worst": {loop: worst(sent, loop, options.worst) for loop in LOOPS},
        "failed": failed[: options.worst],
    }


def main() -> None:
    """Start the server, send the load and print the report."""
    options = parse()
    with tempfile.TemporaryDirectory(prefix="jaxserve-lag-") as name:
        directory = Path(name)
        with started(directory, shlex.split(options.launch)) as (url, process):
            tenant, clients = Tenant(url), Clients(url, process, options)
            tenant.start()
            clients.run()
            tenant.over.set()
            tenant.join(TIMEOUT)
            ended = process.poll()
            time.sleep(1.0)  # the logs are written every half second
            found = report(clients, tenant, directory, options)
    if ended is not None:
        found["over"].append(f"the server ended with status {ended}")
    text = json.dumps(found, indent=2)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    sys.exit(1 if found["over"] else 0)


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument(
        "--clients",
        type=int,
        default=1,
        help="threads that send requests",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        type=lambda text: [int(word) for word in text.split(",")],
        help="numbers of requests, separated by commas",
    )
    parser.add_argument("--worst", type=int, default=10, help="number of requests to name per loop")
    parser.add_argument("--launch", default="", help="flags of `jaxserve launch` for the server")
    parser.add_argument("--json", type=Path, help="file for the report")
    return parser.parse_args()


if __name__ == "__main__":
    main()
