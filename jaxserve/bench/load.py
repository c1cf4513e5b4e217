"""Send a workload to any OpenAI-compatible server, and record and summarize the time of every token.

A workload is a list of prompts, output lengths and arrival times, which are drawn from a seed. There are three kinds:
random token ids, a text file, and a trace of a production service. The report has percentiles, throughput and goodput,
as a table and as JSON with the environment.
"""

from __future__ import annotations

import asyncio
import csv
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import accumulate, cycle, islice
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson

from jaxserve.errors import ConfigError
from jaxserve.version import __version__


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload. at: seconds from the start until it is sent; None: as soon as concurrency allows

    messages: of a chat, in place of the prompt
    """

    prompt: str | list[int]
    num_prompt_tokens: int | None  # None: only the server knows the number
    max_tokens: int
    at: float | None = None
    messages: list[dict[str, Any]] | None = None


def random_workload(
    count: int, *, input_len: int, output_len: int, vocab_size: int, spread: float = 0.0, seed: int = 0
) -> list[LoadRequest]:
    """Make prompts of random token ids. With `spread` 0.5, lengths are drawn from 0.5 to 1.5 times the given ones."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    requests = []
    for _ in range(count):
        n = length(input_len)
        requests.append(LoadRequest(random_prompt(rng, n, vocab_size), n, length(output_len)))
    return requests


def random_prompt(rng: random.Random, length: int, vocab_size: int) -> list[int]:
    """Return random token ids, without the lowest ones, which are special tokens in many vocabularies."""
    return [rng.randrange(min(256, vocab_size // 2), vocab_size) for _ in range(length)]


def dataset_workload(path: Path, count: int, *, output_len: int, seed: int = 0) -> list[LoadRequest]:
    """Read prompts from a JSONL file: the first string under prompt, question, text, turns or messages.

    Raises ConfigError if the file cannot be read, or if no line has a prompt.
    """
    lines = _text(path).split("\n")  # splitlines would also split at U+2028, which JSON's strings may contain
    prompts = [text for number, line in enumerate(lines, 1) if (text := _prompt_of(path, number, line))]
    if not prompts:
        raise ConfigError(f"{path} holds no line with a prompt, question, text, turns or messages")
    rng = random.Random(seed)
    return [LoadRequest(rng.choice(prompts), None, output_len) for _ in range(count)]


def _text(path: Path) -> str:
    """Return the text of the user's file. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8") from None


def _prompt_of(path: Path, number: int, line: str) -> str | None:
    try:
        record = json.loads(line) if line.strip() else {}
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise ConfigError(f"line {number} of {path} is no JSON object")
    for key in ("prompt", "question", "text", "turns", "messages"):
        value = record.get(key)
        if isinstance(value, list) and value:
            value = value[0].get("content") if isinstance(value[0], dict) else value[0]
        if isinstance(value, str):
            return value
    return None


def trace_workload(
    path: Path, count: int, *, vocab_size: int, speed: float = 1.0, max_len: int, seed: int = 0
) -> list[LoadRequest]:
    """Read arrival times and lengths from a CSV trace (TIMESTAMP, ContextTokens, GeneratedTokens).

    Prompts are random token ids.
    speed: divides the arrival times. max_len: limit of prompt plus output tokens, at least 3
    Raises ConfigError if the file is not a trace of at least `count` requests.
    """
    rng = random.Random(seed)
    requests: list[LoadRequest] = []
    for at, prompt_len, output_len in trace_rows(path):
        prompt_len = max(1, min(prompt_len, max_len - 2))
        output_len = max(1, min(output_len, max_len - prompt_len - 1))
        prompt = random_prompt(rng, prompt_len, vocab_size)
        requests.append(LoadRequest(prompt, prompt_len, output_len, at / speed))
        if len(requests) == count:
            return requests
    raise ConfigError(
        f"{path} has {len(requests)} requests, fewer than the {count} asked for", fix="lower --num-prompts"
    )


def trace_rows(path: Path) -> Iterator[tuple[float, int, int]]:
    """Yield the seconds since the first row, the prompt tokens and the output tokens of each row of a CSV trace.

    Raises ConfigError if the file cannot be read, or if a row has another form.
    """
    start: datetime | None = None
    rows = csv.DictReader(_text(path).splitlines())
    for row in rows:
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or when
            yield (when - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError):  # TypeError: the row is cut off, or the file has two forms of time
            fix = "it needs the columns TIMESTAMP, ContextTokens and GeneratedTokens"
            raise ConfigError(f"line {rows.line_num} of {path} is no row of a trace", fix=fix) from None


def warm_up_workload(requests: list[LoadRequest], count: int, *, vocab_size: int, seed: int = 0) -> list[LoadRequest]:
    """Return requests of the same lengths with other prompts, so that the measured prompts are not cached."""
    rng = random.Random(f"warm-up {seed}")

    def other(prompt: str | list[int]) -> str | list[int]:
        return f"{rng.random()} {prompt}" if isinstance(prompt, str) else random_prompt(rng, len(prompt), vocab_size)

    return [replace(request, prompt=other(request.prompt), at=None) for request in islice(cycle(requests), count)]


def poisson(requests: list[LoadRequest], rate: float, *, seed: int = 0) -> list[LoadRequest]:
    """Return the requests with arrival times: `rate` requests per second, with exponential gaps."""
    rng = random.Random(seed)
    times = accumulate((rng.expovariate(rate) for _ in requests[1:]), initial=0.0)
    return [replace(request, at=at) for request, at in zip(requests, times, strict=False)]


_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")  # texts in a chunk of a chat
_NO_STREAM = (ValueError, LookupError, TypeError, AttributeError)  # raised by reading events of another form
READ_TIMEOUT = 600.0  # most seconds without a byte


@dataclass(slots=True)
class Timing:
    """The times of one request, in seconds since the start of the run."""

    sent: float
    token_times: list[float] = field(default_factory=list)  # time of each chunk with text or tokens, at least one
    output_tokens: int = 0
    prompt_tokens: int = 0
    ended: float = 0.0
    error: str | None = None

    @property
    def ttft(self) -> float:
        return self.token_times[0] - self.sent

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def tpot(self) -> float | None:
        """Mean seconds of an output token after the first; None for fewer than two tokens."""
        if self.output_tokens < 2 or not self.token_times:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class LoadTarget:
    """The server under load."""

    base_url: str  # without /v1
    model: str
    api_key: str | None = None
    chat: bool = False
    ignore_eos: bool = True
    token_ids: bool = False  # whether to request token ids, so that a token without text is timed too


def root_url(text: str) -> str:
    """Return a server's address without the /v1 that OpenAI's clients need."""
    return text.rstrip("/").removesuffix("/v1")


async def find_model(base_url: str, api_key: str | None = None) -> str:
    """Return the first model that the server serves. Raises ConfigError if no server answers."""
    async with httpx2.AsyncClient(headers=_headers(api_key)) as client:
        try:
            reply = await client.get(f"{base_url}/v1/models")
            return str(reply.json()["data"][0]["id"])
        except (httpx2.HTTPError, httpx2.InvalidURL, LookupError, TypeError, ValueError) as error:
            raise ConfigError(f"no OpenAI-compatible server at {base_url}: {error}") from None


async def run_load(
    target: LoadTarget,
    requests: list[LoadRequest],
    *,
    concurrency: int | None,
    on_done: Callable[[Timing], None] = lambda timing: None,
) -> tuple[list[Timing], float]:
    """Send all requests, at most `concurrency` at once and none before its time.

    Returns the timings and the seconds of the whole run.
    """
    gate = asyncio.Semaphore(concurrency or len(requests) or 1)

    async with client_of(target) as client:
        start = time.perf_counter()  # after the client has read the certificates of this machine, for 0.05 s and more

        async def one(request: LoadRequest) -> Timing:
            if request.at is not None:
                await asyncio.sleep(max(0.0, request.at - (time.perf_counter() - start)))
            async with gate:
                timing = await send(client, target, request, start)
            on_done(timing)
            return timing

        timings = await asyncio.gather(*(one(request) for request in requests))
        seconds = time.perf_counter() - start
    return list(timings), seconds


def client_of(target: LoadTarget) -> httpx2.AsyncClient:
    """Return a client without a limit of connections."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx2.AsyncClient(limits=limits, timeout=READ_TIMEOUT, headers=_headers(target.api_key))


async def send(client: httpx2.AsyncClient, target: LoadTarget, request: LoadRequest, start: float) -> Timing:
    """Send a request and read its stream. start: the time of a run's start, on the clock of `perf_counter`"""
    timing = Timing(sent=time.perf_counter() - start)
    chat = target.chat or request.messages is not None
    route = "/v1/chat/completions" if chat else "/v1/completions"
    try:
        async with client.stream("POST", target.base_url + route, json=_body(target, request)) as reply:
            if reply.status_code != 200:
                timing.error = f"{reply.status_code}: {(await reply.aread())[:200]!r}"
            else:
                await _read_events(reply, timing, start)
    except (httpx2.HTTPError, httpx2.InvalidURL, *_NO_STREAM) as error:
        timing.error = f"{type(error).__name__}: {error}"
    timing.ended = time.perf_counter() - start
    if timing.error is None and not timing.token_times:
        timing.error = "no token arrived"
    return timing


async def _read_events(reply: httpx2.Response, timing: Timing, start: float) -> None:
    counted = ended = False
    async for line in reply.aiter_lines():
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        now = time.perf_counter() - start
        event = orjson.loads(line[6:])
        if "error" in event:
            timing.error = str(event["error"].get("message"))
        timing.token_times += [now for choice in event.get("choices", ()) if _is_timed(choice, timing)]
        if usage := event.get("usage"):
            counted = True
            timing.output_tokens = usage["completion_tokens"]
            timing.prompt_tokens = usage["prompt_tokens"]
    if timing.error is None and not (ended and counted):
        timing.error = "the stream has no usage" if ended else "the stream ended before its end was sent"


def _is_timed(choice: dict[str, Any], timing: Timing) -> bool:
    """Return whether a chunk brings tokens. If no chunk did, the last one does: its token has no text."""
    brings = _has_text(choice) or bool(choice.get("token_ids"))
    return brings or (bool(choice.get("finish_reason")) and not timing.token_times)


def _has_text(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has text of the answer, of the reasoning before it, or of a call."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(name) for name in _TEXTS))


def _body(target: LoadTarget, request: LoadRequest) -> dict[str, object]:
    body: dict[str, object] = {
        "model": target.model,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    if target.token_ids:
        body["return_token_ids"] = True
    if request.messages is not None:
        return body | {"messages": request.messages}
    if target.chat:
        return body | {"messages": [{"role": "user", "content": request.prompt}]}
    return body | {"prompt": request.prompt}


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


@dataclass(frozen=True, slots=True)
class Spread:
    """Statistics of a sample in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        if not seconds:
            return None
        ms = np.asarray(seconds) * 1e3
        points = [float(np.mean(ms)), *(float(p) for p in np.percentile(ms, [50, 90, 99])), float(np.max(ms))]
        return cls(*(round(point, 3) for point in points))


@dataclass(frozen=True, slots=True)
class LoadReport:
    completed: int
    failed: int
    seconds: float
    request_rate: float  # completed requests per second
    prompt_tokens: int
    output_tokens: int
    output_rate: float  # tokens per second
    total_rate: float  # prompt and output tokens per second
    goodput: float | None  # requests per second within the limits; None without limits
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None  # gaps between two chunks
    e2e_ms: Spread | None
    first_error: str | None


def summarize(
    timings: Sequence[Timing], seconds: float, *, ttft_limit: float | None = None, tpot_limit: float | None = None
) -> LoadReport:
    """Summarize a run. A request counts for goodput if it is within both limits, in seconds."""
    good = [t for t in timings if t.error is None]
    output = sum(t.output_tokens for t in good)
    prompt = sum(t.prompt_tokens for t in good)
    limited = ttft_limit is not None or tpot_limit is not None
    within = sum(_within(t.ttft, ttft_limit) and _within(t.tpot, tpot_limit) for t in good)
    return LoadReport(
        completed=len(good),
        failed=len(timings) - len(good),
        seconds=round(seconds, 3),
        request_rate=round(len(good) / seconds, 3),
        prompt_tokens=prompt,
        output_tokens=output,
        output_rate=round(output / seconds, 2),
        total_rate=round((prompt + output) / seconds, 2),
        goodput=round(within / seconds, 3) if limited else None,
        ttft_ms=Spread.of([t.ttft for t in good]),
        tpot_ms=Spread.of([t.tpot for t in good if t.tpot is not None]),
        itl_ms=Spread.of([gap for t in good for gap in t.gaps]),
        e2e_ms=Spread.of([t.ended - t.sent for t in good]),
        first_error=next((t.error for t in timings if t.error is not None), None),
    )


def _within(value: float | None, limit: float | None) -> bool:
    return limit is None or value is None or value <= limit


def table(report: LoadReport) -> str:
    """Return the report as aligned lines."""
    lines = [
        f"completed {report.completed}, failed {report.failed}, in {report.seconds:.2f} s",
        f"output {report.output_rate:.1f} tokens/s, total {report.total_rate:.1f} tokens/s, "
        f"{report.request_rate:.2f} requests/s"
        + (f", goodput {report.goodput:.2f}/s" if report.goodput is not None else ""),
        f"{'ms':28}{'mean':>10}{'median':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    names = {
        "time to first token": report.ttft_ms,
        "time per output token": report.tpot_ms,
        "gap between chunks": report.itl_ms,
        "end to end": report.e2e_ms,
    }
    for name, spread in names.items():
        if spread is not None:
            lines.append(f"{name:28}" + "".join(f"{value:10.1f}" for value in asdict(spread).values()))
    if report.first_error is not None:
        lines.append(f"first error: {report.first_error}")
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """Return the versions and the machine, which are printed beside every figure."""
    packages = {"jaxserve": __version__}
    for name in ("jax", "jaxlib", "flax", "numpy"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "packages": packages,
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def write_json(record: dict[str, Any], path: Path | None, details: dict[str, Any] | None = None) -> None:
    """Print a record with the environment as one JSON line, and write it to `path` together with `details`.

    Raises ConfigError if it cannot be written.
    """
    record = {"environment": environment()} | record
    print(orjson.dumps(record).decode())
    if path is not None:
        try:
            path.write_bytes(orjson.dumps(record | (details or {})))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
