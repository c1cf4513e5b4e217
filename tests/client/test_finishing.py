"""A pause that waits for requests, over engines whose every message the test gives by hand."""

import asyncio
from typing import Any

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.types.calls import Resume
from jaxserve.types.step import FinishReason
from tests.client import test_prompt_handover
from tests.client.test_async_engine import until
from tests.client.test_prompt_handover import Asked, answer_read, answer_write, end_prompt, folder
from tests.client.test_replicas import ReplicaLink, generate, run

__all__ = ["folder"]  # a fixture

STOP = FinishReason.STOP


async def answered(links: tuple[ReplicaLink, ...], name: str, result: Any = None) -> None:
    """Answer a call to all of the engines."""
    await until(lambda: all(link.calls for link in links))
    assert [[each.call.name for each in link.calls] for link in links] == [[name]] * len(links)
    for link in links:
        link.answer(result)


async def begun(engine: AsyncEngine, link: ReplicaLink) -> tuple[asyncio.Task[list[int]], asyncio.Task[Any]]:
    """Send the request "first", then call `finish`. Returns the tasks of both."""
    first = generate(engine, "first")
    await until(lambda: link.requests)
    pause = asyncio.create_task(engine.finish())
    await asyncio.sleep(0.01)
    return first, pause


def test_what_has_come_ends_and_what_comes_later_starts_after_the_pause() -> None:
    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        (link,) = links
        first, pause = await begun(engine, link)
        later, step = generate(engine, "later"), generate(engine, "first", partly_answered=True)  # as of a beam search
        await until(lambda: len(link.requests) == 2)
        assert [request.client_id for request in link.requests] == ["first", "first"]
        link.give(link.ids[0], 5, STOP)
        assert await first == [5]
        await asyncio.sleep(0.15)
        assert not link.calls
        link.give(link.ids[1], 6, STOP)
        assert await step == [6]
        await asyncio.sleep(0.15)
        next_step = generate(engine, "first", partly_answered=True)
        await until(lambda: len(link.requests) == 3)
        assert not link.calls
        link.give(link.ids[2], 7, STOP)
        await answered(links, "pause")
        assert await pause is True and await next_step == [7]
        await until(lambda: len(link.requests) == 4)
        assert await asyncio.gather(engine.finish(), answered(links, "pause")) == [True, None], "it is paused"
        link.give(link.ids[3], 8, STOP)
        assert await later == [8]

    run(test, count=1)


def test_a_call_waits_for_what_came_before_it_although_another_waits_already() -> None:
    """And of a later request with many prompts none starts, not only the first."""

    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        (link,) = links
        first, pause = await begun(engine, link)
        second = generate(engine, "second")
        await asyncio.sleep(0.01)
        assert len(link.requests) == 1
        pauses = [pause, asyncio.create_task(engine.finish())]
        await until(lambda: len(link.requests) == 2)
        later = [generate(engine, "later"), generate(engine, "later", already_accepted=True)]
        link.give(link.ids[0], 5, STOP)
        assert await first == [5]
        await asyncio.sleep(0.2)
        assert not link.calls and len(link.requests) == 2
        link.give(link.ids[1], 6, STOP)
        for _ in pauses:
            await until(lambda: link.calls)
            link.answer()
        assert await asyncio.gather(*pauses) == [True, True] and await second == [6]
        await until(lambda: len(link.requests) == 4)
        for engine_id in link.ids[2:]:
            link.give(engine_id, 7, STOP)
        assert await asyncio.gather(*later) == [[7], [7]]

    run(test, count=1)


def test_it_is_given_up_when_steps_are_to_run_again() -> None:
    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        (link,) = links
        first, pause = await begun(engine, link)
        later = generate(engine, "later")
        await asyncio.gather(engine.call(Resume()), answered(links, "resume"))
        assert await pause is False
        await until(lambda: len(link.requests) == 2)
        for engine_id in link.ids:
            link.give(engine_id, 5, STOP)
        assert await asyncio.gather(first, later) == [[5], [5]] and not link.calls

    run(test, count=1)


def test_what_leaves_an_engine_that_dies_is_waited_for_in_the_other() -> None:
    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        tasks = [generate(engine, name) for name in "ab"]
        await until(lambda: all(link.requests for link in links))
        pause = asyncio.create_task(engine.finish())
        await asyncio.sleep(0.01)
        links[0].die_at()
        await until(lambda: len(links[1].requests) == 2)
        links[0].become_ready()
        for engine_id in links[1].ids:
            assert not links[0].calls and not links[1].calls
            links[1].give(engine_id, 5, STOP)
        await answered(links, "pause")
        assert await pause is True and await asyncio.gather(*tasks) == [[5], [5]]

    run(test)


def test_a_request_whose_prompt_goes_on_in_another_engine_ends_before_the_pause() -> None:
    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        prefill, decode = links
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        pause = asyncio.create_task(engine.finish())
        await asyncio.sleep(0.01)
        end_prompt(prefill)
        await answer_read(decode, await answer_write(prefill), 32)
        await until(lambda: decode.requests)
        await asyncio.sleep(0.15)
        assert not prefill.calls and not decode.calls
        decode.give(decode.ids[0], 5, STOP)
        assert await asked.task == [5]
        await answered(links, "pause")
        assert await pause is True

    test_prompt_handover.run(test)
