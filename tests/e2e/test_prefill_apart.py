"""The demo model in two engines, of which one computes the prompts: the bits of one engine that does both."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.engine.factory import build_engine
from jaxserve.engine.page_handover import check_handover
from jaxserve.engine.server import BuiltEngine, Channel
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig, RopeConfig
from jaxserve.transport import socket_directory
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from tests.thread_link import ThreadLink
from tests.waiting import LAST_RESORT

# few programs; room for eight prompts of 200 tokens
FEW: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 512, "num_pages": 128}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=2)
ASKED = {
    "greedy": GREEDY,
    "sampled": SamplingParams(seed=5, max_tokens=12, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(seed=6, max_tokens=12, ignore_eos=True, logprobs=0, repetition_penalty=1.3, top_k=50),
    "choices": SamplingParams(seed=7, n=3, max_tokens=8, ignore_eos=True, logprobs=0),
    "grammar": SamplingParams(
        seed=8, max_tokens=30, logprobs=0, grammar=GrammarSpec(kind="regex", source="[a-f]{3}-[0-9]{4}")
    ),
    "scores": SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0, prompt_logprobs=0),
}


def prompt_of(name: str, length: int = 200) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(300, 2000) for _ in range(length)]


async def ask(engine: AsyncEngine, name: str, **options: Any) -> tuple[Any, int]:
    """Tokens and log-probabilities of the choices, and how many tokens were in a cache."""
    params, found, cached = ASKED[name], {}, 0
    async for output in engine.generate(prompt_of(name), params, **options):
        tokens = found.setdefault(output.index, [])
        logprobs = [entry.logprob for entry in output.logprobs or []]
        tokens.append((list(output.token_ids), logprobs))
        cached = output.num_cached_tokens
    return {
        index: ([token for tokens, _ in parts for token in tokens], [each for _, values in parts for each in values])
        for index, parts in found.items()
    }, cached


def with_two(keys: dict[str, Any], work: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    mesh = {"replicas": 2, "prefill_replicas": 1, "prefill_min_tokens": 32}
    config = Config.of(**FEW, **keys).replace(mesh=mesh)

    one_by_one = threading.Lock()  # the second one finds the programs that the first one compiled

    def build(channel: Channel) -> BuiltEngine:
        with one_by_one:
            return build_engine(config, channel.send)

    async def run() -> None:
        engine = AsyncEngine(config, [ThreadLink(config, build), ThreadLink(config, build)])
        await engine.start()
        try:
            await asyncio.wait_for(work(engine), LAST_RESORT)
        finally:
            await engine.stop()

    asyncio.run(run())


async def check_crowd(engine: AsyncEngine) -> None:
    """More prompts than there is room for: pages are evicted before they are used, and computed again."""
    before = engine.replicas[1].stats.computed_prompt_tokens
    apart = await asyncio.gather(*(ask(engine, "greedy", cache_salt=str(number)) for number in range(12)))
    assert all(found == apart[0][0] for found, _ in apart)
    assert engine.replicas[1].stats.computed_prompt_tokens > before
    assert engine.num_live == 0


def test_bits_are_those_of_one_engine(compile_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In deterministic mode, all at once: tokens, log-probabilities, choices, grammars."""
    monkeypatch.setattr(socket_directory, "SHARED_MEMORY", tmp_path)

    async def work(engine: AsyncEngine) -> None:
        apart = dict(zip(ASKED, await asyncio.gather(*(ask(engine, name) for name in ASKED)), strict=True))
        stats = [state.stats for state in engine.replicas]
        while stats[1].generation_tokens < 3 * 12 + 3 * 8:
            await asyncio.sleep(0.05)
            stats = [state.stats for state in engine.replicas]
        passed = len(ASKED) - 1  # not the one that reads its whole prompt
        size = engine.info.page_size
        assert stats[0].details["pages_written"] == stats[1].details["pages_read"] == passed * (200 // size)
        assert stats[1].computed_prompt_tokens <= (passed + 2) * size, "the rest of a page for each choice"
        assert engine.stats().prompt_tokens == 200 * (len(ASKED) + 2), "each prompt is counted once"
        assert stats[1].details["pages_written"] == stats[0].details["pages_read"] == 0
        assert all(cached == 0 for name, (_, cached) in apart.items() if name != "choices")
        for name in ASKED:
            joint = await ask(engine, name, replica=1, cache_salt="alone")
            assert apart[name][0] == joint[0], name
        again, cached = await ask(engine, "greedy")
        assert again == apart["greedy"][0] and cached >= 192, "the decode engine has the prompt"
        await check_crowd(engine)

    with_two({"compile_cache": compile_cache, "deterministic": True}, work)
    assert not [*tmp_path.iterdir()]


def test_models_whose_pages_cannot_be_passed_are_refused() -> None:
    config, rope = Config.of(replicas=2, prefill_replicas=1), RopeConfig(2)
    model = ModelConfig("X", 8, 8, 8, 1, 1, 1, 2, 256, rope)
    check_handover(config, model, generates=True)
    check_handover(Config(), model.replace(layer_windows=(4,)), generates=True)
    with pytest.raises(ConfigError, match="sliding window"):
        check_handover(config, model.replace(layer_windows=(4,)), generates=True)
    with pytest.raises(ConfigError, match="generate text"):
        check_handover(config, model, generates=False)
