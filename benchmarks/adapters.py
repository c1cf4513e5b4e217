"""What room for adapters costs a step: the time without room, with 32 slots that no row uses, and with 1, 8 and 32.

    python -m benchmarks.adapters [--model DIR] [--rank 16] [--rows 8] [--tokens 64] [--rounds 20]

The step is `decode` of --rows rows and `extend` of --tokens tokens, on zeros. Each round runs the programs by turns;
the figure is the least of all rounds. The processor's time is given too, because other work on the machine does not
count in it. There are two floors, both measured here: the bytes of the weights and of all slots over the memory's
bandwidth, and the operations over the rate of products. The longer one is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from benchmarks.floors import decode_floor, measure_machine, model_size
from jaxserve.config import Config
from jaxserve.engine.factory import load, locate
from jaxserve.models.adapters import AdapterShape, adapt
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.structure import build
from jaxserve.runtime.adapters import NO_ADAPTER
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup

CASES = {"no room": (0, 0), "0 of 32": (32, 0), "1": (1, 1), "8": (8, 8), "32": (32, 32)}  # slots, used ones
SCALE = 0.01  # of an adapter's numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    for name, default in (("rank", 16), ("rows", 8), ("tokens", 64), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    mesh, machine = make_mesh("cpu"), measure_machine()
    runs: dict[tuple[str, str], Callable[[], None]] = {}
    sizes: dict[str, Any] = {}
    for case, (slots, used) in CASES.items():
        config = Config.of(options.model, slots=slots, max_rank=options.rank, compile_cache=None, num_pages=256)
        directory = locate(config)
        loaded = load(config, ModelFiles.open(directory), mesh, lambda message: None)
        resolved = RunnerConfig.resolve(config, loaded.config, mesh.platform, loaded.structure.activation_dtype)
        setup = RunnerSetup.of(loaded, resolved, mesh)
        programs = setup.program_set((256,) * setup.steps.num_groups, resolved.max_model_len)
        leaves, numbers = loaded.leaves, 0
        if setup.adapters is not None:
            table = jnp.full(setup.adapters.table.shape, 0 if used else NO_ADAPTER, jnp.int32)
            leaves = (*leaves, *map(_zeros, setup.adapters.stacks), table)
            numbers = sum(math.prod(stack.shape) for stack in setup.adapters.stacks) if used else 0
        runs["decode", case] = _run(programs.decode(options.rows), leaves)
        runs["extend", case] = _run(programs.extend(options.tokens), leaves)
        size = model_size(Path(directory))
        sizes[case] = dataclasses.replace(size, parameters=size.parameters + numbers)
    best = {key: (float("inf"), float("inf")) for key in runs}
    for _ in range(options.rounds):
        for key, run in runs.items():
            began, spent = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - began, time.process_time() - spent
            best[key] = min(best[key][0], took[0]), min(best[key][1], took[1])
    print(f"adapters of rank {options.rank}, load {os.getloadavg()[0]:.1f}; {machine.bandwidth / 1e9:.1f} GB/s, "
          f"{machine.rate / 1e9:.0f} GFLOP/s")  # fmt: skip
    print("ms, of the processor in brackets; their ratios to no room; the floor")
    for family, count in (("decode", options.rows), ("extend", options.tokens)):
        for case in CASES:
            wall, cpu = best[family, case]
            plain = best[family, "no room"]
            floor = decode_floor(machine, sizes[case], count, 0)
            print(f"{family}[{count}] {case:8} {wall * 1e3:8.2f} ({cpu * 1e3:8.2f})  x{wall / plain[0]:.2f} "
                  f"(x{cpu / plain[1]:.2f})  floor {floor * 1e3:.2f}")  # fmt: skip


def write_adapter(directory: Path, model: Path, rank: int, seed: int) -> Path:
    """Write a random adapter for every linear layer of a model, in peft's form. Returns its directory."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, tensor in adapt(build(read_config(model), jnp.dtype("float32")), AdapterShape(1, rank)).tensors.items():
        out, size = tensor.shape
        for half, shape in (("A", (rank, size)), ("B", (out, rank))):
            values = rng.normal(0, SCALE, shape).astype(np.float32)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = values
    directory.mkdir(parents=True)
    targets = sorted({name.split(".")[-3] for name in tensors})
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def _zeros(struct: Any) -> jax.Array:
    return jnp.zeros(struct.shape, struct.dtype)


def _run(program: Program, leaves: tuple[jax.Array, ...]) -> Callable[[], None]:
    """Return a function that runs the program once on zeros."""
    compiled = program.compile()
    state = jax.tree.map(_zeros, program.args[1:-1])
    packed = _zeros(program.args[-1])
    donated = len(program.donate)

    def run(state: list[Any]) -> None:
        results = compiled(leaves, *state[0], packed)
        jax.block_until_ready(results)
        state[0] = tuple(results[:donated])

    return functools.partial(run, [state])


if __name__ == "__main__":
    main()
