"""Measure speculation on recorded texts: tokens per second with and without drafts, by turns in one process.

    python -m benchmarks.speculation MODEL_DIR [--rows 1 8] [--texts 8] [--tokens 400] [--rounds 2]

A model of random weights writes no text, so its sampler is replaced: it draws a token as always, and then returns the
next token of a recorded text. All other work is the served model's. `--texts` of each kind are written, as many at once
as there are rows. They are made from this repository:

edit    a source file at one commit; the prompt has the file of the commit before
json    records of which one value each was changed; the prompt has them as they were
extract records as JSON; the prompt has their values, a line of text each
prose   a document; the prompt has another one
wrong   as edit, with a drafter whose drafts are never right

A draft model guesses nothing of a recorded text, so with one the model writes its own:

    python -m examples.draft_model DRAFT
    python -m benchmarks.make_model MODEL_DIR --widen 2 --layers 24      # or the demo model: jaxserve/assets/demo
    python -m benchmarks.speculation MODEL_DIR --draft-model DRAFT [--rows 1 8 32] [--tokens 96] [--rounds 3]

Three engines in one process write greedily by turns: without drafts, with n-grams, and with the draft model. A head in
EAGLE-3's form is measured as a draft model is, and both in one run:

    python -m examples.draft_model HEAD --head --widen 2                 # the demo model: without --widen
    python -m benchmarks.speculation MODEL_DIR --draft-model DRAFT HEAD [--rows 1 8 32] [--tokens 96] [--rounds 3]

The prompts are the demo model's, by default of these kinds; `--prompts FILE` has others, one in each line.

prose   a story
edit    the story of the prompt, told again of another animal
json    a list of countries with their capitals, by a JSON schema

With `--hostile` one draft model gets random weights, so that none of its drafts is right. It is compared with no drafts
and with itself if it never rested, from when each row has `--after` tokens, by default 64:

    python -m benchmarks.speculation MODEL_DIR --draft-model DRAFT --hostile --rows 1 --texts 2 --tokens 256

Tokens and seconds count from when each row has its first token, or `--after`. `device` is the share of the seconds in
which the process waits for the device, and `host` is the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from examples.demo_model import stories
from jaxserve.config import Config
from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.engine.factory import build_engine
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import EAGLE3
from jaxserve.models.checkpoint.read_config import architecture_of
from jaxserve.runtime.model_runner import ModelRunner, VerifyStep
from jaxserve.runtime.sampling.sampler import RowsToSample, Sampled, sample
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.step_input import DeviceStep
from jaxserve.speculation.ngram import Drafter, NGramDrafter
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import EngineRequest, GrammarSpec, SamplingParams
from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import DraftCounters, Request

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS = 1000  # of the other file, at most
VOCAB_LIMIT = 32000  # of make_model's default model
Text = tuple[list[int], list[int]]  # prompt, output
Seconds = tuple[float, float]  # of the clock, and of the process's CPU time


class WrongDrafter:
    """Its drafts are never right: no text has this token."""

    def propose(self, request: Request, most: int) -> list[int]:
        """See `Drafter`."""
        return [VOCAB_LIMIT - 1] * most

    def forget(self, request_id: str) -> None:
        """Nothing is kept."""


# --- texts


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _edits() -> Iterator[tuple[str, str]]:
    """Yield source files before and after a commit, newest commits first."""
    for commit in _git("log", "--format=%h", "-n", "500", "--no-merges", "--", "jaxserve").split():
        for name in _git("diff", "--name-only", "--diff-filter=M", f"{commit}~1", commit, "--", "jaxserve").split():
            if name.endswith(".py"):
                yield _git("show", f"{commit}~1:{name}"), _git("show", f"{commit}:{name}")


def _records(rng: random.Random, count: int) -> list[dict[str, Any]]:
    """Return records with three texts and two numbers each."""
    words = sorted({word for word in (ROOT / "README.md").read_text().split() if word.isalpha() and len(word) > 3})
    keys = rng.sample(["name", "address", "city", "customer", "comment"], 3)
    return [
        {key: " ".join(rng.sample(words, 2)) for key in keys}
        | {"id": rng.randrange(10**5), "total": rng.randrange(10**4)}
        for _ in range(count)
    ]


def _changed_records() -> Iterator[tuple[str, str]]:
    rng = random.Random(0)
    while True:
        rows = _records(rng, 30)
        yield json.dumps(rows, indent=1), json.dumps([row | {"total": rng.randrange(10**4)} for row in rows], indent=1)


def _extracted_records() -> Iterator[tuple[str, str]]:
    rng = random.Random(0)
    while True:
        rows = _records(rng, 30)
        lines = [", ".join(rows[0]), *(", ".join(map(str, row.values())) for row in rows)]
        yield "\n".join(lines), json.dumps(rows, indent=1)


def _prose() -> Iterator[tuple[str, str]]:
    texts = [path.read_text() for path in sorted(ROOT.glob("docs/*.md"))]
    while True:
        yield from zip(texts, texts[1:] + texts[:1], strict=True)


def texts(kind: str, count: int, num_tokens: int, tokenizer: Tokenizer) -> list[Text]:
    """Return `count` texts of one kind, each with `num_tokens` tokens of output."""
    found: list[Text] = []
    source = {
        "edit": _edits,
        "wrong": _edits,
        "json": _changed_records,
        "extract": _extracted_records,
        "prose": _prose,
    }[kind]()
    for before, after in source:
        prompt, output = tokenizer.encode(before)[:PROMPT_TOKENS], tokenizer.encode(after)
        # the output begins shortly before the first token that is new
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(prompt, output, strict=False)))
        begin = max(0, same - num_tokens // 4)
        if len(prompt) >= 40 and len(output) >= begin + num_tokens:
            found.append((prompt + output[:begin], output[begin : begin + num_tokens]))
        if len(found) == count:
            return found
    raise SystemExit(f"the history has too few texts of kind {kind}")


# --- a sampler that returns recorded tokens


def recorded_sampler(every: list[Text]) -> Callable[..., Sampled]:
    """Return `sample` with the tokens of a text in place of its own. A request's seed is the number of its text."""
    longest = max(len(prompt) + len(output) for prompt, output in every)
    table = np.zeros((len(every), longest + 1), np.int32)
    for row, (prompt, output) in zip(table, every, strict=True):
        row[: len(prompt) + len(output)] = prompt + output

    @functools.wraps(sample)
    def recorded(logits: jax.Array, rows: RowsToSample, state: SlotState, *args: object, **kwargs: object) -> Sampled:
        sampled = sample(logits, rows, state, *args, **kwargs)  # type: ignore[arg-type]
        slot = jnp.minimum(rows.slots, state.num_slots - 1)
        text = state.seed[slot, 0].astype(jnp.int32)
        token = jnp.asarray(table).at[text, state.position[slot]].get(mode="clip")
        # the sampler's own token takes part, so that its work is not removed
        token = token + jnp.minimum(sampled.tokens[:, 0], 0)
        return Sampled(sampled.tokens.at[:, 0].set(token), sampled.logprobs, sampled.id_logprobs, sampled.candidates)

    return recorded


# --- runs


@dataclass
class Turns:
    """The runs of one kind of text at one number of rows: (seconds, CPU seconds of the process) of each.

    groups: the texts that are written at once
    counts: of the last run: rows with drafts, drafts, drafts that were accepted
    """

    kind: str
    rows: int
    groups: list[list[tuple[int, Text]]]
    drafted: list[Seconds] = field(default_factory=list)
    plain: list[Seconds] = field(default_factory=list)
    counts: tuple[int, ...] = (0, 0, 0)

    def take(self, core: EngineCore, drafter: Drafter) -> None:
        """Write all texts with drafts and without, group by group."""
        runs: list[tuple[Seconds, Seconds]] = []
        self.counts = 0, 0, 0
        for group in self.groups:
            drafted, found = run(core, drafter, group)
            plain, _ = run(core, None, group)
            runs.append((drafted, plain))
            counts = found.num_drafts, found.num_draft_tokens, found.num_accepted_tokens
            self.counts = tuple(map(sum, zip(self.counts, counts, strict=True)))
        drafted, plain = ([sum(part) for part in zip(*each, strict=True)] for each in zip(*runs, strict=True))
        self.drafted.append((drafted[0], drafted[1]))
        self.plain.append((plain[0], plain[1]))

    def line(self, num_tokens: int) -> str:
        """Return the report, of the fastest runs. CPU time says more if the machine has other work."""
        (wall, cpu), (plain_wall, plain_cpu) = (
            map(min, zip(*runs, strict=True)) for runs in (self.drafted, self.plain)
        )
        rate, (rows, drafts, accepted) = self.rows * len(self.groups) * num_tokens, self.counts
        return (
            f"{self.kind:7} {self.rows:3} rows: {rate / plain_wall:6.1f} -> {rate / wall:6.1f} tokens/s "
            f"(x{plain_wall / wall:.2f}), CPU x{plain_cpu / cpu:.2f}; {rows} rows with drafts, "
            f"{accepted} of {drafts} accepted"
        )


def run(core: EngineCore, drafter: Drafter | None, numbered: list[tuple[int, Text]]) -> tuple[Seconds, DraftCounters]:
    """Generate the outputs. Returns the times from the last prompt's first token to the end, and what drafts did."""
    runner = core.runner
    runner.rebuild()
    config = core.scheduler.config
    engine = EngineCore(runner, config, CoreOptions(vocab_size=VOCAB_LIMIT, drafter=drafter))
    for number, (prompt, output) in numbered:
        params = SamplingParams(temperature=0.0, max_tokens=len(output), ignore_eos=True, seed=number)
        engine.add(EngineRequest(request_id=str(number), prompt_token_ids=prompt, params=params))
    made: dict[str, list[int]] = {str(number): [] for number, _ in numbered}
    started = cpu = 0.0
    while engine.has_work:
        for each in engine.step():
            made[each.request_id] += each.token_ids
        if not started and all(made.values()):
            started, cpu = time.perf_counter(), time.process_time()
    seconds = time.perf_counter() - started, time.process_time() - cpu
    assert [made[str(number)] for number, _ in numbered] == [output for _, (_, output) in numbered]
    return seconds, engine.scheduler.stats().drafts or DraftCounters()


# --- a model's own text

ENTRY = {"type": "object", "properties": {"country": {"type": "string"}, "capital": {"type": "string"}}}
ENTRY |= {"required": ["country", "capital"], "additionalProperties": False}
LIST = {"type": "array", "items": ENTRY, "minItems": 4, "maxItems": 6}
SCHEMA = {"type": "object", "properties": {"countries": LIST}, "required": ["countries"], "additionalProperties": False}
OWN_KINDS = "prose", "edit", "json"
NEVER_RESTS = "never rests"  # the draft model, in every step
FROM_FILE = "file"


@dataclass
class Prompts:
    """What a model is asked for. kind: as in this module's docstring; `file`: of --prompts"""

    kind: str
    token_ids: list[list[int]]

    def params(self, num_tokens: int, *, exactly: bool) -> SamplingParams:
        """Return how each output is made: greedily, with at most `num_tokens` tokens, or exactly as many."""
        grammar = GrammarSpec(kind="json_schema", source=json.dumps(SCHEMA)) if self.kind == "json" else None
        return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=exactly, grammar=grammar)


def own_prompts(kind: str, count: int, tokenizer: Tokenizer) -> Prompts:
    """Return `count` prompts of one kind for the demo model."""
    rng = random.Random(kind)
    asked = "Tell me a story about {}."
    found = []
    for place in range(count):
        animal, other = rng.sample(stories.CHARACTERS, 2)
        turns = ["user", asked.format(stories.with_article(animal)), "assistant"]
        if kind == "edit":
            turns += [stories.tell(rng, animal), "user", asked.format(stories.with_article(other)), "assistant"]
        elif kind == "json":
            turns[1] = (
                f"{rng.choice(['List', 'Name', 'Tell me'])} {4 + place % 3} countries and their capitals. Use JSON."
            )
        pairs = zip(turns[::2], [*turns[1::2], None], strict=True)
        text = "".join(f"<|im_start|>{role}\n" + (f"{said}<|im_end|>\n" if said else "") for role, said in pairs)
        found.append(tokenizer.encode(text))
    return Prompts(kind, found)


@dataclass
class Written:
    """What writing took, from when each row had its first token.

    cpu: seconds of CPU time of the process, which say more if the machine has other work
    wait: seconds in which the process waited for the device
    """

    outputs: list[list[int]] = field(default_factory=list)
    tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    cpu: float = 0.0
    wait: float = 0.0

    def add(self, other: Written) -> None:
        """Add what another group of prompts took."""
        self.outputs += other.outputs
        for name in ("tokens", "steps", "seconds", "cpu", "wait"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Waiting:
    """Adds up the seconds of `result()` of steps while it is active."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Measure."""
        with contextlib.ExitStack() as stack:
            for each in (DeviceStep, VerifyStep):
                stack.enter_context(mock.patch.object(each, "result", self._timed(each.result)))
            yield

    def _timed(self, result: Callable[..., Any]) -> Callable[..., Any]:
        def timed(step: object) -> Any:
            began = time.perf_counter()
            try:
                return result(step)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def write(
    core: EngineCore, prompts: list[list[int]], params: SamplingParams, waiting: Waiting, after: int = 1
) -> Written:
    """Write an output after each prompt. All prompts are there at once. after: tokens of a row before it counts"""
    core.flush_prefix_cache()
    made: dict[str, list[int]] = {str(number): [] for number in range(len(prompts))}
    for name, prompt in zip(made, prompts, strict=True):
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, params=params))
    before, counters = Written(), core.scheduler.counters
    while core.has_work:
        for each in core.step():
            made[each.request_id] += each.token_ids
        if not before.tokens and all(len(tokens) >= after for tokens in made.values()):
            first = sum(map(len, made.values()))
            before = Written([], first, counters.steps, time.perf_counter(), time.process_time(), waiting.seconds)
    seconds, total = time.perf_counter() - before.seconds, sum(map(len, made.values()))
    return Written(
        outputs=list(made.values()),
        tokens=total - before.tokens,
        steps=counters.steps - before.steps,
        seconds=seconds,
        cpu=time.process_time() - before.cpu,
        wait=waiting.seconds - before.wait,
    )


def compare(options: argparse.Namespace) -> None:
    """Print a line for each kind, number of rows and way to guess: the fastest of the rounds."""
    tokenizer, most = Tokenizer.from_directory(options.directory), max(options.rows)
    if options.prompts is not None:
        lines = options.prompts.read_text().splitlines()
        asked = [Prompts(FROM_FILE, [tokenizer.encode(line) for line in lines])]
    else:
        kinds = options.kinds or (OWN_KINDS[:1] if options.hostile else OWN_KINDS)
        asked = [own_prompts(kind, max(most, options.texts), tokenizer) for kind in kinds]
    ways: dict[str, dict[str, Any]] = {"none": {}}
    if not options.hostile:
        ways["n-grams"] = {"method": "ngram"}
    for directory in options.draft_model:
        is_head = architecture_of(ModelFiles.open(directory).config) in EAGLE3
        way, method = ("head", "eagle3") if is_head else ("draft model", "draft_model")
        if way in ways:
            raise SystemExit(f"--draft-model: {directory} is a second {way}")
        ways[way] = {"method": method, "draft_model": str(directory)}
    cores: dict[str, EngineCore] = {}
    for way, keys in ways.items():
        sizes = {"max_num_seqs": max(8, most), "max_num_batched_tokens": 128, "max_model_len": 512}
        config = Config.of(str(options.directory), **sizes, **keys)
        cores[way] = core = build_engine(config, lambda message: None).core
        times = core.scheduler.config.step_times
        each = ", ".join(f"{rows} rows {1000 * seconds:.2f}" for rows, seconds in times.draft.items())
        print(
            f"{way}: a step of one row takes {1000 * times.decode_seconds(1):.2f} ms, with drafts {costs(times)}",
            end="",
        )
        print(f"; proposing drafts takes, in ms: {each}" if each else "", flush=True)
    if options.hostile:
        *_, drafting = cores.values()
        runner, rng = drafting.runner, np.random.default_rng(0)
        assert isinstance(runner, ModelRunner)
        noise = [rng.normal(0, 0.1, leaf.shape).astype(leaf.dtype) for leaf in runner.draft_leaves]
        runner.draft_leaves = tuple(map(jax.device_put, noise, (leaf.sharding for leaf in runner.draft_leaves)))
        cores[NEVER_RESTS] = drafting
    for prompts in asked:
        for rows in options.rows:
            _by_turns(cores, prompts, rows, options)


def _by_turns(cores: dict[str, EngineCore], prompts: Prompts, rows: int, options: argparse.Namespace) -> None:
    texts = prompts.token_ids[: max(rows, options.texts)]
    groups = [texts[i : i + rows] for i in range(0, len(texts) - rows + 1, rows)]
    runs: dict[str, list[Written]] = {way: [] for way in cores}
    counts: dict[str, tuple[int, int, int]] = {}
    waiting, params = Waiting(), prompts.params(options.tokens, exactly=options.hostile)
    with waiting.active():
        for _ in range(options.rounds):
            for way, core in cores.items():
                before, written = core.scheduler.stats().drafts or DraftCounters(), Written()
                patience = mock.patch("jaxserve.scheduler.speculation.PATIENCE", 10**9)
                with patience if way == NEVER_RESTS else contextlib.nullcontext():
                    for group in groups:
                        written.add(write(core, group, params, waiting, options.after))
                after = core.scheduler.stats().drafts or DraftCounters()
                runs[way].append(written)
                accepted = after.num_accepted_tokens - before.num_accepted_tokens
                rested = after.num_rest_steps - before.num_rest_steps
                counts[way] = accepted, after.num_draft_tokens - before.num_draft_tokens, rested
    fastest = {way: min(found, key=lambda written: written.seconds) for way, found in runs.items()}
    plain = fastest["none"]
    for way, best in fastest.items():
        (accepted, drafts, rested), device = counts[way], best.wait / best.seconds
        same = sum(map(list.__eq__, best.outputs, plain.outputs))
        print(
            f"{prompts.kind:5} {rows:2} rows, {way:11}: {best.tokens / best.steps / rows:5.2f} tokens a step and row, "
            f"{best.tokens / best.seconds:7.1f} tokens/s (x{plain.seconds / best.seconds:.2f}, "
            f"CPU x{min(each.cpu for each in runs['none']) / min(each.cpu for each in runs[way]):.2f}); "
            f"device {device:.0%}, host {1 - device:.0%}, {1000 * best.seconds / best.steps:.2f} ms a step; "
            f"{accepted} of {drafts} drafts accepted, {rested} steps without the draft model; "
            f"{same} of {len(best.outputs)} texts as without; "
            f"load {os.getloadavg()[0]:.1f}",
            flush=True,
        )


def costs(times: StepTimes) -> str:
    """Return what a step with drafts costs, as measured at the start: by tokens, against one row without drafts."""
    one = times.decode_seconds(1)
    return ", ".join(f"{size}: x{seconds / one:.2f}" for size, seconds in times.verify.items())


def main() -> None:
    """Run all kinds by turns and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--texts", type=int, default=8, help="of each kind")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--draft-model", type=Path, nargs="+", help="a draft model, a head, or one of each")
    parser.add_argument("--prompts", type=Path, help="with --draft-model")
    parser.add_argument("--hostile", action="store_true", help="with --draft-model: give it random weights")
    parser.add_argument("--after", type=int, help="with --draft-model: tokens of each row before it counts")
    options = parser.parse_args()
    options.after = options.after or (64 if options.hostile else 1)
    if options.draft_model is not None:
        if options.hostile and len(options.draft_model) > 1:
            parser.error("--hostile is for one draft model")
        return compare(options)
    if options.prompts is not None or options.hostile or options.after > 1:
        parser.error("--prompts, --hostile and --after are for --draft-model")
    tokenizer, most = Tokenizer.from_directory(options.directory), max(options.rows)
    count = max(most, options.texts)
    kinds = options.kinds or ["edit", "json", "extract", "prose", "wrong"]
    every = {kind: texts(kind, count, options.tokens, tokenizer) for kind in kinds}
    numbered = list(enumerate(text for found in every.values() for text in found))
    keys = {
        "max_num_seqs": max(8, most),
        "num_pages": 2 * most * (2 * PROMPT_TOKENS + options.tokens) // 16,
        "method": "ngram",
    }
    config = Config.of(str(options.directory), **keys)
    with mock.patch("jaxserve.runtime.programs.sample", recorded_sampler([text for _, text in numbered])):
        core = build_engine(config, lambda message: None).core
    section, load = config.speculation, os.getloadavg
    cost = costs(core.scheduler.config.step_times)
    print(
        f"load {load()[0]:.1f}; seconds of a step with drafts, by tokens, against a step of one row: {cost}", flush=True
    )
    for rows in options.rows:
        for place, kind in enumerate(kinds):
            part = numbered[place * count : (place + 1) * count]
            turns = Turns(kind, rows, [part[i : i + rows] for i in range(0, count - rows + 1, rows)])
            for _ in range(options.rounds):
                ngrams = NGramDrafter(section.prompt_lookup_min, section.prompt_lookup_max)
                turns.take(core, WrongDrafter() if kind == "wrong" else ngrams)
            print(f"{turns.line(options.tokens)}; load {load()[0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
