"""Count the prompt tokens that a model with recurrent states computes, whose prefix cache keeps states sparsely.

    python -m benchmarks.prefix_states
    python -m benchmarks.prefix_states --interval 2048 --chunk 8192
    python -m benchmarks.prefix_states --run qwen3_5

Two workloads, one request after the other: questions about one text of 3,000 tokens, and an agent whose history grows
to 7,650 tokens in 20 turns. Beside the tokens computed are those of a model that keeps K and V of all tokens, which are
found by whole pages, and the least possible: the tokens that no earlier request had. It counts decisions of the
scheduler, and no model runs.

--run CASE serves a tiny model of tests/models/families.py in deterministic mode instead. Each answer is compared, with
its log-probabilities, to that of the same engine with an empty cache.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.scheduler import fake_tokens
from jaxserve import Engine, SamplingParams
from jaxserve.config import Config
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types.scheduling import SchedulerConfig, StateSizes
from jaxserve.types.step import Request
from tests.models.checkpoints import random_tensors, write_checkpoint, write_words
from tests.models.families import STATE_CASES
from tests.models.families import VOCAB as TINY_VOCAB

PAGE, BORDER = 16, 64  # tokens
TEXT, QUESTION, ANSWER = 3000, 60, 100  # tokens
TURNS, FIRST, RESULT = 20, 1000, 250  # of the agent: turns, tokens of its first prompt and of a tool's result
_VOCAB, _CONTEXT = 50_000, 16_384


@dataclass(frozen=True)
class Sizes:
    """interval: tokens between two states that are kept; None: K and V of all tokens. states: pages of states"""

    interval: int | None
    states: int
    chunk: int  # prompt tokens of a step


@dataclass(frozen=True)
class Asked:
    """A prompt, the tokens of it that were computed, the least possible, and its answer with log-probabilities."""

    prompt: list[int]
    computed: int
    least: int
    answer: list[int]
    logprobs: list[float]


Ask = Callable[[list[int]], tuple[int, list[int], list[float]]]  # prompt -> tokens computed, answer, log-probabilities


def by_scheduler(sizes: Sizes) -> Ask:
    """Return what asks a scheduler, one request after the other. All tokens of its answers are 1."""
    states = None if sizes.interval is None else StateSizes(sizes.states, sizes.interval, BORDER)
    scheduler = Scheduler(
        SchedulerConfig(
            num_pages=4096,
            page_size=PAGE,
            max_num_seqs=8,
            max_num_batched_tokens=sizes.chunk + 8,
            prefill_chunk_size=sizes.chunk,
            max_model_len=_CONTEXT,
            states=states,
        )
    )

    def ask(prompt: list[int]) -> tuple[int, list[int], list[float]]:
        before = scheduler.counters.prefill_tokens
        params = SamplingParams(max_tokens=ANSWER)
        scheduler.add(Request(f"r{before}", prompt, params, 0.0, seed=0, max_tokens=ANSWER))
        while (output := scheduler.schedule(0.0)) is not None:
            scheduler.update(output, fake_tokens(output), 0.0)
        scheduler.check_integrity()
        return scheduler.counters.prefill_tokens - before, [1] * ANSWER, []

    return ask


def by_engine(engine: Engine, *, cold: bool) -> Ask:
    """Return what asks an engine. cold: with an empty prefix cache for each prompt"""
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True, logprobs=0)

    def ask(prompt: list[int]) -> tuple[int, list[int], list[float]]:
        if cold:
            engine.core.flush_prefix_cache()
        [[answer]] = engine.generate([prompt], params)
        computed = len(prompt) - answer.num_cached_tokens
        return computed, answer.token_ids, [each.logprob for each in answer.logprobs or []]

    return ask


def questions(ask: Ask, rng: random.Random, vocab: int = _VOCAB) -> list[Asked]:
    """Ask about one text."""
    text, found = rng.choices(range(3, vocab), k=TEXT), list[Asked]()
    for number in range(5):
        prompt = text + rng.choices(range(3, vocab), k=QUESTION)
        found.append(_asked(ask, prompt, QUESTION if number else len(prompt)))
    return found


def turns(ask: Ask, rng: random.Random, vocab: int = _VOCAB) -> list[Asked]:
    """Ask as an agent does: each prompt is the last one, its answer and a tool's result."""
    prompt, found = rng.choices(range(3, vocab), k=FIRST), list[Asked]()
    for number in range(TURNS):
        # the last token of an answer is not computed when it ends
        found.append(_asked(ask, prompt, RESULT + 1 if number else FIRST))
        prompt = prompt + found[-1].answer + rng.choices(range(3, vocab), k=RESULT)
    return found


def _asked(ask: Ask, prompt: list[int], least: int) -> Asked:
    computed, answer, logprobs = ask(prompt)
    return Asked(prompt, computed, least, answer, logprobs)


WORKLOADS = {"questions about one text": questions, "turns of an agent": turns}


def serve(case: str, sizes: Sizes, directory: Path) -> Engine:
    """Return an engine with a tiny model of random weights, in deterministic mode."""
    hf = STATE_CASES[case] | {"max_position_embeddings": _CONTEXT}
    write_words(write_checkpoint(directory, hf, random_tensors(hf)), TINY_VOCAB)
    states: dict[str, Any] = {"num_state_pages": sizes.states, "state_interval": sizes.interval}
    tree = {
        "model": {"path": str(directory)},
        "cache": {"num_pages": 1024, "page_size": PAGE, **states},
        "scheduler": {"max_num_seqs": 2, "max_num_batched_tokens": sizes.chunk},
        "runtime": {"deterministic": True},
    }
    return Engine(config=Config.parse(tree))


def main() -> None:
    """Print a table per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, default=512, help="tokens; cache.state_interval")
    parser.add_argument("--states", type=int, default=64, help="cache.num_state_pages")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step")
    parser.add_argument("--run", choices=STATE_CASES, metavar="CASE", help="serve this tiny model")
    options = parser.parse_args()
    sizes = Sizes(options.interval, options.states, options.chunk)
    if options.run is None:
        for name, workload in WORKLOADS.items():
            sparse, whole = (
                workload(by_scheduler(each), random.Random(0))
                for each in (sizes, Sizes(None, options.states, options.chunk))
            )
            _print_table(name, sparse, "K and V", [each.computed for each in whole])
        return
    with tempfile.TemporaryDirectory() as folder:
        engine = serve(options.run, sizes, Path(folder))
        for name, workload in WORKLOADS.items():
            engine.core.flush_prefix_cache()
            warm = workload(by_engine(engine, cold=False), random.Random(0), TINY_VOCAB)
            ask = by_engine(engine, cold=True)
            same = [ask(each.prompt)[1:] == (each.answer, each.logprobs) for each in warm]
            _print_table(name, warm, "equal", same)
            assert all(same), "an answer differs from a cold one"


def _print_table(name: str, asked: Sequence[Asked], column: str, values: Sequence[int]) -> None:
    """Print the numbers of each request and their sums. values: of one more column"""
    print(f"{name}\n{'':4}{'prompt':>8}{'computed':>10}{column:>10}{'least':>8}")
    rows = [
        (len(each.prompt), each.computed, int(value), each.least) for each, value in zip(asked, values, strict=True)
    ]
    for number, row in enumerate(rows, start=1):
        print(f"{number:4d}{row[0]:8d}{row[1]:10d}{row[2]:10d}{row[3]:8d}")
    total = [sum(column) for column in zip(*rows, strict=True)]
    print(f"all {total[0]:8d}{total[1]:10d}{total[2]:10d}{total[3]:8d}\n", flush=True)


if __name__ == "__main__":
    main()
