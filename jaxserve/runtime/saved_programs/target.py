"""Compiles for devices that are not there. XLA runs its passes, Triton, Mosaic, LLVM and ptxas, and plans CUDA graphs.

Nothing can be measured: every matrix product gets an untuned kernel unless XLA is given autotuning results. No program
runs. A GPU needs the packages of jax's CUDA plugin, a TPU needs libtpu; neither needs a device.
"""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.errors import ConfigError
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.mesh import AXES, DeviceMesh
from jaxserve.system import install_command

# Values from NVIDIA's data sheet and from the CUDA programming guide's table for compute capability 9.0.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  device_memory_size: 150754820096
  cuda_compute_capability { major: 9 }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  name: "NVIDIA H200"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
_KNOWN = {"h200": H200}
_TPU = "tpu:"  # then the name of a topology, for example tpu:v5e:2x2
_ONE_CHIP = ":1x1"  # libtpu must be told that its host has one chip
_GPU_SHARE = 0.93  # of the memory, which XLA reserves at start, see runtime.mesh


@dataclass(frozen=True)
class Target:
    """Devices to compile for. device_bytes: their memory; 0 if it is not known"""

    mesh: DeviceMesh
    device_bytes: int


class DevicelessProgram(Program):
    """A program whose arguments are on the mesh of a target."""

    def compile(self) -> jax.stages.Compiled:
        """Lower and compile the program for its target."""
        return compile_for(self)


def make_target(name: str, *, tensor: int = 1, expert: int = 1) -> Target:
    """Return tensor * expert devices of a kind: h200, tpu:TOPOLOGY, or a file with XLA's text that describes a GPU.

    Raises ConfigError if this installation cannot compile for it.
    """
    count = tensor * expert
    text = "" if name.startswith(_TPU) else _KNOWN.get(name) or _read(name)
    try:
        if text:
            found = topologies.get_topology_desc(name, "cuda", target_config=text, topology=f"1x1x{count}")
        else:
            bounds = {"chips_per_host_bounds": (1, 1, 1)} if name.endswith(_ONE_CHIP) else {}
            found = topologies.get_topology_desc(name.removeprefix(_TPU), "tpu", **bounds)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        extra = "tpu" if name.startswith(_TPU) else "cuda"
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"jax cannot compile for {name}: {first}", fix=install_command(extra)) from None
    if len(found.devices) != count:
        raise ConfigError(f"{name} has {len(found.devices)} devices", fix="set mesh.tensor and mesh.expert to them")
    mesh = Mesh(np.array(found.devices).reshape(1, tensor, expert), AXES)
    size = re.search(r"device_memory_size: (\d+)", text)
    memory = int(int(size[1]) * _GPU_SHARE) * count if size else 0
    return Target(DeviceMesh(mesh, NamedSharding(mesh, PartitionSpec())), memory)


def compile_for(program: Program) -> jax.stages.Compiled:
    """Compile a program whose arguments are on the mesh of `make_target`."""
    with _on_target(program):
        return _lower(program).compile(compiler_options=dict(program.options) or None)


def lowered_text(program: Program) -> str:
    """Return the StableHLO of a program whose arguments are on the mesh of `make_target`."""
    with _on_target(program):
        return _lower(program).as_text()


def _lower(program: Program) -> jax.stages.Lowered:
    platform = "tpu" if _device(program).platform == "tpu" else "cuda"
    jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
    return jitted.trace(*program.args).lower(lowering_platforms=(platform,))


def _device(program: Program) -> Any:
    return jax.tree.leaves(program.out_shardings)[0].mesh.devices.flat[0]


def _on_target(program: Program) -> AbstractContextManager[None]:
    """Return a context in which Pallas lowers for the target's device, not for the machine's own.

    Kernels over several devices are lowered while the program is compiled.
    """
    device = _device(program)
    kind = "tpu" if device.platform == "tpu" else "gpu"
    abstract = AbstractDevice(device.device_kind, getattr(device, "core_count", 1), kind)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=abstract))


def _read(name: str) -> str:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"no target {name!r}", fix=f"one of {', '.join(_KNOWN)}, tpu:TOPOLOGY, or a file")
    return path.read_text(encoding="utf-8")
