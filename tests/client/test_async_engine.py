"""Requests on their way through AsyncEngine, beside an engine whose every message the test gives by hand."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from jaxserve.client.async_engine import AbortSignal, AsyncEngine
from jaxserve.config import Config
from jaxserve.errors import EngineDeadError, InvalidValueError, QueueFullError, ServerError
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.calls import LoadAdapter
from jaxserve.types.messages import (
    Abort,
    AdapterStatus,
    Add,
    Call,
    EngineStats,
    FromEngine,
    Located,
    Outputs,
    Ready,
    Reply,
    ToEngine,
)
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.step import FinishReason, TokenOutput
from tests.api.fakes import DEMO, demo_info
from tests.waiting import LAST_RESORT


class HandLink:
    """Keeps what is sent; gives what the test puts, and dies when it is told to."""

    def __init__(self) -> None:
        self.info = demo_info(Tokenizer.from_directory(DEMO))
        self.requests: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.working: list[str] = []  # when it dies
        self.messages: asyncio.Queue[FromEngine | None] = asyncio.Queue()

    async def start(self) -> None:
        self.messages.put_nowait(Located(str(DEMO)))
        self.messages.put_nowait(Ready(self.info))

    async def receive(self) -> FromEngine:
        message = await self.messages.get()
        if message is None:
            raise EngineDeadError("killed by the test")
        return message

    def send(self, message: ToEngine) -> None:
        match message:
            case Add():
                self.requests += message.requests()
            case Abort(request_ids):
                self.aborted += request_ids
            case _:
                raise AssertionError(message)

    def give(self, engine_id: str, token_id: int | None = None, reason: FinishReason | None = None) -> None:
        tokens = [] if token_id is None else [token_id]
        self.messages.put_nowait(Outputs([TokenOutput(request_id=engine_id, token_ids=tokens, finish_reason=reason)]))

    def die(self) -> None:
        self.messages.put_nowait(None)

    def pulse(self) -> None: ...

    def in_work(self) -> list[str]:
        return self.working

    def dump_stacks(self) -> None: ...

    def kill(self) -> None: ...

    async def stop(self) -> None: ...


class Client:
    """One request, read in the background."""

    def __init__(
        self,
        engine: AsyncEngine,
        request_id: str,
        params: SamplingParams | None = None,
        signal: AbortSignal | None = None,
    ) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.reasons: dict[int, str] = {}
        params = params or SamplingParams(max_tokens=50)
        self.stream: AsyncIterator[RequestOutput] = engine.generate(
            [1, 2], params, request_id=request_id, signal=signal
        )
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for output in self.stream:
            assert output.request_id
            self.tokens.setdefault(output.index, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.reasons[output.index] = output.finish_reason

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


Test = Callable[[AsyncEngine, HandLink], Coroutine[None, None, None]]


def run(test: Test, **scheduler: int) -> None:
    async def main() -> None:
        link = HandLink()
        engine = AsyncEngine(Config().replace(scheduler=scheduler), link)
        await engine.start()
        try:
            await asyncio.wait_for(test(engine, link), LAST_RESORT)
        finally:
            await engine.stop()

    asyncio.run(main())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_what_comes_for_a_request_that_left_never_reaches_one_of_its_id() -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        first = Client(engine, "same")
        await until(lambda: len(link.requests) == 1)
        link.give(link.requests[0].request_id, 80)
        await until(lambda: first.tokens)
        await first.leave()
        second = Client(engine, "same")
        await until(lambda: len(link.requests) == 2)
        old, new = (request.request_id for request in link.requests)
        link.give(old, 81)
        link.give(old, reason=FinishReason.ABORT)
        link.give(new, 90, FinishReason.LENGTH)
        await second.task
        assert (second.tokens, second.reasons) == ({0: [90]}, {0: "length"})
        assert engine.num_live == 0

    run(test)


def test_requests_of_one_id_are_answered_side_by_side() -> None:
    """Also when the first choice of one has ended before the other comes."""

    async def test(engine: AsyncEngine, link: HandLink) -> None:
        first = Client(engine, "same", SamplingParams(n=2))
        await until(lambda: len(link.requests) == 2)
        link.give(link.requests[0].request_id, 80, FinishReason.STOP)
        await until(lambda: first.reasons)
        second = Client(engine, "same", SamplingParams(n=2))
        await until(lambda: len(link.requests) == 4)
        for number, request in enumerate(link.requests[1:]):
            link.give(request.request_id, 90 + number, FinishReason.LENGTH)
        await asyncio.gather(first.task, second.task)
        assert first.tokens == {0: [80], 1: [90]} and second.tokens == {0: [91], 1: [92]}
        groups = [request.group for request in link.requests]
        assert groups[0] == groups[1] != groups[2] == groups[3] and "same" not in groups

    run(test)


def test_an_abort_ends_every_request_of_its_id_and_no_other() -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        clients = [Client(engine, name, SamplingParams(n=2)) for name in ("same", "same", "sam", "same-0")]
        await until(lambda: len(link.requests) == 8)
        assert await engine.abort("same") and not await engine.abort("")
        assert link.aborted == [request.request_id for request in link.requests[:4]]
        for engine_id in link.aborted:
            link.give(engine_id, reason=FinishReason.ABORT)
        await asyncio.gather(*(client.task for client in clients[:2]))
        assert not await engine.abort("same") and engine.num_live == 4
        for client in clients:
            await client.leave()
        assert engine.num_live == 0 and len(link.aborted) == 8

    run(test)


def test_an_abort_that_a_dying_engine_never_read_is_answered_by_the_next() -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        aborted, other = Client(engine, "aborted"), Client(engine, "other")
        await until(lambda: len(link.requests) == 2)
        link.give(link.requests[0].request_id, 80)
        await until(lambda: aborted.tokens)
        assert await engine.abort("aborted")
        link.die()
        await aborted.task
        assert (aborted.tokens, aborted.reasons) == ({0: [80]}, {0: "abort"})
        await until(lambda: len(link.requests) == 3)
        assert link.requests[2].request_id == link.requests[1].request_id
        link.give(link.requests[2].request_id, 90, FinishReason.LENGTH)
        await other.task

    run(test)


@pytest.mark.parametrize("admitted", [False, True])
def test_a_request_that_an_engine_took_is_not_the_clients_mistake(admitted: bool) -> None:
    """The next engine refuses it: 500 if the one before had begun it, 400 if none ever looked at it."""

    async def test(engine: AsyncEngine, link: HandLink) -> None:
        client = Client(engine, "a")
        await until(lambda: link.requests)
        link.messages.put_nowait(Outputs([], admitted=[link.requests[0].request_id] if admitted else []))
        link.die()
        await until(lambda: len(link.requests) == 2)
        refusal = TokenOutput(
            request_id=link.requests[1].request_id, finish_reason=FinishReason.ERROR, error="too long", error_status=400
        )
        link.messages.put_nowait(Outputs([refusal]))
        with pytest.raises(ServerError if admitted else InvalidValueError, match="too long"):
            await client.task

    run(test)


def test_a_request_that_is_held_is_aborted_at_once() -> None:
    """While others are tried again after a death: no engine has it."""

    async def test(engine: AsyncEngine, link: HandLink) -> None:
        suspect = Client(engine, "suspect")
        await until(lambda: link.requests)
        link.working = [link.requests[0].request_id]
        link.die()
        await until(lambda: len(link.requests) == 2)
        held = Client(engine, "held", SamplingParams(n=2))
        await until(lambda: engine.num_live == 3)
        assert await engine.abort("held")
        await held.task
        assert held.reasons == {0: "abort", 1: "abort"} and link.aborted == []
        late = Client(engine, "late", SamplingParams(n=2))
        await until(lambda: engine.num_live == 3)
        link.give(link.requests[1].request_id, 80, FinishReason.LENGTH)
        await suspect.task
        await until(lambda: len(link.requests) == 4)
        for request in link.requests[2:]:
            link.give(request.request_id, 90, FinishReason.LENGTH)
        await late.task
        assert late.tokens == {0: [90], 1: [90]}

    run(test)


def test_a_suspect_whose_client_leaves_holds_nobody_up() -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        suspect = Client(engine, "suspect")
        await until(lambda: link.requests)
        link.working = [link.requests[0].request_id]
        link.die()
        await until(lambda: len(link.requests) == 2)
        held = Client(engine, "held")
        await until(lambda: engine.num_live == 2)
        await suspect.leave()
        await until(lambda: len(link.requests) == 3)
        link.give(link.requests[2].request_id, 90, FinishReason.LENGTH)
        await held.task

    run(test)


def test_waiting_prompt_tokens_are_counted_as_they_are_sent() -> None:
    """Each choice has its prompt; what was admitted, gave a token, ended or left waits no more."""

    async def test(engine: AsyncEngine, link: HandLink) -> None:
        clients = [Client(engine, "a") for _ in range(60)]
        await until(lambda: sum(client.task.done() for client in clients) == 55)
        assert [client.task.done() for client in clients] == [False] * 5 + [True] * 55
        assert {type(client.task.exception()) for client in clients[5:]} == {QueueFullError}
        with pytest.raises(QueueFullError):
            engine.check_queue(1, 1)
        admitted, given, ended, aborted, left = (request.request_id for request in link.requests)
        engine.check_queue(1, 0)
        link.messages.put_nowait(Outputs([], admitted=[admitted, "unknown"]))
        link.give(given, 80)
        link.give(ended, reason=FinishReason.LENGTH)
        link.give(aborted, reason=FinishReason.ABORT)
        await until(lambda: engine.num_live == 3)
        engine.check_queue(4, 2)
        with pytest.raises(QueueFullError):
            engine.check_queue(5, 2)
        await clients[4].leave()
        assert left in link.aborted
        engine.check_queue(1, 10**6)  # nothing waits: any prompt may
        for client in clients[:2]:
            await client.leave()

    run(test, max_queued_tokens=10)


def test_siblings_are_sent_as_one_message() -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        client = Client(engine, "a", SamplingParams(n=3, seed=5))
        await until(lambda: link.requests)
        assert [request.params.seed for request in link.requests] == [5, 6, 7]
        assert len({id(request.prompt_token_ids) for request in link.requests}) == 1
        await client.leave()

    run(test)


@pytest.mark.parametrize("token_id", [2**31, -(2**40), 1.5])
def test_a_prompt_that_cannot_be_sent_leaves_nothing_behind(token_id: Any) -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        with pytest.raises(InvalidValueError):
            await anext(engine.generate([1, token_id], SamplingParams(n=2)))
        assert engine.num_live == 0 and await engine.drained(0.0) and link.requests == []
        engine.check_queue(1, 1)

    run(test)


def test_a_signal_aborts_its_own_requests_now_and_later() -> None:
    """Those of another request with the same id go on."""

    async def test(engine: AsyncEngine, link: HandLink) -> None:
        signal = AbortSignal()
        mine = Client(engine, "same", SamplingParams(n=2), signal)
        other = Client(engine, "same")
        await until(lambda: len(link.requests) == 3)
        signal.set()
        assert link.aborted == [request.request_id for request in link.requests[:2]]
        later = Client(engine, "same", None, signal)
        await until(lambda: len(link.aborted) == 3)
        assert link.aborted[2] == link.requests[3].request_id
        for engine_id in link.aborted:
            link.give(engine_id, reason=FinishReason.ABORT)
        await asyncio.gather(mine.task, later.task)
        assert mine.reasons == {0: "abort", 1: "abort"} and later.reasons == {0: "abort"} and engine.num_live == 1
        signal.set()
        assert len(link.aborted) == 3
        await other.leave()

    run(test)


def test_requests_are_answered_before_the_engine_has_ended() -> None:
    """One that is stuck is waited for as long as HTTP waits for its clients."""
    answered: list[bool] = []

    async def test(engine: AsyncEngine, link: HandLink) -> None:
        client = Client(engine, "a")
        await until(lambda: link.requests)

        async def stop() -> None:
            await asyncio.wait((client.task,), timeout=0.5)
            answered.append(client.task.done())

        link.stop = stop  # type: ignore[method-assign]
        await engine.stop()
        assert isinstance(client.task.exception(), EngineDeadError)

    run(test)
    assert answered[0]


def test_a_part_of_an_accepted_request_is_not_refused_by_a_drain_or_a_full_queue() -> None:
    async def test(engine: AsyncEngine, link: HandLink) -> None:
        first = Client(engine, "a", SamplingParams(n=9))
        await until(lambda: len(link.requests) == 9)
        with pytest.raises(QueueFullError):
            engine.check_queue()
        engine.drain()
        part = asyncio.ensure_future(anext(engine.generate([1], SamplingParams(), already_accepted=True)))
        await until(lambda: len(link.requests) == 10)
        others = [1]
        assert not await engine.drained(0.05)
        for request in link.requests:
            link.give(request.request_id, 5, FinishReason.STOP)
        assert (await part).token_ids == [5]
        await first.task
        assert not await engine.drained(0.05, lambda: len(others))
        others.clear()
        assert await engine.drained(0.0, lambda: len(others))

    run(test, max_queued_requests=1)


def test_adapters_of_an_earlier_run_have_their_names_until_they_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    """Their calls come before the first request. What cannot be loaded is a line in the log, and then no name."""
    old = [AdapterStatus(name=name, digest=name, rank=8, version=3, path=f"/{name}") for name in ("sql", "poet")]
    own = AdapterStatus(name="own", digest="own", rank=8, version=1)  # of the configuration
    calls: list[Call] = []

    class CalledLink(HandLink):
        def send(self, message: ToEngine) -> None:
            calls.append(message) if isinstance(message, Call) else super().send(message)

    async def main() -> None:
        link = CalledLink()
        engine = AsyncEngine(Config(), link)
        engine.load_first(old)
        link.messages.put_nowait(Outputs([], EngineStats(adapters=[own])))
        await engine.start()

        async def told(*adapters: AdapterStatus) -> None:
            link.messages.put_nowait(Outputs([], EngineStats(adapters=[*adapters])))
            async with asyncio.timeout(LAST_RESORT):
                while not link.messages.empty():
                    await asyncio.sleep(0)
            await asyncio.sleep(0)

        assert [call.call for call in calls] == [
            LoadAdapter(each.name, each.path, replace=True, digest=each.digest) for each in old
        ]
        await told(own)
        assert engine.stats().adapters == [own, *old]
        link.messages.put_nowait(Reply(calls[0].call_id))
        link.messages.put_nowait(Reply(calls[1].call_id, error="the adapter 'poet' is not loaded: /poet has changed"))
        for _ in range(2):  # an engine tells its statistics each second
            await told(own, old[0])
        assert engine.stats().adapters == [own, old[0]]
        await engine.stop()

    asyncio.run(main())
    assert "'poet' is not loaded" in caplog.text
