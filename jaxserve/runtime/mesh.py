"""Devices and the mesh of one engine.

This file chooses the platform and the kernels for experts, and makes the axes (data, tensor, expert) and the shardings.
A sharding is made once: a new NamedSharding per step would miss JAX's dispatch cache.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.config import MeshSection
from jaxserve.errors import ConfigError
from jaxserve.ops.moe import kernels_of
from jaxserve.runtime.compilation.attention_sizes import has_triton
from jaxserve.system import NVIDIA_DRIVER, install_command

AXES = ("data", "tensor", "expert")
# These TPUs have 16 MiB of VMEM. The kernel for experts may use 64 MiB, and a prefill of Mixtral needs 45 MiB.
_SMALL_TPUS = ("TPU v2", "TPU v3", "TPU v4")
_EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
# Share of a GPU's memory that XLA reserves at start. Its default of 0.75 would leave a quarter of the memory unused.
# The rest is for CUDA's context, CUDA graphs and the workspaces of libraries.
_GPU_FRACTION = "0.93"
_FRACTION_NAMES = ("XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_CLIENT_MEM_FRACTION")  # jax refuses both at once


@dataclass(frozen=True)
class DeviceMesh:
    """A jax Mesh and the replicated sharding on it."""

    mesh: Mesh
    replicated: NamedSharding

    @property
    def platform(self) -> str:
        """Return the platform: cpu, gpu or tpu."""
        return self.devices[0].platform

    @property
    def devices(self) -> list[Any]:
        return list(self.mesh.devices.flat)

    @property
    def local_devices(self) -> list[Any]:
        """Return the devices of this process."""
        return [device for device in self.devices if device.process_index == jax.process_index()]

    @property
    def tensor(self) -> int:
        """Return the number of tensor-parallel devices, over which heads are split."""
        return self.mesh.shape["tensor"]


def make_mesh(platform: str = "auto", *, data: int = 1, tensor: int = 1, expert: int = 1) -> DeviceMesh:
    """Make a mesh of the first data * tensor * expert devices of a platform (auto, cpu, gpu, tpu).

    If this process belongs to a group of several, the devices are all processes' devices, and all must be used.
    Raises ConfigError if there are too few devices.
    """
    devices = find_devices(platform)
    count = data * tensor * expert
    if count > len(devices):
        raise ConfigError(
            f"mesh asks for {count} devices (data {data} x tensor {tensor} x expert {expert}), "
            f"and there are {len(devices)} of {devices[0].platform}",
            fix="lower mesh.tensor or mesh.expert" if data == 1 else "set mesh.data to 1, as only that works yet",
        )
    if count < len(devices) and jax.process_count() > 1:
        raise ConfigError(
            f"the hosts have {len(devices)} devices, and the mesh uses {count}",
            fix="set mesh.tensor and mesh.expert so that their product is the number of devices of all hosts",
        )
    grid = np.array(devices[:count]).reshape(data, tensor, expert)
    mesh = Mesh(grid, AXES)
    return DeviceMesh(mesh, NamedSharding(mesh, PartitionSpec()))


def configured_mesh(section: MeshSection) -> DeviceMesh:
    """Make the mesh of a configuration. Raises ConfigError as `make_mesh`.

    If it is auto, `tensor` is all devices until `shape_plan.SplitSearch` knows the model and chooses the split.
    """
    if section.is_auto:
        return make_mesh(section.device, data=section.data, tensor=len(find_devices(section.device)))
    tensor, expert = section.split
    return make_mesh(section.device, data=section.data, tensor=tensor, expert=expert)


def expert_kernels(name: str, mesh: DeviceMesh) -> Literal["auto", "xla", "triton", "tpu"]:
    """Return the kernels that `runtime.experts` names. "auto" is XLA's on a GPU before Ampere, and on a small TPU.

    Raises ConfigError if "triton" cannot run here.
    """
    device = mesh.devices[0]
    if name == "auto" and (device.device_kind.startswith(_SMALL_TPUS) or not has_triton(device)):
        return "xla"
    if name == "triton" and not has_triton(device):
        raise ConfigError(
            "runtime.experts 'triton' needs a GPU of compute capability 8.0 or more", fix="use runtime.experts: auto"
        )
    return kernels_of(name, mesh.platform)


def find_devices(platform: str = "auto") -> list[Any]:
    """Return the devices of this process, or of all hosts of its group. "auto" is JAX's default platform.

    Raises ConfigError if the platform has no device, or if "auto" finds only the CPU although the machine has an
    NVIDIA GPU. Sets the share of a GPU's memory unless the environment does; it takes effect at the process's first use
    of a device.
    """
    if not any(name in os.environ for name in _FRACTION_NAMES):
        os.environ[_FRACTION_NAMES[0]] = _GPU_FRACTION
    if platform == "auto":
        devices = jax.devices()
        if devices[0].platform == "cpu" and NVIDIA_DRIVER.exists():
            raise ConfigError(
                "an NVIDIA GPU is present, but JAX cannot use it",
                fix=f"{install_command(_EXTRAS['gpu'])}, or choose the CPU with --device cpu",
            )
        return devices
    try:
        return jax.devices(platform)
    except RuntimeError as error:
        fix = install_command(_EXTRAS[platform]) if platform in _EXTRAS else None
        raise ConfigError(f"mesh.device is {platform!r}, and JAX finds none: {error}", fix=fix) from error
