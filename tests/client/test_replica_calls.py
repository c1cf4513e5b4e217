"""Calls to several engines of which one dies meanwhile."""

import asyncio

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.errors import ServerError
from jaxserve.types.messages import Call
from tests.client.test_async_engine import until
from tests.client.test_replicas import ReplicaLink, generate, run


async def start_again(engine: AsyncEngine, link: ReplicaLink, index: int) -> list[Call]:
    """Let an engine die and become ready. Returns the calls that it gets then."""
    starts = link.starts
    link.die_at()
    await until(lambda: link.starts > starts)
    link.calls.clear()
    link.become_ready()
    await until(lambda: engine.replicas[index].alive)
    await asyncio.sleep(0.01)
    return link.calls


@pytest.mark.parametrize("has_answered", [False, True])
@pytest.mark.parametrize("method", ["update_from_directory", "update_from_file", "resume"])
def test_an_engine_that_was_started_again_during_a_call_gets_it_too(method: str, has_answered: bool) -> None:
    """Before the other one has answered nobody knows that the call was carried out, so the start does not repeat it."""
    args = {} if method == "resume" else {"path": "x", "version": "2"}

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = asyncio.create_task(engine.call(method, **args))
        await until(lambda: first.calls and second.calls)
        if has_answered:
            first.answer("2")
            await asyncio.sleep(0.01)
        assert await start_again(engine, first, 0) == []
        second.answer("2")
        await until(lambda: first.calls)
        assert (first.calls[0].method, first.calls[0].args) == (method, args)
        assert not task.done(), "it is the answer of both"
        first.answer("2")
        assert await task == "2"

    run(test)


def test_an_engine_that_is_started_after_a_call_gets_it_once() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = asyncio.create_task(engine.call("pause"))
        await until(lambda: first.calls and second.calls)
        first.die_at()
        await until(lambda: first.starts == 2)
        second.answer()
        await task
        first.calls.clear()
        first.become_ready()
        await until(lambda: engine.replicas[0].alive)
        await asyncio.sleep(0.01)
        assert [call.method for call in first.calls] == ["pause"]

    run(test)


def test_an_engine_whose_update_failed_ends_what_it_computes() -> None:
    """The clients got an error. Its rows would be taken until these outputs had their last token."""

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        tasks = [generate(engine, name) for name in "ab"]
        await until(lambda: first.requests and second.requests)
        update = asyncio.create_task(engine.call("update_from_directory", path="x"))
        await until(lambda: first.calls and second.calls)
        first.answer("1")
        second.answer(error="no such file")
        with pytest.raises(ServerError):
            await update
        assert second.aborted == second.ids and first.aborted == []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)
