"""Requests whose deadline passes while no engine has them."""

import asyncio

import pytest

from jaxserve.client import sequences
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.errors import RequestTimeoutError
from jaxserve.types.step import FinishReason
from tests.client.test_async_engine import until
from tests.client.test_replicas import ReplicaLink, generate, run


def test_a_deadline_holds_while_the_engine_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "DEADLINE_INTERVAL", 0.01)

    async def test(engine: AsyncEngine, link: ReplicaLink) -> None:
        tasks = [generate(engine, "late", deadline=0.05), generate(engine, "endless")]
        await until(lambda: len(link.requests) == 2)
        link.die_at()
        with pytest.raises(RequestTimeoutError, match=r"the deadline of .* has passed"):
            await asyncio.wait_for(tasks[0], 20)
        assert engine.num_live == 1
        link.become_ready()
        await until(lambda: len(link.requests) == 3)
        link.give(link.ids[-1], 5, FinishReason.STOP)
        assert await tasks[1] == [5]

    run(test, count=1)
