"""256 users who choose their request ids out of a pool of 64: no answer ever reaches another request.

They stream and leave, ask again under the same id, abort by an id that others use too, and the engine's process is
killed meanwhile. Prompts are random, and the device's tokens are a function of the prompt: a foreign token is seen.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.errors import NotReadyError, QueueFullError
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason
from tests.fakes import alone
from tests.faults.fake_engine import MARKS
from tests.waiting import LAST_RESORT

USERS = 256
IDS = [f"id{i}" for i in range(64)]
FIRST = [token for token in range(1, 97) if token not in MARKS]  # a prompt that begins with a mark does harm


class Users:
    """What becomes of `count` requests. `counts` are of their ends; one that is not expected is an AssertionError."""

    def __init__(self, engine: AsyncEngine, count: int) -> None:
        self.counts: Counter[str] = Counter()
        self.left = count
        self._engine = engine

    async def run(self, number: int) -> None:
        """One user after the other request, until `count` have been asked."""
        rng = random.Random(number)
        name = rng.choice(IDS)
        while self.left > 0:
            self.left -= 1
            end = await asyncio.wait_for(self._ask(rng, name), LAST_RESORT)
            self.counts[end] += 1
            if end != "left" or rng.random() < 0.5:  # else it asks again under the id that may still be in use
                name = rng.choice(IDS)
            if end == "refused":
                await asyncio.sleep(0.2)

    async def _ask(self, rng: random.Random, name: str) -> str:
        n = rng.choice([1, 1, 1, 1, 1, 2, 3, 8])
        prompt = [rng.choice(FIRST), *(rng.randrange(97) for _ in range(rng.randrange(1, 40)))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, 40), temperature=0.0, n=n, stop_token_ids=(rng.randrange(97),)
        )
        leaves_after = rng.randrange(8) if rng.random() < 0.1 else None
        aborts_after = rng.randrange(8) if rng.random() < 0.03 else None
        tokens: list[list[int]] = [[] for _ in range(n)]
        reasons: list[FinishReason | None] = [None] * n
        outputs = self._engine.generate(prompt, params, request_id=name)
        count = 0
        try:
            async for output in outputs:
                tokens[output.index] += output.token_ids
                assert reasons[output.index] is None, "an output after the end"
                reasons[output.index] = output.finish_reason
                if count == leaves_after:
                    await cast("AsyncGenerator[RequestOutput]", outputs).aclose()
                    break
                if count == aborts_after:
                    await self._engine.abort(name)
                count += 1
        except (NotReadyError, QueueFullError):
            return "refused"
        expected, reason = alone(prompt, params)
        for given, end in zip(tokens, reasons, strict=True):
            assert given == expected[: len(given)], "a foreign token"
            if end in (FinishReason.STOP, FinishReason.LENGTH):
                assert (given, end) == (expected, reason), "a token is missing"
        if None in reasons:
            assert count == leaves_after, "no end"
            return "left"
        return "aborted" if FinishReason.ABORT in reasons else "completed"


@pytest.mark.parametrize(
    ("count", "kills"), [(3_000, 2), pytest.param(100_000, 5, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_no_answer_reaches_another_request(count: int, kills: int) -> None:
    async def kill(users: Users, link: ProcessLink) -> None:
        for number in range(1, kills + 1):
            while users.left > count * (1 - number / (kills + 1)):
                await asyncio.sleep(0.01)
            link.kill()

    async def run() -> tuple[Counter[str], int]:
        link = ProcessLink(Config(), module="tests.faults.fake_engine")
        engine = AsyncEngine(Config(), link)
        await engine.start()
        try:
            users = Users(engine, count)
            await asyncio.gather(kill(users, link), *(users.run(number) for number in range(USERS)))
            assert engine.num_live == 0
            return users.counts, engine.restarts
        finally:
            await engine.stop()

    counts, restarts = asyncio.run(run())
    print(dict(counts), restarts, "restarts")
    assert counts.total() == count and restarts == kills
    assert counts["completed"] > count / 2 and counts["left"] and counts["aborted"]
