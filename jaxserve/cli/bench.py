"""`jaxserve bench serve|capacity|pictures|offline`: measure a server, or with `offline` an engine in this process.

`capacity` finds the highest request rate within limits, `pictures` measures text streams beside chats with pictures.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track

from jaxserve.bench.capacity import Limits, Trial, curve, find_capacity
from jaxserve.bench.load import (
    LoadRequest,
    LoadTarget,
    Timing,
    dataset_workload,
    find_model,
    poisson,
    random_workload,
    root_url,
    run_load,
    summarize,
    table,
    trace_workload,
    warm_up_workload,
    write_json,
)
from jaxserve.bench.offline import run_offline
from jaxserve.bench.pictures import KINDS, measure_pictures, picture_chats, picture_table
from jaxserve.bench.plot import check_plot, plot, plot_trials
from jaxserve.cli.options import api_key, at_least, load_config, positive, share
from jaxserve.engine.engine import TextEngine
from jaxserve.errors import ConfigError

# flag -> (its default, the workloads that read it)
_WORKLOAD_FLAGS = {
    "dataset": (None, ("dataset",)),
    "input_len": (128, ("random", "pictures")),
    "output_len": (64, ("random", "dataset", "pictures")),
    "spread": (0.0, ("random",)),
    "vocab_size": (1000, ("random", "trace", "pictures")),
    "request_rate": (None, ("random", "dataset")),
    "trace_speed": (1.0, ("trace",)),
    "max_len": (2048, ("trace",)),
}


def run(words: Sequence[str]) -> int:
    """Run the command `bench`. Raises ConfigError."""
    options = _parser().parse_args(words)
    _check_file(options.json, "--json")
    return options.run(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="jaxserve bench", description=__doc__)
    commands = parser.add_subparsers(required=True)
    serve = commands.add_parser("serve", help="measure a server with OpenAI's API")
    serve.add_argument("--concurrency", type=at_least(1), help="maximum number of requests in flight")
    serve.add_argument("--request-rate", type=positive, help="requests per second; default: all at once")
    serve.add_argument("--trace-speed", type=positive, help="2: in half the time of the trace (1)")
    serve.add_argument("--ttft-limit", type=positive, help="limit for goodput in ms")
    serve.add_argument("--tpot-limit", type=positive, help="limit for goodput in ms")
    serve.set_defaults(run=_serve)
    capacity = commands.add_parser("capacity", help="find the highest request rate within limits on the latencies")
    capacity.add_argument("--ttft", type=duration, help="limit of the time to the first token: 500ms, 0.5s")
    capacity.add_argument("--gap", type=duration, help="limit of the mean time of a token after it: 50ms")
    capacity.add_argument("--share", type=share, default=0.9, help="share of the requests within the limits (0.9)")
    capacity.add_argument("--request-rate", type=positive, default=1.0, help="requests per second at first (1)")
    capacity.add_argument("--seconds", type=positive, default=20.0, help="least time in which a trial sends (20)")
    capacity.add_argument("--precision", type=positive, default=0.1, help="of the rate that is found (0.1)")
    capacity.set_defaults(run=_capacity)
    pictures = commands.add_parser("pictures", help="measure text streams beside chats with pictures")
    pictures.add_argument("--kind", choices=KINDS, default="fresh", help="of the pictures (fresh)")
    pictures.add_argument("--size", type=size, default=(1024, 1024), help="of a picture in pixels (1024x1024)")
    pictures.add_argument("--streams", type=at_least(1), default=4, help="text requests at all times (4)")
    pictures.add_argument("--concurrency", type=at_least(1), default=2, help="chats with pictures at once (2)")
    pictures.add_argument("--seconds", type=positive, default=20.0, help="for which the text streams run alone (20)")
    pictures.set_defaults(run=_pictures)
    for command in (serve, capacity, pictures):
        command.add_argument("--base-url", type=root_url, default="http://127.0.0.1:8000", help="with or without /v1")
        command.add_argument("--model", help="default: the first one served")
        command.add_argument("--api-key", type=api_key)
        command.add_argument("--vocab-size", type=at_least(2), help="random prompts use token ids below it (1000)")
        command.add_argument(
            "--token-ids",
            action="store_true",
            help="ask for token ids too, which jaxserve and vLLM send: a token without text is timed",
        )
    for command in (serve, capacity):
        command.add_argument("--chat", action="store_true", help="use chat/completions; needs --dataset")
        command.add_argument("--stop-at-eos", action="store_true", help="default: every request runs to --output-len")
        command.add_argument("--dataset", type=Path, help="JSONL file with prompts, instead of random ones")
        command.add_argument("--trace", type=Path, help="CSV file with TIMESTAMP, ContextTokens, GeneratedTokens")
        command.add_argument("--max-len", type=at_least(3), help="most tokens of prompt plus output of a trace (2048)")
        command.add_argument(
            "--warmup", type=at_least(0), default=0, help="number of requests with other prompts before the measurement"
        )
        command.add_argument("--plot", type=Path, help="PNG file for the latencies (extra: bench)")
    offline = commands.add_parser("offline", help="run a workload in process, without HTTP")
    offline.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags of launch, e.g. -- --model DIR")
    offline.set_defaults(run=_offline)
    for command, count in ((serve, 64), (capacity, 20), (pictures, 16), (offline, 32)):
        command.add_argument("--num-prompts", type=at_least(1), default=count, help=f"({count}); of capacity: at least")
        command.add_argument("--input-len", type=at_least(1), help="tokens per random prompt (128)")
        command.add_argument("--output-len", type=at_least(1), help="tokens per output, except of a trace (64)")
        if command is not pictures:
            command.add_argument("--spread", type=share, help="0.5: lengths from 0.5 to 1.5 times these (0)")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--json", type=Path, help="file for the report; of serve also every timing")
    return parser


def launch_flags(options: argparse.Namespace) -> list[str]:
    """Return the flags of launch that follow `--`."""
    return options.flags[1:] if options.flags[:1] == ["--"] else options.flags


def _offline(options: argparse.Namespace) -> int:
    _fill_defaults(options, "random")
    with TextEngine(config=load_config(launch_flags(options), os.environ)) as engine:
        requests = _random_workload(options, engine.info.vocab_size)
        _check_context(requests, engine)
        report = asdict(run_offline(engine, requests))
    for name, value in report.items():
        print(f"{name:16} {value}")
    write_json({"model": engine.info.served_names[0], "report": report}, options.json)
    return 0


def _check_context(requests: Sequence[LoadRequest], engine: TextEngine) -> None:
    """Raise ConfigError if a request cannot run."""
    if engine.info.task != "generate":
        raise ConfigError(
            f"bench offline measures models that generate text, and {engine.info.architecture} does not",
            fix="name another model",
        )
    longest = max(len(request.prompt) + request.max_tokens for request in requests)
    if longest > engine.info.max_model_len:
        raise ConfigError(
            f"a prompt and its output have {longest} tokens, and the context is {engine.info.max_model_len}",
            fix="lower --input-len or --output-len",
        )


def _serve(options: argparse.Namespace) -> int:
    kind, target = _target(options)
    requests = _workload(options, kind)
    if options.warmup:
        _warm_up(target, requests, options)
    timings, seconds = asyncio.run(_with_progress(target, requests, options.concurrency))
    limits = {"ttft_limit": _seconds(options.ttft_limit), "tpot_limit": _seconds(options.tpot_limit)}
    report = summarize(timings, seconds, **limits)
    print(table(report))
    timed = {"timings": [asdict(timing) for timing in timings]}
    write_json({"model": target.model, "report": asdict(report)}, options.json, timed)
    if options.plot is not None:
        plot(timings, options.plot)
    return 1 if report.failed else 0


def _capacity(options: argparse.Namespace) -> int:
    if options.ttft is None and options.gap is None:
        raise ConfigError("a capacity needs a limit", fix="give --ttft 500ms, --gap 50ms or both")
    first, options.trace_speed, options.concurrency = options.request_rate, None, None
    options.request_rate = None
    kind, target = _target(options)
    limits = Limits(options.ttft, options.gap, options.share)
    least, seed = options.num_prompts, options.seed

    def workload(rate: float, trial: int) -> list[LoadRequest]:
        """Draw the requests of a trial: enough for its time, at `rate` a second."""
        options.num_prompts, options.seed = max(least, math.ceil(rate * options.seconds)), seed + 1000 * trial
        requests = _workload(options, kind)
        if kind != "trace":
            return poisson(requests, rate, seed=options.seed)
        last = requests[-1].at or 1.0
        return [replace(each, at=(each.at or 0.0) * (len(requests) - 1) / (last * rate)) for each in requests]

    if options.warmup:
        _warm_up(target, workload(first, -1), options)
    trials = asyncio.run(_trials(target, workload, limits, first, options.precision))
    print(curve(trials, limits))
    best = max((trial.rate for trial in trials if trial.holds), default=0.0)
    record = {"model": target.model, "capacity": best, "limits": asdict(limits)}
    write_json(record, options.json, {"trials": [asdict(trial) for trial in trials]})
    if options.plot is not None:
        plot_trials(trials, limits, options.plot)
    return 0 if best else 1


def _pictures(options: argparse.Namespace) -> int:
    _fill_defaults(options, "pictures")
    model = asyncio.run(find_model(options.base_url, options.api_key)) if options.model is None else options.model
    target = LoadTarget(options.base_url, model, options.api_key, token_ids=options.token_ids)
    output = options.output_len
    chats = picture_chats(options.kind, options.num_prompts, size=options.size, output_len=output, seed=options.seed)
    report = asyncio.run(
        measure_pictures(
            target,
            chats,
            streams=options.streams,
            input_len=options.input_len,
            output_len=output,
            vocab_size=options.vocab_size,
            seconds=options.seconds,
            concurrency=options.concurrency,
            seed=options.seed,
        )
    )
    print(picture_table(report))
    write_json({"model": model, "kind": options.kind, "report": asdict(report)}, options.json)
    return 1 if report.failed else 0


async def _trials(
    target: LoadTarget,
    workload: Callable[[float, int], list[LoadRequest]],
    limits: Limits,
    rate: float,
    precision: float,
) -> list[Trial]:
    trials = []
    async for trial in find_capacity(target, workload, limits, rate=rate, precision=precision):
        holds = "holds" if trial.holds else "does not hold"
        print(f"{trial.rate:.2f} requests/s: {trial.within:.0%} within, {holds}", file=sys.stderr)
        trials.append(trial)
    return trials


def duration(text: str) -> float:
    """Read seconds: 500ms, 0.5s or 0.5. Raises ArgumentTypeError."""
    number, unit = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    return positive(number) * unit


def size(text: str) -> tuple[int, int]:
    """Read WIDTHxHEIGHT. Raises ArgumentTypeError."""
    width, _, height = text.partition("x")
    return at_least(1)(width), at_least(1)(height)


def _target(options: argparse.Namespace) -> tuple[str, LoadTarget]:
    """Check the flags of a workload. Returns its kind and the server. Raises ConfigError."""
    kind = "trace" if options.trace else "dataset" if options.dataset else "random"
    _fill_defaults(options, kind)
    if options.chat and options.dataset is None:
        raise ConfigError("--chat needs --dataset: a chat prompt is text")
    _check_file(options.plot, "--plot")
    if options.plot is not None:
        check_plot(options.plot)
    model = asyncio.run(find_model(options.base_url, options.api_key)) if options.model is None else options.model
    ignore_eos, ids = not options.stop_at_eos, options.token_ids
    return kind, LoadTarget(options.base_url, model, options.api_key, options.chat, ignore_eos, token_ids=ids)


def _fill_defaults(options: argparse.Namespace, kind: str) -> None:
    """Set the flags that are not given. Raises ConfigError for a flag that the workload `kind` does not read."""
    for name, (default, kinds) in _WORKLOAD_FLAGS.items():
        if getattr(options, name, None) is None:
            setattr(options, name, default)
        elif kind not in kinds:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{flag} has no effect on a {kind} workload", fix=f"leave {flag} out")


def _check_file(path: Path | None, flag: str) -> None:
    """Raise ConfigError before the measurement if a file cannot be written."""
    if path is not None and (not path.parent.is_dir() or path.is_dir()):
        raise ConfigError(f"{flag}: no file can be written at {path}", fix="name a file in a directory that exists")


def _warm_up(target: LoadTarget, requests: list[LoadRequest], options: argparse.Namespace) -> None:
    others = warm_up_workload(requests, options.warmup, vocab_size=options.vocab_size, seed=options.seed)
    timings, _ = asyncio.run(run_load(target, others, concurrency=options.concurrency))
    if failed := [timing.error for timing in timings if timing.error is not None]:
        print(f"jaxserve: {len(failed)} requests of the warm-up failed: {failed[0]}", file=sys.stderr)


async def _with_progress(
    target: LoadTarget, requests: list[LoadRequest], concurrency: int | None
) -> tuple[list[Timing], float]:
    bar = iter(track(range(len(requests)), description="requests", console=Console(stderr=True), transient=True))

    def step(_: Timing) -> None:
        next(bar, None)

    return await run_load(target, requests, concurrency=concurrency, on_done=step)


def _workload(options: argparse.Namespace, kind: str) -> list[LoadRequest]:
    if kind == "trace":
        return trace_workload(
            options.trace,
            options.num_prompts,
            vocab_size=options.vocab_size,
            speed=options.trace_speed,
            max_len=options.max_len,
            seed=options.seed,
        )
    if kind == "dataset":
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
