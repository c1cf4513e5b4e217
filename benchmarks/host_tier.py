"""Measure evicted pages in the memory of the host and in a file: a working set of three times the pages of the device.

    python -m benchmarks.host_tier DIR [--prompts 24] [--tokens 512] [--streams 0]

The model of DIR (benchmarks.make_model) gets the prompts one after the other, each pass in another order, and writes
one token to each. Prints for each pass the median time to the first token, the share of prompt tokens from the cache,
and the tokens that were computed. `restarted` is a new engine with the file of the one before. `distinct` are prompts
that never come again: what keeping their pages costs. With --streams so many streams run instead of all this, while
the prompts come again twice, and the seconds between their tokens are printed: of prompts whose pages are loaded in
several steps, and by turns of those whose pages are loaded at once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from jaxserve import Engine, SamplingParams
from jaxserve.kv import kv_manager

PAGE = 16  # tokens
STEPS = 30  # before and after a prompt comes
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def engine(options: argparse.Namespace, **keys: Any) -> Engine:
    pages = options.prompts * options.tokens // 3 // PAGE
    sizes: dict[str, Any] = {"num_pages": pages, "page_size": PAGE, "max_model_len": 2 * options.tokens}
    return Engine(str(options.directory), dtype="float32", max_num_seqs=8, **sizes, **keys)


def prompts(options: argparse.Namespace, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1000, 8000) for _ in range(options.tokens)] for _ in range(options.prompts)]


def run(name: str, served: Engine, texts: list[list[int]], seed: int) -> None:
    """Ask each prompt once in a random order, and print the line of the pass."""
    order = random.Random(seed).sample(texts, len(texts))
    before, seconds = served.core.stats(), []
    for text in order:
        began = time.perf_counter()
        served.generate(text, ONE_TOKEN)
        seconds.append(time.perf_counter() - began)
    after = served.core.stats()
    computed = after.computed_prompt_tokens - before.computed_prompt_tokens
    hits = 1 - computed / sum(map(len, texts))
    median, whole = 1e3 * statistics.median(seconds), sum(seconds)
    print(f"{name:28} {median:8.1f} ms  {hits:6.1%} hits  {computed:7} computed  {whole:6.2f} s", flush=True)


def beside(options: argparse.Namespace, texts: list[list[int]]) -> None:
    """Print the times of steps of running streams: alone, and while each prompt's pages are loaded, in several steps or
    at once by turns.
    """
    served = engine(options, host_memory=options.memory)
    run("host, pass 1", served, texts, 1)
    params = SamplingParams(temperature=0.0, max_tokens=4 * STEPS * len(texts) + 8, ignore_eos=True)
    for stream in range(options.streams):
        served.add_request([1000 + stream] * PAGE, params)
    usual = kv_manager.MAX_LOADED
    forms = {"in several steps": usual, "at once": options.prompts * options.tokens}
    steps: dict[str, list[float]] = {"alone": [], **{name: [] for name in forms}}
    for number, text in enumerate([*texts, *texts]):
        name = list(forms)[(number + number // len(texts)) % 2]
        kv_manager.MAX_LOADED = forms[name]
        measure(served, steps["alone"], STEPS)
        served.add_request(text, ONE_TOKEN)
        measure(served, steps[name], STEPS)
    kv_manager.MAX_LOADED = usual
    for name, seconds in steps.items():
        median, last = statistics.median(seconds), statistics.quantiles(seconds, n=100)[98]
        print(f"{name:16} median {1e3 * median:.1f} ms  p99 {1e3 * last:.1f} ms  longest {1e3 * max(seconds):.1f} ms")
    loaded = served.core.stats().details["host_pages_loaded"]
    print(f"{loaded} pages loaded, {served.core.stats().computed_prompt_tokens} prompt tokens computed")
    served.runner.close()


def measure(served: Engine, seconds: list[float], count: int) -> None:
    """Make steps and append the seconds of each."""
    for _ in range(count):
        began = time.perf_counter()
        served.step()
        seconds.append(time.perf_counter() - began)


def main() -> None:
    """Measure without the tier, with it, and with a file, and print a line for each pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--memory", default="2GiB", help="of the host")
    parser.add_argument("--streams", type=int, default=0)
    options = parser.parse_args()
    texts = prompts(options, 0)
    if options.streams:
        return beside(options, texts)
    with tempfile.TemporaryDirectory() as directory:
        tiers = {"device": {}, "host": {"host_memory": options.memory}}
        tiers["file"] = tiers["host"] | {"disk": directory}
        for name, keys in tiers.items():
            served = engine(options, **keys)
            for number in (1, 2, 3):
                run(f"{name}, pass {number}", served, texts, number)
            for number in (1, 2):
                run(f"{name}, distinct", served, prompts(options, number), number)
            served.runner.close()
        served = engine(options, **tiers["file"])
        file = served.runner.host.files[0]
        while file is not None and len(file.checked) < len(file.to_check):
            time.sleep(0.1)
        run("file, restarted", served, texts, 4)
        served.runner.close()


if __name__ == "__main__":
    main()
