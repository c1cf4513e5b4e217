"""Devices and the mesh: which accelerators one engine uses and how its arrays lie on them.

Owns the choice of platform, the axes (data, tensor, expert) and the shardings, each made once: a fresh NamedSharding a
step would miss JAX's dispatch cache. Knows no model.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.installation import install_command

AXES = ("data", "tensor", "expert")
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
# Of a GPU's memory, what XLA reserves at once; its own default of 0.75 would leave a quarter of the KV pages unmade.
# What is left out holds CUDA's context, its graphs and the libraries' workspaces.
_GPU_FRACTION = "0.93"
_NVIDIA = Path("/proc/driver/nvidia/version")  # there while the kernel driver is loaded


@dataclass(frozen=True)
class DeviceMesh:
    """A jax Mesh with the shardings that the runtime asks for."""

    mesh: Mesh
    replicated: NamedSharding

    @property
    def platform(self) -> str:
        """cpu, gpu or tpu."""
        return self.devices[0].platform

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def tensor(self) -> int:
        """Devices over which heads are split."""
        return self.mesh.shape["tensor"]


def make_mesh(platform: str = "auto", *, data: int = 1, tensor: int = 1, expert: int = 1) -> DeviceMesh:
    """The first data * tensor * expert devices of a platform (auto, cpu, gpu, tpu). Raises ConfigError."""
    devices = find_devices(platform)
    count = data * tensor * expert
    if count > len(devices):
        raise ConfigError(
            f"mesh asks for {count} devices (data {data} x tensor {tensor} x expert {expert}), "
            f"and there are {len(devices)} of {devices[0].platform}",
            fix="lower mesh.tensor, mesh.data or mesh.expert",
        )
    grid = np.array(devices[:count]).reshape(data, tensor, expert)
    mesh = Mesh(grid, AXES)
    return DeviceMesh(mesh, NamedSharding(mesh, PartitionSpec()))


def find_devices(platform: str = "auto") -> list[Any]:
    """Devices of this process. "auto" takes JAX's default, but no CPU where a GPU idles for want of a plugin.

    XLA_PYTHON_CLIENT_MEM_FRACTION is set if the caller's environment does not; it counts for the first call of the
    process that touches a device, and only on a GPU.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_FRACTION)
    if platform == "auto":
        devices = jax.local_devices()
        if devices[0].platform == "cpu" and _NVIDIA.exists():
            raise ConfigError(
                "an NVIDIA GPU is present, but JAX cannot use it",
                fix=f"{install_command(_EXTRAS['gpu'])}, or choose the CPU with --device cpu",
            )
        return devices
    try:
        return jax.local_devices(backend=platform)
    except RuntimeError as error:
        fix = install_command(_EXTRAS[platform]) if platform in _EXTRAS else None
        raise ConfigError(f"mesh.device is {platform!r}, and JAX finds none: {error}", fix=fix) from error
