"""Time attention alone: write and attend of some layers, at rows x context x width of the page table.

    python -m benchmarks.attention 32x160 1x8192 8x512x1024 [--backend xla] [--layers 16] [--tokens 128]

Each row has the last `--tokens` tokens of its context in the step: 1, a decode step, or part of a prompt. Pages are in
random order in the pool. The third number is the page table's width in pages, by default what the context needs. By the
contract of backends it must not change the time.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.ops.paged_attention import AttentionMetadata, AttentionSpec, Backend, get_backend

Caches = tuple[jax.Array, ...]


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer; the default is make_model's 189M model."""

    query: int = 16
    kv: int = 4
    dim: int = 64
    page_size: int = 16


@dataclass(frozen=True)
class Case:
    rows: int
    context: int  # tokens
    table: int  # pages
    tokens: int = 1  # of a row in the step

    @classmethod
    def parse(cls, text: str, page_size: int, tokens: int = 1) -> Case:
        """Parse "32x160" or "32x160x1024". Raises ValueError."""
        rows, context, *table = map(int, text.split("x"))
        return cls(rows, context, max(-(-context // page_size), *table, 1), min(tokens, context))


def attention_seconds(backend: Backend, case: Case, heads: Heads, *, layers: int = 16, repeats: int = 9) -> float:
    """Return the fastest of `repeats` steps of the rows' tokens in every layer, in float32."""
    rng = np.random.default_rng(0)
    metadata, num_pages = _metadata(case, heads.page_size, rng)
    shape = backend.cache_shape(num_pages, heads.page_size, heads.kv, heads.dim)
    caches = tuple(jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(layers))
    shape = case.rows * case.tokens, heads.query, heads.dim
    q = jnp.asarray(rng.standard_normal(shape, np.float32))
    new = q[:, : heads.kv]
    spec = AttentionSpec(heads.dim**-0.5, heads.kv)

    def step(caches: Caches, q: jax.Array, new: jax.Array, metadata: AttentionMetadata) -> tuple[Caches, jax.Array]:
        """Write K and V `new` [tokens, kv heads, head size] and attend q [tokens, heads, head size] in every layer."""
        written = []
        for cache in caches:
            cache = backend.write(cache, new, new, metadata.slot_mapping)
            q = q + backend.attend(q, cache, metadata, spec)  # one layer after the other
            written.append(cache)
        return tuple(written), q

    compiled = jax.jit(step, donate_argnums=0).lower(caches, q, new, metadata).compile()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        caches, out = compiled(caches, q, new, metadata)
        out.block_until_ready()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def _metadata(case: Case, page_size: int, rng: np.random.Generator) -> tuple[AttentionMetadata, int]:
    """Return the metadata of one step, and the number of pages in the pool."""
    pages = -(-case.context // page_size)
    num_pages = case.rows * pages
    table = np.zeros((case.rows, case.table), np.int32)
    table[:, :pages] = rng.permutation(num_pages).reshape(case.rows, pages)
    positions = np.tile(np.arange(case.context - case.tokens, case.context, dtype=np.int32), case.rows)
    row = np.repeat(np.arange(case.rows), case.tokens)
    metadata = AttentionMetadata(
        page_table=jnp.asarray(table),
        cu_q_lens=jnp.arange(case.rows + 1, dtype=jnp.int32) * case.tokens,
        kv_lens=jnp.full(case.rows, case.context, jnp.int32),
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(table[row, positions // page_size] * page_size + positions % page_size),
        decode_only=case.tokens == 1,
    )
    return metadata, num_pages


def main() -> None:
    """Measure the cases of the command line and print a row for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", help="ROWSxCONTEXT or ROWSxCONTEXTxPAGES")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    heads = Heads()
    backend = get_backend(options.backend, jax.local_devices()[0].platform)
    for text in options.cases:
        case = Case.parse(text, heads.page_size, options.tokens)
        ms = attention_seconds(backend, case, heads, layers=options.layers) * 1e3
        shape = f"{case.rows} rows x {case.tokens} of {case.context} tokens, table of {case.table} pages"
        print(f"{backend.name}: {shape}: {ms:.2f} ms", flush=True)


if __name__ == "__main__":
    main()
