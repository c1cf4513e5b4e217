"""What a benchmark sends: prompts, output lengths and arrival times, all from a seed.

Owns the three kinds of workload (random token ids, a text file, a trace of a production service). Knows no server.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request of a workload. `at`: seconds after the start at which it is sent, or None for closed loop."""

    prompt: str | list[int]
    num_prompt_tokens: int | None  # None: only the server knows
    max_tokens: int
    at: float | None = None


def random_workload(
    count: int, *, input_len: int, output_len: int, vocab_size: int, spread: float = 0.0, seed: int = 0
) -> list[LoadRequest]:
    """Prompts of random token ids. `spread` 0.5 draws lengths from half to one and a half of the given ones."""
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, round(mean * rng.uniform(1 - spread, 1 + spread)))

    requests = []
    for _ in range(count):
        n = length(input_len)
        # the lowest ids are special tokens in many vocabularies
        prompt = [rng.randrange(min(256, vocab_size // 2), vocab_size) for _ in range(n)]
        requests.append(LoadRequest(prompt, n, length(output_len)))
    return requests


def dataset_workload(path: Path, count: int, *, output_len: int, seed: int = 0) -> list[LoadRequest]:
    """Read prompts from a JSONL file: the first string under prompt, question, text, turns or messages.

    Raises ConfigError if no line has one.
    """
    prompts = [text for line in path.read_text(encoding="utf-8").splitlines() if (text := _prompt_of(line))]
    if not prompts:
        raise ConfigError(f"{path} holds no line with a prompt, question, text, turns or messages")
    rng = random.Random(seed)
    return [LoadRequest(rng.choice(prompts), None, output_len) for _ in range(count)]


def _prompt_of(line: str) -> str | None:
    record = json.loads(line) if line.strip() else {}
    for key in ("prompt", "question", "text", "turns", "messages"):
        value = record.get(key)
        if isinstance(value, list) and value:
            value = value[0]["content"] if isinstance(value[0], dict) else value[0]
        if isinstance(value, str):
            return value
    return None


def trace_workload(
    path: Path, count: int, *, vocab_size: int, speed: float = 1.0, max_len: int, seed: int = 0
) -> list[LoadRequest]:
    """Arrival times and lengths of a CSV trace (TIMESTAMP, ContextTokens, GeneratedTokens), prompts at random."""
    rng = random.Random(seed)
    requests: list[LoadRequest] = []
    for at, prompt_len, output_len in _trace_rows(path):
        prompt_len = max(1, min(prompt_len, max_len - 2))
        output_len = max(1, min(output_len, max_len - prompt_len - 1))
        prompt = [rng.randrange(min(256, vocab_size // 2), vocab_size) for _ in range(prompt_len)]
        requests.append(LoadRequest(prompt, prompt_len, output_len, at / speed))
        if len(requests) == count:
            break
    return requests


def _trace_rows(path: Path) -> Iterator[tuple[float, int, int]]:
    start: datetime | None = None
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            when = datetime.fromisoformat(row["TIMESTAMP"][:26])
            start = start or when
            yield (when - start).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"])


def poisson(requests: list[LoadRequest], rate: float, *, seed: int = 0) -> list[LoadRequest]:
    """The same requests arriving at `rate` a second, with exponential gaps."""
    rng = random.Random(seed)
    at = 0.0
    timed = []
    for request in requests:
        timed.append(LoadRequest(request.prompt, request.num_prompt_tokens, request.max_tokens, at))
        at += rng.expovariate(rate)
    return timed
