"""Measure the engine beside vLLM on this CPU: the same weights in float32 and bfloat16, closed batches, by turns.

    python -m benchmarks.make_model DIR
    python -m benchmarks.beside_vllm DIR --peer PEER/bin/python [--rows 1 8 32] [--rounds 2] [--tries 2] [--adapters N]
    python -m benchmarks.beside_vllm DIR --forms BF16 --rows 1 --prompt 4000 --output 2

PEER is an environment with vLLM for CPUs; without it we are measured alone. Prompts and answers are those of
`benchmarks.beside_llamacpp`, or have other numbers of tokens. With --adapters both serve the same N random adapters of
rank 16, which the rows have by turns. Behind them is the floor of a batch without adapters, see `floors`: the
products of all prompt tokens, and a step for each other token. Each round runs all sides in processes of their own, by
turns, and each takes the best of its tries. vLLM rounds the activations of bfloat16 weights to bfloat16, which is our
`runtime.activations: rounded`; it is left out on a processor that cannot. Prints output tokens a second and the ratios
to vLLM. The end of what vLLM said stands there if it does not serve the model.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax.numpy as jnp

from benchmarks.adapters import write_adapter
from benchmarks.beside_llamacpp.__main__ import FORMS, OUTPUT, PROMPT, engine_of
from benchmarks.floors import Machine, decode_floor, measure_machine, model_size, prefill_floor
from jaxserve import SamplingParams
from jaxserve.ops import native

_PEER = Path(__file__).with_name("peer.py")
_CACHE_GIB = "2"  # vLLM's KV cache
_SIDES = {"F32": ("exact",), "BF16": ("exact", "rounded")}
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="python of an environment with vLLM")
    parser.add_argument("--forms", nargs="+", default=list(_SIDES), choices=_SIDES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens")
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # FORM, PRODUCTS, DIR: our side with adapters
    options = parser.parse_args()
    if options.only:
        ours(options, *options.only)
        return
    machine = measure_machine()
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.adapters):
            write_adapter(Path(directory, f"adapter{number}"), Path(options.model), RANK, number)
        for form in options.forms:
            floors = [_floor(options, machine, form, rows) for rows in options.rows]
            for number in range(options.rounds):
                _round(options, form, number, floors, directory)


def _floor(options: argparse.Namespace, machine: Machine, form: str, rows: int) -> float:
    """Return the most output tokens a second of a batch."""
    model = dataclasses.replace(model_size(Path(options.model)), itemsize=4 if form == "F32" else 2)
    context = options.prompt + options.output // 2
    steps = (options.output - 1) * decode_floor(machine, model, rows, context)
    return rows * options.output / (prefill_floor(machine, model, rows * options.prompt) + steps)


def ours(options: argparse.Namespace, form: str, products: str, directory: str) -> None:
    """Print the tokens a second of the best batch of each number of rows, with the adapters in `directory` by turns."""
    adapters = sorted(Path(directory).iterdir())
    engine = engine_of(options.model, form, max(options.rows), products, "auto", slots=len(adapters))
    for each in adapters:
        engine.load_adapter(each.name, each)
    params = SamplingParams(temperature=0.0, max_tokens=options.output, ignore_eos=True)
    for count in options.rows:
        best = 0.0
        for _ in range(options.tries):
            prompts = [[random.randrange(300, 8000) for _ in range(options.prompt)] for _ in range(count)]
            began = time.perf_counter()
            for number, prompt in enumerate(prompts):
                engine.add_request(prompt, params, adapter=adapters[number % len(adapters)].name)
            while engine.has_unfinished:
                engine.step()
            best = max(best, count * options.output / (time.perf_counter() - began))
        print(best)


def _round(options: argparse.Namespace, form: str, number: int, floors: list[float], adapters: str) -> None:
    """Run all sides once, and print a line for each number of rows. adapters: directory of them"""
    rows = list(map(str, options.rows))
    program = "benchmarks.beside_vllm" if options.adapters else "benchmarks.beside_llamacpp"
    mine = [sys.executable, "-m", program, options.model, "--rows", *rows, "--tries", str(options.tries)]
    mine += ["--prompt", str(options.prompt), "--output", str(options.output), "--only", form]
    sides = [name for name in _SIDES[form] if name == "exact" or native.can_round(jnp.dtype("bfloat16"))]
    ends = {name: [name, adapters] if options.adapters else ["--products", name] for name in sides}
    own = {name: _rates([*mine, *end], len(rows)) for name, end in ends.items()}
    numbers = [str(options.prompt), str(options.output), str(options.tries), *rows]
    other = []
    if options.peer:
        try:
            other = _rates([options.peer, str(_PEER), options.model, FORMS[form][0], adapters, *numbers], len(rows))
        except subprocess.CalledProcessError as error:
            print(f"vLLM: {error.stderr[-600:]}")
    for index, count in enumerate(options.rows):
        ratios = {name: f" ({rates[index] / other[index]:.2f})" if other else "" for name, rates in own.items()}
        rates = ", ".join(f"{name} {own[name][index]:.3g}{ratios[name]}" for name in own)
        peer = f"; vLLM {other[index]:.3g}" if other else ""
        print(f"{form:5} {count:3} rows, round {number}: {rates}{peer}; floor {floors[index]:.3g}", flush=True)


def _rates(command: list[str], count: int) -> list[float]:
    """Return the numbers in the last lines of a program's output."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return list(map(float, done.stdout.split("\n")[:-1][-count:]))


if __name__ == "__main__":
    main()
