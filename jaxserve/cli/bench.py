"""`jaxserve bench serve|offline`: measure a server, or the engine in process."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson
from rich.console import Console
from rich.progress import track

from jaxserve.bench.load import Target, Timing, find_model, root_url, run_load
from jaxserve.bench.offline import run_offline
from jaxserve.bench.plot import plot
from jaxserve.bench.report import environment, summarize, table
from jaxserve.bench.workload import LoadRequest, dataset_workload, poisson, random_workload, trace_workload
from jaxserve.cli.options.settings import load_config
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError


def run(words: Sequence[str]) -> int:
    options = _parser().parse_args(words)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxserve bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="load a server that speaks OpenAI's API")
    serve.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
    serve.add_argument("--model", help="default: the first one served")
    serve.add_argument("--api-key")
    serve.add_argument("--chat", action="store_true", help="use chat/completions; needs --dataset")
    serve.add_argument("--stop-at-eos", action="store_true", help="default: every request runs to its length")
    serve.add_argument("--num-prompts", type=int, default=64)
    serve.add_argument("--input-len", type=int, default=128, help="prompt tokens of the random workload")
    serve.add_argument("--output-len", type=int, default=64)
    serve.add_argument("--spread", type=float, default=0.0, help="0.5: lengths from half to one and a half")
    serve.add_argument("--vocab-size", type=int, default=1000, help="random prompts use ids below it")
    serve.add_argument("--dataset", type=Path, help="JSONL with prompts, instead of random ones")
    serve.add_argument("--trace", type=Path, help="CSV with TIMESTAMP, ContextTokens, GeneratedTokens")
    serve.add_argument("--trace-speed", type=float, default=1.0)
    serve.add_argument("--max-len", type=int, default=2048, help="longest prompt and output of a trace")
    serve.add_argument("--concurrency", type=int, help="requests in flight at most")
    serve.add_argument("--request-rate", type=float, help="arrivals a second; default: all at once")
    serve.add_argument("--warmup", type=int, default=0, help="requests sent before the measured ones")
    serve.add_argument("--ttft-limit", type=float, help="ms, for goodput")
    serve.add_argument("--tpot-limit", type=float, help="ms, for goodput")
    serve.add_argument("--seed", type=int, default=0)
    serve.add_argument("--json", type=Path, help="write the report and every timing")
    serve.add_argument("--plot", type=Path, help="write a PNG of the latencies (extra: bench)")
    serve.set_defaults(run=_serve)
    offline = commands.add_parser("offline", help="run a workload in process, without HTTP")
    offline.add_argument("--num-prompts", type=int, default=32)
    offline.add_argument("--input-len", type=int, default=128)
    offline.add_argument("--output-len", type=int, default=64)
    offline.add_argument("--spread", type=float, default=0.0)
    offline.add_argument("--seed", type=int, default=0)
    offline.add_argument("--json", type=Path)
    offline.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags of launch, e.g. -- --model DIR")
    offline.set_defaults(run=_offline)
    return parser


def _flags(options: argparse.Namespace) -> list[str]:
    return options.flags[1:] if options.flags[:1] == ["--"] else options.flags


def _offline(options: argparse.Namespace) -> int:
    engine = Engine(config=load_config(_flags(options), os.environ))
    requests = random_workload(
        options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        vocab_size=engine.info.vocab_size,
        spread=options.spread,
        seed=options.seed,
    )
    report = asdict(run_offline(engine, requests))
    for name, value in report.items():
        print(f"{name:16} {value}")
    line = {"model": engine.info.served_names[0], "environment": environment(), "report": report}
    print(orjson.dumps(line).decode())
    if options.json is not None:
        options.json.write_bytes(orjson.dumps(line))
    return 0


def _serve(options: argparse.Namespace) -> int:
    model = options.model or asyncio.run(find_model(options.base_url, options.api_key))
    if options.chat and options.dataset is None:
        raise ConfigError("--chat needs --dataset: a chat prompt is text")
    target = Target(options.base_url, model, options.api_key, options.chat, not options.stop_at_eos)
    requests = _workload(options)
    if options.warmup:
        asyncio.run(run_load(target, requests[: options.warmup], concurrency=options.concurrency))
    timings, seconds = asyncio.run(_with_progress(target, requests, options.concurrency))
    report = summarize(
        timings, seconds, ttft_limit=_seconds(options.ttft_limit), tpot_limit=_seconds(options.tpot_limit)
    )
    print(table(report))
    line = {"model": model, "environment": environment(), "report": asdict(report)}
    print(orjson.dumps(line).decode())
    if options.json is not None:
        options.json.write_bytes(orjson.dumps(line | {"timings": [asdict(t) for t in timings]}))
    if options.plot is not None:
        plot(timings, options.plot)
    return 1 if report.failed else 0


async def _with_progress(
    target: Target, requests: list[LoadRequest], concurrency: int | None
) -> tuple[list[Timing], float]:
    bar = iter(track(range(len(requests)), description="requests", console=Console(stderr=True), transient=True))

    def step(_: Timing) -> None:
        next(bar, None)

    return await run_load(target, requests, concurrency=concurrency, on_done=step)


def _workload(options: argparse.Namespace) -> list[LoadRequest]:
    if options.trace is not None:
        return trace_workload(
            options.trace,
            options.num_prompts,
            vocab_size=options.vocab_size,
            speed=options.trace_speed,
            max_len=options.max_len,
            seed=options.seed,
        )
    if options.dataset is not None:
        requests = dataset_workload(
            options.dataset, options.num_prompts, output_len=options.output_len, seed=options.seed
        )
    else:
        requests = random_workload(
            options.num_prompts,
            input_len=options.input_len,
            output_len=options.output_len,
            vocab_size=options.vocab_size,
            spread=options.spread,
            seed=options.seed,
        )
    return poisson(requests, options.request_rate, seed=options.seed) if options.request_rate else requests


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
