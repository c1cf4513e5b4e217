"""What room for adapters costs a step: time and bytes with 0, 1, 8 and 32 slots, every row with an adapter.

    python -m benchmarks.adapters [--model DIR] [--rank 16] [--rows 8] [--tokens 64] [--rounds 20]

The step is `decode` of --rows rows and `extend` of --tokens tokens, on zeros. Each round runs the programs by turns;
the figure is the least of all rounds. The processor's time is given too, because other work on the machine does not
count in it. The floor is the share of the weights that the stacks of all slots add: a step reads both once.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.config import Config
from jaxserve.engine.factory import load, locate
from jaxserve.models.adapters import stack_bytes
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.runtime.compilation.compiler import Program
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.runner_setup import RunnerSetup

SLOTS = (0, 1, 8, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    for name, default in (("rank", 16), ("rows", 8), ("tokens", 64), ("rounds", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    mesh = make_mesh("cpu")
    runs: dict[tuple[str, int], Callable[[], None]] = {}
    added: dict[int, float] = {}
    for slots in SLOTS:
        config = Config.of(options.model, slots=slots, max_rank=options.rank, compile_cache=None, num_pages=256)
        loaded = load(config, ModelFiles.open(locate(config)), mesh, lambda message: None)
        resolved = RunnerConfig.resolve(config, loaded.config, mesh.platform, loaded.structure.activation_dtype)
        setup = RunnerSetup.of(loaded, resolved, mesh)
        programs = setup.program_set((256,) * setup.steps.num_groups, resolved.max_model_len)
        stacks = () if setup.adapters is None else tuple(map(_zeros, setup.adapters.structs))
        leaves = (*loaded.leaves, *stacks)  # all rows have the adapter of slot 0
        runs["decode", slots] = _run(programs.decode(options.rows), leaves)
        runs["extend", slots] = _run(programs.extend(options.tokens), leaves)
        weights = loaded.structure.num_bytes
        added[slots] = 0.0 if setup.adapters is None else stack_bytes(setup.adapters.adapted) / weights
    best = {key: (float("inf"), float("inf")) for key in runs}
    for _ in range(options.rounds):
        for key, run in runs.items():
            began, spent = time.perf_counter(), time.process_time()
            run()
            took = time.perf_counter() - began, time.process_time() - spent
            best[key] = min(best[key][0], took[0]), min(best[key][1], took[1])
    print(f"adapters of rank {options.rank}; ms, of the processor in brackets; ratio to no slots")
    for family in ("decode", "extend"):
        for slots in SLOTS:
            wall, cpu = best[family, slots]
            ratio = cpu / best[family, 0][1]
            line = f"{family:7} {slots:3} slots {wall * 1e3:8.2f} ({cpu * 1e3:8.2f})  x{ratio:.2f}"
            print(f"{line}  stacks +{added[slots]:.1%} of the weights' bytes")


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
