"""Models with recurrent states through scheduler and runner: the tokens are transformers' own, whatever happens.

That is with and without a prefix cache, at every border of chunks, in a crowd, after preemption and after the device's
state was lost. Pages begin as NaN, so that a state that was never written shows.
"""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.ops.state import StateArrays
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.scheduler.scheduler import StepsInFlight
from jaxserve.types.sampling import GrammarSpec
from jaxserve.types.scheduling import StateSizes
from tests.e2e import golden_runner
from tests.fake_grammar import CountingMatcher, HandExecutor
from tests.fakes import make_request, run_all
from tests.models import families

PAGE, BORDER, LONGEST, NEW = 16, 64, 256, 30
OTHERS = ("lfm2_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5, deterministic")
OTHERS += ("bamba", "granite4", "nemotron_h", "kimi_linear", "falcon_h1")
SERVED = ["lfm2", "qwen3_5", *(pytest.param(case, marks=pytest.mark.slow) for case in OTHERS)]


@dataclass(frozen=True)
class Served:
    model: LoadedModel
    runner: ModelRunner
    prompt: list[int]
    greedy: list[int]  # of transformers

    def core(self, threads: HandExecutor | None = None, **changes: Any) -> EngineCore:
        """A new scheduler over the compiled programs, with states of NaN. threads: make token masks"""
        runner, plan = self.runner, self.runner.plan
        runner.rebuild()
        runner.caches = tuple(
            jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache) if isinstance(cache, StateArrays) else cache
            for cache in runner.caches
        )
        states = StateSizes(plan.num_state_pages, 2 * BORDER, BORDER)
        options = {"make_matcher": lambda spec: CountingMatcher(3, int(spec.source)), "mask_threads": threads}
        return golden_runner.make_core(runner, options=options, **({"states": states} | changes))


@pytest.fixture(scope="module", params=SERVED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str
) -> Iterator[Served]:
    case, _, deterministic = request.param.partition(", ")
    model, runner = golden_runner.start(
        case,
        tmp_path_factory.mktemp(case),
        compile_cache,
        max_num_batched_tokens=128,
        max_model_len=LONGEST,
        page_size=PAGE,
        num_pages=128,
        num_state_pages=6,
        state_interval=2 * BORDER,
        state_border=BORDER,
        deterministic=bool(deterministic),
    )
    arrays = np.load(families.GOLDENS / f"{case}.npz")
    yield Served(model, runner, arrays["ids"].tolist(), arrays["greedy"].tolist())
    runner.close()


def crowd() -> dict[str, list[int]]:
    """Prompts with a shared beginning, whose tails end before, at and after the borders of kept states."""
    rng = random.Random(3)
    stem = rng.choices(range(3, families.VOCAB), k=150)
    tails = [(64, 1), (64, 2), (128, 1), (128, 63), (128, 64), (128, 65), (150, 1), (150, 20), (0, 40)]
    return {f"r{i}": stem[:cut] + rng.choices(range(3, families.VOCAB), k=k) for i, (cut, k) in enumerate(tails)}


def tokens_of(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return golden_runner.tokens_of(core, prompts, NEW)


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, list[int]]:
    """Of each prompt alone, without the cache."""
    return golden_runner.tokens_alone(served.runner, lambda: served.core(prefix_cache=False), crowd(), NEW)


@pytest.mark.parametrize("chunk", [1, 7, 63, 64, 65, None])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_transformers_tokens_at_every_border_of_chunks(served: Served, chunk: int | None, prefix_cache: bool) -> None:
    core = served.core(prefill_chunk_size=chunk, prefix_cache=prefix_cache)
    for name in ("first", "again"):
        request = make_request(name, served.prompt, max_tokens=len(served.greedy))
        assert run_all(core, [request])[name].token_ids == served.greedy


@pytest.mark.parametrize("chunk", [None, 65])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_in_a_crowd(served: Served, expected: dict[str, list[int]], chunk: int | None, prefix_cache: bool) -> None:
    core = served.core(prefill_chunk_size=chunk, prefix_cache=prefix_cache)
    for _ in range(2):  # the second time the cache is warm
        assert tokens_of(core, crowd()) == expected
    assert (core.scheduler.counters.cached_tokens > 0) == prefix_cache


def test_few_pages_and_few_states(served: Served, expected: dict[str, list[int]]) -> None:
    """Requests are preempted, and states are evicted."""
    states = StateSizes(served.runner.plan.num_state_pages, BORDER, BORDER)
    core = served.core(num_pages=18, new_token_ratio=0.01, states=states)
    for _ in range(2):
        assert tokens_of(core, crowd()) == expected
    assert core.scheduler.counters.retractions > 0


def test_siblings_share_a_state(served: Served, expected: dict[str, list[int]]) -> None:
    core, prompt = served.core(), crowd()["r5"]
    requests = [make_request(f"s{i}", prompt, max_tokens=NEW, group="one") for i in range(3)]
    transcripts = run_all(core, requests)
    assert all(transcript.token_ids == expected["r5"] for transcript in transcripts.values())
    assert core.scheduler.counters.prefill_tokens == len(prompt) + 2 * (len(prompt) - 192)


def constrained(core: EngineCore, threads: HandExecutor | None) -> dict[str, list[int]]:
    """The tokens of three prompts under a grammar, whose masks the threads make now and then."""
    rng, grammar, found = random.Random(2), GrammarSpec(kind="regex", source=str(NEW)), dict[str, list[int]]()
    for name, prompt in list(crowd().items())[3:6]:
        core.add(make_request(name, prompt, max_tokens=NEW, grammar=grammar))
        found[name] = []
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.token_ids
        if threads is not None:
            threads.run(rng.choice([0, 1, 5]))
            for mask in core._masks._masks.values():
                mask.budget.is_slow = rng.random() < 0.5
    return found


def test_a_row_whose_token_mask_is_late_folds_nothing_twice(served: Served) -> None:
    threads, expected = HandExecutor(), constrained(served.core(), None)
    take_back = StepsInFlight.take_back
    with patch.object(StepsInFlight, "take_back", autospec=True, side_effect=take_back) as taken:
        assert constrained(served.core(threads), threads) == expected
    assert sum(len(call.args[1]) for call in taken.call_args_list) > 10


def test_after_the_devices_state_was_lost(served: Served, expected: dict[str, list[int]]) -> None:
    core = served.core()
    for name, prompt in crowd().items():
        core.add(make_request(name, prompt, max_tokens=NEW))
    found: dict[str, list[int]] = {name: [] for name in crowd()}
    for step in range(10_000):
        if step == 12:
            served.runner.rebuild()
            core.recover()
        for output in core.step():
            found[output.request_id] += output.token_ids
        if not core.has_work:
            break
    assert found == expected


def test_a_planned_pool_holds_what_may_run(served: Served) -> None:
    plan = served.runner.plan
    states = [cache for cache in served.runner.caches if isinstance(cache, StateArrays)]
    assert plan.pages_by_group == (plan.num_pages, 6)
    assert plan.num_state_pages * plan.state_page_bytes == sum(
        x.nbytes for each in states for x in jax.tree.leaves(each)
    )
    assert dataclasses.asdict(plan)["num_state_pages"] == 6


@jax.jit
def poisoned(states: StateArrays, pages: jax.Array) -> StateArrays:
    """With NaN in these pages; an index above those that there are is none."""
    return jax.tree.map(lambda x: x.at[pages].set(jnp.nan, mode="drop"), states)


def poison_free_pages(core: EngineCore, runner: ModelRunner) -> None:
    """Fill each page of states that no request and no prefix holds."""
    group = core.scheduler.kv.states
    assert group is not None
    free = np.full(group.num_pages, group.num_pages, np.int32)
    free[: group.pool.num_free] = group.pool._free
    runner.caches = tuple(poisoned(cache, free) if isinstance(cache, StateArrays) else cache for cache in runner.caches)


def test_a_page_of_nan_that_is_not_the_rows_own_reaches_no_row(served: Served, expected: dict[str, list[int]]) -> None:
    """Free pages are NaN before every step, while requests are preempted and states are evicted."""
    states = StateSizes(served.runner.plan.num_state_pages, BORDER, BORDER)
    core = served.core(num_pages=18, new_token_ratio=0.01, states=states)
    for name, prompt in crowd().items():
        core.add(make_request(name, prompt, max_tokens=NEW))
    found: dict[str, list[int]] = {name: [] for name in crowd()}
    while core.has_work:
        for output in core.step():
            found[output.request_id] += output.token_ids
        poison_free_pages(core, served.runner)
    assert found == expected


MANY, DISTINCT = 10_000, 200
TIE = 1e-4  # nats between the two likeliest tokens, as near as logits come to transformers': rounding may choose


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_ten_thousand_requests_at_three_times_the_memory(served: Served) -> None:
    """The requests that are there want three times the pages; each gets the tokens that its prompt got alone.

    A prompt's output ends before its first tie: a step of other shapes rounds otherwise.
    """
    rng, num_pages = random.Random(5), 24
    stems = [rng.choices(range(3, families.VOCAB), k=150) for _ in range(4)]
    prompts = [
        rng.choice(stems)[: rng.choice([0, 64, 128, rng.randrange(150)])]
        + rng.choices(range(3, families.VOCAB), k=rng.randrange(1, 60))
        for _ in range(DISTINCT)
    ]
    lengths = [rng.choice([1, 2, 8, NEW]) for _ in prompts]
    alone: list[list[int]] = []
    for i, prompt in enumerate(prompts):
        core = served.core(prefix_cache=False)
        request = make_request("alone", prompt, max_tokens=lengths[i], logprobs=2)
        outputs = run_all(core, [request])["alone"].outputs
        likeliest = [token.top_logprobs for output in outputs for token in output.logprobs or []]
        lengths[i] = next((k for k, (first, second) in enumerate(likeliest) if first - second < TIE), lengths[i])
        alone.append([token for output in outputs for token in output.token_ids][: lengths[i]])
    usable = [i for i in range(DISTINCT) if lengths[i]]  # the first token of the others is a tie
    assert len(usable) > 0.9 * DISTINCT
    core = served.core(num_pages=num_pages, new_token_ratio=0.1)
    wanted, live, done = 0, dict[str, tuple[int, list[int]]](), 0
    sizes = [-(-(len(prompt) + length) // PAGE) for prompt, length in zip(prompts, lengths, strict=True)]
    while done < MANY:
        while wanted < 3 * num_pages and done + len(live) < MANY:
            name, index = f"r{done + len(live)}", rng.choice(usable)
            core.add(make_request(name, prompts[index], max_tokens=lengths[index]))
            live[name], wanted = (index, []), wanted + sizes[index]
        for output in core.step():
            index, tokens = live[output.request_id]
            tokens += output.token_ids
            if output.finish_reason is not None:
                assert tokens == alone[index], output.request_id
                del live[output.request_id]
                done, wanted = done + 1, wanted - sizes[index]
        if done % 100 == 0:
            core.scheduler.check_integrity()
    core.scheduler.check_integrity()
    counters, group = core.scheduler.counters, core.scheduler.kv.states
    assert group is not None and group.num_available == group.num_pages
    assert core.scheduler.stats().num_pages_held == 0
    assert counters.retractions > 0 and counters.cached_tokens > 0
    print(f"{counters.retractions} preemptions, {counters.prefill_tokens} tokens computed, "
          f"{counters.cached_tokens} cached, {counters.stateless_tokens} without a state")  # fmt: skip
