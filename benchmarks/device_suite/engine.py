"""The engine part of the device suite: start, single steps and offline workloads, on random weights.

Defines the model shapes, the batches of the steps, and the workloads with published figures of others. A step runs the
engine's compiled program on a state in which every row has a given context. A workload runs the engine in process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_suite.kernels import machine_of
from benchmarks.device_suite.models import PAGE, compile_cache, model_directory
from benchmarks.device_suite.rows import Bench, Row
from jaxserve.bench.load import random_workload
from jaxserve.bench.offline import run_offline
from jaxserve.engine.engine import TextEngine
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import ScheduledRow, SchedulerOutput, SlotInit

START_LIMIT = 420.0  # seconds of a cold start, which compiles forty programs
PROMPT = 30  # tokens per prompt of the workloads, as in SGLang's published runs


@dataclass(frozen=True)
class Workload:
    """`count` requests at once, of `tokens` output tokens each.

    published: tokens per second of SGLang on an H100
    estimate: seconds that the workload takes
    """

    count: int
    tokens: int
    published: float | None = None
    estimate: float = 20.0


WORKLOADS = (
    Workload(1, 500, 142),
    Workload(100, 500, 10_900),
    Workload(500, 500, 24_600, 30),
    Workload(5000, 128, None, 90),
)
SMALL_POOL = Workload(5000, 128, 10_500, 90)
SMALL_POOL_TOKENS = 20_480


class Started:
    """The engine that a cell of a section starts, for the cells after it."""

    engine: TextEngine


def engine_cells(bench: Bench, model: str) -> None:
    """Measure the start, decode steps, prefills and workloads of one engine."""
    steps = [(rows, 305) for rows in (1, 100, 500, 8, 32)] + [(1, 4096)]
    steps += [(rows, context) for rows in (100, 500) for context in (60, 550)]
    prefills = [2048, 512, 8192]
    workloads = WORKLOADS
    if bench.tiny:
        steps, prefills, workloads = [(2, 20)], [32], (Workload(2, 4),)
    names = [*(f"decode {b} x {c}" for b, c in steps), *(f"prefill {n}" for n in prefills), *map(_name, workloads)]
    if all(bench.results.done(bench.section, name) for name in names):
        return
    started = Started()
    if not start(bench, model, started):
        return
    for rows, context in steps:
        bench.cell(f"decode {rows} x {context}", 8, partial(_decode_step, bench, started, rows, context))
    for tokens in prefills:
        bench.cell(f"prefill {tokens}", 8, partial(_prefill, bench, started, tokens))
    for workload in workloads:
        bench.cell(_name(workload), workload.estimate, partial(_run_workload, started, workload))


def restart(bench: Bench, model: str) -> None:
    """Measure a second start, with the compile cache of the first."""
    start(bench, model, Started())


def small_pool(bench: Bench, model: str) -> None:
    """Measure more requests than the pool of pages holds at once."""
    workload = Workload(8, 8) if bench.tiny else SMALL_POOL
    if bench.wants(_name(workload), workload.estimate + 60):
        pool = {} if bench.tiny else {"num_pages": SMALL_POOL_TOKENS // PAGE}
        started = Started()

        def measure() -> Row:
            """Start an engine with the pool and run the workload."""
            started.engine = _engine(bench, model, **pool)
            return _run_workload(started, workload)

        bench.cell(_name(workload), workload.estimate + 60, measure, limit=START_LIMIT)


def _name(workload: Workload) -> str:
    return f"{workload.count} requests of {workload.tokens}"


def start(bench: Bench, model: str, started: Started) -> bool:
    """Start an engine and record a row: cold start if the compile cache was empty, else warm start.

    If the attention backend of this platform fails, try XLA's. Returns whether an engine started.
    """
    cache = compile_cache(bench, model)
    name = "warm start" if cache.exists() and any(cache.iterdir()) else "cold start"

    def measure(attention: str) -> Row:
        """Start the engine with an attention backend."""
        began = time.perf_counter()
        engine = started.engine = _engine(bench, model, attention=attention)
        return {
            "seconds": time.perf_counter() - began,
            "phases": engine.info.seconds,
            "programs": engine.info.num_programs,
            "attention": engine.info.attention,
            "kv_tokens": engine.info.num_kv_tokens,
            "dtype": engine.info.dtype,
        }

    estimate = 0 if bench.tiny else 40
    if bench.again(name, estimate, partial(measure, "auto"), limit=START_LIMIT):
        return True
    return bench.again(f"{name} on xla", estimate, partial(measure, "xla"), limit=START_LIMIT)


def _engine(bench: Bench, model: str, **keys: Any) -> TextEngine:
    """Return an engine with random weights in the model's shape."""
    limits: dict[str, Any] = {"max_model_len": 16384, "max_num_seqs": 512, "max_num_batched_tokens": 8192}
    if bench.tiny:
        limits = {"max_model_len": 128, "max_num_seqs": 2, "max_num_batched_tokens": 32, "num_pages": 32}
    cache = compile_cache(bench, model)
    cache.mkdir(parents=True, exist_ok=True)
    keys = {"load_format": "random", "page_size": PAGE, "compile_cache": cache} | limits | keys
    return TextEngine(str(model_directory(bench, model)), **keys)


# --- steps


def _decode_step(bench: Bench, started: Started, rows: int, context: int) -> Row:
    """Time decode steps of `rows` rows, whose context grows from `context` by one token per step."""
    engine, runner = started.engine, started.engine.runner
    steps, runs = (2, 1) if bench.tiny else (20, 5)
    page_size = engine.info.page_size
    pages = -(-(context + steps * runs + 4) // page_size)
    if rows * pages > engine.info.num_pages:
        return {"skipped": f"needs {rows * pages} pages of {engine.info.num_pages}"}
    table = np.zeros(runner.state.page_table.shape, np.int32)
    table[:rows, :pages] = (
        np.random.default_rng(0).permutation(engine.info.num_pages)[: rows * pages].reshape(rows, pages)
    )
    position = np.zeros(runner.state.num_slots, np.int32)
    position[:rows] = context - 1
    runner.state = runner.state.replace(page_table=jnp.asarray(table), position=jnp.asarray(position))
    decode_rows = [ScheduledRow(f"r{slot}", slot, context - 1, 1, True, [], pages, []) for slot in range(rows)]
    output = SchedulerOutput(0, decode_rows, rows, [])
    for _ in range(3):  # XLA captures its graphs in the first calls
        runner.execute(output).result()
    seconds = []
    for _ in range(runs):
        began = time.perf_counter()
        handles = [runner.execute(output) for _ in range(steps)]
        handles[-1].result()
        seconds.append((time.perf_counter() - began) / steps)
    step = statistics.median(seconds)
    floor = _step_floor(bench, engine, rows, rows * context)
    return {"ms": step * 1e3, "tok_s": rows / step, "floor_ms": floor * 1e3, "of_roofline": floor / step}


def _weight_bytes(engine: TextEngine) -> int:
    """Return the bytes of the weights that a step reads: all but an untied embedding."""
    specs = engine.runner.structure.specs
    sizes = {spec.name: leaf.nbytes for spec, leaf in zip(specs, engine.runner.leaves, strict=True)}
    untied = not engine.runner.structure.config.tie_word_embeddings
    return sum(size for name, size in sizes.items() if not (untied and "embed_tokens" in name))


def _step_floor(bench: Bench, engine: TextEngine, tokens: int, context: int) -> float:
    """Return the least seconds of a step: the longer of reading the weights and their products, plus reading the
    KV cache.
    """
    weights = _weight_bytes(engine)
    machine = machine_of(bench)
    itemsize = engine.runner.leaves[0].dtype.itemsize
    kv_token = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.runner.caches)) / engine.info.num_kv_tokens
    return machine.floor(weights, 2 * tokens * weights / itemsize) + context * kv_token / machine.bandwidth


def _prefill(bench: Bench, started: Started, tokens: int) -> Row:
    """Time one prompt in one chunk, to its first token."""
    engine, runner = started.engine, started.engine.runner
    num_pages = -(-tokens // engine.info.page_size)
    if num_pages > engine.info.num_pages or tokens > runner.buckets.max_tokens:
        return {"skipped": f"{tokens} tokens do not fit"}
    params = SamplingParams(temperature=0.0)
    prompt = [index % 1000 for index in range(tokens)]
    row = ScheduledRow("r0", 0, 0, tokens, True, prompt, 0, list(range(num_pages)))
    output = SchedulerOutput(0, [row], 0, [SlotInit(0, params, 0, tokens, prompt, ())])
    runner.execute(output).result()
    again = SchedulerOutput(0, [row], 0, [])
    seconds = []
    for _ in range(1 if bench.tiny else 5):
        began = time.perf_counter()
        runner.execute(again).result()
        seconds.append(time.perf_counter() - began)
    chunk = statistics.median(seconds)
    config = runner.structure.config
    products = 2 * tokens * _weight_bytes(engine) / runner.leaves[0].dtype.itemsize
    attention = 2 * tokens**2 * config.num_heads * config.head_dim * len(runner.caches)
    floor = (products + attention) / machine_of(bench).flops
    return {"ms": chunk * 1e3, "tok_s": tokens / chunk, "of_roofline": floor / chunk}


def _reset(engine: TextEngine) -> None:
    """Clear the slots, which the steps above used without the scheduler."""
    runner = engine.runner
    runner.state = jax.tree.map(jnp.zeros_like, runner.state)


def _run_workload(started: Started, workload: Workload) -> Row:
    engine = started.engine
    _reset(engine)
    requests = random_workload(workload.count, input_len=PROMPT, output_len=workload.tokens, vocab_size=1000)
    report = run_offline(engine, requests)
    row: Row = {"tok_s": report.output_rate}
    row |= {name: getattr(report, name) for name in ("seconds", "step_ms", "host_us", "preemptions", "compiles")}
    if workload.published is not None:
        row |= {"sglang_h100_tok_s": workload.published, "over_sglang": report.output_rate / workload.published}
    return row


SECTIONS: dict[str, Callable[[Bench, str], None]] = {
    "engine": engine_cells,
    "restart": restart,
    "pool": small_pool,
}
