"""Several engines behind one AsyncEngine, each a link whose every message the test gives by hand."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from jaxserve.client import supervisor
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError, HTTPError, InvalidValueError, NotReadyError, ServerError
from jaxserve.types.calls import (
    EngineCall,
    FlushCache,
    Pause,
    ReadState,
    Sleep,
    UpdateFromDirectory,
    UpdateFromFile,
    Wake,
)
from jaxserve.types.messages import AdapterStatus, Call, EngineStats, Failed, Outputs, Ready, Reply, ToEngine
from jaxserve.types.page_keys import PageEvents, page_keys
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import FinishReason
from tests.client.test_async_engine import HandLink, until
from tests.waiting import LAST_RESORT

PROMPT = list(range(40))  # two full pages


class ReplicaLink(HandLink):
    """One of several. starts: how often it was started; is_held: it does not become ready by itself"""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.starts = 0
        self.is_held = False

    async def start(self) -> None:
        self.starts += 1
        if not self.is_held:
            await super().start()

    def send(self, message: ToEngine) -> None:
        if isinstance(message, Call):
            self.calls.append(message)
        else:
            super().send(message)

    def answer(self, result: Any = True, error: str | None = None) -> None:
        self.messages.put_nowait(Reply(self.calls.pop(0).call_id, result, error))

    def become_ready(self) -> None:
        self.messages.put_nowait(Ready(self.info))

    @property
    def ids(self) -> list[str]:
        return [request.request_id for request in self.requests]

    def die_at(self, *working: str) -> None:
        self.is_held, self.working = True, list(working)
        self.die()


Test = Callable[..., Coroutine[None, None, None]]


def run(test: Test, count: int = 2, **server: Any) -> None:
    async def main() -> None:
        links = [ReplicaLink() for _ in range(count)]
        engine = AsyncEngine(Config().replace(mesh={"replicas": count}), links)
        await engine.start()
        try:
            await asyncio.wait_for(test(engine, *links), LAST_RESORT)
        finally:
            await engine.stop()

    asyncio.run(main())


def generate(engine: AsyncEngine, name: str, **options: Any) -> asyncio.Task[list[int]]:
    async def read() -> list[int]:
        tokens = []
        params = SamplingParams(max_tokens=50, n=options.pop("n", 1))
        async for output in engine.generate(PROMPT, params, request_id=name, **options):
            tokens += output.token_ids
        return tokens

    return asyncio.create_task(read())


def test_requests_are_spread_and_choices_stay_together() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        tasks = [generate(engine, "pair", n=2), generate(engine, "one")]
        await until(lambda: len(first.requests) + len(second.requests) == 3)
        assert [request.client_id for request in first.requests] == ["pair", "pair"]
        assert [request.client_id for request in second.requests] == ["one"]
        assert [state.num_live for state in engine.replicas] == [2, 1] and engine.num_live == 3
        assert engine.info.max_num_seqs == 2 * first.info.max_num_seqs
        await engine.abort("pair")
        assert first.aborted == first.ids and not second.aborted
        for engine_id in first.ids:
            first.give(engine_id, None, FinishReason.ABORT)
        second.give(second.ids[0], 5, FinishReason.STOP)
        assert await asyncio.gather(*tasks) == [[], [5]]
        assert [state.num_live for state in engine.replicas] == [0, 0]

    run(test)


def test_a_request_goes_to_an_engine_that_has_its_adapter() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        adapter = AdapterStatus(name="sql", digest="1" * 32, rank=4, version=1)
        second.messages.put_nowait(Outputs([], EngineStats(adapters=[adapter])))
        await until(lambda: engine.stats().adapters == [adapter])
        tasks = [generate(engine, name, adapter=adapter.digest) for name in "ab"]
        await until(lambda: len(second.requests) == 2)
        first.messages.put_nowait(Outputs([], EngineStats(adapters=[adapter])))
        await until(lambda: all(state.stats.adapters for state in engine.replicas))
        tasks.append(generate(engine, "c", adapter=adapter.digest))
        await until(lambda: len(first.requests) == 1)
        for task in tasks:
            task.cancel()

    run(test)


def test_a_prompt_goes_where_its_pages_are_and_elsewhere_once_they_are_evicted() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        keys = b"".join(page_keys("", b"".join(token.to_bytes(4, "little") for token in PROMPT), 16))
        second.messages.put_nowait(Outputs([], EngineStats(), [], PageEvents(keys)))
        await asyncio.sleep(0.01)
        tasks = [generate(engine, name) for name in ("a", "b")]
        await until(lambda: len(second.requests) == 2)
        second.messages.put_nowait(Outputs([], EngineStats(), [], PageEvents(removed=keys)))
        await asyncio.sleep(0.01)
        tasks.append(generate(engine, "c"))
        await until(lambda: first.requests)
        tasks.append(generate(engine, "salted", cache_salt="s"))
        await until(lambda: len(first.requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_request_may_name_its_engine() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        tasks = [generate(engine, "a", replica=1), generate(engine, "b", replica=1)]
        await until(lambda: len(second.requests) == 2)
        with pytest.raises(InvalidValueError, match="engines 0 to 1"):
            await generate(engine, "c", replica=2)
        assert not first.requests and engine.num_live == 2
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_the_requests_of_a_dead_engine_go_on_in_the_others_at_once() -> None:
    """With the tokens that they have, their seeds and their choices; the server stays ready meanwhile."""

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        pair, other = generate(engine, "pair", n=2), generate(engine, "other")
        await until(lambda: len(first.requests) == 2 and second.requests)
        left, right = first.ids
        first.give(left, 7)
        await until(lambda: engine.replicas[0].num_live == 2 and not first.messages.qsize())
        first.die_at(left, right)
        await until(lambda: len(second.requests) == 3)
        assert engine.status.phase == "ready" and engine.alive and engine.restarts == 1
        assert [state.status.phase for state in engine.replicas] == ["restarting", "ready"]
        moved: list[EngineRequest] = second.requests[1:]
        assert [request.resumed_token_ids for request in moved] == [[7], []]
        assert [request.params.seed for request in moved] == [request.params.seed for request in first.requests]
        again = generate(engine, "again")  # the first one is not ready yet
        await until(lambda: len(second.requests) == 4)
        for engine_id in second.ids:
            second.give(engine_id, 8, FinishReason.STOP)
        assert [sorted(await pair), await other, await again] == [[7, 8, 8], [8], [8]]
        first.become_ready()
        await until(lambda: engine.replicas[0].status.phase == "ready")
        last = generate(engine, "last")
        await until(lambda: len(first.requests) == 3)
        first.give(first.ids[-1], 9, FinishReason.STOP)
        assert await last == [9]

    run(test)


def test_without_another_engine_requests_wait_for_the_first_that_is_ready() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        tasks = [generate(engine, "a"), generate(engine, "b")]
        await until(lambda: first.requests and second.requests)
        second.die_at()
        await until(lambda: len(first.requests) == 2)
        first.die_at()
        await until(lambda: engine.status.phase == "restarting")
        with pytest.raises(NotReadyError):
            await generate(engine, "c")
        second.become_ready()
        await until(lambda: len(second.requests) == 3)
        for engine_id in second.ids[1:]:
            second.give(engine_id, 4, FinishReason.STOP)
        assert await asyncio.gather(*tasks) == [[4], [4]]

    run(test)


def test_a_request_that_kills_engines_kills_two_and_then_ends_alone() -> None:
    """Three engines. The others' requests and the third engine never wait for the search."""

    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        tasks = {name: generate(engine, name) for name in ("killer", "b", "c")}
        await until(lambda: all(link.requests for link in links))
        links[0].die_at(links[0].ids[0])
        await until(lambda: len(links[1].requests) == 2)
        links[1].die_at(*links[1].ids)
        await until(lambda: len(links[2].requests) == 2)  # only b leaves
        assert [request.client_id for request in links[2].requests] == ["c", "b"]
        links[0].become_ready()
        links[1].become_ready()
        await until(lambda: len(links[1].requests) == 3)
        assert links[1].requests[2].client_id == "killer"
        new = generate(engine, "new")  # not to the engine that looks for the culprit
        await until(lambda: len(links[0].requests) == 2)
        links[1].die_at(links[1].ids[2])
        with pytest.raises(ServerError, match="the engine died each time it computed this request"):
            await tasks["killer"]
        for link in (links[0], links[2]):
            for engine_id in link.ids:
                link.give(engine_id, 3, FinishReason.STOP)
        assert [await tasks["b"], await tasks["c"], await new] == [[3], [3], [3]]
        links[1].become_ready()
        await until(lambda: engine.replicas[1].status.phase == "ready")
        assert [link.starts for link in links] == [2, 3, 1]

    run(test, 3)


def test_a_request_that_gave_outputs_after_a_death_is_no_suspect_at_the_next() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = generate(engine, "a")
        await until(lambda: first.requests)
        first.die_at(first.ids[0])
        await until(lambda: second.requests)
        first.become_ready()
        await until(lambda: engine.replicas[0].status.phase == "ready")
        for token in range(4):
            second.give(second.ids[0], token)
        second.die_at(second.ids[0])
        await until(lambda: len(first.requests) == 2)
        assert first.requests[1].resumed_token_ids == [0, 1, 2, 3]
        first.give(first.ids[1], 9, FinishReason.STOP)
        assert await task == [0, 1, 2, 3, 9]

    run(test)


@pytest.fixture
def no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many restarts as there are before an engine is given up, without the 42 seconds between them."""
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0,) * len(supervisor.RESTART_DELAYS))


@pytest.mark.usefixtures("no_delays")
def test_an_engine_that_is_given_up_leaves_a_server_that_serves() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = generate(engine, "a", replica=0)
        await until(lambda: first.requests)
        first.is_held = True

        async def fails() -> None:
            raise ConfigError("the device is gone")

        first.start = fails  # type: ignore[method-assign]
        first.die()
        await until(lambda: second.requests and engine.replicas[0].status.phase == "dead")
        assert engine.status.phase == "ready" and engine.alive
        with pytest.raises(EngineDeadError, match="engine 0"):
            await generate(engine, "b", replica=0)
        second.give(second.ids[0], 2, FinishReason.STOP)
        assert await task == [2]
        assert await asyncio.gather(engine.call(FlushCache()), _answer(second)) == [True, None]

    run(test)


async def _answer(*links: ReplicaLink, results: tuple[Any, ...] = (), errors: tuple[str | None, ...] = ()) -> None:
    await until(lambda: all(link.calls for link in links))
    for link, result, error in zip(links, results or [True] * 9, errors or [None] * 9, strict=False):
        link.answer(result, error)


def test_an_engine_that_cannot_start_ends_the_start_of_the_server() -> None:
    async def main() -> None:
        links = [ReplicaLink(), ReplicaLink()]
        links[1].is_held = True
        engine = AsyncEngine(Config().replace(mesh={"replicas": 2}), links)
        await engine.start(wait=False)
        await until(lambda: engine.replicas[0].status.phase == "ready")
        assert engine.status.phase == "loading" and not engine.was_ready
        links[1].messages.put_nowait(Failed("there is no second GPU", "lower mesh.replicas"))
        links[1].die()
        with pytest.raises(ConfigError, match="no second GPU"):
            await engine.wait_ready()
        await engine.stop()

    asyncio.run(main())


def test_what_an_engine_measures_later_is_known() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        before = engine.info.useful_rows
        for link, rows in ((first, 3.0), (second, 4.0)):
            details = {"useful_rows": rows, "programs_total": 27.0, "programs_ready": 27.0}
            link.messages.put_nowait(Outputs([], EngineStats(details=details)))
        await until(lambda: engine.info.useful_rows == 7)
        assert engine.info.num_pages == first.info.num_pages + second.info.num_pages and before != 7
        assert engine.stats().details["programs_total"] == 54

    run(test)


def test_calls_go_to_all_engines_and_their_answers_are_one() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        async def call(call: EngineCall, results: tuple[Any, ...]) -> Any:
            return (await asyncio.gather(engine.call(call), _answer(first, second, results=results)))[0]

        assert await call(FlushCache(), (None, None)) is None
        assert await call(Sleep(), (["weights"], ["kv_cache", "weights"])) == ["kv_cache", "weights"]
        assert await call(Wake(), ([], [])) == []
        state = {"paused": True, "asleep": [], "version": "1"}
        assert (await call(ReadState(), (state, state | {"paused": False})))["paused"] is False
        assert await call(UpdateFromDirectory(path="x"), ("1", "1")) == "1"
        task = asyncio.create_task(engine.call(UpdateFromDirectory(path="y")))
        await until(lambda: first.calls and second.calls)
        update = UpdateFromDirectory(path="y", version="2", number=2)
        assert first.calls[0].call == second.calls[0].call == update
        first.answer("2")
        second.answer(error="no such file")
        with pytest.raises(ServerError, match="carried out by engines 0, and not by all: engine 1: no such file"):
            await task
        tasks = [generate(engine, name) for name in "ab"]  # never by weights that differ
        await until(lambda: len(first.requests) == 2)
        assert await call(UpdateFromDirectory(path="z"), ("2", "2")) == "2"
        tasks.append(generate(engine, "c"))
        await until(lambda: second.requests)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_call_for_all_engines_is_refused_while_one_is_started() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        second.die_at()
        await until(lambda: engine.replicas[1].status.phase == "restarting")
        with pytest.raises(NotReadyError, match="engine 1 is restarting"):
            await engine.call(Pause())
        assert not first.calls

    run(test)


def test_an_engine_is_brought_to_the_state_of_the_others_before_it_serves() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        await asyncio.gather(engine.call(Pause("retract")), _answer(first, second))
        second.die_at()
        await until(lambda: engine.replicas[1].status.phase == "restarting")
        second.become_ready()
        await until(lambda: second.calls)
        assert second.calls[0].call == Pause("retract")

    run(test)


def test_an_engine_without_the_weights_of_an_upload_gets_no_requests() -> None:
    """They went with its process. When the last engine that has them dies too, all have those of the start."""

    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        await asyncio.gather(engine.call(UpdateFromFile(path="x")), _answer(first, second, results=("1", "1")))
        second.die_at()
        await until(lambda: engine.replicas[1].status.phase == "restarting")
        second.become_ready()
        await until(lambda: engine.replicas[1].status.phase == "ready")
        tasks = [generate(engine, name) for name in "ab"]
        await until(lambda: len(first.requests) == 2)
        first.die_at()
        await until(lambda: len(second.requests) == 2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(test)


def test_a_drain_waits_for_requests_that_were_moved() -> None:
    async def test(engine: AsyncEngine, first: ReplicaLink, second: ReplicaLink) -> None:
        task = generate(engine, "a")
        await until(lambda: first.requests)
        engine.drain()
        first.die_at(first.ids[0])
        await until(lambda: second.requests)
        assert engine.status.phase == "draining" and not await engine.drained(0.05)
        second.give(second.ids[0], 1, FinishReason.STOP)
        assert await task == [1] and await engine.drained(5)

    run(test)


@pytest.mark.usefixtures("no_delays")
def test_when_the_last_engine_is_given_up_every_request_has_an_answer() -> None:
    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        tasks = [generate(engine, name) for name in "abc"]
        await until(lambda: sum(len(link.requests) for link in links) == 3)

        async def fails() -> None:
            raise ConfigError("the devices are gone")

        for link in links:
            link.start = fails  # type: ignore[method-assign]
            link.die()
        for task in tasks:
            with pytest.raises(HTTPError):
                await task
        assert engine.status.phase == "dead"

    run(test)
