"""Measure offline throughput: run a workload on the engine in this process, without HTTP."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jaxserve.bench.load import LoadRequest
from jaxserve.engine.engine import TextEngine
from jaxserve.types.messages import EngineStats
from jaxserve.types.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """The figures of one run. Rates are tokens per second; `step_ms` and `host_us` are means over its steps."""

    requests: int
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_rate: float
    total_rate: float
    steps: int
    step_ms: float
    host_us: float
    preemptions: int
    compiles: int


def run_offline(engine: TextEngine, requests: list[LoadRequest], *, temperature: float = 0.0) -> OfflineReport:
    """Run all requests at once, each to its full length."""
    before = engine.core.stats()
    started = time.perf_counter()
    for request in requests:
        engine.add_request(
            request.prompt,
            SamplingParams(temperature=temperature, max_tokens=request.max_tokens, ignore_eos=True, seed=0),
        )
    while engine.has_unfinished:
        engine.step()
    return _report(len(requests), time.perf_counter() - started, before, engine.core.stats())


def _report(count: int, seconds: float, before: EngineStats, after: EngineStats) -> OfflineReport:
    steps = max(after.steps - before.steps, 1)
    prompt, output = after.prompt_tokens - before.prompt_tokens, after.generation_tokens - before.generation_tokens
    return OfflineReport(
        requests=count,
        seconds=round(seconds, 3),
        prompt_tokens=prompt,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        output_tokens=output,
        output_rate=round(output / seconds, 2),
        total_rate=round((prompt + output) / seconds, 2),
        steps=steps,
        step_ms=round(seconds / steps * 1e3, 3),
        host_us=round((after.host_seconds - before.host_seconds) / steps * 1e6, 1),
        preemptions=after.preemptions - before.preemptions,
        compiles=after.compiles - before.compiles,
    )
