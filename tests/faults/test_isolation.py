"""256 users at once, each with a secret of its own: nobody ever sees a token that follows from another's prompt.

The device is the one that can be computed by hand (tests/fakes.py): a token is a function of every token that the
request finds in its pages, so one wrong page, slot or id anywhere is a wrong token here.
"""

import asyncio
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass, field

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.engine.server import BuiltEngine, Channel
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.messages import EngineStats, Located
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason
from tests.api.fakes import DEMO, demo_info
from tests.fakes import VOCAB, alone, make_core, small_config
from tests.faults.faulty_runner import FaultyRunner
from tests.thread_link import ThreadLink
from tests.waiting import until

USERS = 256
SCHEDULER = small_config(
    num_pages=90, page_size=4, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=64, policy="priority",
    new_token_ratio=0.05,
)  # fmt: skip  # room for a third of what may run: retractions all the time


def build(channel: Channel) -> BuiltEngine:
    channel.send(Located(str(DEMO)))
    info = demo_info(Tokenizer.from_directory(DEMO))
    return BuiltEngine(make_core(SCHEDULER), info, lambda spec: Future())


@dataclass
class Crowd:
    """What users do, drawn from one seed."""

    engine: AsyncEngine
    requests_each: int
    finished: int = 0
    aborted: int = 0
    foreign: list[str] = field(default_factory=list)

    async def run(self) -> None:
        await asyncio.gather(*(self._user(user) for user in range(USERS)))

    async def _user(self, user: int) -> None:
        rng = random.Random(user)
        nonce = [user % VOCAB, user // VOCAB, rng.randrange(VOCAB), rng.randrange(VOCAB)]
        for number in range(self.requests_each):
            await self._ask(rng, user, number, nonce)
            if rng.random() < 0.1:
                await asyncio.sleep(rng.random() * 0.01)  # users fall out of step

    async def _ask(self, rng: random.Random, user: int, number: int, nonce: list[int]) -> None:
        """Prompts begin alike, so that users share prefixes; the secret comes after, or in the middle of a page."""
        prompt = [7] * rng.choice([0, 3, 8, 16]) + nonce + [number % VOCAB] * rng.randrange(1, 6)
        params = SamplingParams(temperature=rng.choice([0.0, 1.0]), seed=user, max_tokens=rng.randrange(1, 20))
        expected, _ = alone(prompt, params)
        name = f"user{user}.{number}" if rng.random() < 0.5 else f"u{user}{number}"  # prefixes of each other
        leave_after = rng.randrange(6) if rng.random() < 0.15 else None
        tokens: list[int] = []
        stream = self.engine.generate(prompt, params, request_id=name, priority=rng.randrange(3))
        async for output in stream:
            tokens += output.token_ids
            if output.finish_reason is FinishReason.ABORT:
                break
            if leave_after is not None and len(tokens) > leave_after:
                if rng.random() < 0.5:
                    break
                await self.engine.abort(name)
                leave_after = None
        else:
            self._check(name, tokens == expected)
            self.finished += 1
            return
        await stream.aclose()  # type: ignore[attr-defined]
        self._check(name, tokens == expected[: len(tokens)])
        self.aborted += 1

    def _check(self, name: str, right: bool) -> None:
        if not right:
            self.foreign.append(name)


def _idle(stats: EngineStats) -> bool:
    return stats.num_running == stats.num_waiting == stats.num_pages_used == 0


async def crowd_of(requests_each: int) -> Crowd:
    engine = AsyncEngine(Config(), ThreadLink(Config(), build))
    await engine.start()
    try:
        crowd = Crowd(engine, requests_each)
        await crowd.run()
        await until(lambda: engine.stats().cached_tokens and _idle(engine.stats()), "the numbers of an idle engine")
        stats = engine.stats()
        print(f"{crowd.finished} finished, {crowd.aborted} aborted, {stats.preemptions} retracted or preempted")
        assert stats.preemptions > requests_each and stats.cached_tokens > 0
        return crowd
    finally:
        await engine.stop()


@pytest.mark.parametrize("requests_each", [10, pytest.param(391, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_nobody_sees_a_token_of_another(requests_each: int) -> None:
    crowd = asyncio.run(crowd_of(requests_each))
    assert crowd.foreign == []
    assert crowd.finished + crowd.aborted == USERS * requests_each
    assert crowd.aborted > 0.05 * USERS * requests_each


def build_slow(channel: Channel) -> BuiltEngine:
    """Two milliseconds a step, so that there is something left to abort."""
    built = build(channel)
    built.core.runner = FaultyRunner(built.core.runner, lambda output: time.sleep(0.002))
    return built


def test_an_abort_ends_exactly_one() -> None:
    """The others' ids are prefixes of its own, and it of theirs."""
    names = ["a", "a-0", "a-0-0", "aa", "a.1", ""]

    async def run() -> dict[str, list[int]]:
        engine = AsyncEngine(Config(), ThreadLink(Config(), build_slow))
        await engine.start()
        tokens: dict[str, list[int]] = {name: [] for name in names}

        async def ask(name: str) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
            async for output in engine.generate([1, 2, 3], params, request_id=name or "none"):
                tokens[name] += output.token_ids

        try:
            tasks = [asyncio.create_task(ask(name)) for name in names]
            while not all(tokens.values()):
                await asyncio.sleep(0)
            assert not await engine.abort("") and not await engine.abort("-0")
            assert await engine.abort("a")
            await asyncio.gather(*tasks)
            return tokens
        finally:
            await engine.stop()

    expected, _ = alone([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=50))
    tokens = asyncio.run(run())
    assert len(tokens["a"]) < 50 and all(tokens[name] == expected for name in names[1:])
