"""Measure running streams while long prompts arrive: engines with roles beside engines that do both, by turns.

    python -m benchmarks.make_model DIR --hidden 512 --layers 8 --heads 8 --kv-heads 4 --ffn 1408
    python -m benchmarks.prefill_apart DIR [--streams 4] [--tokens 8000] [--seconds 15] [--rounds 2]

Two servers are there all the time, each with two engines of one core each: `joint` (mesh.replicas 2) and `apart`
(mesh.prefill_replicas 1 of them). By turns each gets --streams streams, without and with prompts of --tokens tokens, of
which the next one arrives when the one before has its first token. This process, which makes the text, shares the first
core, which is that of the prefill engine.

Prints the gaps between two outputs of a stream and the times to the first token of the prompts, in milliseconds, and
the ratio of the 99th percentile with prompts to that without.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.types.sampling import SamplingParams

STREAM_TOKENS = 4096
SETTLE = 1.0  # seconds that streams run before they are measured
FORMS = {"joint": 0, "apart": 1}  # mesh.prefill_replicas


@dataclass
class Measured:
    """What phases of one kind have given. gaps, first_tokens: milliseconds"""

    gaps: list[float] = field(default_factory=list)
    first_tokens: list[float] = field(default_factory=list)

    def percentile(self, percent: float) -> float:
        return float(np.percentile(self.gaps, percent))


def config_of(options: argparse.Namespace, prefill: int) -> Config:
    config = Config.of(
        str(options.directory),
        dtype="float32",
        max_num_seqs=16,
        num_pages=(3 * options.tokens + options.streams * STREAM_TOKENS) // 16,
        max_model_len=options.tokens + 1024,
        wait_for_programs=True,
    )
    return config.replace(mesh={"replicas": 2, "prefill_replicas": prefill, "device": "cpu"})


class Load:
    """Streams and prompts of one server."""

    def __init__(self, engine: AsyncEngine, num_streams: int, num_tokens: int) -> None:
        self._engine = engine
        self._num_streams = num_streams
        self._num_tokens = num_tokens
        self._random = random.Random(num_streams)

    def _prompt(self, length: int) -> list[int]:
        return [self._random.randrange(300, 2000) for _ in range(length)]

    async def _stream(self, times: list[float]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=STREAM_TOKENS, ignore_eos=True)
        async for _ in self._engine.generate(self._prompt(32), params):
            times.append(time.perf_counter())

    async def _ask_prompts(self, first_tokens: list[float]) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        while True:
            began, first = time.perf_counter(), 0.0
            async for _ in self._engine.generate(self._prompt(self._num_tokens), params):
                first = first or time.perf_counter() - began
            first_tokens.append(1000 * first)

    async def run(self, seconds: float, measured: Measured, *, prompts: bool) -> None:
        """Add what the streams and prompts of one phase give."""
        times: list[list[float]] = [[] for _ in range(self._num_streams)]
        tasks = [asyncio.create_task(self._stream(each)) for each in times]
        while not all(times):
            await asyncio.sleep(0.01)
        await asyncio.sleep(SETTLE)
        begin = time.perf_counter()
        if prompts:
            tasks.append(asyncio.create_task(self._ask_prompts(measured.first_tokens)))
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in times:
            measured.gaps += (1000 * np.diff([at for at in each if at >= begin])).tolist()
        while any(state.stats.num_running for state in self._engine.replicas):
            await asyncio.sleep(0.05)


async def measure(options: argparse.Namespace) -> dict[tuple[str, bool], Measured]:
    """Return what was measured, by form and by whether prompts arrived."""
    engines = {name: AsyncEngine(config_of(options, prefill)) for name, prefill in FORMS.items()}
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the engines got their cores before
    found = {(name, prompts): Measured() for name in FORMS for prompts in (False, True)}
    try:
        for engine in engines.values():
            await engine.start()
        loads = {name: Load(engine, options.streams, options.tokens) for name, engine in engines.items()}
        for load in loads.values():
            await load.run(1.0, Measured(), prompts=True)  # the first time of everything
        for _ in range(options.rounds):
            for (name, prompts), measured in found.items():
                await loads[name].run(options.seconds, measured, prompts=prompts)
    finally:
        for engine in engines.values():
            await engine.stop()
    return found


def report(found: dict[tuple[str, bool], Measured]) -> list[str]:
    """Return the lines of the table."""
    lines = [
        "form  | prompts | gap p50 | p99 | p99.9 | longest | gaps | p99 ratio | first token p50 | longest | prompts"
    ]
    for (name, prompts), measured in found.items():
        gaps = " | ".join(f"{measured.percentile(each):.1f}" for each in (50, 99, 99.9, 100))
        ratio = f"{measured.percentile(99) / found[name, False].percentile(99):.2f}" if prompts else ""
        first = measured.first_tokens
        times = f"{np.median(first):.0f} | {max(first):.0f} | {len(first)}" if first else " | | "
        shown = "yes" if prompts else "no"
        lines.append(f"{name:5} | {shown:7} | {gaps} | {len(measured.gaps)} | {ratio} | {times}")
    return lines


def main() -> None:
    """Measure both forms by turns and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--rounds", type=int, default=2)
    print("\n".join(report(asyncio.run(measure(parser.parse_args())))))


if __name__ == "__main__":
    main()
