"""Joins this process's devices with the other hosts' devices, by jax.distributed."""

from __future__ import annotations

import jax
from jax._src import distributed

CONNECT_LIMIT = 120  # seconds that the processes wait for each other
JAX_HEARTBEAT_LIMIT = 60  # seconds; a group's own connections notice a lost host sooner


def join_devices(coordinator: str, rank: int, num_hosts: int) -> None:
    """Let this process see the devices of all hosts. Call it before the first use of a device.

    coordinator: HOST:PORT at which host 0 listens, and nowhere else
    """
    # It would catch SIGTERM, which ends an engine process.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        coordinator,
        num_hosts,
        rank,
        cluster_detection_method="deactivate",
        initialization_timeout=CONNECT_LIMIT,
        heartbeat_timeout_seconds=JAX_HEARTBEAT_LIMIT,
        coordinator_bind_address=coordinator,
    )


def write_programs() -> None:
    """Let this process write the cache of compiled programs, whatever its rank. Call it after a device was used.

    JAX lets only process 0 write it. The other processes have different keys, so they would compile at every start.
    Each process has a cache directory of its own, see program_cache.py.
    """
    distributed.global_state.process_id = 0  # read at the first use of a device, and then by the cache only
