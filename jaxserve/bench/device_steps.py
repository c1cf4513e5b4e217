"""The steps part of the device suite: decode steps without an engine, whose start would compile forty programs.

Only the programs that are measured are compiled. Every row has a context of random pages; steps are dispatched one
after the other, and the host waits once at the end. The profile lists the kernels of a few steps.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.device_engine import model_directory
from jaxserve.bench.device_kernels import machine_of
from jaxserve.bench.device_rows import Bench, Row
from jaxserve.models.loading.loader import random_model
from jaxserve.runtime import kv_cache, memory
from jaxserve.runtime.compilation.buckets import fit
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup
from jaxserve.runtime.steps import step_input
from jaxserve.runtime.steps.step_input import PageUpdates
from jaxserve.types.step import ScheduledRow

_PAGE = 16
_CONTEXTS = (305, 60, 550)
_CHAINED = 20  # steps of one measurement
_COMPILING = 300.0  # seconds that a program may take to compile, XLA's autotuning included


class StepBench:
    """Weights, caches and state of one model on this device, and the decode programs that were asked for."""

    def __init__(self, bench: Bench, model: str) -> None:
        self._bench = bench
        mesh = make_mesh()
        seqs, context, tokens = (4, 128, 32) if bench.tiny else (512, 1024, 512)
        dtype = jnp.dtype("float32" if bench.tiny else "bfloat16")
        loaded = random_model(model_directory(bench, model), dtype=dtype, mesh=mesh.mesh)
        self._pages = seqs * (context // _PAGE)
        config = RunnerConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=tokens,
            max_model_len=context,
            page_size=_PAGE,
            cache_dtype=dtype,
            num_pages=self._pages,
        )
        setup = RunnerSetup.of(loaded, config, mesh)
        self.attention, self._buckets = setup.backend.name, setup.buckets
        self._programs = setup.program_set((self._pages, 0), context)
        self._compiled: dict[int, jax.stages.Compiled] = {}
        self._leaves, self._num_slots = loaded.leaves, seqs
        untied = not loaded.config.tie_word_embeddings
        self._weight_bytes = sum(
            leaf.nbytes
            for leaf, spec in zip(loaded.leaves, loaded.structure.specs, strict=True)
            if not (untied and "embed_tokens" in spec.name)
        )
        self._caches = kv_cache.allocate(setup.layers, (self._pages, 0))
        self._state = jax.tree.map(
            lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), self._programs.shapes.state
        )

    def compile(self, rows: int) -> Row:
        """Compile the program of `rows` rows."""
        bucket = fit(self._buckets.decode, rows)
        began = time.perf_counter()
        compiled = self._compiled[rows] = self._programs.decode(bucket).compile()
        scratch = memory.scratch_bytes(compiled)
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "bucket": bucket, "attention": self.attention, "temporary_mib": scratch / 2**20}

    def steps(self, rows: int, context: int) -> Row:
        """Time steps of `rows` rows, whose contexts grow from `context` by one token a step."""
        run = self._prepare(rows, context)
        count, runs = (2, 1) if self._bench.tiny else (_CHAINED, 5)
        run(3)  # XLA records its graphs in the first calls
        seconds = []
        for _ in range(runs):
            began = time.perf_counter()
            dispatched = run(count)
            seconds.append(((time.perf_counter() - began) / count, dispatched / count))
        step, host = statistics.median(total for total, _ in seconds), statistics.median(host for _, host in seconds)
        floor = self._floor(rows, context)
        row: Row = {"ms": step * 1e3, "tok_s": rows / step, "floor_ms": floor * 1e3, "of_roofline": floor / step}
        return row | {"dispatch_us": host * 1e6}  # of the host, for one step; more than a step's own: it waits

    def profile(self, rows: int, context: int) -> Row:
        """List the kernels of three steps by the time that they took: (name, count, microseconds)."""
        run = self._prepare(rows, context)
        run(3)
        directory = self._bench.options.work / f"profile-{rows}"
        with jax.profiler.trace(str(directory)):
            run(3)
        kernels = _kernels(directory)
        return {"us": sum(us for _, _, us in kernels), "kernels": kernels[:60]}

    def _prepare(self, rows: int, context: int) -> Callable[[int], float]:
        """Return a function that runs so many steps and returns the seconds until the last was dispatched."""
        room = 1 if self._bench.tiny else 3 + 5 * _CHAINED
        pages = -(-(context + room) // _PAGE)
        table = np.zeros(self._state.page_table.shape, np.int32)
        chosen = np.random.default_rng(0).permutation(self._pages)[: rows * pages]
        table[:rows, :pages] = chosen.reshape(rows, pages)
        position = np.zeros(self._num_slots, np.int32)
        position[:rows] = context - 1
        self._state = self._state.replace(page_table=jnp.asarray(table), position=jnp.asarray(position))
        scheduled = [ScheduledRow(f"r{slot}", slot, context - 1, 1, True, [], pages, []) for slot in range(rows)]
        bucket = fit(self._buckets.decode, rows)
        packed = step_input.pack_decode(scheduled, PageUpdates.of([]), bucket, self._num_slots, want_logprobs=False)
        program = self._compiled[rows]

        def run(count: int) -> float:
            """Run `count` steps."""
            began, sampled = time.perf_counter(), None
            for _ in range(count):
                self._caches, self._state, sampled = program(self._leaves, self._caches, self._state, packed)
            dispatched = time.perf_counter() - began
            jax.block_until_ready(sampled)
            return dispatched

        return run

    def _floor(self, rows: int, context: int) -> float:
        machine, itemsize = machine_of(self._bench), self._leaves[0].dtype.itemsize
        kv_token = sum(leaf.nbytes for leaf in jax.tree.leaves(self._caches)) / (self._pages * _PAGE)
        products = 2 * rows * self._weight_bytes / itemsize
        return machine.floor(self._weight_bytes, products) + rows * context * kv_token / machine.bandwidth


def _kernels(directory: Path) -> list[tuple[str, int, float]]:
    """Return (name, count, microseconds) of the events on the devices, the longest first. On a CPU, of its threads."""
    data = jax.profiler.ProfileData.from_file(str(next(directory.rglob("*.xplane.pb"))))
    planes: list[Any] = list(data.planes)
    on_device = [plane for plane in planes if plane.name.startswith("/device:")] or planes
    count, micros = Counter[str](), Counter[str]()
    for plane in on_device:
        for line in plane.lines:
            for event in line.events:
                count[event.name] += 1
                micros[event.name] += event.duration_ns / 1e3
    return [(name[:120], count[name], round(us, 1)) for name, us in micros.most_common()]


def step_cells(bench: Bench, model: str) -> None:
    """Measure decode steps at a few sizes, and list their kernels."""
    sizes, contexts = ((2,), (20,)) if bench.tiny else ((1, 128, 512), _CONTEXTS)
    names = [f"{kind} {rows}" for rows in sizes for kind in ("compile decode", "profile")]
    names += [f"decode {rows} x {context}" for rows in sizes for context in contexts]
    if all(bench.results.done(bench.section, name) for name in names):
        return
    steps: list[StepBench] = []

    def start() -> Row:
        """Load the model."""
        began = time.perf_counter()
        steps.append(StepBench(bench, model))
        return {"seconds": time.perf_counter() - began}

    if not bench.again("start", 5, start, limit=_COMPILING):
        return
    for rows in sizes:
        if bench.again(f"compile decode {rows}", 20, partial(steps[0].compile, rows), limit=_COMPILING):
            for context in contexts:
                bench.cell(f"decode {rows} x {context}", 3, partial(steps[0].steps, rows, context))
    if bench.section.startswith("steps-"):
        for rows in sizes:
            bench.cell(f"profile {rows}", 5, partial(steps[0].profile, rows, contexts[0]), limit=120)


SECTIONS: dict[str, Callable[[Bench, str], None]] = {
    "steps": step_cells,
    "steps_in_parts": step_cells,
    "steps_async": step_cells,
    "steps_cublas": step_cells,
}
