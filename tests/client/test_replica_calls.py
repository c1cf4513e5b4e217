"""Calls to several engines of which one dies meanwhile."""

import asyncio
from typing import Any

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.control import ControlRecord
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
        numbered = {} if method == "resume" else {"number": 1}
        assert (first.calls[0].method, first.calls[0].args) == (method, args | numbered)
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


@pytest.mark.parametrize("method", ["sleep", "wake"])
def test_an_engine_that_sleeps_alone_gives_its_requests_to_the_others_and_gets_none(method: str) -> None:
    """A sleep or a wake that one engine could not carry out. What waits in a sleeping engine has no end."""
    tags = ["kv_cache", "weights"]

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        async def call(name: str, error: str | None = None) -> None:
            task = asyncio.create_task(engine.call(name, **({"mode": "retract"} if name == "sleep" else {})))
            await until(lambda: first.calls and second.calls)
            first.answer([] if name == "wake" and error is None else tags, error if name == "wake" else None)
            second.answer(tags if name == "sleep" and error is None else [], error if name == "sleep" else None)
            await task

        if method == "wake":
            await call("sleep")
        tasks = [generate(engine, name) for name in "ab"]
        await until(lambda: first.requests and second.requests)
        with pytest.raises(ServerError, match="no memory"):
            await call(method, error="no memory")
        tasks += [generate(engine, name) for name in "cd"]
        await until(lambda: len(second.requests) == 4)
        assert [each.client_id for each in second.requests] == ["b", "a", "c", "d"]
        assert first.aborted == first.ids and not second.aborted
        await call("wake")
        tasks.append(generate(engine, "e"))
        await until(lambda: len(first.requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_an_engine_that_alone_is_paused_gives_its_requests_to_the_others() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        async def call(method: str, refused: str | None = None) -> None:
            task = asyncio.create_task(engine.call(method))
            await until(lambda: first.calls and second.calls)
            first.answer()
            second.answer(error=refused)
            await task

        tasks = [generate(engine, "a", replica=0)]
        await until(lambda: first.requests)
        with pytest.raises(ServerError, match="not by all"):
            await call("pause", "no")
        await until(lambda: len(second.requests) == 1)
        assert first.aborted == first.ids
        await call("resume")
        tasks.append(generate(engine, "b"))
        await until(lambda: len(first.requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_new_engine_keeps_the_weights_of_an_update_that_ended_a_sleep() -> None:
    record = ControlRecord()
    record.record("sleep", {"level": 2}, ["kv_cache", "weights"])
    record.record("update_from_directory", record.begun_update({"path": "x"}), "1")
    update = ("update_from_directory", {"path": "x", "version": "1", "number": 1})
    assert record.calls() == [update, ("sleep", {"level": 2, "tags": ["kv_cache"], "mode": "retract"})]
    record.record("wake", {}, [])
    assert record.calls() == [update]


def test_no_two_updates_have_one_number_whatever_fails_or_dies_between() -> None:
    """Nor one label, if the calls have none: a new engine would count from the beginning."""

    async def test(engine: AsyncEngine, link: ReplicaLink) -> None:
        async def update(path: str, error: str | None = None) -> dict[str, Any]:
            task = asyncio.create_task(engine.call("update_from_directory", path=path))
            await until(lambda: link.calls)
            args = link.calls[0].args
            link.answer(args["version"], error)
            await asyncio.gather(task, return_exceptions=True)
            return args

        assert await update("a") == {"path": "a", "version": "1", "number": 1}
        assert await update("b", "no such file") == {"path": "b", "version": "2", "number": 2}
        assert await update("c") == {"path": "c", "version": "2", "number": 3}
        (again,) = await start_again(engine, link, 0)
        assert again.args == {"path": "c", "version": "2", "number": 3}
        link.answer("2")
        assert await update("d") == {"path": "d", "version": "3", "number": 4}

    run(test, 1)


def test_an_update_begins_when_the_one_before_it_has_ended() -> None:
    """Else both had one label."""

    async def test(engine: AsyncEngine, link: ReplicaLink) -> None:
        updates = [asyncio.create_task(engine.call("update_from_directory", path=path)) for path in "ab"]
        for path, label in ("a", "1"), ("b", "2"):
            await until(lambda: link.calls)
            await asyncio.sleep(0.01)
            assert [(call.args["path"], call.args["version"]) for call in link.calls] == [(path, label)]
            link.answer(label)
        assert await asyncio.gather(*updates) == ["1", "2"]

    run(test, 1)
