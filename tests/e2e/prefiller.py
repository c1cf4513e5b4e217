"""A process that computes a prompt, writes its pages and waits: python -m tests.e2e.prefiller FILE KEYS."""

from __future__ import annotations

import json
import sys

from jaxserve import Engine, SamplingParams


def main() -> None:
    path, keys = sys.argv[1], json.loads(sys.argv[2])
    prompt, engine = keys.pop("prompt"), Engine(**keys)
    engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=1))
    print(engine.handover.write(path, prompt), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
