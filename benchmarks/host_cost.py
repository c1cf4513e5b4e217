"""Measure the host work of a decode step in the runtime: packing its rows and unpacking its tokens.

Calls the functions that the runner calls, on made-up rows and without the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import jax.numpy as jnp

from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.step_input import DeviceStep, PageUpdates, StepOutputs, pack_decode
from jaxserve.types.step import ScheduledRow

ROWS = (1, 16, 64, 256, 1024, 2048)


@dataclass(frozen=True)
class HostCost:
    """Seconds per decode step, the least of the repeats."""

    rows: int
    pack: float
    unpack: float


def measure_host_cost(num_rows: int, *, page_size: int = 16, repeats: int = 30) -> HostCost:
    """Measure a decode step of `num_rows` rows, of which one in `page_size` takes a new page."""
    rows = [_decode_row(slot, page_size) for slot in range(num_rows)]
    sampled = Sampled(jnp.ones((num_rows, 2), jnp.int32), jnp.zeros((num_rows, 42), jnp.int32))
    pack, unpack = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        pack_decode(rows, PageUpdates.of(rows), num_rows, num_rows, any(r.logprobs is not None for r in rows))
        packed = time.perf_counter()
        DeviceStep(num_rows, range(num_rows), sampled, StepOutputs()).result()
        pack.append(packed - start)
        unpack.append(time.perf_counter() - packed)
    return HostCost(num_rows, min(pack), min(unpack))


def _decode_row(slot: int, page_size: int) -> ScheduledRow:
    new_page_ids = [slot] if slot % page_size == 0 else []
    return ScheduledRow(f"request-{slot}", slot, 100, 1, True, [], 7, new_page_ids)
