"""The steps part of the device suite: decode steps and a prefill without an engine, which would compile forty programs.

Only the programs that are measured are compiled, and kept for the server of the same model. Every row has a context of
random pages; steps are dispatched one after the other, and the host waits once at the end. The profile lists the
kernels of a few steps.
"""

from __future__ import annotations

import json
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

from benchmarks.device_suite.kernels import machine_of
from benchmarks.device_suite.models import PAGE, compile_cache, limits, model_directory
from benchmarks.device_suite.rows import PROFILE, Bench, Row
from jaxserve.models.checkpoint.loader import random_model
from jaxserve.runtime import kv_cache, memory, step_input
from jaxserve.runtime.compilation import program_cache
from jaxserve.runtime.compilation.buckets import fit
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup
from jaxserve.runtime.step_input import PageUpdates
from jaxserve.types.step import ScheduledRow

_CHAINED = 20  # steps of one measurement
_ROOM = 3 + 5 * _CHAINED  # tokens by which a context grows
_COMPILING = 300.0  # seconds that a program may take to compile, XLA's autotuning included
# What is measured by model: (rows, context), the one of each number of rows that decides first.
_DECODES = {
    "gpt-oss-20b": ((1, 1536), (512, 1536)),
}
_LLAMA = tuple((rows, context) for context in (305, 60, 550) for rows in (1, 128, 512))
_PROMPT = 2048


class StepBench:
    """Weights, caches and state of one model on this device, and its programs. `load` comes first."""

    def __init__(self, bench: Bench, model: str) -> None:
        self._bench, self._model = bench, model
        self._compiled: dict[str, jax.stages.Compiled] = {}

    def load(self) -> Row:
        """Draw the weights on the device and allocate what the programs need."""
        bench, began = self._bench, time.perf_counter()
        mesh = make_mesh()
        dtype = jnp.dtype("float32" if bench.tiny else "bfloat16")
        cache = compile_cache(bench, self._model)
        cache.mkdir(parents=True, exist_ok=True)
        program_cache.enable(cache)
        loaded = random_model(model_directory(bench, self._model), dtype=dtype, mesh=mesh.mesh)
        sizes = limits(bench, self._model)
        config = RunnerConfig(
            **sizes,  # type: ignore[arg-type]  # all of them are numbers
            cache_dtype=dtype,
            attention=bench.options.attention,
        )
        self._setup = setup = RunnerSetup.of(loaded, config, mesh)
        self._buckets, self._num_slots = setup.buckets, config.max_num_seqs
        self._num_pages = (sizes["num_pages"],) * setup.steps.num_groups
        self._programs = setup.program_set(self._num_pages, config.max_model_len)
        self._leaves = loaded.leaves
        self._fixed_bytes, self._expert_bytes = _weight_bytes(loaded)
        self._caches = kv_cache.allocate(setup.layers, self._num_pages)
        state, hidden = self._programs.shapes.state, self._programs.shapes.hidden
        self._state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype, device=s.sharding), state)
        self._hidden = jnp.zeros(hidden.shape, hidden.dtype, device=hidden.sharding)
        jax.block_until_ready((self._caches, self._state))
        weights = sum(leaf.nbytes for leaf in loaded.leaves)
        pools = sum(leaf.nbytes for leaf in jax.tree.leaves(self._caches))
        return {
            "seconds": time.perf_counter() - began,
            "attention": setup.backend.name,
            "weights_gb": weights / 1e9,
            "cache_gb": pools / 1e9,
        }

    def compile(self, rows: int) -> Row:
        """Compile the program of a decode step of `rows` rows."""
        bucket = fit(self._buckets.decode, rows)
        return {"bucket": bucket} | self._compile(f"decode {rows}", self._programs.decode(bucket))

    def compile_prefill(self, tokens: int) -> Row:
        """Compile the programs of a prompt of `tokens` tokens in one chunk, and of its first token."""
        head = self._compile("head", self._programs.head_sample(self._buckets.head[0]))
        row = self._compile("prefill", self._programs.extend(fit(self._buckets.extend, tokens)))
        return row | {"head_seconds": head["seconds"]}

    def _compile(self, name: str, program: Any) -> Row:
        began = time.perf_counter()
        compiled = self._compiled[name] = program.compile()
        program_cache.share()
        seconds = time.perf_counter() - began
        scratch = memory.scratch_bytes(compiled)
        return {"seconds": seconds, "attention": self._setup.backend.name, "temporary_mib": scratch / 2**20}

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

    def prefill(self, tokens: int) -> Row:
        """Time one prompt in one chunk, until the host has its first token."""
        pages = -(-tokens // PAGE)
        self._set_pages(1, pages)
        size, head = fit(self._buckets.extend, tokens), self._buckets.head[0]
        prompt = [index % 1000 for index in range(tokens)]
        scheduled = [ScheduledRow("r0", 0, 0, tokens, True, prompt, 0, [])]
        rows, updates = self._programs.extend_rows(size), self._programs.extend_updates(size)
        packed = step_input.pack_extend(scheduled, PageUpdates.of([]), size, rows, updates, self._num_slots)
        last = step_input.pack_head([0], [tokens - 1], head, self._num_slots)
        mask, ids = (np.zeros(struct.shape, np.int32) for struct in self._programs.head_sample(head).args[-2:])
        seconds = []
        for _ in range(3 + (1 if self._bench.tiny else 5)):
            began = time.perf_counter()
            result = self._compiled["prefill"](self._leaves, self._caches, self._state, self._hidden, packed)
            self._caches, self._state, self._hidden = result[:3]
            self._state, sampled = self._compiled["head"](self._leaves, self._state, self._hidden, last, mask, ids)
            jax.block_until_ready(sampled)
            seconds.append(time.perf_counter() - began)
        chunk = statistics.median(seconds[3:])
        config = self._setup.loaded.config
        attention = 2 * tokens**2 * config.num_heads * config.head_dim * len(self._caches)
        products = 2 * tokens * self._weights_met(tokens) / self._itemsize
        floor = (products + attention) / machine_of(self._bench).flops
        return {"ms": chunk * 1e3, "tok_s": tokens / chunk, "floor_ms": floor * 1e3, "of_roofline": floor / chunk}

    def profile(self, rows: int, context: int) -> Row:
        """List the kernels of three steps by the time that they took: (name, count, microseconds)."""
        run = self._prepare(rows, context)
        run(3)
        directory = self._bench.options.work / f"profile-{rows}"
        with jax.profiler.trace(str(directory)):
            run(3)
        kernels = _kernels(directory)
        _keep_profile(self._bench.options.out / PROFILE, f"{self._bench.section} decode {rows} x {context}", kernels)
        return {"us": sum(us for _, _, us in kernels), "kernels": kernels[:20]}

    def _set_pages(self, rows: int, pages: int) -> None:
        """Give each of the first rows `pages` random pages in each group of layers."""
        slots, columns = self._state.page_table.shape
        table = np.zeros((slots, columns), np.int32)
        groups = [count for count in self._num_pages if count]
        width = columns // len(groups)
        for group, count in enumerate(groups):
            chosen = np.random.default_rng(group).permutation(count)[: rows * pages]
            table[:rows, group * width : group * width + pages] = chosen.reshape(rows, pages)
        self._state = self._state.replace(page_table=jnp.asarray(table))

    def _prepare(self, rows: int, context: int) -> Callable[[int], float]:
        """Return a function that runs so many steps and returns the seconds until the last was dispatched."""
        pages = -(-(context + (6 if self._bench.tiny else _ROOM)) // PAGE)
        self._set_pages(rows, pages)
        position = np.zeros(self._num_slots, np.int32)
        position[:rows] = context - 1
        self._state = self._state.replace(position=jnp.asarray(position))
        scheduled = [ScheduledRow(f"r{slot}", slot, context - 1, 1, True, [], pages, []) for slot in range(rows)]
        bucket, groups = fit(self._buckets.decode, rows), self._setup.steps.num_groups
        packed = step_input.pack_decode(scheduled, PageUpdates.of([]), bucket, self._num_slots, False, groups)
        program = self._compiled[f"decode {rows}"]

        def run(count: int) -> float:
            """Run `count` steps."""
            began, sampled = time.perf_counter(), None
            for _ in range(count):
                self._caches, self._state, sampled = program(self._leaves, self._caches, self._state, packed)
            dispatched = time.perf_counter() - began
            jax.block_until_ready(sampled)
            return dispatched

        return run

    @property
    def _itemsize(self) -> int:
        """The bytes of a number of the activations."""
        return self._setup.loaded.structure.activation_dtype.itemsize

    def _weights_met(self, rows: int) -> float:
        """Return the bytes of the weights that one token meets, of experts those that it chose."""
        moe = self._setup.loaded.config.moe
        return self._fixed_bytes + (self._expert_bytes * moe.experts_per_token / moe.num_experts if moe else 0)

    def _weights_read(self, rows: int) -> float:
        """Return the bytes of weights that a step of `rows` rows reads if rows choose experts at random."""
        moe = self._setup.loaded.config.moe
        if moe is None:
            return self._fixed_bytes
        return self._fixed_bytes + self._expert_bytes * (1 - (1 - moe.experts_per_token / moe.num_experts) ** rows)

    def _floor(self, rows: int, context: int) -> float:
        """Return the least seconds of a step: of its weights and products, and of what its layers read of the cache."""
        machine = machine_of(self._bench)
        products = 2 * rows * self._weights_met(rows) / self._itemsize
        read = 0.0
        for layer, pages in zip(self._setup.layers, self._caches, strict=True):
            of_token = sum(leaf.nbytes for leaf in jax.tree.leaves(pages)) / (self._num_pages[layer.group] * PAGE)
            seen = min(context, self._setup.groups[layer.group - 1].tokens) if layer.group else context
            read += rows * seen * of_token
        return machine.floor(self._weights_read(rows), products) + read / machine.bandwidth


def _weight_bytes(loaded: Any) -> tuple[float, float]:
    """Return the bytes of the weights that every step reads, without an untied table of embeddings, and of experts."""
    untied = not loaded.config.tie_word_embeddings
    fixed = experts = 0.0
    for leaf, spec in zip(loaded.leaves, loaded.structure.specs, strict=True):
        if "expert" in spec.axes:
            experts += leaf.nbytes
        elif not (untied and "embed_tokens" in spec.name):
            fixed += leaf.nbytes
    return fixed, experts


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


def _keep_profile(path: Path, name: str, kernels: list[tuple[str, int, float]]) -> None:
    """Add the kernels of a step to the file of profiles, which is never there in part."""
    profiles = json.loads(path.read_text()) if path.exists() else {}
    temporary = path.with_suffix(".part")
    temporary.write_text(json.dumps(profiles | {name: kernels[:200]}))
    temporary.replace(path)


def step_cells(bench: Bench, model: str) -> None:
    """Measure decode steps at a few sizes, list their kernels, and measure a prompt."""
    decodes, prompt = _DECODES.get(model, _LLAMA), _PROMPT
    if bench.tiny:
        decodes, prompt = ((2, 20),), 32
    sizes = tuple(dict.fromkeys(rows for rows, _ in decodes))
    whole = bench.section.startswith("steps-") and model != "gpt-oss-20b"  # not a variant: with profiles and a prompt
    names = [f"compile decode {rows}" for rows in sizes] + [f"decode {rows} x {context}" for rows, context in decodes]
    if whole:
        names += [f"profile {rows}" for rows in sizes] + [f"prefill {prompt}"]
    if all(bench.results.done(bench.section, name) for name in names):
        return
    steps = StepBench(bench, model)
    if not bench.again("start", 20, steps.load, limit=_COMPILING, answers="Do weights and cache fit, and how long?"):
        return
    compiled = []
    for rows in sizes:
        question = f"How long does XLA with its autotuning take for {_rows(rows)}?"
        if bench.again(f"compile decode {rows}", 20, partial(steps.compile, rows), limit=_COMPILING, answers=question):
            compiled.append(rows)
            _decode_cell(bench, steps, *next(decode for decode in decodes if decode[0] == rows), optional=False)
    if whole:
        for rows in compiled:
            measure, question = (
                partial(steps.profile, rows, decodes[0][1]),
                f"Which kernels take the time of {_rows(rows)}?",
            )
            bench.cell(f"profile {rows}", 5, measure, limit=120, answers=question)
        names = f"compile prefill {prompt}", f"prefill {prompt}"
        if not bench.results.done(bench.section, names[1]) and bench.again(
            names[0], 20, partial(steps.compile_prefill, prompt), limit=_COMPILING, answers="How long for a prompt's?"
        ):
            question = f"How long is the first token of {prompt} away, and how near is arithmetic?"
            bench.cell(names[1], 3, partial(steps.prefill, prompt), answers=question)
    for rows, context in decodes:
        if rows in compiled:
            _decode_cell(bench, steps, rows, context, optional=True)


def _rows(count: int) -> str:
    return "one row" if count == 1 else f"{count} rows"


def _decode_cell(bench: Bench, steps: StepBench, rows: int, context: int, *, optional: bool) -> None:
    name = f"decode {rows} x {context}"
    if not bench.planned(name):
        question = f"How many tokens a second from {_rows(rows)} of {context} tokens, and how near is the floor?"
        bench.cell(name, 2, partial(steps.steps, rows, context), answers=question, optional=optional)


SECTIONS: dict[str, Callable[[Bench, str], None]] = {
    "steps": step_cells,
    "steps_in_parts": step_cells,
    "steps_async": step_cells,
    "steps_cublas": step_cells,
}
