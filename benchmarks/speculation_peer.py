"""Measure speculation by n-grams beside vLLM's: tokens per second of both servers with and without it, by turns.

    python -m benchmarks.speculation_peer DIR --peer VLLM_ENVIRONMENT [--kinds edit json prose] [--texts 4] [--rows 1]

Both servers write the texts of benchmarks.speculation. A checkpoint in DIR writes them by itself: make_model's 189M
model, whose attention and MLP add nothing to the hidden states, and whose head gives token t + 1 the highest logit
after token t. So a text is a run of successive token ids, and each of its tokens occurs once. A prompt has the same ids
where the recorded prompt has the same text, and ids of no text elsewhere. A match of some tokens is then never a
coincidence, so more drafts are right than in a real text, for both servers alike.

Prints the output tokens per second after the first token, over all texts of a kind.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import json
import tempfile
import urllib.request
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from benchmarks.compare import Server, jaxserve_server, running, vllm_server
from benchmarks.make_model import Shape, make_model
from benchmarks.speculation import Text, texts
from jaxserve.bench.load import LoadRequest, LoadTarget, find_model, run_load
from jaxserve.text.tokenizer import Tokenizer

FIRST_ID = 300  # the ids below are the tokenizer's special ones
MAX_LEN = 4096
DRAFTS = 7  # a step with 8 tokens costs little more than one with 1


def make_counting_model(directory: Path) -> None:
    """Write a model that writes token t + 1 after token t."""
    make_model(directory, Shape())
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    tensors["lm_head.weight"] = np.roll(tensors["model.embed_tokens.weight"], 1, axis=0)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}, indent=2))


def renumbered(text: Text, first: int, filler: int) -> Text:
    """Return a text whose output has the ids from `first` + 1 on. Prompt tokens that are not in it count from `filler`.

    The last prompt token is `first`, so that the output follows.
    """
    prompt, output = text
    ids = list(range(filler, filler + len(prompt)))
    for a, b, size in difflib.SequenceMatcher(None, prompt, output, autojunk=False).get_matching_blocks():
        ids[a : a + size] = range(first + 1 + b, first + 1 + b + size)
    return [*ids, first], list(range(first + 1, first + 1 + len(output)))


def workloads(directory: Path, options: argparse.Namespace) -> dict[str, list[Text]]:
    """Return the texts of each kind, each with ids of its own."""
    tokenizer = Tokenizer.from_directory(directory)
    size = options.tokens + 1
    filler = FIRST_ID + size * options.texts * len(options.kinds)
    firsts = iter(range(FIRST_ID, filler, size))
    found = {kind: texts(kind, options.texts, options.tokens, tokenizer) for kind in options.kinds}
    return {kind: [renumbered(text, next(firsts), filler) for text in each] for kind, each in found.items()}


def check(url: str, model: str, text: Text) -> None:
    """Raise SystemExit unless the server writes the text."""
    prompt, output = text
    body = {"model": model, "prompt": prompt, "max_tokens": len(output), "temperature": 0, "ignore_eos": True}
    data = json.dumps(body | {"return_token_ids": True}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)["choices"][0]["token_ids"]
    if found != output:
        raise SystemExit(f"{url} wrote another text: {found[:8]}, expected {output[:8]}")


def rate(url: str, model: str, found: list[Text], rows: int) -> float:
    """Return the output tokens per second after the first token, of all texts together."""
    requests = [LoadRequest(prompt, len(prompt), len(output)) for prompt, output in found]
    target = LoadTarget(url, model, token_ids=True)
    timings, _ = asyncio.run(run_load(target, requests, concurrency=rows))
    errors = [timing.error for timing in timings if timing.error]
    if errors:
        raise SystemExit(errors[0])
    seconds = sum(timing.token_times[-1] - timing.token_times[0] for timing in timings)
    return rows * sum(timing.output_tokens - 1 for timing in timings) / seconds


def servers(directory: Path, peer: Path) -> dict[str, tuple[Server, Server]]:
    """Return each engine without and with speculation."""
    ours, theirs = jaxserve_server(directory, MAX_LEN), vllm_server(directory, MAX_LEN, peer)
    ngram = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_min": 2, "prompt_lookup_max": 8}
    flags = "--speculation.method", "ngram", "--speculation.num-speculative-tokens", str(DRAFTS)
    return {
        "jaxserve": (ours, Server("jaxserve", (*ours.command, *flags), ours.environment)),
        "vllm": (
            theirs,
            Server("vllm", (*theirs.command, "--speculative-config", json.dumps(ngram)), theirs.environment),
        ),
    }


def main() -> None:
    """Measure all servers in turn and print a line for each kind of text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--peer", type=Path, required=True, help="virtual environment with vllm")
    parser.add_argument("--kinds", nargs="+", default=["edit", "json", "prose"])
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rows", type=int, default=1)
    options = parser.parse_args()
    make_counting_model(options.directory)
    found = workloads(options.directory, options)
    log = Path(tempfile.gettempdir()) / "jaxserve-speculation-peer.log"
    for name, pair in servers(options.directory, options.peer).items():
        rates: list[dict[str, float]] = []
        for server in pair:
            with running(server, log) as url:
                model = asyncio.run(find_model(url))
                check(url, model, found[options.kinds[0]][0])
                rates.append({kind: rate(url, model, each, options.rows) for kind, each in found.items()})
        for kind, plain in rates[0].items():
            drafted = rates[1][kind]
            print(f"{name:9} {kind:7} {plain:6.1f} -> {drafted:6.1f} tokens/s (x{drafted / plain:.2f})", flush=True)


if __name__ == "__main__":
    main()
