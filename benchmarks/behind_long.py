"""Measure the time to first token of a short request behind long prompts, at any OpenAI-compatible server.

    python -m benchmarks.behind_long --base-url http://127.0.0.1:8000 --label fcfs --long 1 4 16 --long-len 8000

For each number of long prompts, `--repeats` times: sends the long prompts together, the short request `--after` seconds
later, and reads all to their end. A row has the median, minimum and maximum time to first token of the short request,
and the median without long prompts. --label names the row.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import statistics
from typing import Any

from jaxserve.bench.load import LoadRequest, LoadTarget, environment, find_model, random_workload, root_url, run_load
from jaxserve.errors import ConfigError

HEADER = "| server | long prompts | short alone, ms | behind them, ms | least | greatest |\n|---|---|---|---|---|---|"


def requests_of(num_long: int, options: argparse.Namespace, seed: int) -> list[LoadRequest]:
    """Return the long prompts, which are sent at once, then the short request. No two prompts share a prefix."""
    vocab = {"vocab_size": options.vocab_size}
    short = random_workload(1, input_len=options.short_len, output_len=options.short_output, seed=2 * seed + 1, **vocab)
    if not num_long:
        return [dataclasses.replace(short[0], at=0.0)]
    longs = random_workload(num_long, input_len=options.long_len, output_len=1, seed=2 * seed, **vocab)
    at_once = [dataclasses.replace(each, at=0.0) for each in longs]
    return [*at_once, dataclasses.replace(short[0], at=options.after)]


def first_token_seconds(target: LoadTarget, requests: list[LoadRequest]) -> float:
    """Return the time to first token of the last request. Raises ConfigError if any of them failed."""
    timings, _ = asyncio.run(run_load(target, requests, concurrency=None))
    for timing in timings:
        if timing.error is not None:
            raise ConfigError(f"a request failed: {timing.error}")
    return timings[-1].ttft


def measure(target: LoadTarget, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return one record per number of long prompts, with times in milliseconds."""

    def times(num_long: int, offset: int) -> list[float]:
        seeds = range(offset, offset + options.repeats)
        return [1000 * first_token_seconds(target, requests_of(num_long, options, seed)) for seed in seeds]

    times(0, options.seed)  # the first request of a server takes longer
    alone = statistics.median(times(0, options.seed + 1000))
    records = []
    for num_long in options.long:
        behind = times(num_long, options.seed + 10_000 * (1 + num_long))
        records.append({"label": options.label, "long": num_long, "alone_ms": alone, "behind_ms": behind})
    return records


def row(record: dict[str, Any]) -> str:
    behind = record["behind_ms"]
    numbers = (record["alone_ms"], statistics.median(behind), min(behind), max(behind))
    return f"| {record['label']} | {record['long']} | " + " | ".join(f"{number:.1f}" for number in numbers) + " |"


def main(arguments: list[str] | None = None) -> None:
    """Measure the server of the command line and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
    parser.add_argument("--api-key")
    parser.add_argument("--label", default="server", help="name of the rows, for example jaxserve fcfs")
    parser.add_argument("--long", type=int, nargs="+", default=[1, 4, 16], help="long prompts before the short request")
    parser.add_argument("--long-len", type=int, default=8000, help="tokens of a long prompt")
    parser.add_argument("--short-len", type=int, default=32, help="tokens of the short prompt")
    parser.add_argument("--short-output", type=int, default=4, help="tokens of the short answer")
    parser.add_argument("--after", type=float, default=0.3, help="seconds from the long prompts to the short request")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="take another one for each run against the same server")
    parser.add_argument("--vocab-size", type=int, default=1000, help="random prompts use ids below it")
    parser.add_argument("--token-ids", action="store_true", help="request token ids: a token without text counts")
    parser.add_argument("--json", action="store_true", help="print the records and the environment as well")
    options = parser.parse_args(arguments)
    model = asyncio.run(find_model(options.base_url, options.api_key))
    target = LoadTarget(options.base_url, model, options.api_key, token_ids=options.token_ids)
    records = measure(target, options)
    print(HEADER, *map(row, records), sep="\n")
    if options.json:
        print(json.dumps({"model": model, "environment": environment(), "records": records}))


if __name__ == "__main__":
    main()
