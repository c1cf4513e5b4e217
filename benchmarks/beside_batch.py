"""Measure what a running batch costs online requests, and how much of the idle capacity it uses.

    python -m benchmarks.beside_batch --base-url http://127.0.0.1:8000 --rate 6 --seconds 24 --rounds 3

Each round has three phases: a batch alone, online requests alone, and both, so that a drift of the machine affects all.
The first phase begins after half a minute without online requests, because the batch then takes larger steps. The p99
is that of all rounds together; with few requests it is that of the slowest few. The report has the online time to first
token with and without the batch, the parts of its mean by the server's histograms (the rest is the client and the
network), and the share of the capacity left by online requests that the batch used.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx2
import numpy as np

from jaxserve.bench.load import (
    LoadRequest,
    LoadTarget,
    Timing,
    environment,
    find_model,
    poisson,
    random_prompt,
    random_workload,
    root_url,
    run_load,
)
from jaxserve.scheduler.background import ONLINE_MEMORY

SETTLE_SECONDS = 3.0  # from the start of a batch to the measurement
QUIET_SECONDS = ONLINE_MEMORY + 1.0  # without online requests, after which the server expects none
_STAGES = {
    "queue": "jaxserve:request_queue_time_seconds",
    "prefill": "jaxserve:request_prefill_time_seconds",
    "server": "jaxserve:time_to_first_token_seconds",
}


@dataclass(frozen=True, slots=True)
class Shape:
    """The workload of online and batch requests."""

    input_len: int
    output_len: int
    vocab_size: int

    def requests(self, count: int, seed: int) -> list[LoadRequest]:
        sizes = {"input_len": self.input_len, "output_len": self.output_len, "vocab_size": self.vocab_size}
        return random_workload(count, spread=0.5, seed=seed, **sizes)


class BatchClient:
    """A batch of random completions at a server."""

    def __init__(self, base_url: str, model: str, api_key: str | None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._model = model
        self._http = httpx2.Client(base_url=f"{base_url}/v1", headers=headers, timeout=600)
        self._id = ""

    def start(self, count: int, shape: Shape, seed: int) -> None:
        """Upload a batch of `count` requests and wait until the first one has finished."""
        data = b"".join(self._line(number, shape, seed) for number in range(count))
        parts = {"file": ("lines.jsonl", data)}
        file = self._http.post("/files", data={"purpose": "batch"}, files=parts).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = self._http.post("/batches", json=body).raise_for_status().json()["id"]
        while self.state()["request_counts"]["completed"] == 0:
            time.sleep(0.1)

    def _line(self, number: int, shape: Shape, seed: int) -> bytes:
        prompt = random_prompt(random.Random(f"{seed}-{number}"), shape.input_len, shape.vocab_size)
        body = {"model": self._model, "prompt": prompt, "max_tokens": shape.output_len}
        body |= {"temperature": 0, "ignore_eos": True}
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(line).encode() + b"\n"

    def state(self) -> dict[str, Any]:
        return self._http.get(f"/batches/{self._id}").raise_for_status().json()

    def output_tokens(self) -> int:
        """Return the output tokens of the batch so far. Raises SystemExit if it is no longer running."""
        state = self.state()
        if state["status"] != "in_progress":
            raise SystemExit(f"the batch is {state['status']}: give it more --lines")
        return state["usage"]["output_tokens"]

    def cancel(self) -> None:
        self._http.post(f"/batches/{self._id}/cancel").raise_for_status()
        while self.state()["status"] == "cancelling":
            time.sleep(0.1)


@dataclass
class Phases:
    """The timings of the online requests of all rounds, and the tokens per second of each kind of phase."""

    target: LoadTarget
    shape: Shape
    options: argparse.Namespace
    timings: dict[str, list[Timing]] = field(default_factory=lambda: {"alone": [], "beside": []})
    stages: dict[str, list[dict[str, float]]] = field(default_factory=lambda: {"alone": [], "beside": []})
    capacity: list[float] = field(default_factory=list)
    online_rate: list[float] = field(default_factory=list)
    batch_rate: list[float] = field(default_factory=list)

    def online(self, phase: str, seed: int) -> tuple[int, float]:
        """Send the online requests of a phase, with prompts that no other phase uses.

        Returns their number and the seconds. Raises SystemExit if one fails.
        """
        count = max(1, round(self.options.rate * self.options.seconds))
        requests = poisson(self.shape.requests(count, seed), self.options.rate, seed=seed // 2)  # same times in both
        before = self._sums()
        timings, seconds = asyncio.run(run_load(self.target, requests, concurrency=None))
        for timing in timings:
            if timing.error is not None:
                raise SystemExit(f"an online request failed: {timing.error}")
        after = self._sums()
        self.timings[phase] += timings
        self.stages[phase].append({name: (after[name] - before[name]) / count * 1000 for name in _STAGES})
        return count, seconds

    def _sums(self) -> dict[str, float]:
        """Return the seconds of online requests by stage; NaN if the server has no such metric."""
        headers = {"Authorization": f"Bearer {self.target.api_key}"} if self.target.api_key else {}
        text = httpx2.get(f"{self.target.base_url}/metrics", headers=headers).text
        found = {
            name: re.search(rf"^{metric}_sum(?:{{.*}})? ([0-9.e+-]+)$", text, re.M) for name, metric in _STAGES.items()
        }
        return {name: float(match[1]) if match else float("nan") for name, match in found.items()}

    @contextlib.contextmanager
    def _batch(self, seed: int) -> Iterator[BatchClient]:
        """Run a batch meanwhile."""
        batch = BatchClient(self.target.base_url, self.target.model, self.target.api_key)
        batch.start(self.options.lines, self.shape, seed)
        try:
            time.sleep(SETTLE_SECONDS)
            yield batch
        finally:
            batch.cancel()

    def batch_alone(self, number: int) -> None:
        with self._batch(seed=-1 - number) as batch:
            before, started = batch.output_tokens(), time.perf_counter()
            time.sleep(self.options.seconds)
            self.capacity.append((batch.output_tokens() - before) / (time.perf_counter() - started))

    def round(self, number: int) -> None:
        """Run the three phases of one round."""
        if number:
            time.sleep(QUIET_SECONDS)
        self.batch_alone(number)
        self.online("alone", 2 * number)
        with self._batch(seed=number) as batch:
            before = batch.output_tokens()
            count, seconds = self.online("beside", 2 * number + 1)
            self.batch_rate.append((batch.output_tokens() - before) / seconds)
        self.online_rate.append(sum(timing.output_tokens for timing in self.timings["beside"][-count:]) / seconds)

    def report(self) -> dict[str, Any]:
        """Summarize all rounds."""
        capacity, online, batch = map(np.asarray, (self.capacity, self.online_rate, self.batch_rate))
        used = batch / (capacity - online)
        ttft = {phase: [timing.ttft * 1000 for timing in timings] for phase, timings in self.timings.items()}
        size = len(ttft["alone"]) // self.options.rounds
        p99 = {phase: float(np.percentile(times, 99)) for phase, times in ttft.items()}
        return {
            "online_requests": len(ttft["alone"]),
            "ttft_p50_ms": {phase: float(np.percentile(times, 50)) for phase, times in ttft.items()},
            "ttft_p90_ms": {phase: float(np.percentile(times, 90)) for phase, times in ttft.items()},
            "ttft_p99_ms": p99,
            "ttft_p99_ms_of_rounds": {
                phase: [float(np.percentile(times[i : i + size], 99)) for i in range(0, len(times), size)]
                for phase, times in ttft.items()
            },
            "ttft_p99_ratio": p99["beside"] / p99["alone"],
            "ttft_mean_ms": {phase: self._means(phase, float(np.mean(times))) for phase, times in ttft.items()},
            "tokens_per_second_of_rounds": {
                "batch_alone": capacity.tolist(),
                "online": online.tolist(),
                "batch_beside": batch.tolist(),
            },
            "spare_capacity_used_of_rounds": used.tolist(),
            "spare_capacity_used": float(np.mean(batch) / np.mean(capacity - online)),
        }

    def _means(self, phase: str, client: float) -> dict[str, float]:
        rounds = self.stages[phase]
        mean = {name: float(np.mean([each[name] for each in rounds])) for name in _STAGES}
        api = mean["server"] - mean["queue"] - mean["prefill"]
        return {"queue": mean["queue"], "prefill": mean["prefill"], "api": api, "client": client - mean["server"]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all rounds against the server; return the report with the environment."""
    model = asyncio.run(find_model(options.base_url, options.api_key))
    shape = Shape(options.input_len, options.output_len, options.vocab_size)
    target = LoadTarget(options.base_url, model, options.api_key, token_ids=True)
    phases = Phases(target, shape, options)
    for number in range(options.rounds):
        phases.round(number)
    return {"model": model, "environment": environment(), **phases.report()}


def main() -> None:
    """Measure the server of the command line and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
    parser.add_argument("--api-key")
    parser.add_argument("--rate", type=float, default=6.0, help="online requests per second")
    parser.add_argument("--seconds", type=float, default=24.0, help="seconds per phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=5000, help="requests per batch")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=1000, help="random prompts use ids below it")
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
