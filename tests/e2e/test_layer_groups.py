"""A model whose layers see a window of 12, chunks of 8 and a window of 6: three groups, beside group 0 without layers.

Its tokens are those of dense attention, past the borders and across them in a chunk of a prompt, whatever the prefix
cache, the chunks of prompts and the shortage of pages.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.scheduling import GroupSizes
from tests.e2e import golden_runner
from tests.e2e.test_windows import LONGEST, NEW, PAGE, crowd, tokens_of

CASE = "gemma3"
WINDOWS, CHUNKS = (12, None, 6), (None, 8, None)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[ModelRunner]:
    _, made = golden_runner.start(
        CASE,
        tmp_path_factory.mktemp(CASE),
        compile_cache,
        {"layer_windows": WINDOWS, "layer_chunks": CHUNKS, "local_rope": None},
        max_num_batched_tokens=16,
        max_model_len=LONGEST,
        page_size=PAGE,
        num_pages=512,
        host_memory=2**20,
    )
    yield made
    made.close()


def core_of(runner: ModelRunner, **changes: Any) -> EngineCore:
    runner.rebuild()
    return golden_runner.make_core(runner, **changes)


def few(runner: ModelRunner) -> tuple[GroupSizes, ...]:
    """Groups with hardly more pages than one sequence needs."""
    spans = core_of(runner).scheduler.config.spans
    groups = zip(runner.plan.group_sizes, spans, strict=True)
    return tuple(dataclasses.replace(group, num_pages=span.least(LONGEST) + 2) for group, span in groups)


def test_tokens_of_layers_of_three_kinds_are_those_of_dense_attention(runner: ModelRunner) -> None:
    assert [group.reach for group in runner.plan.groups] == [("window", 12), ("chunk", 8), ("window", 6)]
    prompts = crowd()
    expected = golden_runner.tokens_alone(runner, lambda: core_of(runner, prefix_cache=False), prompts, NEW)
    for chunk in (None, 5):
        core = core_of(runner, prefill_chunk_size=chunk)
        for _ in range(2):  # the second time the cache is warm
            assert tokens_of(core, prompts) == expected
        assert core.scheduler.counters.cached_tokens > 0
    host = {"num_host_pages": runner.plan.num_host_pages, "groups": few(runner)}
    short = core_of(runner, num_pages=40, new_token_ratio=0.01, **host)
    computed = []
    for _ in range(2):
        assert tokens_of(short, prompts) == expected
        computed.append(short.scheduler.counters.prefill_tokens)
    assert computed[1] < 2 * computed[0], "some pages came back from the memory of the host"
    tiers = short.scheduler.kv.host
    assert tiers is not None and all(tier.num_loaded for tier in tiers.tiers)
    short.scheduler.check_integrity()
