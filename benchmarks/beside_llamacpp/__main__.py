"""Measure the engine beside llama.cpp on this CPU: the same weights in four forms, closed batches, by turns.

    python -m venv PEER && CMAKE_ARGS=-DGGML_NATIVE=ON PEER/bin/pip install llama-cpp-python gguf safetensors
    python -m benchmarks.make_model DIR
    python -m benchmarks.beside_llamacpp DIR --peer PEER/bin/python [--rows 1 8 32] [--rounds 2]

Every prompt has 128 random tokens and every answer 64; all of a batch are there at the beginning. llama.cpp computes
one prompt after the other and then decodes all rows together, on all cores. Each round runs both sides in processes of
their own, one after the other, and each takes the best of three. Prints output tokens a second of both and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxserve import Engine, SamplingParams

PROMPT, OUTPUT, TRIES = 128, 64, 3
FORMS = {  # llama.cpp's and ours: model.dtype, model.quantization
    "F32": ("float32", "none"),
    "BF16": ("bfloat16", "none"),
    "Q8_0": ("bfloat16", "int8"),
    "Q4_0": ("bfloat16", "int4"),
}


def ours(model: str, form: str, rows: int) -> None:
    """Print the tokens a second of the best of TRIES batches."""
    dtype, quantization = FORMS[form]
    engine = Engine(model, dtype=dtype, quantization=quantization, max_num_seqs=rows)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True)
    best = 0.0
    for _ in range(TRIES):
        prompts = [[random.randrange(300, 8000) for _ in range(PROMPT)] for _ in range(rows)]
        began = time.perf_counter()
        engine.generate(prompts, params)
        best = max(best, rows * OUTPUT / (time.perf_counter() - began))
    print(best)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="python of an environment with llama-cpp-python, gguf and safetensors")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # FORM: our side of one measurement
    options = parser.parse_args()
    if options.only:
        ours(options.model, options.only, options.rows[0])
        return
    with tempfile.TemporaryDirectory() as directory:
        peer = str(Path(__file__).with_name("peer.py"))
        subprocess.run([options.peer, peer, "make", options.model, directory], check=True)
        for form in options.forms:
            for rows in options.rows:
                file = f"{directory}/model-{form}.gguf"
                theirs = [options.peer, peer, "run", file, *map(str, (rows, PROMPT, OUTPUT, TRIES))]
                mine = [sys.executable, "-m", "benchmarks.beside_llamacpp", options.model]
                mine += ["--only", form, "--rows", str(rows)]
                for number in range(options.rounds):
                    own = float(_said(mine)[-1])
                    times = [json.loads(line) for line in _said(theirs)]
                    other = rows * OUTPUT / min(map(sum, times))
                    steps = 1e3 * min(decoding for _, decoding in times) / (OUTPUT - 1)
                    load = os.getloadavg()[0]
                    rates = f"{own:6.1f} and {other:6.1f} tokens/s ({own / other:.2f})"
                    print(f"{form:5} {rows:3} rows, round {number}: {rates}; its step {steps:.1f} ms, load {load:.1f}")


def _said(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")[:-1]


if __name__ == "__main__":
    main()
