r"""Measure the engine beside llama.cpp on this CPU: the same weights in each form, closed batches, by turns.

    python -m venv PEER && CMAKE_ARGS=-DGGML_NATIVE=ON PEER/bin/pip install llama-cpp-python gguf safetensors
    python -m benchmarks.make_model DIR
    python -m benchmarks.beside_llamacpp DIR --peer PEER/bin/python [--rows 1 8 32] [--rounds 2] [--files GGUF_DIR]
    python -m benchmarks.beside_llamacpp DIR --peer PEER/bin/python --rows 1 --prompt 4000 --output 2

Every prompt has 128 random tokens and every answer 64, or other numbers; all of a batch are there at the beginning.
llama.cpp computes one prompt after the other and then decodes all rows together, on all cores. Each round runs all
sides in processes of their own, one after the other, and each takes the best of its tries. Ours runs with
`runtime.activations` exact and rounded; in float32 and FP4 there is only exact. NVFP4 and MXFP4 are measured beside
Q4_0. Our keys and values are float32 unless --cache is bfloat16; llama.cpp's are float16. Prints output tokens a second
and the ratios to llama.cpp.

The GGUF files of a Llama are made here. llama.cpp's own converter makes those of another architecture beforehand, one
for each form:

    python convert_hf_to_gguf.py DIR --outtype bf16 --outfile GGUF_DIR/model-BF16.gguf

--avx2 compares both without AVX-512 on a processor that has it: our kernels are compiled for x86-64-v3, and XLA's code
is limited to AVX2. llama.cpp is built so:

    CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON -DGGML_AVX512=OFF" \
        PEER/bin/pip install --no-binary llama-cpp-python llama-cpp-python
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
from jaxserve.config import Config

PROMPT, OUTPUT = 128, 64
_PEER = Path(__file__).with_name("peer.py")
FORMS = {  # llama.cpp's and ours: model.dtype, model.quantization
    "F32": ("float32", "none"),
    "BF16": ("bfloat16", "none"),
    "Q8_0": ("bfloat16", "int8"),
    "Q4_0": ("bfloat16", "int4"),
    "NVFP4": ("bfloat16", "nvfp4"),
    "MXFP4": ("bfloat16", "mxfp4"),
}
_EXACT = ("F32", "NVFP4", "MXFP4")  # activations are never rounded


def peer_form(form: str) -> str:
    """Return llama.cpp's form that one of ours is measured beside."""
    return "Q4_0" if form in ("NVFP4", "MXFP4") else form


def engine_of(model: str, form: str, rows: int, products: str, cache: str, slots: int = 0) -> Engine:
    """Return our side for up to `rows` requests, with room for `slots` adapters."""
    dtype, quantization = FORMS[form]
    tree = {
        "model": {"path": model, "dtype": dtype, "quantization": quantization},
        "cache": {"dtype": cache},
        "scheduler": {"max_num_seqs": rows},
        "runtime": {"activations": "exact" if form in _EXACT else products},
        "lora": {"slots": slots},
    }
    return Engine(config=Config.parse(tree))


def ours(
    model: str, form: str, rows: list[int], products: str, tries: int, cache: str, prompt: int, output: int
) -> None:
    """Print the tokens a second of the best of `tries` batches of each number of rows."""
    engine = engine_of(model, form, max(rows), products, cache)
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    for count in rows:
        best = 0.0
        for _ in range(tries):
            prompts = [[random.randrange(300, 8000) for _ in range(prompt)] for _ in range(count)]
            began = time.perf_counter()
            engine.generate(prompts, params)
            best = max(best, count * output / (time.perf_counter() - began))
        print(best)


def without_avx512(directory: Path) -> dict[str, str]:
    """Return what the environment of our side adds, so that it runs what a processor with AVX2 alone runs.

    Our kernels are compiled by a script in `directory`, and kept there.
    """
    compiler = directory / "gcc-v3"
    compiler.write_text('#!/bin/sh\nexec gcc "$@" -march=x86-64-v3\n')  # the last -march is the one that counts
    compiler.chmod(0o700)
    cache = str(directory / "cache")
    return {"CC": str(compiler), "XDG_CACHE_HOME": cache, "XLA_FLAGS": "--xla_cpu_max_isa=AVX2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--peer", help="python of an environment with llama-cpp-python, gguf and safetensors")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=FORMS)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--products", nargs="+", default=["exact", "rounded"], choices=["exact", "rounded"])
    parser.add_argument("--tries", type=int, default=3)
    parser.add_argument("--cache", default="auto", choices=["auto", "bfloat16"], help="of ours; llama.cpp's is float16")
    parser.add_argument("--files", help="directory with the GGUF files, which are made there if they are missing")
    parser.add_argument("--avx2", action="store_true", help="without AVX-512; the peer is built without it")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # FORM: our side of one measurement
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens")
    parser.add_argument("--output", type=int, default=OUTPUT, help="tokens, 2 or more")
    options = parser.parse_args()
    if options.only:
        products, sizes = options.products[0], (options.prompt, options.output)
        ours(options.model, options.only, options.rows, products, options.tries, options.cache, *sizes)
        return
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.files or temporary
        if options.avx2:
            os.environ |= without_avx512(Path(temporary))
        wanted = {peer_form(form) for form in options.forms}
        if missing := [form for form in sorted(wanted) if not Path(directory, f"model-{form}.gguf").exists()]:
            subprocess.run([options.peer, str(_PEER), "make", options.model, directory, *missing], check=True)
        for form in options.forms:
            for number in range(options.rounds):
                _round(options, form, number, directory)


def _round(options: argparse.Namespace, form: str, number: int, directory: str) -> None:
    """Run all sides once, and print a line for each number of rows."""
    rows, tries = list(map(str, options.rows)), str(options.tries)
    mine = [sys.executable, "-m", "benchmarks.beside_llamacpp", options.model, "--only", form, "--rows", *rows]
    sizes = [str(options.prompt), str(options.output)]
    mine += ["--tries", tries, "--cache", options.cache, "--prompt", sizes[0], "--output", sizes[1], "--products"]
    names = [name for name in options.products if name == "exact" or form not in _EXACT]
    own = {name: list(map(float, _said([*mine, name])[-len(rows) :])) for name in names}
    for index, count in enumerate(options.rows):
        file = f"{directory}/model-{peer_form(form)}.gguf"
        said = _said([options.peer, str(_PEER), "run", file, rows[index], *sizes, tries])
        times = [json.loads(line) for line in said]
        other = count * options.output / min(map(sum, times))
        rates = ", ".join(f"{name} {own[name][index]:.3g} ({own[name][index] / other:.2f})" for name in names)
        prompts, steps = (min(each) for each in zip(*times, strict=True))
        parts = f"prompts {prompts:.2f} s, a step {1e3 * steps / (options.output - 1):.1f} ms"
        load = os.getloadavg()[0]
        print(
            f"{form:5} {count:3} rows, round {number}: {rates}; llama.cpp {other:.3g} ({parts}); load {load:.1f}",
            flush=True,
        )


def _said(command: list[str]) -> list[str]:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split("\n")[:-1]


if __name__ == "__main__":
    main()
