"""Engines with roles behind one AsyncEngine, each a link whose every message the test gives by hand."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import check_roles
from jaxserve.client.prompt_handover import MAX_FILES
from jaxserve.client.relay import RelayedTokens
from jaxserve.client.sequences import LiveSequence, OutputQueue
from jaxserve.config import Config
from jaxserve.errors import ConfigError
from jaxserve.text.detokenizer import RequestOutput
from jaxserve.transport import socket_directory
from jaxserve.types.calls import ReadPages, WritePages
from jaxserve.types.messages import Add, EngineStats, Outputs, decode_from_worker, encode
from jaxserve.types.page_keys import PageEvents, page_keys
from jaxserve.types.sampling import EngineRequest, Prefilled, SamplingParams, siblings
from jaxserve.types.step import FinishReason, TokenOutput
from tests.client.test_async_engine import until
from tests.client.test_replicas import ReplicaLink
from tests.waiting import LAST_RESORT

PROMPT = list(range(40))  # two full pages of 16
SEEDED = SamplingParams(max_tokens=50, seed=7)

Test = Callable[..., Coroutine[None, None, None]]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(socket_directory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def run(test: Test, count: int = 2, prefill: int = 1, min_tokens: int = 8) -> None:
    async def main() -> None:
        mesh = {"replicas": count, "prefill_replicas": prefill, "prefill_min_tokens": min_tokens}
        links = [ReplicaLink() for _ in range(count)]
        engine = AsyncEngine(Config().replace(mesh=mesh), links)
        await engine.start()
        try:
            await asyncio.wait_for(test(engine, *links), LAST_RESORT)
        finally:
            await engine.stop()

    asyncio.run(main())


class Asked:
    """A request, read in the background."""

    def __init__(self, engine: AsyncEngine, name: str, params: SamplingParams = SEEDED, **options: Any) -> None:
        self.outputs: list[RequestOutput] = []
        self.task = asyncio.create_task(self._read(engine, name, params, options))

    async def _read(self, engine: AsyncEngine, name: str, params: SamplingParams, options: dict[str, Any]) -> list[int]:
        async for output in engine.generate(PROMPT, params, request_id=name, **options):
            self.outputs.append(output)
        return [token for output in self.outputs for token in output.token_ids]


def end_prompt(link: ReplicaLink, number: int = -1, num_cached: int = 0) -> None:
    output = TokenOutput(request_id=link.ids[number], finish_reason=FinishReason.LENGTH, num_cached_tokens=num_cached)
    output.queue_seconds = 0.25
    link.messages.put_nowait(Outputs([output]))


async def answer_write(link: ReplicaLink, tokens: int = 32) -> Path:
    await until(lambda: link.calls)
    call = link.calls[0].call
    assert isinstance(call, WritePages) and call.token_ids == PROMPT
    path = Path(call.path)
    path.write_bytes(b"pages")
    link.answer(tokens)
    return path


async def answer_read(link: ReplicaLink, path: Path, *answers: int) -> None:
    for tokens in answers:
        await until(lambda: link.calls)
        call = link.calls[0].call
        assert isinstance(call, ReadPages) and call.path == str(path)
        assert path.exists()
        link.answer(tokens)


def test_a_prompt_is_computed_by_one_engine_and_goes_on_in_the_other(folder: Path) -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        [sent] = prefill.requests
        assert (sent.params.max_tokens, sent.hold_seconds > 0, sent.prompt_token_ids) == (0, True, PROMPT)
        end_prompt(prefill, num_cached=16)
        path = await answer_write(prefill)
        assert folder in path.parents
        await answer_read(decode, path, 16, 32)
        await until(lambda: decode.requests)
        [own] = decode.requests
        assert own.params == SEEDED and own.prompt_token_ids == PROMPT and not own.hold_seconds
        assert isinstance(own.prefilled, Prefilled) and own.prefilled.num_cached_tokens == 16
        assert own.prefilled.queue_seconds == 0.25 and own.prefilled.seconds > 0
        assert [state.num_live for state in engine.replicas] == [0, 1] and not path.exists()
        decode.give(decode.ids[0], 5, FinishReason.STOP)
        assert await asked.task == [5]
        assert [state.role for state in engine.replicas] == ["prefill", "decode"]

    run(test)
    assert not [*folder.iterdir()]


def test_choices_are_computed_and_go_on_together() -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = Asked(engine, "pair", SamplingParams(max_tokens=50, n=2))
        await until(lambda: len(prefill.requests) == 2)
        end_prompt(prefill, 0)
        await asyncio.sleep(0.01)
        assert not prefill.calls, "the other choice is not computed yet"
        end_prompt(prefill, 1)
        await answer_read(decode, await answer_write(prefill), 32)
        await until(lambda: len(decode.requests) == 2)
        for engine_id, token in zip(decode.ids, (5, 6), strict=True):
            decode.give(engine_id, token, FinishReason.STOP)
        assert sorted(await asked.task) == [5, 6]

    run(test)


def test_choices_that_a_worker_sends_one_by_one_go_on_too() -> None:
    """As when the thinking of each ends: they are of one request, and each has a message of its own."""

    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        names, outbox = iter(["w1-1", "w1-2"]), OutputQueue()
        request = EngineRequest(request_id="", prompt_token_ids=PROMPT, params=SamplingParams(max_tokens=9, n=2))
        for index, own in enumerate(siblings(request, lambda: next(names), 7)):
            message = decode_from_worker(encode(Add.of(own)))
            assert isinstance(message, Add)
            [sent] = message.requests()
            engine.submit([LiveSequence(sent, RelayedTokens(index, []), outbox)], message)
        await until(lambda: len(prefill.requests) == 2)
        for number in range(2):
            end_prompt(prefill, number)
        for count in (1, 2):
            await answer_read(decode, await answer_write(prefill), 32)
            await until(lambda count=count: len(decode.requests) == count)

    run(test)


def test_what_needs_no_other_engine_is_not_passed_on() -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        keys = b"".join(page_keys("", b"".join(token.to_bytes(4, "little") for token in PROMPT), 16))
        decode.messages.put_nowait(Outputs([], EngineStats(), [], PageEvents(keys)))
        await asyncio.sleep(0.01)
        of_prompt = SamplingParams(max_tokens=9, prompt_logprobs=1)
        names = {"cached": SEEDED, "one": SamplingParams(max_tokens=1), "scores": of_prompt}
        asked = [Asked(engine, name, params) for name, params in names.items()]
        asked += [Asked(engine, "named", replica=0), Asked(engine, "other salt", cache_salt="x")]
        await until(lambda: len(prefill.requests) == 4 and decode.requests)
        assert [request.client_id for request in decode.requests] == ["cached"]
        kept = {request.client_id: request.params.max_tokens for request in prefill.requests}
        assert kept == {"one": 1, "scores": 9, "named": 50, "other salt": 0}
        for link in (prefill, decode):
            for request in link.requests:
                if request.params.max_tokens:
                    link.give(request.request_id, 4, FinishReason.STOP)
        end_prompt(prefill, 3)
        await answer_read(decode, await answer_write(prefill), 32)
        await until(lambda: len(decode.requests) == 2)
        decode.give(decode.ids[1], 4, FinishReason.STOP)
        assert [await each.task for each in asked] == [[4]] * 5

    run(test, min_tokens=9)  # the prompt has 8 tokens after its pages


@pytest.mark.parametrize("phase", ["computed", "written", "read"])
def test_a_prefill_engine_dies(phase: str) -> None:
    """Before its pages are written the request is computed by the decode engine. A file that is there is read."""

    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        if phase == "computed":
            prefill.die_at(*prefill.ids)
        else:
            end_prompt(prefill)
            await until(lambda: prefill.calls)
            if phase == "written":
                prefill.die_at()
            else:
                path = await answer_write(prefill)
                await until(lambda: decode.calls)
                prefill.die_at()
                await until(lambda: engine.restarts)
                await answer_read(decode, path, 32)
        await until(lambda: decode.requests)
        [own] = decode.requests
        assert own.params == SEEDED and (own.prefilled is None) == (phase == "computed")
        decode.give(own.request_id, 5)
        await until(lambda: asked.outputs)
        again = Asked(engine, "b")  # no prefill engine serves
        await until(lambda: len(decode.requests) == 2)
        for engine_id in decode.ids:
            decode.give(engine_id, 6, FinishReason.STOP)
        assert [await asked.task, await again.task] == [[5, 6], [6]]

    run(test)


def test_a_prefill_engine_dies_while_prompts_wait_for_their_files() -> None:
    """Each is taken up when the call of one before it has failed. There is no engine then that would answer."""

    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = [Asked(engine, str(number)) for number in range(MAX_FILES + 3)]
        await until(lambda: len(prefill.requests) == len(asked))
        for number in range(len(asked)):
            end_prompt(prefill, number)
        await until(lambda: len(prefill.calls) == MAX_FILES)
        prefill.die_at()
        await until(lambda: len(decode.requests) == len(asked))
        for engine_id in decode.ids:
            decode.give(engine_id, 5, FinishReason.STOP)
        assert [await each.task for each in asked] == [[5]] * len(asked)
        prefill.become_ready()
        await until(lambda: engine.replicas[0].alive)
        prefill.calls.clear()
        again = Asked(engine, "again")
        await until(lambda: len(prefill.requests) > len(asked))
        end_prompt(prefill)
        await answer_read(decode, await answer_write(prefill), 32)
        await until(lambda: len(decode.requests) > len(asked))
        decode.give(decode.ids[-1], 6, FinishReason.STOP)
        assert await again.task == [6]

    run(test)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("phase", ["read", "decoding"])
def test_a_decode_engine_dies(phase: str, count: int) -> None:
    """Another one reads the file, or gets the prompt anew; if there is none, the prefill engine goes on."""

    async def test(engine: AsyncEngine, prefill: ReplicaLink, *decodes: ReplicaLink) -> None:
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        end_prompt(prefill)
        path = await answer_write(prefill)
        await until(lambda: decodes[0].calls)
        if phase == "read":
            decodes[0].die_at()
        else:
            await answer_read(decodes[0], path, 32)
            await until(lambda: decodes[0].requests)
            decodes[0].give(decodes[0].ids[0], 5)
            await until(lambda: asked.outputs)
            decodes[0].die_at(decodes[0].ids[0])
        last = prefill if count == 2 else decodes[1]
        if phase == "read":
            await answer_read(last, path, 32) if count == 3 else await _answer_own(last, path)
        elif count == 3:
            await until(lambda: len(prefill.requests) == 2)
            end_prompt(prefill)
            await answer_read(last, await answer_write(prefill), 32)
        await until(lambda: last.requests[-1:] and last.requests[-1].params == SEEDED)
        assert last.requests[-1].resumed_token_ids == ([5] if phase == "decoding" else [])
        last.give(last.ids[-1], 6, FinishReason.STOP)
        assert await asked.task == ([5, 6] if phase == "decoding" else [6])

    async def _answer_own(link: ReplicaLink, path: Path) -> None:
        """The engine that wrote the pages has them."""
        await answer_read(link, path, 32)

    run(test, count)


def test_pages_that_do_not_come_stop_no_request() -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        for number, failure in enumerate(("write", "read", "room", "nothing")):
            asked = Asked(engine, failure)
            await until(lambda n=number: len(prefill.requests) == n + 1)
            end_prompt(prefill)
            if failure in ("write", "nothing"):
                await until(lambda: prefill.calls)
                prefill.answer(0, "no space left" if failure == "write" else None)
            else:
                path = await answer_write(prefill)
                await until(lambda: decode.calls)
                if failure == "read":
                    decode.answer(None, "the pages are of other weights")
                else:
                    await answer_read(decode, path, 16, 16)
            await until(lambda n=number: len(decode.requests) == n + 1)
            decode.give(decode.ids[-1], 5, FinishReason.STOP)
            assert await asked.task == [5]

    run(test)


@pytest.mark.parametrize("phase", ["prompt", "just ended", "write", "read"])
def test_an_abort_is_answered_in_every_phase(phase: str) -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        if phase in ("prompt", "just ended"):
            assert await engine.abort("a") and prefill.aborted == prefill.ids
            if phase == "prompt":
                prefill.give(prefill.ids[0], None, FinishReason.ABORT)
            else:
                end_prompt(prefill)
        else:
            end_prompt(prefill)
            await until(lambda: prefill.calls)
            call = prefill.calls[0].call
            assert isinstance(call, WritePages)
            path = Path(call.path)
            if phase == "read":
                await answer_write(prefill)
                await until(lambda: decode.calls)
            assert await engine.abort("a")
            if phase == "write":
                await answer_write(prefill)
            else:
                decode.answer(16)
            await until(lambda: not path.exists())
        assert await asked.task == [] and asked.outputs[-1].finish_reason == "abort"
        assert engine.num_live == 0 and not decode.requests and not prefill.aborted[1:]

    run(test)


def test_a_client_leaves_while_pages_are_passed_on() -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        end_prompt(prefill)
        await until(lambda: prefill.calls)
        asked.task.cancel()
        await asyncio.gather(asked.task, return_exceptions=True)
        path = await answer_write(prefill)
        await until(lambda: not path.exists())
        assert engine.num_live == 0 and not decode.calls and not decode.requests and not decode.aborted

    run(test)


def test_a_failed_prompt_ends_its_request() -> None:
    async def test(engine: AsyncEngine, prefill: ReplicaLink, decode: ReplicaLink) -> None:
        asked = Asked(engine, "a")
        await until(lambda: prefill.requests)
        failed = TokenOutput(request_id=prefill.ids[0], finish_reason=FinishReason.ERROR, error="not finite")
        prefill.messages.put_nowait(Outputs([failed]))
        with pytest.raises(Exception, match="not finite"):
            await asked.task
        assert engine.num_live == 0 and not prefill.calls

    run(test)


def test_a_request_that_kills_prefill_engines_ends() -> None:
    """Its prompt kills two prefill engines; then it is tried alone and ends. Nothing else is lost."""

    async def test(engine: AsyncEngine, *links: ReplicaLink) -> None:
        first, second, decode = links
        asked = Asked(engine, "killer")
        await until(lambda: first.requests)
        first.die_at(first.ids[0])
        await until(lambda: second.requests)
        second.die_at(second.ids[0])
        second.become_ready()
        await until(lambda: len(second.requests) == 2)
        second.die_at(second.ids[1])
        with pytest.raises(Exception, match="died each time"):
            await asked.task
        other = Asked(engine, "other")
        await until(lambda: decode.requests)
        decode.give(decode.ids[0], 5, FinishReason.STOP)
        assert await other.task == [5]

    run(test, count=3, prefill=2)


def test_what_cannot_work_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"mesh\.prefill_replicas: mesh\.replicas is 2, and one of them"):
        Config().replace(mesh={"replicas": 2, "prefill_replicas": 2})
    with pytest.raises(ConfigError, match=r"mesh\.prefill_replicas"):
        Config().replace(mesh={"prefill_replicas": 1})
    config = Config().replace(mesh={"replicas": 2, "prefill_replicas": 1}, cache={"prefix_cache": False})
    with pytest.raises(ConfigError, match=r"cache\.prefix_cache is off"):
        check_roles(config)
