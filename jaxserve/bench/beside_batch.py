"""What a running batch costs online requests, and how much of the idle capacity it uses.

    python -m jaxserve.bench.beside_batch --base-url http://127.0.0.1:8000 --rate 4 --seconds 60

Three runs at one server: online requests alone, a batch alone, both. Reported are the online p99 time to first token
with and without the batch, and the share of the capacity left by the online requests that the batch used, in tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx2
import numpy as np

from jaxserve.bench.load import Target, Timing, find_model, run_load
from jaxserve.bench.report import environment
from jaxserve.bench.workload import LoadRequest, poisson, random_workload

SETTLE_SECONDS = 5.0  # a batch runs so long before anything is measured beside it


@dataclass(frozen=True, slots=True)
class Shape:
    """One workload for online requests and lines alike."""

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

    def start(self, lines: int, shape: Shape) -> None:
        data = b"".join(self._line(number, shape) for number in range(lines))
        parts = {"file": ("lines.jsonl", data)}
        file = self._http.post("/files", data={"purpose": "batch"}, files=parts).raise_for_status().json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        self._id = self._http.post("/batches", json=body).raise_for_status().json()["id"]
        while self.state()["request_counts"]["completed"] == 0:
            time.sleep(0.1)

    def _line(self, number: int, shape: Shape) -> bytes:
        rng = random.Random(number)
        low = min(256, shape.vocab_size // 2)
        prompt = [rng.randrange(low, shape.vocab_size) for _ in range(shape.input_len)]
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": shape.output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        line = {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body}
        return json.dumps(line).encode() + b"\n"

    def state(self) -> dict[str, Any]:
        return self._http.get(f"/batches/{self._id}").raise_for_status().json()

    def output_tokens(self) -> int:
        state = self.state()
        if state["status"] != "in_progress":
            raise SystemExit(f"the batch is {state['status']}: give it more --lines")
        return state["usage"]["output_tokens"]

    def cancel(self) -> None:
        self._http.post(f"/batches/{self._id}/cancel").raise_for_status()
        while self.state()["status"] == "cancelling":
            time.sleep(0.1)


def online(target: Target, requests: list[LoadRequest]) -> tuple[list[Timing], float]:
    timings, seconds = asyncio.run(run_load(target, requests, concurrency=None))
    for timing in timings:
        if timing.error is not None:
            raise SystemExit(f"an online request failed: {timing.error}")
    return timings, seconds


def percentile(timings: list[Timing], share: float) -> float:
    """Time to first token, ms."""
    return float(np.percentile([timing.ttft for timing in timings], share)) * 1000


def measure(options: argparse.Namespace) -> dict[str, Any]:
    model = asyncio.run(find_model(options.base_url, options.api_key))
    shape = Shape(options.input_len, options.output_len, options.vocab_size)
    target = Target(options.base_url, model, options.api_key)
    count = max(1, round(options.rate * options.seconds))
    make = lambda seed: poisson(shape.requests(count, seed), options.rate, seed=0)
    online(target, make(0)[: max(1, count // 10)])  # warm-up
    alone, _ = online(target, make(1))

    batch = BatchClient(options.base_url, model, options.api_key)
    batch.start(options.lines, shape)
    try:
        time.sleep(SETTLE_SECONDS)
        before, started = batch.output_tokens(), time.perf_counter()
        time.sleep(options.seconds)
        middle, batch_alone = batch.output_tokens(), time.perf_counter() - started
        beside, seconds = online(target, make(2))  # other prompts: none is in the prefix cache
        after = batch.output_tokens()
    finally:
        batch.cancel()
    capacity = (middle - before) / batch_alone
    online_rate = sum(timing.output_tokens for timing in beside) / seconds
    batch_rate = (after - middle) / seconds
    return {
        "model": model,
        "environment": environment(),
        "online_requests": count,
        "ttft_p50_ms": {"alone": percentile(alone, 50), "beside": percentile(beside, 50)},
        "ttft_p99_ms": {"alone": percentile(alone, 99), "beside": percentile(beside, 99)},
        "ttft_p99_ratio": percentile(beside, 99) / percentile(alone, 99),
        "tokens_per_second": {"batch_alone": capacity, "online": online_rate, "batch_beside": batch_rate},
        "spare_capacity_used": batch_rate / (capacity - online_rate),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="without /v1")
    parser.add_argument("--api-key")
    parser.add_argument("--rate", type=float, default=2.0, help="online requests a second")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--lines", type=int, default=5000)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=1000, help="random prompts use ids below it")
    print(json.dumps(measure(parser.parse_args()), indent=2))


if __name__ == "__main__":
    main()
