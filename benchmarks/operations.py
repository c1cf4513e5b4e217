"""List what a closed batch costs on a CPU, operation by operation, beside the floors of the products.

    python -m benchmarks.operations DIR --form BF16 --rows 8 [--products exact] [--cache bfloat16] [--most 20]

The batch is that of benchmarks.beside_llamacpp: prompts of 128 tokens and answers of 64. XLA's profiler gives the time
of each operation of each program, which it makes a little longer. An operation is named by its kind, its shape without
the rows, and the last parts of its name in the model. The rest of the time is the host's, and what XLA's threads take
to begin. The floor of the products is the longer of the weights' bytes at --bandwidth and the multiply-adds at --rate.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import jax

from benchmarks.beside_llamacpp.__main__ import FORMS, OUTPUT, PROMPT, engine_of
from benchmarks.engine import random_prompt
from benchmarks.floors import model_size
from jaxserve import Engine, SamplingParams
from jaxserve.models.checkpoint.hf_config import read_config

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = ((?:\(.*?\)|\S+)) ([\w-]+)\((.*)$")
_TARGET = re.compile(r'custom_call_target="(?:jaxserve_)?(\w+)"')
_NAME = re.compile(r'op_name="([^"]*)"')
_RATES = {"exact": 96.0, "BF16": 191.0, "Q8_0": 384.0, "Q4_0": 384.0}  # billion multiply-adds a second, two cores


@dataclass
class Spent:
    """Milliseconds and number of each operation of a program, and of all."""

    ms: Counter[str] = field(default_factory=Counter)
    count: Counter[str] = field(default_factory=Counter)

    def lines(self, most: int) -> list[str]:
        return [f"  {ms:9.2f} ms {self.count[name]:7d}  {name}" for name, ms in self.ms.most_common(most)]


def names_of(engine: Engine) -> dict[tuple[str, str], str]:
    """Return what each instruction of the engine's programs is called here, by (module, instruction).

    "" for those whose operations have events of their own.
    """
    names = {}
    for compiled in engine.runner.compiled.values():
        text = compiled.as_text() or ""
        module = text.split(",", 1)[0].removeprefix("HloModule ")
        for line in text.splitlines():
            if (found := _LINE.match(line)) is not None:
                inner = found[3] in ("while", "conditional", "call")
                names[module, found[1]] = "" if inner else _name(*found.groups()[1:])
    return names


def _name(shape: str, kind: str, rest: str) -> str:
    target, path = _TARGET.search(rest), _NAME.search(rest)
    parts = [] if path is None else [part for part in path[1].split("/") if not part.startswith("jit(")]
    shape = re.sub(r"\[\d+,?", "[", shape.split("{")[0], count=1)  # programs of one kind differ in the rows
    return f"{target[1] if target else kind} {shape} {'/'.join(parts[-3:])}"


def spent_in(directory: str, names: dict[tuple[str, str], str]) -> tuple[dict[str, Spent], float]:
    """Read a profile: the operations by program, and the milliseconds in which at least one ran."""
    data = jax.profiler.ProfileData.from_file(str(next(Path(directory).rglob("*.xplane.pb"))))
    programs: dict[str, Spent] = defaultdict(Spent)
    spans: list[tuple[float, float]] = []
    for event in (event for plane in data.planes for line in plane.lines for event in line.events):
        module = dict(event.stats).get("hlo_module")
        name = "" if module is None else names.get((str(module), event.name), event.name)
        if name:
            programs[str(module)].ms[name] += event.duration_ns / 1e6
            programs[str(module)].count[name] += 1
            spans.append((event.start_ns, event.start_ns + event.duration_ns))
    busy = end = 0.0
    for start, stop in sorted(spans):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return programs, busy / 1e6


def batch_seconds(engine: Engine, rows: int, tokens: int) -> float:
    """Return the seconds of a batch of `rows` random prompts with answers of `tokens` tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = [random_prompt(engine, PROMPT, time.time_ns() + row) for row in range(rows)]
    began = time.perf_counter()
    engine.generate(prompts, params)
    return time.perf_counter() - began


def floors(options: argparse.Namespace, weight_bytes: int) -> tuple[float, float]:
    """Return the least milliseconds of the products of all prompts, and of a decode step."""
    config = read_config(Path(options.model))
    numbers, head = model_size(Path(options.model)).parameters, config.vocab_size * config.hidden_size
    exact = options.products == "exact" or options.form == "F32"
    rate = 1e6 * (options.rate or _RATES["exact" if exact else options.form])
    step = max(weight_bytes / (options.bandwidth * 1e6), options.rows * numbers / rate)
    return (options.rows * PROMPT * (numbers - head) + options.rows * head) / rate, step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--form", default="BF16", choices=FORMS)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--products", default="rounded", choices=["exact", "rounded"])
    parser.add_argument("--cache", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--most", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, default=45.0, help="GB/s")
    parser.add_argument("--rate", type=float, help="billion multiply-adds a second; default: of two cores of a Zen 4")
    options = parser.parse_args()
    engine = engine_of(options.model, options.form, options.rows, options.products, options.cache)
    batch_seconds(engine, options.rows, OUTPUT)
    first, whole = (min(batch_seconds(engine, options.rows, count) for _ in range(3)) for count in (1, OUTPUT))
    of_prompts, of_step = floors(options, sum(leaf.nbytes for leaf in engine.runner.leaves))
    print(f"{options.form}, {options.rows} rows: {options.rows * OUTPUT / whole:.1f} tokens/s; ", end="")
    print(f"prompts {first * 1e3:.0f} ms, products at least {of_prompts:.0f}; ", end="")
    print(f"a step {(whole - first) / (OUTPUT - 1) * 1e3:.2f} ms, products at least {of_step:.2f}")
    names = names_of(engine)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            traced = batch_seconds(engine, options.rows, OUTPUT)
        programs, busy = spent_in(directory, names)
    print(f"traced {traced * 1e3:.0f} ms, {busy:.0f} ms of them in operations")
    for module, spent in programs.items():
        print(f"{module}: {spent.ms.total():.1f} ms", *spent.lines(options.most), sep="\n")


if __name__ == "__main__":
    main()
