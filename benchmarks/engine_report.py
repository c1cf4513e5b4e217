"""Print the cost of the engine around the model, as text and as a JSON line.

python -m benchmarks.engine_report [--rows 64 256 ...] [--decode-rows 1 8 32] [-- FLAGS OF LAUNCH]
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import engine as engine_costs
from jaxserve.bench.load import write_json
from jaxserve.cli.bench import launch_flags
from jaxserve.cli.options import load_config
from jaxserve.engine.engine import TextEngine


def main(words: Sequence[str]) -> int:
    """Measure and print the report; return the exit code."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_report", description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=list(engine_costs.ROWS), help="rows for the host work")
    parser.add_argument("--decode-rows", type=int, nargs="+", default=[1, 8, 32], help="rows of the decode steps")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of the prefix hit and the stall")
    parser.add_argument("--contexts", type=int, nargs="+", default=[], help="context lengths of one decoding row")
    parser.add_argument(
        "--deterministic-rows", type=int, nargs="+", default=[], help="rows for the cost of runtime.deterministic"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("flags", nargs=argparse.REMAINDER, help="after --: flags of launch")
    return _engine(parser.parse_args(words))


def _engine(options: argparse.Namespace) -> int:
    host = [engine_costs.host_work(rows) for rows in options.rows]
    print(f"{'rows':>6}{'scheduler us':>14}{'pack us':>10}{'unpack us':>11}{'total us':>10}")
    for work in host:
        print(f"{work.rows:6}{work.scheduler:14.1f}{work.pack:10.1f}{work.unpack:11.1f}{work.total:10.1f}")
    engine = TextEngine(config=load_config(launch_flags(options), os.environ))
    decode = [engine_costs.decode_cost(engine, rows) for rows in options.decode_rows]
    for cost in decode:
        print(f"decode of {cost.rows} rows: {cost.step_ms:.3f} ms per step, {cost.dispatches:.2f} dispatches per step")
    hit = engine_costs.prefix_hit(engine, options.prompt_tokens)
    print(
        f"prefix hit of {hit.cached_tokens} of {hit.prompt_tokens} tokens: first token after {hit.warm_ms:.1f} ms "
        f"instead of {hit.cold_ms:.1f} ms, {hit.speedup:.1f} times faster"
    )
    contexts = [engine_costs.context_cost(engine, context) for context in sorted(options.contexts)]
    for cost in contexts:
        print(f"decode over {cost.context} of at most {cost.table_tokens} tokens: {cost.step_ms:.2f} ms per step")
    stall = engine_costs.stall(engine, streams=16, prompt_tokens=options.prompt_tokens)
    print(
        f"a prompt of {stall.prompt_tokens} tokens among {stall.streams} streams: longest gap "
        f"{stall.longest_gap_with_prompt_ms:.1f} ms, without it {stall.longest_gap_ms:.1f} ms; "
        f"a chunk takes {stall.chunk_ms:.1f} ms"
    )
    copies = engine_costs.cache_copies(engine)
    print(f"copies of cache size in {len(copies)} decode programs: {sum(copies.values())}")
    compiles = engine.core.stats().compiles
    print(f"XLA compilations after warm-up: {compiles}")
    strict = _deterministic_costs(engine, options)
    records = {"host": [asdict(w) for w in host], "decode": [asdict(c) for c in decode], "prefix_hit": asdict(hit)}
    records |= {"stall": asdict(stall), "cache_copies": copies, "compiles": compiles}
    records |= {"contexts": [asdict(cost) for cost in contexts]}
    records |= {"deterministic": [asdict(cost) for cost in strict]}
    write_json({"model": engine.info.served_names[0], **records}, options.json)
    return 0


def _deterministic_costs(plain: TextEngine, options: argparse.Namespace) -> list[engine_costs.DeterministicCost]:
    if not options.deterministic_rows:
        return []
    flags = [*launch_flags(options), "--runtime.deterministic", "true"]
    strict = TextEngine(config=load_config(flags, os.environ))
    costs = [engine_costs.deterministic_cost(plain, strict, rows) for rows in options.deterministic_rows]
    for cost in costs:
        print(
            f"deterministic mode at {cost.rows} rows: {cost.deterministic_ms:.2f} ms per step instead of "
            f"{cost.plain_ms:.2f}, {cost.factor:.2f} times"
        )
    return costs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
