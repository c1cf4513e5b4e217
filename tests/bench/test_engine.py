"""The engine's benchmark on a tiny model: every measurement runs and counts what it says."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks import engine as bench
from benchmarks.make_model import Shape, make_model
from jaxserve.engine.engine import TextEngine
from tests.quick import quick_programs


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    make_model(path, Shape(hidden=32, layers=1, heads=2, kv_heads=1, ffn=64, vocab=512, context=256))
    return path


def _engine(directory: Path, deterministic: bool) -> TextEngine:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 64}
    with quick_programs():
        return TextEngine(str(directory), deterministic=deterministic, **sizes)


@pytest.fixture(scope="module")
def engine(directory: Path) -> TextEngine:
    return _engine(directory, deterministic=False)


def test_decode_is_one_dispatch_a_step(engine: TextEngine) -> None:
    cost = bench.decode_cost(engine, 3, steps=12)
    assert cost.dispatches == 1 and cost.steps >= 4 and cost.step_ms > 0
    assert engine.runner.num_compiles() == 0


def test_a_prefix_hit_counts_its_pages(engine: TextEngine) -> None:
    hit = bench.prefix_hit(engine, 100)
    assert hit.cached_tokens == 96 and hit.speedup > 0


def test_a_long_prompt_among_streams(engine: TextEngine) -> None:
    stall = bench.stall(engine, streams=2, prompt_tokens=90)
    assert stall.longest_gap_with_prompt_ms > 0 and stall.chunk_ms > 0


def test_contexts_share_their_prefill(engine: TextEngine) -> None:
    before = engine.core.stats().computed_prompt_tokens
    costs = [bench.context_cost(engine, context, steps=4) for context in (64, 128)]
    assert [cost.context for cost in costs] == [64, 128] and all(cost.step_ms > 0 for cost in costs)
    assert engine.core.stats().computed_prompt_tokens - before == 128


def test_no_decode_program_copies_the_cache(engine: TextEngine) -> None:
    copies = bench.cache_copies(engine)
    assert copies and not any(copies.values())


def test_the_cost_of_deterministic_mode(engine: TextEngine, directory: Path) -> None:
    strict = _engine(directory, deterministic=True)
    cost = bench.deterministic_cost(engine, strict, 2, rounds=1)
    assert cost.plain_ms > 0 and cost.deterministic_ms > 0 and cost.factor == cost.deterministic_ms / cost.plain_ms
