"""Measure what a flood of one API key costs another inside the engine, where no client takes time from it.

    python -m benchmarks.tenants_engine [--model DIR] [--requests 200] [--seconds 60]

As benchmarks.tenants, in one process and without HTTP: a light key sends short requests one after the other, alone and
while another keeps --flood requests in hand. Then keys of weight 1 and 3 flood, and their shares of the tokens are
counted. Prints one JSON object; times in milliseconds. The light key should wait at most two steps more than alone,
and at most 1.5 times as long plus one step of the flood.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.bench.load import environment
from jaxserve.config import Config
from jaxserve.engine.core import EngineCore
from jaxserve.engine.factory import build_engine
from jaxserve.types.sampling import EngineRequest, SamplingParams, Tenant

LIGHT, ONE, THREE = Tenant("light"), Tenant("one"), Tenant("three", weight=3.0)
SETTLE = 20  # steps between two light requests


@dataclass
class Load:
    """An engine, and the floods that are kept in hand. tokens: prompt and output tokens of ended requests, by key."""

    core: EngineCore
    prompt_tokens: int
    output_tokens: int
    tokens: dict[str, int] = field(default_factory=dict)
    step_ms: list[float] = field(default_factory=list)
    _random: random.Random = field(default_factory=lambda: random.Random(0))
    _floods: dict[str, Tenant] = field(default_factory=dict)  # by request id
    _number: int = 0

    def add(self, tenant: Tenant, prompt_tokens: int, output_tokens: int) -> str:
        self._number += 1
        params = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        prompt = [self._random.randrange(300, 1000) for _ in range(prompt_tokens)]
        name = str(self._number)
        self.core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params, tenant=tenant))
        return name

    def flood(self, tenant: Tenant, count: int) -> None:
        """Keep `count` requests of a key in hand from now on."""
        for _ in range(count):
            self._floods[self.add(tenant, self.prompt_tokens, self.output_tokens)] = tenant

    def step(self) -> set[str]:
        """Run a step. Returns the requests that got a token."""
        began = time.perf_counter()
        outputs = self.core.step()
        self.step_ms.append(1000 * (time.perf_counter() - began))
        for output in outputs:
            tenant = self._floods.get(output.request_id)
            if tenant is not None:
                self.tokens[tenant.name] = self.tokens.get(tenant.name, 0) + len(output.token_ids)
            if tenant is not None and output.finish_reason is not None:
                del self._floods[output.request_id]
                self.tokens[tenant.name] += self.prompt_tokens
                self.flood(tenant, 1)
        return {output.request_id for output in outputs if output.token_ids}

    def first_tokens(self, count: int) -> tuple[list[float], list[int]]:
        """Send light requests one after the other. Returns milliseconds and steps until the first token of each."""
        times, steps = [], []
        for _ in range(count):
            began, done = time.perf_counter(), len(self.step_ms)
            name = self.add(LIGHT, 32, 4)
            while name not in self.step():
                pass
            times.append(1000 * (time.perf_counter() - began))
            steps.append(len(self.step_ms) - done)
            for _ in range(SETTLE):
                self.step()
        return times, steps


def spread(values: list[Any]) -> dict[str, float]:
    """Return percentiles."""
    return {f"p{point}": round(float(np.percentile(values, point)), 2) for point in (50, 99, 100)}


def measure(core: EngineCore, options: argparse.Namespace) -> dict[str, Any]:
    """Return the report."""
    idle = Load(core, 0, 0)
    idle.first_tokens(20)
    times, steps = idle.first_tokens(options.requests)
    report: dict[str, Any] = {"alone": {"ms": spread(times), "steps": spread(steps)}}
    load = Load(core, options.long_len, options.long_output)
    load.flood(ONE, options.flood)
    for _ in range(2 * SETTLE):
        load.step()
    load.step_ms.clear()
    times, steps = load.first_tokens(options.requests)
    report["beside_a_flood"] = {"ms": spread(times), "steps": spread(steps), "step_ms": spread(load.step_ms)}
    load.flood(THREE, options.flood)
    for _ in range(2 * options.long_output):  # until the requests that had all slots have ended
        load.step()
    load.tokens.clear()
    until = time.perf_counter() + options.seconds
    while time.perf_counter() < until:
        load.step()
    one, three = load.tokens["one"], load.tokens["three"]
    return report | {"served_tokens": load.tokens, "share_of_three": round(three / (one + three), 4)}


def main() -> None:
    """Build the engine of the command line, measure it and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a model's directory; the demo model by default")
    parser.add_argument("--requests", type=int, default=200, help="light requests, alone and beside the flood")
    parser.add_argument("--flood", type=int, default=96, help="requests of a flooding key in hand")
    parser.add_argument("--long-len", type=int, default=400, help="tokens of their prompts")
    parser.add_argument("--long-output", type=int, default=400, help="tokens of their outputs")
    parser.add_argument("--seconds", type=float, default=60.0, help="that the shares are counted")
    parser.add_argument("--max-num-seqs", type=int, help="scheduler.max_num_seqs")
    options = parser.parse_args()
    own = {} if options.max_num_seqs is None else {"max_num_seqs": options.max_num_seqs}
    config = Config.of(options.model, **own)
    core = build_engine(config, lambda message: None).core
    print(json.dumps({"environment": environment()} | measure(core, options), indent=2))


if __name__ == "__main__":
    main()
