"""Time starts of the demo model, cold and warm, and processor seconds of all their processes, with the phases of each.

    python -m benchmarks.start [--rounds N] [--before CHECKOUT] [-- FLAGS OF LAUNCH]

Each round has a start with an empty cache and one with the cache that it filled. --against FLAG adds to each round both
starts with FLAG too, and --before CHECKOUT those of another version, by turns. The phases are those of the ready card;
their sum stands behind them.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import psutil

PORT = 8931
POLL = 0.02  # seconds between two questions
LIMIT = 900.0  # seconds that a start may take
ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--against", action="append", default=[], help="flags of the other kind of start, as one word")
    parser.add_argument("--before", type=Path, help="a checkout of another version, whose starts are measured too")
    options, flags = parser.parse_known_args()
    flags = [flag for flag in flags if flag != "--"]
    kinds = [("as given", flags, ROOT), *((words, [*flags, *words.split()], ROOT) for words in options.against)]
    if options.before is not None:
        kinds.insert(0, ("before", flags, options.before.resolve()))
    print("kind, cache, seconds to ready, to the first answer, processor seconds to ready, to the first answer; phases")
    for _ in range(options.rounds):
        for name, words, checkout in kinds:
            with tempfile.TemporaryDirectory() as cache:
                for state in ("cold", "warm"):
                    *values, phases = measure(words, Path(cache), checkout)
                    total = sum(float(seconds) for seconds in re.findall(r" ([\d.]+)(?:,|$)", phases))
                    print(name, state, *(f"{value:.1f}" for value in values), sep=", ", end="; ")
                    print(f"{phases}; sum {total:.1f}", flush=True)


def measure(flags: list[str], cache: Path, checkout: Path) -> tuple[float, float, float, float, str]:
    """Start a server; return the seconds and processor seconds of a line's columns, and the ready card's phases."""
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(checkout)}
    command = [
        sys.executable,
        "-m",
        "jaxserve",
        "launch",
        "--port",
        str(PORT),
        "--store.path",
        str(cache / "s"),
        *flags,
    ]
    began = time.monotonic()
    with subprocess.Popen(
        command, env=environment, cwd=checkout, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        try:
            while (_get("/health") or {}).get("status") != "ready":
                if process.poll() is not None or time.monotonic() - began > LIMIT:
                    raise SystemExit("the server did not start")
                time.sleep(POLL)
            ready, spent = time.monotonic() - began, _processor_seconds(process.pid)
            body = {"model": "demo", "prompt": "Once", "max_tokens": 1}
            assert _get("/v1/completions", body) is not None
            answered, in_all = time.monotonic() - began, _processor_seconds(process.pid)
            assert process.stdout is not None
            card = "".join(iter(process.stdout.readline, "\n"))
            phases = " ".join(card[card.index("\nstart ") :].split()[1:])
            return ready, answered, spent, in_all, phases
        finally:
            process.send_signal(signal.SIGTERM)


def _get(path: str, body: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """Return the answer; None: there is none yet."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)
    except (urllib.error.URLError, ConnectionError):
        return None


def _processor_seconds(pid: int) -> float:
    """Return user and system seconds of a process and of all that it has started, those that have ended included."""
    root = psutil.Process(pid)
    return sum(sum(process.cpu_times()[:4]) for process in [root, *root.children(recursive=True)])


if __name__ == "__main__":
    main()
