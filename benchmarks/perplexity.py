"""Measure the perplexity of a model with its weights or its KV cache in few bits, beside the same model without.

    python -m benchmarks.perplexity [MODEL] [--stories 120] [--texts README.md docs/*.md]

The texts are cut into windows of a full prompt; a table has each form's perplexity, and the bytes of its weights and of
a token's keys and values.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.demo_model.stories import CHARACTERS, tell
from jaxserve import Engine, SamplingParams
from jaxserve.config import Config

WINDOW = 256  # tokens of a prompt
FORMS: dict[str, dict[str, Any]] = {
    "float32": {"model": {"dtype": "float32"}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "int8": {"model": {"quantization": "int8"}},
    "fp8": {"model": {"quantization": "fp8"}},
    "int4": {"model": {"quantization": "int4"}},
    "nvfp4": {"model": {"quantization": "nvfp4"}},
    "mxfp4": {"model": {"quantization": "mxfp4"}},
    "KV int8": {"model": {"dtype": "float32"}, "cache": {"dtype": "int8"}},
    "KV fp8": {"model": {"dtype": "float32"}, "cache": {"dtype": "fp8"}},
}
SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": WINDOW}
PARAMS = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)


def perplexity(engine: Engine, texts: Sequence[str]) -> float:
    """Return e to the mean negative log-probability of each token after the first of its window."""
    ids = [engine.tokenizer.encode(text) for text in texts]
    windows = [each[first : first + WINDOW] for each in ids for first in range(0, len(each), WINDOW)]
    total = count = 0.0
    for window in windows:
        [[one]] = engine.generate([window], PARAMS)
        found = [each.logprob for each in one.prompt_logprobs or () if each is not None]
        total, count = total - sum(found), count + len(found)
    return math.exp(total / count)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--texts", type=Path, nargs="+", default=[])
    parser.add_argument("--stories", type=int, default=120, help="of examples/demo_model/stories.py, as one text")
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=[*FORMS])
    options = parser.parse_args()
    rng = random.Random(0)
    told = [" ".join(tell(rng, rng.choice(CHARACTERS)) for _ in range(options.stories))] if options.stories else []
    texts = told + [path.read_text() for path in options.texts]
    first = 0.0
    for form in options.forms:
        model = FORMS[form]["model"] | {"path": options.model}
        with Engine(config=Config.parse(FORMS[form] | {"model": model, "scheduler": SIZES})) as engine:
            found, size = perplexity(engine, texts), sum(leaf.nbytes for leaf in engine.runner.leaves)
            token = engine.runner.plan.kv_bytes // engine.info.num_kv_tokens
        first = first or found
        line = f"{form:9s} {found:10.4f} {found / first - 1:+8.2%}"
        print(f"{line}  {size / 2**20:9.2f} MiB {token:6d} bytes a token", flush=True)


if __name__ == "__main__":
    main()
