"""Count the prompt tokens that a model with recurrent states computes, whose prefix cache keeps states sparsely.

    python -m benchmarks.prefix_states
    python -m benchmarks.prefix_states --interval 2048 --states 32

Two workloads, one request after the other: questions about one text of 3,000 tokens, and an agent whose history grows
to 8,000 tokens in 20 turns. Beside the tokens computed are those of a model that keeps K and V of all tokens, which are
found by whole pages, and the least possible: the tokens that no earlier request had. It counts decisions of the
scheduler, so no model runs; that the answers are right is for tests/e2e/test_states.py.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass

from benchmarks.scheduler import fake_tokens
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.scheduling import SchedulerConfig, StateSizes
from jaxserve.types.step import Request

_PAGE, _BORDER = 16, 64  # tokens
_TEXT, _QUESTION, _ANSWER = 3000, 60, 100  # tokens
_TURNS, _FIRST, _RESULT = 20, 1000, 250  # of the agent: turns, tokens of its first prompt and of a tool's result
_VOCAB = 50_000


@dataclass(frozen=True)
class Sizes:
    """interval: tokens between two states that are kept; None: K and V of all tokens. states: pages of states"""

    interval: int | None
    states: int
    chunk: int  # prompt tokens of a step


def computed_tokens(prompts: list[list[int]], sizes: Sizes) -> list[int]:
    """Return how many tokens each prompt computes, one request after the other, each with an answer of _ANSWER."""
    states = None if sizes.interval is None else StateSizes(sizes.states, sizes.interval, _BORDER)
    config = SchedulerConfig(
        num_pages=4096,
        page_size=_PAGE,
        max_num_seqs=8,
        max_num_batched_tokens=sizes.chunk + 8,
        prefill_chunk_size=sizes.chunk,
        max_model_len=16_384,
        states=states,
    )
    scheduler, counts = Scheduler(config), []
    for number, prompt in enumerate(prompts):
        before = scheduler.counters.prefill_tokens
        params = SamplingParams(max_tokens=_ANSWER)
        scheduler.add(Request(f"r{number}", prompt, params, 0.0, seed=0, max_tokens=_ANSWER))
        while (output := scheduler.schedule(0.0)) is not None:
            scheduler.update(output, fake_tokens(output), 0.0)
        scheduler.check_integrity()
        counts.append(scheduler.counters.prefill_tokens - before)
    return counts


def questions(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Return prompts with one text, and the least tokens to compute of each."""
    text = rng.choices(range(2, _VOCAB), k=_TEXT)
    prompts = [text + rng.choices(range(2, _VOCAB), k=_QUESTION) for _ in range(5)]
    return prompts, [_TEXT + _QUESTION, *(_QUESTION for _ in prompts[1:])]


def turns(rng: random.Random) -> tuple[list[list[int]], list[int]]:
    """Return the prompts of an agent, and the least tokens to compute of each: all tokens of `fake_tokens` are 1."""
    history, prompts = rng.choices(range(2, _VOCAB), k=_FIRST), list[list[int]]()
    for _ in range(_TURNS):
        prompts.append(list(history))
        history += [1] * _ANSWER + rng.choices(range(2, _VOCAB), k=_RESULT)
    # the last token of an answer is not computed when it ends
    return prompts, [_FIRST, *(_RESULT + 1 for _ in prompts[1:])]


def main() -> None:
    """Print a table per workload."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--interval", type=int, default=512, help="tokens; cache.state_interval")
    parser.add_argument("--states", type=int, default=64, help="cache.num_state_pages")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step")
    options = parser.parse_args()
    for name, (prompts, least) in (
        ("questions about one text", questions(random.Random(0))),
        ("turns of an agent", turns(random.Random(0))),
    ):
        sparse = computed_tokens(prompts, Sizes(options.interval, options.states, options.chunk))
        whole = computed_tokens(prompts, Sizes(None, options.states, options.chunk))
        print(f"{name}\n{'':4}{'prompt':>8}{'computed':>10}{'K and V':>10}{'least':>8}")
        for number, row in enumerate(zip(map(len, prompts), sparse, whole, least, strict=True), start=1):
            print(f"{number:4d}{row[0]:8d}{row[1]:10d}{row[2]:10d}{row[3]:8d}")
        print(f"all {sum(map(len, prompts)):8d}{sum(sparse):10d}{sum(whole):10d}{sum(least):8d}\n")


if __name__ == "__main__":
    main()
