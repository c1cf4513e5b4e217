"""Calls to several engines of which one dies meanwhile."""

import asyncio

import msgspec
import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.control import ControlRecord
from jaxserve.errors import ServerError
from jaxserve.types.calls import (
    EngineCall,
    Pause,
    Resume,
    Sleep,
    Update,
    UpdateFromDirectory,
    UpdateFromFile,
    Wake,
    WorkerCall,
)
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
@pytest.mark.parametrize(
    "call", [UpdateFromDirectory(path="x", version="2"), UpdateFromFile(path="x", version="2"), Resume()]
)
def test_an_engine_that_was_started_again_during_a_call_gets_it_too(call: EngineCall, has_answered: bool) -> None:
    """Before the other one has answered nobody knows that the call was carried out, so the start does not repeat it."""

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = asyncio.create_task(engine.call(call))
        await until(lambda: first.calls and second.calls)
        if has_answered:
            first.answer("2")
            await asyncio.sleep(0.01)
        assert await start_again(engine, first, 0) == []
        second.answer("2")
        await until(lambda: first.calls)
        numbered = msgspec.structs.replace(call, number=1) if isinstance(call, Update) else call
        assert first.calls[0].call == numbered
        assert not task.done(), "it is the answer of both"
        first.answer("2")
        assert await task == "2"

    run(test)


def test_an_engine_that_is_started_after_a_call_gets_it_once() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = asyncio.create_task(engine.call(Pause()))
        await until(lambda: first.calls and second.calls)
        first.die_at()
        await until(lambda: first.starts == 2)
        second.answer()
        await task
        first.calls.clear()
        first.become_ready()
        await until(lambda: engine.replicas[0].alive)
        await asyncio.sleep(0.01)
        assert [each.call for each in first.calls] == [Pause()]

    run(test)


def test_an_engine_whose_update_failed_ends_what_it_computes() -> None:
    """The clients got an error. Its rows would be taken until these outputs had their last token."""

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        tasks = [generate(engine, name) for name in "ab"]
        await until(lambda: first.requests and second.requests)
        update = asyncio.create_task(engine.call(UpdateFromDirectory(path="x")))
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


@pytest.mark.parametrize("kind", [Sleep, Wake])
def test_an_engine_that_sleeps_alone_gives_its_requests_to_the_others_and_gets_none(kind: type[Sleep | Wake]) -> None:
    """A sleep or a wake that one engine could not carry out. What waits in a sleeping engine has no end."""
    tags = ["kv_cache", "weights"]

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        async def call(kind: type[Sleep | Wake], error: str | None = None) -> None:
            task = asyncio.create_task(engine.call(Sleep(mode="retract") if kind is Sleep else Wake()))
            await until(lambda: first.calls and second.calls)
            first.answer([] if kind is Wake and error is None else tags, error if kind is Wake else None)
            second.answer(tags if kind is Sleep and error is None else [], error if kind is Sleep else None)
            await task

        if kind is Wake:
            await call(Sleep)
        tasks = [generate(engine, name) for name in "ab"]
        await until(lambda: first.requests and second.requests)
        with pytest.raises(ServerError, match="no memory"):
            await call(kind, error="no memory")
        tasks += [generate(engine, name) for name in "cd"]
        await until(lambda: len(second.requests) == 4)
        assert [each.client_id for each in second.requests] == ["b", "a", "c", "d"]
        assert first.aborted == first.ids and not second.aborted
        await call(Wake)
        tasks.append(generate(engine, "e"))
        await until(lambda: len(first.requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_an_engine_that_alone_is_paused_gives_its_requests_to_the_others() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        async def call(call: EngineCall, refused: str | None = None) -> None:
            task = asyncio.create_task(engine.call(call))
            await until(lambda: first.calls and second.calls)
            first.answer()
            second.answer(error=refused)
            await task

        tasks = [generate(engine, "a", replica=0)]
        await until(lambda: first.requests)
        with pytest.raises(ServerError, match="not by all"):
            await call(Pause(), "no")
        await until(lambda: len(second.requests) == 1)
        assert first.aborted == first.ids
        await call(Resume())
        tasks.append(generate(engine, "b"))
        await until(lambda: len(first.requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_new_engine_keeps_the_weights_of_an_update_that_ended_a_sleep() -> None:
    record = ControlRecord()
    record.record(Sleep(level=2), ["kv_cache", "weights"])
    record.record(record.begun_update(UpdateFromDirectory(path="x")), "1")
    update = UpdateFromDirectory(path="x", version="1", number=1)
    assert record.calls() == [update, Sleep(2, "retract", ("kv_cache",))]
    record.record(Wake(), [])
    assert record.calls() == [update]


def test_no_two_updates_have_one_number_whatever_fails_or_dies_between() -> None:
    """Nor one label, if the calls have none: a new engine would count from the beginning."""

    async def test(engine: AsyncEngine, link: ReplicaLink) -> None:
        async def update(path: str, error: str | None = None) -> EngineCall | WorkerCall:
            task = asyncio.create_task(engine.call(UpdateFromDirectory(path=path)))
            await until(lambda: link.calls)
            call = link.calls[0].call
            assert isinstance(call, UpdateFromDirectory)
            link.answer(call.version, error)
            await asyncio.gather(task, return_exceptions=True)
            return call

        assert await update("a") == UpdateFromDirectory(path="a", version="1", number=1)
        assert await update("b", "no such file") == UpdateFromDirectory(path="b", version="2", number=2)
        assert await update("c") == UpdateFromDirectory(path="c", version="2", number=3)
        (again,) = await start_again(engine, link, 0)
        assert again.call == UpdateFromDirectory(path="c", version="2", number=3)
        link.answer("2")
        assert await update("d") == UpdateFromDirectory(path="d", version="3", number=4)

    run(test, 1)


def test_an_update_begins_when_the_one_before_it_has_ended() -> None:
    """Else both had one label."""

    async def test(engine: AsyncEngine, link: ReplicaLink) -> None:
        updates = [asyncio.create_task(engine.call(UpdateFromDirectory(path=path))) for path in "ab"]
        for number, (path, label) in enumerate((("a", "1"), ("b", "2")), 1):
            await until(lambda: link.calls)
            await asyncio.sleep(0.01)
            assert [each.call for each in link.calls] == [UpdateFromDirectory(path=path, version=label, number=number)]
            link.answer(label)
        assert await asyncio.gather(*updates) == ["1", "2"]

    run(test, 1)
