"""`jaxserve bench serve|offline`: measure a server, or the engine in this process."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import track

from jaxserve.bench.load import LoadTarget, Timing, find_model, root_url, run_load
from jaxserve.bench.offline import run_offline
from jaxserve.bench.plot import plot
from jaxserve.bench.report import summarize, table, write_json
from jaxserve.bench.workload import LoadRequest, dataset_workload, poisson, random_workload, trace_workload
from jaxserve.cli.options.settings import load_config
from jaxserve.engine.engine import TextEngine
from jaxserve.errors import ConfigError


def run(words: Sequence[str]) -> int:
    """Run the command `bench`. Raises ConfigError."""
    options = _parser().parse_args(words)
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxserve bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="measure a server with OpenAI's API")
    serve.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
    serve.add_argument("--model", help="default: the first one served")
    serve.add_argument("--api-key")
    serve.add_argument("--chat", action="store_true", help="use chat/completions; needs --dataset")
    serve.add_argument("--stop-at-eos", action="store_true", help="default: every request runs to --output-len")
    serve.add_argument("--vocab-size", type=int, default=1000, help="random prompts use token ids below it")
    serve.add_argument("--dataset", type=Path, help="JSONL file with prompts, instead of random ones")
    serve.add_argument("--trace", type=Path, help="CSV file with TIMESTAMP, ContextTokens, GeneratedTokens")
    serve.add_argument("--trace-speed", type=float, default=1.0)
    serve.add_argument("--max-len", type=int, default=2048, help="maximum tokens of prompt plus output of a trace")
    serve.add_argument("--concurrency", type=int, help="maximum number of requests in flight")
    serve.add_argument("--request-rate", type=float, help="requests per second; default: all at once")
    serve.add_argument("--warmup", type=int, default=0, help="number of requests sent before the measurement")
    serve.add_argument("--ttft-limit", type=float, help="limit for goodput in ms")
    serve.add_argument("--tpot-limit", type=float, help="limit for goodput in ms")
    serve.add_argument("--plot", type=Path, help="PNG file for the latencies (extra: bench)")
    serve.set_defaults(run=_serve)
    offline = commands.add_parser("offline", help="run a workload in process, without HTTP")
    offline.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags of launch, e.g. -- --model DIR")
    offline.set_defaults(run=_offline)
    for command, count in ((serve, 64), (offline, 32)):
        command.add_argument("--num-prompts", type=int, default=count)
        command.add_argument("--input-len", type=int, default=128, help="tokens per random prompt")
        command.add_argument("--output-len", type=int, default=64, help="tokens per output")
        command.add_argument("--spread", type=float, default=0.0, help="0.5: lengths from 0.5 to 1.5 times these")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--json", type=Path, help="file for the report; of serve also every timing")
    return parser


def launch_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of launch that follow `--`."""
    return options.flags[1:] if options.flags[:1] == ["--"] else options.flags


def _offline(options: argparse.Namespace) -> int:
    engine = TextEngine(config=load_config(launch_flags(options), os.environ))
    report = asdict(run_offline(engine, _random_workload(options, engine.info.vocab_size)))
    for name, value in report.items():
        print(f"{name:16} {value}")
    write_json({"model": engine.info.served_names[0], "report": report}, options.json)
    return 0


def _serve(options: argparse.Namespace) -> int:
    model = options.model or asyncio.run(find_model(options.base_url, options.api_key))
    if options.chat and options.dataset is None:
        raise ConfigError("--chat needs --dataset: a chat prompt is text")
    target = LoadTarget(options.base_url, model, options.api_key, options.chat, not options.stop_at_eos)
    requests = _workload(options)
    if options.warmup:
        asyncio.run(run_load(target, requests[: options.warmup], concurrency=options.concurrency))
    timings, seconds = asyncio.run(_with_progress(target, requests, options.concurrency))
    limits = {"ttft_limit": _seconds(options.ttft_limit), "tpot_limit": _seconds(options.tpot_limit)}
    report = summarize(timings, seconds, **limits)
    print(table(report))
    timed = {"timings": [asdict(timing) for timing in timings]}
    write_json({"model": model, "report": asdict(report)}, options.json, timed)
    if options.plot is not None:
        plot(timings, options.plot)
    return 1 if report.failed else 0


async def _with_progress(
    target: LoadTarget, requests: list[LoadRequest], concurrency: int | None
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
        requests = _random_workload(options, options.vocab_size)
    return poisson(requests, options.request_rate, seed=options.seed) if options.request_rate else requests


def _random_workload(options: argparse.Namespace, vocab_size: int) -> list[LoadRequest]:
    return random_workload(
        options.num_prompts,
        input_len=options.input_len,
        output_len=options.output_len,
        vocab_size=vocab_size,
        spread=options.spread,
        seed=options.seed,
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3
