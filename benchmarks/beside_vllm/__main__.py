"""Measure the engine beside vLLM on this CPU: the same weights in float32 and bfloat16, closed batches, by turns.

    python -m benchmarks.make_model DIR
    python -m benchmarks.beside_vllm DIR --peer PEER/bin/python [--rows 1 8 32] [--rounds 2] [--tries 2] [--adapters N]

With --adapters both serve the same N random adapters of rank 16, which the rows of a batch have by turns. PEER is an
environment with vLLM for CPUs. Prompts and answers are those of `benchmarks.beside_llamacpp`. Each round runs all sides
in processes of their own, by turns, and each takes the best of its tries. vLLM rounds the activations of bfloat16
weights to bfloat16, which is our `runtime.activations: rounded`. Prints output tokens a second and the ratios to vLLM.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.adapters import write_adapter
from benchmarks.beside_llamacpp.__main__ import FORMS, OUTPUT, PROMPT, engine_of
from jaxserve import SamplingParams

_PEER = Path(__file__).with_name("peer.py")
_CACHE_GIB = "2"  # vLLM's KV cache
_SIDES = {"F32": ("exact",), "BF16": ("exact", "rounded")}
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", required=True, help="python of an environment with vLLM")
    parser.add_argument("--forms", nargs="+", default=list(_SIDES), choices=_SIDES)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tries", type=int, default=2)
    parser.add_argument("--adapters", type=int, default=0)
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # FORM, PRODUCTS, DIR: our side with adapters
    options = parser.parse_args()
    if options.only:
        form, products, directory = options.only
        ours(options.model, form, options.rows, products, options.tries, sorted(Path(directory).iterdir()))
        return
    with tempfile.TemporaryDirectory() as directory:
        for number in range(options.adapters):
            write_adapter(Path(directory, f"adapter{number}"), Path(options.model), RANK, number)
        for form in options.forms:
            for number in range(options.rounds):
                _round(options, form, number, directory)


def ours(model: str, form: str, rows: Sequence[int], products: str, tries: int, adapters: Sequence[Path]) -> None:
    """Print the tokens a second of the best of `tries` batches of each number of rows, with adapters by turns."""
    engine = engine_of(model, form, max(rows), products, "auto", slots=len(adapters))
    for each in adapters:
        engine.load_adapter(each.name, each)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    for count in rows:
        best = 0.0
        for _ in range(tries):
            prompts = [[random.randrange(300, 8000) for _ in range(PROMPT)] for _ in range(count)]
            began = time.perf_counter()
            for number, prompt in enumerate(prompts):
                engine.add_request(prompt, params, adapter=adapters[number % len(adapters)].name)
            while engine.has_unfinished:
                engine.step()
            best = max(best, count * OUTPUT / (time.perf_counter() - began))
        print(best)


def _round(options: argparse.Namespace, form: str, number: int, adapters: str) -> None:
    """Run all sides once, and print a line for each number of rows. adapters: directory of them"""
    rows = list(map(str, options.rows))
    mine = [sys.executable, "-m", "benchmarks.beside_llamacpp", options.model, "--only", form, "--rows", *rows]
    mine += ["--tries", str(options.tries), "--products"]
    if options.adapters:
        mine = [sys.executable, "-m", "benchmarks.beside_vllm", options.model, "--peer", "", "--rows", *rows]
        mine += ["--tries", str(options.tries), "--only", form]
    own = {name: _rates([*mine, name, *([adapters] * bool(options.adapters))], len(rows)) for name in _SIDES[form]}
    numbers = [str(PROMPT), str(OUTPUT), str(options.tries), *rows]
    other = _rates([options.peer, str(_PEER), options.model, FORMS[form][0], adapters, *numbers], len(rows))
    for index, count in enumerate(options.rows):
        rates = ", ".join(f"{name} {own[name][index]:.1f} ({own[name][index] / other[index]:.2f})" for name in own)
        print(f"{form:5} {count:3} rows, round {number}: {rates}; vLLM {other[index]:.1f}", flush=True)


def _rates(command: list[str], count: int) -> list[float]:
    """Return the numbers in the last lines of a program's output."""
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": _CACHE_GIB, "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return list(map(float, done.stdout.split("\n")[:-1][-count:]))


if __name__ == "__main__":
    main()
