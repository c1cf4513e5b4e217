"""Compare two servers on the same model directory, measured in turn: ratios with minimum, median and maximum.

    python -m benchmarks.compare MODEL_DIR --peer VLLM_ENV [--concurrency 1 8 32] [--rounds 3] [--dtype bfloat16]

Each round starts jaxserve, measures it at every concurrency, stops it, and does the same with vLLM. The order changes
between rounds, so that a drift of the machine affects both. Only one server runs at a time. With `--json FILE` the
rounds in FILE count too, so that a comparison can be made in several calls. floors.py measures the machine before the
first server starts; the share of its floors that each server reaches is printed too.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.floors import Machine, ModelSize, decode_floor, measure_machine, model_size, prefill_floor
from jaxserve.bench.load import LoadReport, LoadTarget, environment, find_model, random_workload, run_load, summarize
from jaxserve.errors import ConfigError
from jaxserve.transport.child import child_environment, python_command

START_TIMEOUT = 600.0  # seconds
WAITING = {"JAXSERVE_RUNTIME__WAIT_FOR_PROGRAMS": "true"}  # a measurement begins with all programs


@dataclass(frozen=True)
class Server:
    """How to start one server. `running` appends host and port to `command`."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


def jaxserve_server(model: Path, max_len: int, dtype: str = "float32") -> Server:
    command = python_command("jaxserve", "launch", "--model", str(model), "--dtype", dtype)
    store = Path(tempfile.gettempdir()) / "jaxserve-compare"  # another server may use the default store
    return Server("jaxserve", (*command, "--max-model-len", str(max_len), "--store.path", str(store)), WAITING)


def vllm_server(model: Path, max_len: int, environment_dir: Path, dtype: str = "float32") -> Server:
    """Return vLLM for a CPU, from its virtual environment."""
    binaries = environment_dir / "bin"
    command = (str(binaries / "vllm"), "serve", str(model), "--dtype", dtype, "--max-model-len", str(max_len))
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{(os.cpu_count() or 1) - 1}",
        "PATH": f"{binaries}:{os.environ['PATH']}",
    }
    return Server("vllm", command, variables)


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[str]:
    """Run a server and yield its URL. Ends its whole process group afterwards."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*server.command, "--host", "127.0.0.1", "--port", str(port)],
            env=child_environment() | server.environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield url
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ConfigError(f"the server ended with status {process.returncode}", fix=f"see {log}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as reply:
                if reply.status == 200:
                    return
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            pass
        time.sleep(0.5)
    raise ConfigError(f"{url} was not ready within {START_TIMEOUT:.0f} s", fix=f"see {log}")


def measure(url: str, concurrency: int, options: argparse.Namespace) -> LoadReport:
    """Measure one server at one concurrency, after a warm-up of the same shape."""
    model = asyncio.run(find_model(url))
    target = LoadTarget(url, model)
    lengths = {"input_len": options.input_len, "output_len": options.output_len, "vocab_size": options.vocab_size}
    warmup = random_workload(max(2, concurrency), seed=1, **lengths)
    asyncio.run(run_load(target, warmup, concurrency=concurrency))
    requests = random_workload(max(8, 3 * concurrency), seed=2, **lengths)
    timings, seconds = asyncio.run(run_load(target, requests, concurrency=concurrency))
    return summarize(timings, seconds)


def compare(
    servers: Sequence[Server], options: argparse.Namespace, records: list[dict[str, object]], save: Callable[[], None]
) -> None:
    """Append a record per round, server and concurrency. Round numbers continue those of `records`."""
    first = 1 + max((int(str(record["round"])) for record in records), default=-1)
    log = Path(tempfile.gettempdir()) / "jaxserve-compare.log"
    for turn in range(first, first + options.rounds):
        for server in servers if turn % 2 == 0 else reversed(servers):
            with running(server, log) as url:
                for concurrency in options.concurrency:
                    report = measure(url, concurrency, options)
                    records.append({"round": turn, "server": server.name, "concurrency": concurrency, **asdict(report)})
                    save()
                    print(
                        f"round {turn} {server.name:9} at {concurrency:3}: {report.output_rate:8.1f} tokens/s",
                        flush=True,
                    )


def ratios(records: Sequence[dict[str, object]], ours: str, peer: str) -> dict[int, tuple[float, float, float]]:
    """Return {concurrency: (minimum, median, maximum)} over rounds of our output rate divided by the peer's."""
    rates = {(r["round"], r["server"], r["concurrency"]): float(str(r["output_rate"])) for r in records}
    found: dict[int, list[float]] = {}
    for (turn, server, concurrency), rate in rates.items():
        if server == ours and (turn, peer, concurrency) in rates:
            found.setdefault(int(str(concurrency)), []).append(rate / rates[turn, peer, concurrency])
    return {c: (min(v), statistics.median(v), max(v)) for c, v in sorted(found.items())}


def floor_rate(machine: Machine, model: ModelSize, concurrency: int, options: argparse.Namespace) -> float:
    """Return output tokens per second if every step took its floor: first the prompts, then `concurrency` rows."""
    prefill = prefill_floor(machine, model, concurrency * options.input_len)
    step = decode_floor(machine, model, concurrency, options.input_len + options.output_len // 2)
    return concurrency * options.output_len / (prefill + options.output_len * step)


def show_floors(
    records: Sequence[dict[str, object]], machine: Machine, model: ModelSize, options: argparse.Namespace
) -> None:
    """Print the medians over the rounds and the floor, for each server and concurrency."""
    print(f"machine: {machine.bandwidth / 1e9:.1f} GB/s, {machine.rate / 1e9:.0f} GFLOP/s (float32, the best product)")
    for concurrency in sorted({int(str(record["concurrency"])) for record in records}):
        floor = floor_rate(machine, model, concurrency, options)
        step = decode_floor(machine, model, concurrency, options.input_len + options.output_len // 2) * 1e3
        print(f"at {concurrency:3}: floor {floor:.1f} tokens/s, {step:.1f} ms per decode step")
        for name in sorted({str(record["server"]) for record in records}):
            own = [r for r in records if r["server"] == name and r["concurrency"] == concurrency]
            rate = statistics.median(float(str(r["output_rate"])) for r in own)
            gap = statistics.median(_median(r["itl_ms"]) for r in own)
            print(
                f"    {name:9} {rate:.1f} tokens/s, {rate / floor:.0%} of the floor; "
                f"median gap between tokens {gap:.1f} ms, the step's floor is {step / gap:.0%} of it"
            )


def _median(spread: object) -> float:
    return float(spread["median"]) if isinstance(spread, dict) else math.nan


def _earlier(path: Path | None) -> list[dict[str, object]]:
    """Return the records that an earlier call wrote."""
    return json.loads(path.read_bytes())["records"] if path is not None and path.exists() else []


def main() -> None:
    """Compare the servers as the command line says and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer", type=Path, help="virtual environment with vllm; without it only jaxserve runs")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=2000)
    parser.add_argument("--max-len", type=int, default=2048)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="floors are of float32")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine, model = measure_machine(), model_size(options.model)
    servers = [jaxserve_server(options.model, options.max_len, options.dtype)]
    if options.peer is not None:
        servers.append(vllm_server(options.model, options.max_len, options.peer, options.dtype))
    records = _earlier(options.json)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that the running server is ended too

    def save() -> None:
        if options.json is not None:
            result = {"environment": environment(), "machine": asdict(machine), "records": records}
            options.json.write_text(json.dumps(result, indent=1))

    compare(servers, options, records, save)
    for concurrency, (low, median, high) in ratios(records, "jaxserve", "vllm").items():
        print(f"at {concurrency:3}: jaxserve / vllm {median:.2f} (min {low:.2f}, max {high:.2f})")
    if options.dtype == "float32":
        show_floors(records, machine, model, options)


if __name__ == "__main__":
    main()
