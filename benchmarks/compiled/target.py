"""An H200 that only compiles. XLA runs its passes, Triton, Mosaic, LLVM and ptxas for it, and plans its CUDA graphs.

It cannot measure: every matrix product gets an untuned kernel, and no program runs. Needs the packages of jax's CUDA
plugin, see `.ci/compile`.
"""

from __future__ import annotations

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


def make_target() -> DeviceMesh:
    """Return a mesh of one device that compiles for an H200."""
    found = topologies.get_topology_desc("h200", "cuda", target_config=_DESCRIPTION, topology="1x1x1")
    mesh = Mesh(np.array(found.devices).reshape(1, 1, 1), AXES)
    return DeviceMesh(mesh, NamedSharding(mesh, PartitionSpec()))


def compile_for(program: Program) -> jax.stages.Compiled:
    """Compile a program whose arguments are on `make_target`'s mesh."""
    jitted = jax.jit(program.function, donate_argnums=program.donate, out_shardings=program.out_shardings)
    device = AbstractDevice(NAME, _CORES, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        lowered = jitted.trace(*program.args).lower(lowering_platforms=("cuda",))
    return lowered.compile(compiler_options=dict(program.options))
