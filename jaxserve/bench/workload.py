"""Workloads: prompts, output lengths and arrival times, drawn from a seed.

There are three kinds: random token ids, a text file, and a trace of a production service.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import accumulate, cycle, islice
from pathlib import Path

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload. at: seconds from the start until it is sent; None: as soon as concurrency allows."""

    prompt: str | list[int]
    num_prompt_tokens: int | None  # None: only the server knows
    max_tokens: int
    at: float | None = None


def random_workload(
    count: int, *, input_len: int, output_len: int, vocab_size: int, spread: float = 0.0, seed: int = 0
) -> list[LoadRequest]:
    """Make prompts of random token ids. With `spread` 0.5 lengths are drawn from 0.5 to 1.5 times the given ones."""
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

    Raises ConfigError if the file cannot be read, or no line has one.
    """
    lines = _text(path).split("\n")  # splitlines would also split at U+2028, which JSON's strings may contain
    prompts = [text for number, line in enumerate(lines, 1) if (text := _prompt_of(path, number, line))]
    if not prompts:
        raise ConfigError(f"{path} holds no line with a prompt, question, text, turns or messages")
    rng = random.Random(seed)
    return [LoadRequest(rng.choice(prompts), None, output_len) for _ in range(count)]


def _text(path: Path) -> str:
    """Return the text of a file of the user. Raises ConfigError."""
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

    Prompts are random token ids. speed: divides the times. max_len: limit of prompt plus output tokens, at least 3
    Raises ConfigError if the file is no trace of so many requests.
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

    Raises ConfigError if the file cannot be read or a row is no such row.
    """
    start: datetime | None = None
    rows = csv.DictReader(_text(path).splitlines())
    for row in rows:
        try:
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or when
            yield (when - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError):  # TypeError: a row that is cut off, or two forms of time
            fix = "it needs the columns TIMESTAMP, ContextTokens and GeneratedTokens"
            raise ConfigError(f"line {rows.line_num} of {path} is no row of a trace", fix=fix) from None


def warm_up_workload(requests: list[LoadRequest], count: int, *, vocab_size: int, seed: int = 0) -> list[LoadRequest]:
    """Return requests as long as those that are measured, with other prompts: these would be cached otherwise."""
    rng = random.Random(f"warm-up {seed}")

    def other(prompt: str | list[int]) -> str | list[int]:
        return f"{rng.random()} {prompt}" if isinstance(prompt, str) else random_prompt(rng, len(prompt), vocab_size)

    return [replace(request, prompt=other(request.prompt), at=None) for request in islice(cycle(requests), count)]


def poisson(requests: list[LoadRequest], rate: float, *, seed: int = 0) -> list[LoadRequest]:
    """Return the requests with arrival times: `rate` per second, with exponential gaps."""
    rng = random.Random(seed)
    times = accumulate((rng.expovariate(rate) for _ in requests[1:]), initial=0.0)
    return [replace(request, at=at) for request, at in zip(requests, times, strict=False)]
