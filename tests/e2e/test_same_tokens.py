"""Greedy tokens of real weights are the same alone and in any company, cache, chunking and shortage of pages.

One engine is compiled; each case gives its runner a scheduler of its own over the same programs.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.types.sampling import EngineRequest
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import FinishReason
from tests.conftest import SMALL, SharedData

CROWD = 64
PREFIX = "<|im_start|>system\nYou are a helpful assistant who knows all countries and their capitals.<|im_end|>\n"
QUESTIONS = ["What is the capital of France?", "Tell me a short story about a dog.", "What is 3 plus 4?", "Hello!"]


@pytest.fixture(scope="module", params=["demo", pytest.param("stories260K-hf", marks=pytest.mark.slow)])
def engine(request: pytest.FixtureRequest, compile_cache: str, shared_data: SharedData) -> Iterator[Engine]:
    model = None if request.param == "demo" else str(shared_data / f"models/{request.param}")
    engine = Engine(model, compile_cache=compile_cache, host_memory="64MiB", **SMALL)
    yield engine
    engine.runner.close()


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    rng = random.Random(0)
    if engine.info.max_model_len < 1024:
        return [
            [1] + [rng.randrange(259, engine.info.vocab_size) for _ in range(rng.randrange(1, 300))]
            for _ in range(CROWD)
        ]
    made = []
    for i in range(CROWD):
        story = " ".join(
            rng.choice(["a", "cat", "ran", "home", "and", "saw", "the", "sea"]) for _ in range(rng.randrange(80))
        )
        text = f"{PREFIX}<|im_start|>user\n{story} {QUESTIONS[i % 4]}<|im_end|>\n<|im_start|>assistant\n"
        made.append(engine.tokenizer.encode(text))
    return made


def core(engine: Engine, **changes: Any) -> EngineCore:
    """A new scheduler over the compiled programs; the pages' old content must not matter."""
    plan, config = engine.runner.plan, engine.runner.config
    numbers: dict[str, Any] = {
        "num_pages": plan.num_pages,
        "page_size": config.page_size,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": plan.max_model_len,
    }
    return EngineCore(
        engine.runner,
        SchedulerConfig(**numbers | changes),
        CoreOptions(vocab_size=engine.info.vocab_size, eos_token_ids=engine.info.eos_token_ids),
    )


def run(core: EngineCore, prompts: list[list[int]]) -> list[list[int]]:
    """Tokens of each prompt, all queued at once; the pages and slots are back afterwards."""
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    params = SamplingParams(temperature=0.0, max_tokens=40)
    for i, prompt in enumerate(prompts):
        core.add(EngineRequest(request_id=str(i), prompt_token_ids=prompt, params=params))
    while core.has_work:
        for output in core.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            tokens[output.request_id] += output.token_ids
        core.scheduler.check_integrity()
    assert core.stats().num_pages_used == 0
    return list(tokens.values())


@pytest.fixture(scope="module")
def alone(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [run(core(engine, prefix_cache=False), [prompt])[0] for prompt in prompts]


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_in_a_crowd(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]], policy: str, prefix_cache: bool
) -> None:
    assert run(core(engine, policy=policy, prefix_cache=prefix_cache), prompts) == alone


def test_with_a_cold_and_a_warm_cache(engine: Engine, prompts: list[list[int]], alone: list[list[int]]) -> None:
    warm = core(engine)
    assert run(warm, prompts) == alone
    cached = warm.stats().cached_tokens
    assert run(warm, prompts) == alone
    assert warm.stats().cached_tokens - cached >= sum(len(p) // 16 * 16 for p in prompts) - 16 * len(prompts)


@pytest.mark.parametrize("chunk", [16, 17, 32, 64, 100, 128])
def test_with_any_chunk_size(engine: Engine, prompts: list[list[int]], alone: list[list[int]], chunk: int) -> None:
    assert run(core(engine, prefill_chunk_size=chunk), prompts[:24]) == alone[:24]


def test_with_evicted_pages_in_the_memory_of_the_host(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]]
) -> None:
    found = {}
    for num_host_pages in (0, engine.runner.plan.num_host_pages):
        tiny = core(engine, num_pages=40, num_host_pages=num_host_pages)
        assert [run(tiny, prompts[:32]) for _ in range(2)] == [alone[:32]] * 2
        found[num_host_pages] = tiny.stats()
    without, kept = found.values()
    assert without.details["host_pages_loaded"] == 0 < kept.details["host_pages_loaded"]
    assert kept.computed_prompt_tokens < without.computed_prompt_tokens
    assert kept.compiles == 0


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_when_pages_run_out(
    engine: Engine, prompts: list[list[int]], alone: list[list[int]], prefix_cache: bool
) -> None:
    tiny = core(engine, num_pages=40, prefix_cache=prefix_cache, new_token_ratio=0.01)
    assert run(tiny, prompts) == alone
    assert tiny.stats().preemptions > 0
    assert tiny.stats().compiles == 0
