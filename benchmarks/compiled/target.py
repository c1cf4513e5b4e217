"""Devices that only compile: an H200, and TPUs v5e and v6e.

For the H200 XLA runs its passes, Triton, Mosaic, LLVM and ptxas, and plans its CUDA graphs. For a TPU libtpu has the
whole compiler, Pallas' part of it included. Neither can measure: the H200's products get untuned kernels, and no
program runs. Needs the packages of jax's CUDA plugin, and libtpu, see `.ci/compile`.
"""

from __future__ import annotations

from types import MappingProxyType

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.mesh import AXES, DeviceMesh

NAME = "NVIDIA H200"
_CORES = 132
# The numbers of NVIDIA's data sheet and of the CUDA programming guide's table for compute capability 9.0.
_DESCRIPTION = f"""
gpu_device_info {{
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
  core_count: {_CORES}
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  device_memory_size: 150754820096
  cuda_compute_capability {{ major: 9 }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  name: "{NAME}"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{NAME}"
"""


TPUS = MappingProxyType({"v5e": "TPU v5 lite", "v6e": "TPU v6 lite"})  # jax's names of the devices
CHIPS = ("h200", *TPUS)


def make_target(chip: str = "h200") -> DeviceMesh:
    """Return a mesh of one device that compiles for one of CHIPS."""
    if chip in TPUS:
        found = topologies.get_topology_desc(f"{chip}:1x1", "tpu", chips_per_host_bounds=(1, 1, 1))
    else:
        found = topologies.get_topology_desc("h200", "cuda", target_config=_DESCRIPTION, topology="1x1x1")
    mesh = Mesh(np.array(found.devices).reshape(1, 1, 1), AXES)
    return DeviceMesh(mesh, NamedSharding(mesh, PartitionSpec()))


def compile_for(program: Program, chip: str = "h200") -> jax.stages.Compiled:
    """Compile a program whose arguments are on the mesh of `make_target` for the same chip."""
    jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
    tpu = chip in TPUS
    device = AbstractDevice(TPUS[chip], 1, "tpu") if tpu else AbstractDevice(NAME, _CORES, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jitted.trace(*program.args).lower(lowering_platforms=("tpu" if tpu else "cuda",))
    return lowered.compile(compiler_options=dict(program.options))
