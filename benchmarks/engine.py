"""The measurements of benchmarks.engine_report: host work per decode step, dispatches, prefix hits, stalls, copies.

Each is a function from an engine, or from a number of rows, to a record.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from dataclasses import dataclass

from benchmarks.host_cost import measure_host_cost
from benchmarks.scheduler import decode_step_seconds
from jaxserve.engine.engine import TextEngine
from jaxserve.types.sampling import SamplingParams

ROWS = (1, 16, 64, 256, 1024, 2048)


@dataclass(frozen=True, slots=True)
class HostWork:
    """Microseconds of one decode step on the host, without jax's dispatch."""

    rows: int
    scheduler: float
    pack: float
    unpack: float

    @property
    def total(self) -> float:
        return self.scheduler + self.pack + self.unpack


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Means over the steps in which exactly `rows` requests decode."""

    rows: int
    steps: int
    step_ms: float
    dispatches: float


@dataclass(frozen=True, slots=True)
class ContextCost:
    """A decode step of one row over `context` tokens. Its page table has room for `table_tokens`."""

    context: int
    table_tokens: int
    step_ms: float


@dataclass(frozen=True, slots=True)
class DeterministicCost:
    """A decode step of `rows` rows without and with `runtime.deterministic`."""

    rows: int
    plain_ms: float
    deterministic_ms: float

    @property
    def factor(self) -> float:
        return self.deterministic_ms / self.plain_ms


@dataclass(frozen=True, slots=True)
class PrefixHit:
    prompt_tokens: int
    cached_tokens: int
    cold_ms: float  # time to the first token
    warm_ms: float

    @property
    def speedup(self) -> float:
        return self.cold_ms / self.warm_ms


@dataclass(frozen=True, slots=True)
class Stall:
    """The longest gap between two tokens of running streams, without and with a long prompt that arrives."""

    streams: int
    prompt_tokens: int
    longest_gap_ms: float
    longest_gap_with_prompt_ms: float
    chunk_ms: float  # mean time of a step that held a chunk


def host_work(num_rows: int) -> HostWork:
    """Measure a decode step of `num_rows` rows."""
    cost = measure_host_cost(num_rows)
    return HostWork(num_rows, decode_step_seconds(num_rows) * 1e6, cost.pack * 1e6, cost.unpack * 1e6)


def random_prompt(engine: TextEngine, length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256, engine.info.vocab_size) for _ in range(length)]


def decode_cost(engine: TextEngine, rows: int, *, steps: int = 40) -> DecodeCost:
    """Decode `rows` requests together, each to the same length."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 8, ignore_eos=True)
    for i in range(rows):
        engine.add_request(random_prompt(engine, 8, i), params)
    while engine.core.stats().num_waiting or engine.core.stats().generation_tokens < rows:
        engine.step()
    for _ in range(4):  # past the last prefill chunk
        engine.step()
    dispatched, began, counted = engine.runner.num_dispatches, time.perf_counter(), 0
    while engine.core.stats().num_running == rows and counted < steps - 4:
        engine.step()
        counted += 1
    seconds = time.perf_counter() - began
    dispatches = engine.runner.num_dispatches - dispatched
    while engine.has_unfinished:
        engine.step()
    return DecodeCost(rows, counted, seconds / counted * 1e3, dispatches / counted)


def context_cost(engine: TextEngine, context: int, *, steps: int = 20) -> ContextCost:
    """Time `steps` decode steps after a prompt of `context` tokens; return the median.

    A longer prompt begins with the shorter ones, so that in ascending order most of each is in the prefix cache.
    """
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2, ignore_eos=True)
    engine.add_request(random_prompt(engine, context, seed=0), params)
    while not engine.step():
        pass
    seconds = []
    while engine.has_unfinished:
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    return ContextCost(context, engine.info.max_model_len, statistics.median(seconds) * 1e3)


def deterministic_cost(
    plain: TextEngine, deterministic: TextEngine, rows: int, *, rounds: int = 3
) -> DeterministicCost:
    """Measure two engines of one model in turn. Returns the fastest round, since other work can only slow one down."""
    steps = [(decode_cost(plain, rows).step_ms, decode_cost(deterministic, rows).step_ms) for _ in range(rounds)]
    return DeterministicCost(rows, min(a for a, _ in steps), min(b for _, b in steps))


def prefix_hit(engine: TextEngine, prompt_tokens: int) -> PrefixHit:
    """Run one prompt twice: with an empty prefix cache, and with its pages in it."""
    engine.core.flush_prefix_cache()
    prompt = random_prompt(engine, prompt_tokens, seed=prompt_tokens)
    cold, _ = _first_token(engine, prompt)
    warm, cached = _first_token(engine, prompt)
    return PrefixHit(prompt_tokens, cached, cold * 1e3, warm * 1e3)


def _first_token(engine: TextEngine, prompt: list[int]) -> tuple[float, int]:
    began = time.perf_counter()
    engine.add_request(prompt, SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    cached = 0
    while engine.has_unfinished:
        for output in engine.step():
            cached = output.num_cached_tokens
    return time.perf_counter() - began, cached


def stall(engine: TextEngine, *, streams: int, prompt_tokens: int) -> Stall:
    """Decode `streams` requests, then add a long prompt."""
    engine.core.flush_prefix_cache()
    length = 2 * math.ceil(prompt_tokens / engine.info.max_num_batched_tokens) + 60
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    for i in range(streams):
        engine.add_request(random_prompt(engine, 8, i), params)
    before = _longest_gap(engine, steps=length // 3)
    long = engine.add_request(random_prompt(engine, prompt_tokens, 99), SamplingParams(max_tokens=1))
    gaps: list[float] = []
    finished = False
    while not finished:
        began = time.perf_counter()
        finished = any(o.request_id == long and o.finished for o in engine.step())
        gaps.append(time.perf_counter() - began)
    while engine.has_unfinished:
        engine.step()
    return Stall(streams, prompt_tokens, before * 1e3, max(gaps) * 1e3, sum(gaps) / len(gaps) * 1e3)


def _longest_gap(engine: TextEngine, steps: int) -> float:
    gaps = []
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        gaps.append(time.perf_counter() - began)
    return max(gaps[4:])  # the first ones include the prefill


def cache_copies(engine: TextEngine) -> dict[str, int]:
    """Count the copies of a whole KV array in each decode program. 0 means that the update is in place."""
    shape = engine.runner.caches[0].shape
    pattern = re.compile(rf"\[{','.join(map(str, shape))}\]\S* copy\(")
    return {
        name: len(pattern.findall(program.as_text()))
        for name, program in engine.runner.compiled.items()
        if name.startswith("decode[")
    }
