"""The kernel part of the device suite: rates of the device, numerics against the reference, times against the roofline.

Defines the grids and their batches, and counts bytes and operations. A time is the median of several runs; a run chains
calls and waits once at the end. Three calls before them let XLA capture its graphs.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_suite.rows import Bench, Row
from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Backend, get_backend
from jaxserve.ops.paged_attention.mosaic_gpu import MosaicGpuBackend, MosaicTuning
from jaxserve.ops.paged_attention.scaled_pages import Pages, ScaledPages
from jaxserve.ops.paged_attention.tpu import TpuBackend
from jaxserve.ops.paged_attention.triton.backend import TritonBackend, TritonTuning
from jaxserve.ops.paged_attention.xla import XlaBackend
from jaxserve.runtime.compilation.compiler import compiler_options
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.numeric_check import serving_cases, wrong_numbers

TOLERANCE = 2e-2  # relative error of bfloat16 attention
DTYPE = jnp.bfloat16
COLD_BYTES = 160 << 20  # more than the second-level cache of an H200 holds


@dataclass(frozen=True)
class HeadSizes:
    """The sizes of a layer's attention."""

    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    values: int | None = None  # columns of V if it is the first of K, as in latent attention
    pages: str | None = None  # dtype of pages in 8 bits

    @property
    def latent(self) -> bool:
        return self.values is not None

    @property
    def num_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.head_dim**-0.5, self.kv_heads, self.window, self.soft_cap, self.values)

    def make_pages(self, backend: Backend, num_pages: int) -> Pages:
        """Return a backend's pages of random numbers, in bfloat16 or in 8 bits."""
        sizes = num_pages, self.page_size, self.kv_heads
        values = normal(6, *backend.cache_shape(*sizes, self.head_dim, latent=self.latent))
        if self.pages is None:
            return values
        scales = jnp.full(backend.scale_shape(*sizes, latent=self.latent), 1 / 32, jnp.float32)
        return ScaledPages(jnp.clip(32 * values, -127, 127).astype(self.pages), scales)


@dataclass(frozen=True)
class Machine:
    """Bytes and bfloat16 operations per second."""

    bandwidth: float
    flops: float

    def floor(self, num_bytes: float, operations: float) -> float:
        """Return the least seconds for these bytes and operations."""
        return max(num_bytes / self.bandwidth, operations / self.flops)


_PACKAGES = ("jax", "flax", "numpy", "nvidia-", "transformers", "triton")  # those that figures depend on
_H200 = Machine(4.3e12, 790e12)  # what is reached of 4.8e12 and 989e12
_PUBLISHED = {"TPU v5 lite": Machine(819e9, 197e12), "TPU v6 lite": Machine(1640e9, 918e12)}  # v5e and v6e, by Google


def published_machine(device_kind: str) -> Machine:
    """Return the published rates of a device by jax's name for its kind; of one that is not known, an H200's."""
    return _PUBLISHED.get(device_kind, _H200)


def machine_of(bench: Bench) -> Machine:
    """Return the rates of the section `ceilings`; without it, published ones of this kind of device."""
    known = published_machine(jax.devices()[0].device_kind)
    measured = (bench.results.get("ceilings", name, "GBps") for name in ("copy", "read"))
    bandwidth = max((rate * 1e9 for rate in measured if rate), default=known.bandwidth)
    rate = bench.results.get("ceilings", "matmul", "TFLOPs")
    return Machine(bandwidth, rate * 1e12 if rate else known.flops)


def clock(function: Callable[..., Any], *args: Any, tiny: bool, chained: int = 20, runs: int = 5) -> float:
    """Return the seconds per call."""
    chained, runs = (1, 1) if tiny else (chained, runs)
    for _ in range(1 if tiny else 3):
        jax.block_until_ready(function(*args))
    seconds = []
    for _ in range(runs):
        started = time.perf_counter()
        results = [function(*args) for _ in range(chained)]
        jax.block_until_ready(results)
        seconds.append((time.perf_counter() - started) / chained)
    return statistics.median(seconds)


def versions(bench: Bench) -> None:
    """Record the device, its driver and the packages."""
    bench.cell("machine", 3, _machine, answers="Which device, driver and packages are these?")


def _machine() -> Row:
    device = jax.devices()[0]
    listed = shutil.which("nvidia-smi")
    told = subprocess.run([listed, "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.mem", "--format=csv"],
                          capture_output=True, text=True, timeout=20).stdout if listed else ""  # fmt: skip
    installed = {each.name: each.version for each in metadata.distributions()}
    return {
        "device": device.device_kind,
        "platform_version": device.client.platform_version,
        "nvidia_smi": told.strip(),
        "memory_gb": (device.memory_stats() or {}).get("bytes_limit", 0) / 1e9,
        "cores": os.cpu_count(),
        "packages": {name: version for name, version in sorted(installed.items()) if name.startswith(_PACKAGES)},
    }


def ceilings(bench: Bench) -> None:
    """Measure the rates of the device: a copy, a large matrix product, an empty dispatch."""
    size = 1 << (16 if bench.tiny else 30)  # float32 numbers: 4 GiB
    width = 64 if bench.tiny else 8192
    known = published_machine(jax.devices()[0].device_kind)

    def copy() -> Row:
        x = jnp.ones((size,), jnp.float32)
        seconds = clock(jax.jit(lambda x: x + 1), x, tiny=bench.tiny)
        return {"us": seconds * 1e6, "GBps": 8 * size / seconds / 1e9, "device": str(jax.devices()[0])}

    def read() -> Row:
        x = jnp.ones((size,), jnp.float32)
        seconds = clock(jax.jit(jnp.sum), x, tiny=bench.tiny)
        rate = 4 * size / seconds
        return {"us": seconds * 1e6, "GBps": rate / 1e9, "of_published": rate / known.bandwidth}

    def matmul() -> Row:
        a, b = normal(1, width, width), normal(2, width, width)
        seconds = clock(jax.jit(jnp.matmul), a, b, tiny=bench.tiny)
        rate = 2 * width**3 / seconds
        return {"us": seconds * 1e6, "TFLOPs": rate / 1e12, "of_published": rate / known.flops}

    def dispatch() -> Row:
        x = jnp.ones((4,), jnp.float32)
        return {"us": clock(jax.jit(lambda x: x * x), x, tiny=bench.tiny, chained=200) * 1e6}

    bench.cell("copy", 3, copy, answers="How many bytes a second does a kernel read and write?")
    bench.cell("read", 3, read, answers="How many bytes a second does a kernel read, on which all floors rest?")
    bench.cell("matmul", 5, matmul, answers="How many operations a second does a large bfloat16 product reach?")
    bench.cell("dispatch", 2, dispatch, answers="What does one call of a program cost the host?")


# --- batches


def normal(seed: int, *shape: int) -> jax.Array:
    draw = jax.jit(lambda: jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(DTYPE))
    return draw()


def batch(rows: Sequence[tuple[int, int]], heads: HeadSizes) -> tuple[jax.Array, AttentionMetadata, int]:
    """Return q [T, N, D], metadata and the number of pages of a batch of rows (q_len, kv_len). Pages are in random
    order.
    """
    q_lens, kv_lens = np.array(rows, np.int32).T
    pages = -(-kv_lens // heads.page_size)
    table = np.zeros((len(rows), int(pages.max())), np.int32)
    order = np.random.default_rng(0).permutation(int(pages.sum())).astype(np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum(pages) - pages, pages, strict=True)):
        table[row, :count] = order[first : first + count]
    starts = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    rows_of_tokens = np.repeat(np.arange(len(rows)), q_lens)
    positions = np.arange(starts[-1]) - starts[rows_of_tokens] + (kv_lens - q_lens)[rows_of_tokens]
    slots = table[rows_of_tokens, positions // heads.page_size] * heads.page_size + positions % heads.page_size
    arrays = (table, starts, kv_lens, positions.astype(np.int32), slots.astype(np.int32))
    metadata = AttentionMetadata(*map(jnp.asarray, arrays), decode_only=all(n == 1 for n in q_lens))
    return normal(3, int(starts[-1]), heads.num_heads, heads.head_dim), metadata, int(pages.sum())


def kernels(bench: Bench) -> dict[str, Backend]:
    """Return the backends of this device; on a CPU the interpreted one of the device that it stands in for.

    A section of its own has Mosaic: an illegal address ends the process, and a wrong barrier hangs.
    """
    platform = bench.platform
    if bench.section.endswith("-mosaic_gpu"):
        return {"mosaic_gpu": get_backend("mosaic_gpu", platform)} if platform == "gpu" else {}
    if platform == "gpu":
        return {"triton": get_backend("triton", platform)}
    if platform == "tpu":
        return {"tpu": get_backend("tpu", platform)}
    if bench.options.family == "tpu":
        return {"tpu": TpuBackend(interpret=True)}
    small = TritonTuning(decode_tile=16, extend_rows=16, extend_tile=16, programs=8)
    return {"triton": TritonBackend(tuning=small, interpret=True)}


def numerics(bench: Bench) -> None:
    """Compare the kernels that serve with numpy, then attention with the float32 reference over head sizes, options and
    ragged lengths.
    """
    edges = [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 300)]
    mixed = [(1, 40), (1, 129), (5, 5), (33, 70), (130, 300)]
    if bench.tiny:
        edges, mixed = [(1, 5), (1, 17)], [(1, 20), (3, 9)]
    shapes = {
        "llama": HeadSizes(2, 2, 32) if bench.tiny else HeadSizes(),
        "gpt-oss": HeadSizes(8, 8, 64, window=128),
        "int8": HeadSizes(pages="int8"),
        "group-1": HeadSizes(4, 1, 64),
        "group-7": HeadSizes(2, 7, 64),
        "group-8-window": HeadSizes(1, 8, 64, window=40, soft_cap=20.0),
        "head-80": HeadSizes(2, 2, 80),
        "head-96": HeadSizes(2, 1, 96),
        "head-256": HeadSizes(2, 2, 256),
        "fp8-head-64-window": HeadSizes(2, 8, 64, window=40, pages="float8_e4m3fn"),
        "latent-128-heads": HeadSizes(1, 128, 576, values=512),
        "latent-16-heads": HeadSizes(1, 16, 576, values=512),
    }
    for shape, heads in list(shapes.items())[: 1 if bench.tiny else None]:
        for kind, rows in {"decode": edges, "mixed": mixed}.items():
            for name, backend in kernels(bench).items():
                cell, question = (
                    functools.partial(_compare, backend, rows, heads),
                    f"Is {name} right for {shape} heads?",
                )
                optional = shape not in ("llama", "gpt-oss")
                bench.cell(f"{name} {shape} {kind}", 4, cell, answers=question, optional=optional)
        if shape == "llama" and not bench.section.endswith("-mosaic_gpu"):
            for case in ("matrix products", "sampler", "sums", "attention", "experts"):
                question = f"Does what serves compute {case} as numpy does?"
                bench.cell(f"serves {case}", 3, functools.partial(_serves, bench, case), answers=question)


def _serves(bench: Bench, name: str) -> Row:
    """Run a case of the check that every start makes, with what `auto` chooses on this device."""
    mesh = make_mesh()
    backend = XlaBackend() if bench.tiny else get_backend("auto", bench.platform)
    cases = serving_cases(backend, mesh, jnp.dtype(DTYPE), deterministic=False, of_experts="auto")
    chosen = [case for case in cases if case.name.startswith(name)]
    wrong = wrong_numbers(chosen, mesh.devices[0], compiler_options(bench.platform))
    return {"ok": bool(chosen) and not wrong, "wrong": wrong}


def _compare(backend: Backend, rows: list[tuple[int, int]], heads: HeadSizes) -> Row:
    q, metadata, num_pages = batch(rows, heads)
    context = normal(4, num_pages * heads.page_size, heads.kv_heads, heads.head_dim)
    values = context if heads.latent else normal(5, *context.shape)
    slots = jnp.arange(context.shape[0], dtype=jnp.int32)

    def attend(backend: Backend) -> np.ndarray:
        """Return the output as float32 [T, N, D]."""
        cache = backend.write(heads.make_pages(backend, num_pages), context, values, slots)
        return np.asarray(_attend(backend)(q, cache, metadata, heads.spec).astype(jnp.float32))[..., : heads.values]

    got, want = attend(backend), attend(get_backend("reference", jax.default_backend()))
    error = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return {"rel_err": error, "ok": bool(error < TOLERANCE)}


def _attend(backend: Backend) -> Callable[..., jax.Array]:
    """Return the compiled `backend.attend`."""
    return _compiled(backend.attend, backend, static_argnums=3)


def _compiled(function: Callable[..., Any], backend: Backend, **keys: Any) -> Callable[..., jax.Array]:
    """Return a jitted function. An interpreted kernel runs once, so LLVM's optimisation would not pay."""
    interpreted = isinstance(backend, TritonBackend | TpuBackend) and backend.interpret
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0} if interpreted else {}, **keys)


# --- times


def attention(bench: Bench) -> None:
    """Time attention of one layer of Llama-3.1-8B over a grid of batches, for every kernel in its default tuning."""
    grid = {
        "decode 32 x 4096": [(1, 4096)] * 32,
        "decode 1 x 4096": [(1, 4096)],
        "decode 100 x 305": [(1, 305)] * 100,
        "decode 500 x 305": [(1, 305)] * 500,
        "decode 64 x 4096": [(1, 4096)] * 64,
        "decode 1 x 305": [(1, 305)],
        "prefill 2048": [(2048, 2048)],
        "prefill 8192": [(8192, 8192)],
        "chunk 512 at 4096": [(512, 4096)],
        "mixed 64 x 600 + chunk 448": [(1, 600)] * 64 + [(448, 448)],
    }
    heads = HeadSizes()
    if bench.tiny:
        grid, heads = {"decode 2 x 40": [(1, 40)] * 2, "prefill 20": [(20, 20)]}, HeadSizes(2, 2, 32)
    time_grid(bench, grid, heads, "")
    in_8_bits = {name: grid[name] for name in ("decode 64 x 4096", "prefill 2048") if name in grid}
    time_grid(bench, in_8_bits, HeadSizes(pages="int8"), "int8 ")


def time_grid(bench: Bench, grid: dict[str, list[tuple[int, int]]], heads: HeadSizes, prefix: str) -> None:
    """Time attention over a grid of batches, rows (q_len, kv_len) by name, for every kernel. prefix: of the cells."""
    for name, rows in grid.items():
        for kernel, backend in kernels(bench).items():
            cell = functools.partial(_time_attention, bench, backend, rows, heads)
            bench.cell(f"{kernel} {prefix}{name}", 12, cell)


def _time_attention(bench: Bench, backend: Backend, rows: list[tuple[int, int]], heads: HeadSizes) -> Row:
    q, metadata, num_pages = batch(rows, heads)
    cache = heads.make_pages(backend, num_pages)
    # One program makes many calls, because one takes microseconds, over more bytes than the device's own cache holds.
    copies = 1 if bench.tiny else min(7, COLD_BYTES // cache.nbytes)
    caches = [cache, *(jax.tree.map(jnp.copy, cache) for _ in range(copies))]
    calls = 1 if bench.tiny else 32

    def chain(q: jax.Array, caches: list[Pages], metadata: AttentionMetadata) -> jax.Array:
        """Call attention `calls` times, each on the output [T, N, D] of the last call."""
        for call in range(calls):
            out = backend.attend(q, caches[call % len(caches)], metadata, heads.spec)
            # A result with fewer columns than q can be no q: the next call depends on one number of it.
            q = q.at[0, 0, 0].set(out[0, 0, 0]) if heads.latent else out
        return q

    seconds = clock(_compiled(chain, backend), q, caches, metadata, tiny=bench.tiny, chained=3) / calls
    columns = heads.head_dim + (heads.values or heads.head_dim)  # of K and V, and of queries and results
    context = sum(kv for _, kv in rows)
    stored = context * heads.kv_heads * (heads.head_dim if heads.latent else columns)
    num_bytes = stored * cache.dtype.itemsize + 2 * q.shape[0] * heads.num_heads * columns
    operations = 2 * heads.num_heads * columns * sum(n * (kv - n) + n * (n + 1) / 2 for n, kv in rows)
    return rates(bench, seconds, num_bytes, operations)


def rates(bench: Bench, seconds: float, num_bytes: float, operations: float) -> Row:
    """Return a row with the time, the rates and the share of the roofline."""
    return {
        "us": seconds * 1e6,
        "GBps": num_bytes / seconds / 1e9,
        "TFLOPs": operations / seconds / 1e12,
        "of_roofline": machine_of(bench).floor(num_bytes, operations) / seconds,
    }


def tune(bench: Bench) -> None:
    """Time decode attention over the kernels' tuning parameters."""
    cells = {"32 x 4096": (32, 4096), "100 x 305": (100, 305), "1 x 4096": (1, 4096)}
    heads = HeadSizes()
    if bench.tiny:
        cells, heads = {"2 x 40": (2, 40)}, HeadSizes(2, 2, 32)
    for cell, (count, context) in cells.items():
        for name, backend in _variants(bench).items():
            rows = [(1, context)] * count
            bench.cell(f"{name} {cell}", 10, functools.partial(_time_attention, bench, backend, rows, heads))


def _variants(bench: Bench) -> dict[str, Backend]:
    backends = kernels(bench)
    variants: dict[str, Backend] = {}
    triton = backends.get("triton")
    if isinstance(triton, TritonBackend):
        sizes = [(32, 4, 7), (64, 4, 5), (64, 4, 7), (64, 2, 5), (128, 8, 5), (64, 4, 3)]  # the last: one buffer
        for tile, warps, stages in sizes[: 1 if bench.tiny else None]:
            tuning = dataclasses.replace(triton.tuning, decode_tile=tile, decode_warps=warps, decode_stages=stages)
            variants[f"triton tile={tile} warps={warps} stages={stages}"] = dataclasses.replace(triton, tuning=tuning)
        for programs in () if bench.tiny else (264, 1056):
            tuning = dataclasses.replace(triton.tuning, programs=programs)
            variants[f"triton programs={programs}"] = dataclasses.replace(triton, tuning=tuning)
    mosaic = backends.get("mosaic_gpu")
    if isinstance(mosaic, MosaicGpuBackend):
        for tile, stages in ((64, 2), (64, 3), (128, 2)):
            variants[f"mosaic_gpu tile={tile} stages={stages}"] = dataclasses.replace(
                mosaic, tuning=MosaicTuning(tile, stages)
            )
    return variants


def write(bench: Bench) -> None:
    """Time the write of one layer's K and V, and check that it is in place."""
    heads = HeadSizes(2, 2, 32) if bench.tiny else HeadSizes()
    for count in (2,) if bench.tiny else (1, 100, 500, 2048):
        for kernel, backend in kernels(bench).items():
            bench.cell(f"{kernel} {count} tokens", 8, functools.partial(_time_write, bench, backend, count, heads))


def _time_write(bench: Bench, backend: Backend, count: int, heads: HeadSizes) -> Row:
    num_pages = 64 if bench.tiny else 20_000
    shape = backend.cache_shape(num_pages, heads.page_size, heads.kv_heads, heads.head_dim)
    cache = jnp.zeros(shape, DTYPE)
    k, v = normal(1, count, heads.kv_heads, heads.head_dim), normal(2, count, heads.kv_heads, heads.head_dim)
    slots = np.random.default_rng(0).permutation(num_pages * heads.page_size)[:count].astype(np.int32)
    compiled = jax.jit(backend.write, donate_argnums=0).lower(cache, k, v, jnp.asarray(slots)).compile()
    memory = compiled.memory_analysis()
    calls = 2 if bench.tiny else 200
    for _ in range(3):
        cache = compiled(cache, k, v, slots)
    jax.block_until_ready(cache)
    started = time.perf_counter()
    for _ in range(calls):
        cache = compiled(cache, k, v, slots)
    jax.block_until_ready(cache)
    aliased = 0 if memory is None else memory.alias_size_in_bytes
    return {
        "us": (time.perf_counter() - started) / calls * 1e6,
        "ok": aliased >= cache.nbytes,
        "temp_bytes": None if memory is None else memory.temp_size_in_bytes,
    }


SECTIONS: dict[str, Callable[[Bench], None]] = {
    "versions": versions,
    "ceilings": ceilings,
    "numerics": numerics,
    "attention": attention,
    "write": write,
    "tune": tune,
}
