"""Workers' engines over relays to one engine: the same tokens, one queue, and deaths on either side."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from unittest.mock import Mock

import msgspec
import pytest

from jaxserve.client import relay as relay_module
from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.relay import RelayLink, WorkerBridge, WorkerBridges, WorkerEngine
from jaxserve.config import Config
from jaxserve.engine.server import BuiltEngine, Channel
from jaxserve.errors import EngineDeadError, InvalidValueError, NotReadyError, QueueFullError
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.transport import child
from jaxserve.transport.group import FrameStream
from jaxserve.types.calls import AbortRequests, LoadAdapter, Prepare
from jaxserve.types.messages import AdapterStatus, Located, Outputs, RequestRefused, ToWorker, decode_to_worker
from jaxserve.types.sampling import SamplingParams, ThinkingBudget
from jaxserve.types.step import FinishReason, TokenOutput
from tests.api.fakes import DEMO, demo_info
from tests.fakes import alone, make_core, small_config
from tests.faults.faulty_runner import FaultyRunner
from tests.thread_link import ThreadLink
from tests.waiting import until

PROMPT = [1, 2, 3, 4, 5, 6, 7, 8, 9]
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)


def build(channel: Channel, adapters: Sequence[AdapterStatus] = ()) -> BuiltEngine:
    """Two milliseconds a step, so that there is a middle. adapters: those that its statistics show"""
    channel.send(Located(str(DEMO)))
    core = make_core(small_config(num_pages=256))
    core.adapters = Mock(statuses=lambda: [*adapters], counts=dict)
    core.runner = FaultyRunner(core.runner, lambda output: time.sleep(0.002))
    return BuiltEngine(core, demo_info(Tokenizer.from_directory(DEMO)), lambda spec: Future())


def refuse(_: Prepare) -> None:
    raise InvalidValueError("not now")


@dataclass
class Setting:
    """An engine, or several, in a thread each, the main process's end, and workers in this event loop.

    link: to the first engine
    """

    link: ThreadLink
    engine: AsyncEngine
    relays: WorkerBridges
    workers: list[WorkerEngine] = field(default_factory=list)
    ends: list[WorkerBridge] = field(default_factory=list)

    async def add_worker(self) -> WorkerEngine:
        here, there = socket.socketpair()
        link = RelayLink(there, {AbortRequests: lambda call: [call.prefix + "1"], Prepare: refuse}, lambda: None)
        prefix = f"w{len(self.workers)}-"
        worker = WorkerEngine(self.engine.config, link, id_prefix=prefix, whole_load=lambda: self.engine.load)
        await worker.start(wait=False)
        self.workers.append(worker)
        self.ends.append(await self.relays.connect(here))
        return worker


@contextlib.asynccontextmanager
async def setting(
    num_workers: int = 2, config: Config | None = None, adapters: Sequence[AdapterStatus] = ()
) -> AsyncIterator[Setting]:
    config = config or Config()
    links = [ThreadLink(config, lambda channel: build(channel, adapters)) for _ in range(config.mesh.replicas)]
    engine = AsyncEngine(config, links)
    here = Setting(links[0], engine, WorkerBridges(engine))
    announcing = asyncio.create_task(here.relays.run())
    for _ in range(num_workers):
        await here.add_worker()
    await engine.start()
    for worker in here.workers:
        await worker.wait_ready()
    try:
        yield here
    finally:
        for worker in here.workers:
            await worker.stop()
        announcing.cancel()
        await engine.stop()


async def collect(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> list[RequestOutput]:
    return [output async for output in engine.generate(prompt, params)]


def tokens(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [token for output in outputs if output.index == index for token in output.token_ids]


def prompts(count: int) -> list[list[int]]:
    return [[number + 1, *PROMPT[: 3 + number % 5]] for number in range(count)]


def test_every_worker_gets_the_tokens_of_its_own_requests() -> None:
    async def run() -> None:
        async with setting() as here:
            params = SamplingParams(temperature=0.0, max_tokens=30)
            engines = [here.engine, *here.workers]
            asked = prompts(12)
            found = await asyncio.gather(*(collect(engines[i % 3], each, params) for i, each in enumerate(asked)))
            for prompt, outputs in zip(asked, found, strict=True):
                assert tokens(outputs) == alone(prompt, params)[0]
            assert here.engine.num_live == 0 and not any(end.num_live for end in here.ends)

    asyncio.run(run())


def test_choices_keep_their_numbers_and_seeds() -> None:
    async def run() -> None:
        async with setting() as here:
            params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=8)
            direct, relayed = [await collect(engine, PROMPT, params) for engine in (here.engine, here.workers[0])]
            assert [tokens(direct, i) for i in range(3)] == [tokens(relayed, i) for i in range(3)]

    asyncio.run(run())


@pytest.mark.parametrize("tokens_of_thought", [0, 4])
@pytest.mark.parametrize("dies", [False, True])
def test_a_thinking_budget_ends_the_thinking_of_each_choice(tokens_of_thought: int, dies: bool) -> None:
    """The worker sends each choice again on its own, after the tokens that end the thinking."""

    async def run() -> None:
        budget = ThinkingBudget(tokens=tokens_of_thought, family="qwen3", inside=True, end_token_ids=(5, 6, 7))
        params = SamplingParams(n=3, seed=7, temperature=1.0, max_tokens=60, thinking=budget)
        async with setting() as here:
            direct = await collect(here.engine, PROMPT, params)
            relayed = []
            async for output in here.workers[0].generate(PROMPT, params):
                relayed.append(output)
                if dies and len(relayed) == 60:
                    here.link.kill()
            for index in range(3):
                assert tokens(relayed, index) == tokens(direct, index)
                assert tokens(relayed, index)[tokens_of_thought:][:3] == [5, 6, 7]
            assert here.engine.restarts == int(dies) and here.engine.num_live == 0

    asyncio.run(run())


@pytest.mark.parametrize("deaths", [1, 3])
def test_requests_of_all_workers_go_on_after_a_death_of_the_engine(deaths: int) -> None:
    async def run() -> None:
        async with setting() as here:
            seen = 0

            async def ask(engine: AsyncEngine, prompt: list[int]) -> list[RequestOutput]:
                nonlocal seen
                outputs = []
                async for output in engine.generate(prompt, LONG):
                    outputs.append(output)
                    seen += 1
                    if seen in range(50, 50 + 100 * deaths, 100):
                        here.link.kill()
                return outputs

            asked = prompts(6)
            found = await asyncio.gather(*(ask(here.workers[i % 2], each) for i, each in enumerate(asked)))
            assert here.engine.restarts == deaths
            for prompt, outputs in zip(asked, found, strict=True):
                assert tokens(outputs) == alone(prompt, LONG)[0]

    asyncio.run(run())


def test_workers_reach_all_engines_and_their_requests_go_on_in_another() -> None:
    """server.workers and mesh.replicas: a worker names the engine, and one of the two engines dies."""

    async def run() -> None:
        async with setting(config=Config().replace(mesh={"replicas": 2})) as here:

            async def ask(number: int) -> list[int]:
                worker = here.workers[number % 2]
                return tokens([each async for each in worker.generate(asked[number], LONG, replica=number // 2 % 2)])

            asked = prompts(8)
            tasks = [asyncio.create_task(ask(number)) for number in range(8)]
            await until(lambda: [state.num_live for state in here.engine.replicas] == [4, 4], "each has its own")
            here.link.kill()
            for prompt, found in zip(asked, await asyncio.gather(*tasks), strict=True):
                assert found == alone(prompt, LONG)[0]
            assert here.engine.num_live == 0
            with pytest.raises(InvalidValueError, match="there are engines 0 to 1"):
                await anext(here.workers[0].generate(PROMPT, LONG, replica=2))

    asyncio.run(run())


def test_a_worker_that_ends_leaves_nothing_and_the_others_go_on() -> None:
    async def run() -> None:
        async with setting() as here:
            stays = asyncio.create_task(collect(here.workers[1], PROMPT, LONG))
            leaves = asyncio.create_task(collect(here.workers[0], PROMPT, LONG))
            await until(lambda: here.engine.num_live == 2, "both run")
            await here.workers[0].stop()
            with pytest.raises(EngineDeadError):
                await leaves
            assert tokens(await stays) == alone(PROMPT, LONG)[0]
            await until(lambda: here.engine.num_live == 0, "nothing is left")
            assert here.ends[0].closed.is_set() and here.relays.open == [here.ends[1]]
            late = await here.add_worker()
            await late.wait_ready()
            assert tokens(await collect(late, PROMPT, LONG)) == alone(PROMPT, LONG)[0]

    asyncio.run(run())


def test_a_client_that_leaves_ends_its_request_in_the_engine() -> None:
    async def run() -> None:
        async with setting() as here:
            outputs = here.workers[0].generate(PROMPT, LONG)
            await anext(outputs)
            assert here.engine.num_live == 1
            await outputs.aclose()  # type: ignore[attr-defined]
            await until(lambda: here.engine.num_live == 0, "it is aborted")

    asyncio.run(run())


def test_an_abort_is_answered() -> None:
    async def run() -> None:
        async with setting() as here:
            task = asyncio.create_task(anext_until_end(here.workers[0]))
            await until(lambda: here.engine.num_live == 1, "it runs")
            assert await here.workers[0].abort("mine") and not await here.workers[1].abort("mine")
            assert (await task).finish_reason is FinishReason.ABORT

    async def anext_until_end(engine: AsyncEngine) -> RequestOutput:
        return [output async for output in engine.generate(PROMPT, LONG, request_id="mine")][-1]

    asyncio.run(run())


def test_the_queue_is_one() -> None:
    """Eight run at once and two may wait: of two workers' requests sent at once, ten are taken."""

    async def run() -> None:
        async with setting(config=Config.of(max_queued_requests=2)) as here:
            asked = [collect(here.workers[i % 2], each, LONG) for i, each in enumerate(prompts(14))]
            found = await asyncio.gather(*asked, return_exceptions=True)
            refused = [each for each in found if isinstance(each, BaseException)]
            assert len(refused) == 4
            for error in refused:
                assert isinstance(error, QueueFullError) and error.limit == "max_queued_requests"

    asyncio.run(run())


def test_workers_know_the_engines_state() -> None:
    async def run() -> None:
        async with setting() as here:
            here.engine.drain()
            await until(lambda: here.workers[0].status.phase == "draining", "it drains")
            with pytest.raises(NotReadyError, match="draining"):
                await collect(here.workers[0], PROMPT, LONG)

    asyncio.run(run())


def test_workers_know_the_adapters() -> None:
    sql, poet = (AdapterStatus(name=name, digest=name, rank=8, version=1) for name in ("sql", "poet"))

    async def load(here: Setting, adapters: list[AdapterStatus], *loaded: AdapterStatus) -> None:
        adapters[:] = [msgspec.structs.replace(each, num_running=3) for each in loaded]
        with pytest.raises(InvalidValueError):  # the engine of this test has no such call, but tells its statistics
            await here.engine.call(LoadAdapter("sql", "/sql"))
        here.relays.tell()
        for end, worker in zip(here.ends, here.workers, strict=True):
            await end.call(AbortRequests("a", None))
            assert worker.stats().adapters == [*loaded]

    async def run() -> None:
        adapters: list[AdapterStatus] = []
        async with setting(adapters=adapters) as here:
            for loaded in ((sql,), (sql, poet), (poet,)):
                await load(here, adapters, *loaded)
            late = await here.add_worker()
            await late.wait_ready()
            assert late.stats().adapters == [poet]
            await load(here, adapters)
            adapters[:] = [sql]  # as by an engine that was started again
            await until(lambda: late.stats().adapters == [sql], "it is told without a call")

    asyncio.run(run())


def test_calls_to_a_worker_are_answered() -> None:
    async def run() -> None:
        async with setting() as here:
            assert [await end.call(AbortRequests("a", None)) for end in here.ends] == [["a1"], ["a1"]]
            await here.workers[0].stop()
            await here.ends[0].closed.wait()
            with pytest.raises(EngineDeadError):
                await here.ends[0].call(AbortRequests("a", None))
            with pytest.raises(InvalidValueError):
                await here.ends[1].call(Prepare())

    asyncio.run(run())


def test_outputs_of_one_step_that_are_too_large_together_come_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As routed experts of long prompts are. An output that is too large alone ends its own sequence."""
    for module in (child, relay_module):
        monkeypatch.setattr(module, "MAX_CHILD_FRAME", 2000, raising=False)
    found: list[ToWorker] = []
    ends: list[bool] = []

    async def run() -> None:
        here, there = socket.socketpair()
        engine = Mock()  # knows no sequence
        relay = WorkerBridge(engine)
        await relay.connect(here)
        worker = FrameStream(lambda body: found.append(decode_to_worker(body)), lambda: ends.append(True))
        await asyncio.get_running_loop().create_connection(lambda: worker, sock=there)
        for name, count in (("a", 100), ("b", 100), ("large", 1000), ("c", 100), ("d", 100), ("e", 100)):
            relay.deliver(name, TokenOutput(request_id=name, token_ids=[100_000] * count))
        async with asyncio.timeout(60):
            while not (ends or sum(len(each.outputs) for each in found if isinstance(each, Outputs)) == 5):
                await asyncio.sleep(0.01)
        assert not ends
        relay.close()
        worker.close()
        await asyncio.sleep(0.01)

    asyncio.run(run())
    outputs = [output for each in found if isinstance(each, Outputs) for output in each.outputs]
    assert [(output.request_id, len(output.token_ids)) for output in outputs] == [(name, 100) for name in "abcde"]
    refused = [each for each in found if isinstance(each, RequestRefused)]
    assert [each.request_id for each in refused] == ["large"] and "bytes" in refused[0].message
