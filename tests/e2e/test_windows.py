"""Models with sliding windows, whose windowed layers keep the window's pages only, through scheduler and runner.

The tokens are transformers' own (the families' goldens), past the window, alone and in a crowd, whatever the prefix
cache, the chunks and the shortage of pages; and a page given away too early shows in them.
"""

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.engine.core import EngineCore
from jaxserve.engine.factory import _restore_pages, _scheduler_config
from jaxserve.models.checkpoint.loader import LoadedModel
from jaxserve.runtime.kv_cache import layer_groups, layer_reach
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.page_file import PageFileConfig
from jaxserve.types.scheduling import UNTIMED, Span
from tests.e2e import golden_runner
from tests.fakes import groups_of, make_request, run_all
from tests.models import families
from tests.quick import quick_programs
from tests.waiting import wait_until

WINDOW, PAGE, LONGEST = 12, 4, 128
NEW = 40  # tokens of the crowd's answers


@dataclass(frozen=True)
class Served:
    model: LoadedModel
    runner: ModelRunner
    prompt: list[int]
    greedy: list[int]  # of transformers
    crowd: dict[str, list[int]]

    def core(self, **changes: Any) -> EngineCore:
        """A new scheduler over the compiled programs; the pages' old content must not matter."""
        plan, chunked = self.runner.plan, any(self.model.config.layer_chunks)
        assert [group.reach for group in plan.groups] == [("chunk" if chunked else "window", WINDOW)]
        return golden_runner.make_core(self.runner, groups=groups_of(plan, changes), **changes)


# gpt_oss and mistral differ most: some layers windowed, with sinks; and all of them. Layers of gemma4_e read other
# layers' caches and have other heads, and those of llama4 see chunks
LONG = ("gemma2", "gemma3", "mistral, deterministic", "gemma4_e, deterministic", "llama4, deterministic")
SERVED = ["gpt_oss", "mistral", "gemma4_e", "llama4", *(pytest.param(case, marks=pytest.mark.slow) for case in LONG)]


@pytest.fixture(scope="module", params=SERVED)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_cache: str
) -> Iterator[Served]:
    case, _, deterministic = request.param.partition(", ")
    model, runner = golden_runner.start(
        case,
        tmp_path_factory.mktemp(case),
        compile_cache,
        max_num_batched_tokens=16,
        max_model_len=LONGEST,
        page_size=PAGE,
        num_pages=512,
        deterministic=bool(deterministic),
        host_memory=2**21,
    )
    arrays = np.load(families.GOLDENS / f"{case}.npz")
    yield Served(model, runner, arrays["ids"].tolist(), arrays["greedy"].tolist(), crowd())
    runner.close()


def crowd() -> dict[str, list[int]]:
    rng = random.Random(3)
    stem = [rng.randrange(3, families.VOCAB) for _ in range(30)]
    cuts = [(rng.randrange(31), rng.randrange(1, 40)) for _ in range(9)]
    return {f"r{i}": stem[:cut] + rng.choices(range(3, families.VOCAB), k=k) for i, (cut, k) in enumerate(cuts)}


def tokens_of(core: EngineCore, prompts: dict[str, list[int]]) -> dict[str, list[int]]:
    return golden_runner.tokens_of(core, prompts, NEW)


@pytest.fixture(scope="module")
def expected(served: Served) -> dict[str, list[int]]:
    """Of each prompt alone, without the cache."""
    return golden_runner.tokens_alone(served.runner, lambda: served.core(prefix_cache=False), served.crowd, NEW)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [None, 5])
def test_transformers_tokens_past_the_window(served: Served, chunk: int | None, prefix_cache: bool) -> None:
    core = served.core(prefill_chunk_size=chunk, prefix_cache=prefix_cache)
    for name in ("first", "again"):
        request = make_request(name, served.prompt, max_tokens=len(served.greedy))
        assert run_all(core, [request])[name].token_ids == served.greedy
    assert core.scheduler.counters.cached_tokens == (36 if prefix_cache else 0)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [None, 5])
def test_in_a_crowd(served: Served, expected: dict[str, list[int]], chunk: int | None, prefix_cache: bool) -> None:
    core = served.core(prefill_chunk_size=chunk, prefix_cache=prefix_cache)
    for _ in range(2):  # the second time the cache is warm
        assert tokens_of(core, served.crowd) == expected


@pytest.mark.parametrize("short", [{"num_pages": 40}, {"num_window_pages": 12}], ids=["pages", "windowed pages"])
def test_when_pages_run_out(served: Served, expected: dict[str, list[int]], short: dict[str, int]) -> None:
    core = served.core(new_token_ratio=0.01, **short)
    assert tokens_of(core, served.crowd) == expected
    assert core.scheduler.counters.retractions > 0


@pytest.mark.parametrize("few", [{"num_pages": 40}, {"num_window_pages": 16}], ids=["pages", "windowed pages"])
def test_evicted_pages_of_both_groups_come_back(
    served: Served, expected: dict[str, list[int]], few: dict[str, int]
) -> None:
    """One request after the other takes the pages of others: the second time they are in the memory of the host."""
    plan = served.runner.plan
    host = {"num_host_pages": plan.num_host_pages, "num_host_window_pages": plan.host_pages_by_group[1]}
    computed, compiles = {}, served.runner.num_compiles()
    for name, keys in (("device", {}), ("host", host)):
        core = served.core(**few, **keys)
        counters, before = core.scheduler.counters, 0
        for _ in range(2):
            before = counters.prefill_tokens
            for request, prompt in served.crowd.items():
                assert tokens_of(core, {request: prompt})[request] == expected[request]
        computed[name] = counters.prefill_tokens - before
    assert computed["host"] <= PAGE * len(served.crowd) < computed["device"], "all but the ends was loaded"
    assert served.runner.num_compiles() == compiles


@pytest.mark.parametrize("killed", [True, False], ids=["engine", "device"])
def test_what_a_failure_interrupts_goes_on(served: Served, expected: dict[str, list[int]], killed: bool) -> None:
    """A new engine is given the tokens that the killed one had sent; after a device's failure the engine has them."""
    core, found = served.core(), {name: list[int]() for name in served.crowd}
    for name, prompt in served.crowd.items():
        core.add(make_request(name, prompt, max_tokens=NEW))
    for _ in range(30):
        for output in core.step():
            found[output.request_id] += output.token_ids
    begun = {name: list(tokens) for name, tokens in found.items() if 0 < len(tokens) < NEW}
    assert len(begun) == 4, "all that run are interrupted"
    served.runner.rebuild()
    waiting = {name: prompt for name, prompt in served.crowd.items() if len(found[name]) < NEW}
    requests = []
    if killed:
        core = served.core()
        requests = [
            make_request(name, prompt, max_tokens=NEW, resumed_token_ids=found[name])
            for name, prompt in waiting.items()
        ]
    else:
        core.recover()
    transcripts = run_all(core, requests)
    assert {
        name: [*tokens, *(transcripts[name].token_ids if name in waiting else [])] for name, tokens in found.items()
    } == expected


def test_a_crowd_with_pages_in_the_memory_of_the_host(served: Served, expected: dict[str, list[int]]) -> None:
    """Requests that are preempted, and prefixes that others share, with few copies and many."""
    plan = served.runner.plan
    for num_host_pages, num_host_window_pages in (
        (9, 7),
        (plan.num_host_pages, plan.host_pages_by_group[1]),
    ):
        core = served.core(
            new_token_ratio=0.01,
            num_pages=40,
            num_window_pages=12,
            num_host_pages=num_host_pages,
            num_host_window_pages=num_host_window_pages,
        )
        for _ in range(2):
            assert tokens_of(core, served.crowd) == expected
        assert core.scheduler.counters.retractions > 0


def test_a_new_engine_finds_the_pages_of_both_groups_in_the_files(
    served: Served, expected: dict[str, list[int]], tmp_path: Path
) -> None:
    if None in map(layer_reach, served.model.config.attention_layers):
        pytest.skip("the other model has the harder case: one of its files has pages without bytes")
    config, plan = served.runner.config, served.runner.plan
    host = {"num_host_pages": plan.num_host_pages, "num_host_window_pages": plan.host_pages_by_group[1]}
    computed = []
    for _ in range(2):
        file = PageFileConfig(tmp_path, "model")
        with quick_programs():  # those of `served`
            runner = ModelRunner(served.model, dataclasses.replace(config, page_file=file), served.runner.mesh)
        core = dataclasses.replace(served, runner=runner).core(num_pages=33, num_window_pages=12, **host)
        _restore_pages(core, runner)
        files = [file for file in runner.host.files if file is not None]
        wait_until(lambda files=files: all(len(file.checked) == len(file.to_check) for file in files), "checked")
        for request, prompt in served.crowd.items():
            assert tokens_of(core, {request: prompt})[request] == expected[request]
        computed.append(core.scheduler.counters.prefill_tokens)
        tokens_of(core, {"last": [3] * (LONGEST - NEW)})  # evicts the others' pages
        runner.close()
    assert computed[1] < computed[0] / 3, "most was loaded"


def test_a_page_given_away_too_early_shows(
    served: Served, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutant keeps one page less than the next token sees. (The page of the first tokens that it sees would not
    do: who gets it writes one token a step, each just after it has left the window.)"""

    def early(size: Span, position: int) -> int:
        return max(0, position - size.reach.tokens + 1) // size.page_size + 2

    monkeypatch.setattr(Span, "first_needed", early)
    assert tokens_of(served.core(num_window_pages=16, prefix_cache=False), served.crowd) != expected


def test_what_is_not_in_a_window_takes_no_memory(served: Served) -> None:
    """Each layer has the pages of its group; where all have a window the other group is numbers without bytes."""
    plan, layers = served.runner.plan, served.model.config.attention_layers
    assert plan.groups[0].num_pages == 2 * 4 * 5 + 2 * 4, "the windows of four requests, twice, and two chunks"
    of_group = {layer: plan.groups[0].num_pages if layer_reach(layer) else plan.num_pages for layer in layers}
    pages = [of_group[layer] for layer in layers if layer.reads is None]
    caches = jax.tree.leaves(served.runner.caches)
    assert [cache.shape[0] for cache in caches] == pages
    assert plan.kv_bytes == sum(cache.nbytes for cache in caches)
    assert (plan.page_bytes == 0) == all(map(layer_reach, layers))


def test_the_scheduler_gets_the_plans_numbers(served: Served) -> None:
    config, plan = _scheduler_config(Config(), served.runner, UNTIMED), served.runner.plan
    assert config.groups == plan.group_sizes
    assert config.num_pages == plan.num_pages


def test_a_context_within_the_window_has_one_group(served: Served) -> None:
    layers, reach = served.model.config.attention_layers, served.runner.plan.groups[0].reach
    assert [layer_groups(layers, longest) for longest in (11, 12, 13)] == [(), (), (reach,)]
