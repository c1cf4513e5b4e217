"""Which devices each replica gets: GPUs and TPU chips by an environment variable, cores of a CPU by affinity.

No two replicas share a device. The choice is made before the child process starts, because JAX takes all devices that
it sees. Nothing here has been run on a TPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from jaxserve.client.processes.roles import Roles
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.system import Platform

_VISIBLE = {"gpu": "CUDA_VISIBLE_DEVICES", "tpu": "TPU_VISIBLE_CHIPS"}
_TPU_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}  # of the chips of one process
_PREFILL_NICENESS = 5  # a prompt keeps a core busy, which the process that writes the streams may share
_LEAST_FRACTION = 0.01  # of cache.memory_fraction


@dataclass(frozen=True)
class DeviceShare:
    """What one engine process may use.

    environment: added to that of its parent. cores: None: all. niceness: by how much its priority is below its parent's
    """

    environment: Mapping[str, str] = field(default_factory=dict)
    cores: frozenset[int] | None = None
    niceness: int = 0


def device_shares(
    config: Config, platform: Platform, environ: Mapping[str, str] = os.environ, cores: Sequence[int] | None = None
) -> list[DeviceShare]:
    """Return the share of each replica. Raises ConfigError if the devices are too few.

    cores: those that this process may use; None: asks the system
    """
    count = config.mesh.replicas
    if platform == "cpu":
        found = sorted(os.sched_getaffinity(0)) if cores is None else cores
        roles = Roles.of_config(config, count)
        return [
            DeviceShare(cores=frozenset(part), niceness=_PREFILL_NICENESS if roles.of(i) == "prefill" else 0)
            for i, part in enumerate(_cores(found, count))
        ]
    size = config.mesh.data * config.mesh.tensor * config.mesh.expert
    visible = _visible(environ.get(_VISIBLE[platform]), count * size)
    parts = [visible[index * size : (index + 1) * size] for index in range(count)]
    return [DeviceShare(_environment(platform, part)) for part in parts]


def _cores(cores: Sequence[int], count: int) -> list[Sequence[int]]:
    if len(cores) < count:
        raise ConfigError(
            f"mesh.replicas is {count}, and there are {len(cores)} cores for them", fix="set it to that or less"
        )
    return [cores[index * len(cores) // count : (index + 1) * len(cores) // count] for index in range(count)]


def _visible(given: str | None, needed: int) -> list[str]:
    """Return the names of the devices. Without the variable they are numbered; an engine fails if one is not there."""
    if given is None:
        return [str(number) for number in range(needed)]
    names = [name.strip() for name in given.split(",") if name.strip()]
    if len(names) < needed:
        raise ConfigError(
            f"the replicas need {needed} devices, and the environment shows {len(names)}",
            fix="lower mesh.replicas or mesh.tensor",
        )
    return names


def _environment(platform: Platform, names: Sequence[str]) -> dict[str, str]:
    variables = {_VISIBLE[platform]: ",".join(names)}
    if platform == "tpu":
        bounds = _TPU_BOUNDS.get(len(names))
        if bounds is None:
            raise ConfigError(f"a replica of {len(names)} TPU chips has no shape", fix="use 1, 2, 4 or 8 a replica")
        variables |= {"TPU_CHIPS_PER_PROCESS_BOUNDS": bounds, "TPU_PROCESS_BOUNDS": "1,1,1"}
    return variables


def replica_config(config: Config, platform: Platform, index: int) -> Config:
    """Return the configuration of one engine: its platform, its share of the host's memory and a folder of its own."""
    cache = config.cache
    changes: dict[str, object] = {}
    if platform == "cpu":  # each engine sees all memory
        changes["memory_fraction"] = max(_LEAST_FRACTION, cache.memory_fraction / config.mesh.replicas)
    if cache.disk is not None:
        changes["disk"] = str(cache.disk / f"engine-{index}")
    return config.replace(mesh={"device": platform}, cache=changes)
