"""Time the recurrence of one layer alone: a row of T tokens, by each form, beside what memory and arithmetic allow.

    python -m benchmarks.states 1 64 512 [--rows 1] [--backends native xla] [--key-heads 16] [--value-heads 32]

The sizes are a gated delta net's of Qwen3.5-4B and 9B. A step of one token also folds the token before it, as in
decoding. "xla per token" is XLA's form in deterministic mode. The floors count the state once in and once out, and 8
operations for each of its numbers, a token and fold: two sums and an update. They use the rates that this machine
reaches in products (`benchmarks.floors`).
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.floors import measure_machine
from jaxserve.ops.state import StateArrays, StateBackend, StateRows, StateSpec, StateWeights, ring_length, state_shapes
from jaxserve.ops.state.native import NativeStates
from jaxserve.ops.state.xla import XlaStates

_REPEATS = 9
_START = 64  # position of a row's first token


def state_seconds(backend: StateBackend, spec: StateSpec, rows: int, tokens: int, *, per_token: bool = False) -> float:
    """Return the fastest of several steps of `rows` rows with `tokens` tokens each, in float32."""
    rng = np.random.default_rng(0)
    state, ring = state_shapes(spec, rows, ring_length(spec, 0))
    assert state is not None
    arrays = StateArrays(jnp.zeros(state, jnp.float32), jnp.ones(ring, jnp.float32))
    raw = jnp.asarray(rng.standard_normal((rows * tokens, spec.key_heads, spec.width), np.float32))
    conv = jnp.asarray(rng.standard_normal((spec.conv_width, spec.key_heads, spec.channels), np.float32))
    weights = StateWeights(conv, log_a=jnp.zeros(spec.heads), dt_bias=jnp.zeros(spec.heads))
    page = jnp.arange(rows, dtype=jnp.int32)
    start = jnp.full(rows, _START, jnp.int32)
    step = StateRows(
        cu_q_lens=jnp.arange(rows + 1, dtype=jnp.int32) * tokens,
        starts=start,
        read=page,
        write=page,
        folded=start - 1 if tokens == 1 else start,
        sure=start + tokens - 1,
        emits=jnp.full((rows, 4, 2), rows, jnp.int32),
        decode_only=tokens == 1,
        per_token=per_token,
    )
    recur = jax.jit(backend.recur, static_argnums=0, donate_argnums=1)
    _, arrays = recur(spec, arrays, raw, weights, step)
    seconds = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        out, arrays = recur(spec, arrays, raw, weights, step)
        jax.block_until_ready((out, arrays))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    """Measure the lengths of the command line and print a row for each form."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokens", nargs="+", type=int)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    parser.add_argument("--backends", nargs="+", default=["native", "xla", "xla per token"])
    options = parser.parse_args()
    spec = StateSpec("delta", options.key_heads, options.value_heads, 128, 128, 4)
    machine, numbers = measure_machine(), spec.heads * spec.k_dim * spec.v_dim * options.rows
    for tokens in options.tokens:
        folds = tokens + (tokens == 1)
        bytes_floor, work_floor = 8 * numbers / machine.bandwidth, 8 * numbers * folds / machine.rate
        floors = f"floors: memory {bytes_floor * 1e3:.3f} ms, arithmetic {work_floor * 1e3:.3f} ms"
        for name in options.backends:
            backend = NativeStates() if name == "native" else XlaStates()
            seconds = state_seconds(backend, spec, options.rows, tokens, per_token=name == "xla per token")
            print(f"{name}: {options.rows} rows x {tokens} tokens: {seconds * 1e3:.2f} ms; {floors}", flush=True)


if __name__ == "__main__":
    main()
