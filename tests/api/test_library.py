"""AsyncEngine: the answers of the routes in a program's own event loop. The engine is the fake of the API's tests."""

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxserve import AsyncEngine, SamplingParams
from jaxserve.config import Config
from jaxserve.errors import ConfigError, InvalidValueError, NotReadyError, ServerError
from jaxserve.library.async_engine import INSTEAD
from jaxserve.types.calls import LoadAdapter, UnloadAdapter
from jaxserve.types.messages import AdapterStatus, EngineStats, Outputs, Ready

from .fakes import FakeLink

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "It is Paris, by the river."


async def told(engine: AsyncEngine, link: FakeLink, **changes: Any) -> None:
    """Let the engine say that it is another one."""
    info = msgspec.structs.replace(engine.info, **changes)
    link.say(Ready(info))
    while engine.info != info:
        await asyncio.sleep(0.01)


def test_an_async_engine_has_the_methods_of_an_engine(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        link = FakeLink()
        link.script = lambda prompt, params: ANSWER
        async with AsyncEngine(Config(), link) as engine:
            whole = await engine.chat(MESSAGES, SamplingParams(max_tokens=100))
            assert whole.choices[0].message.content == ANSWER
            chunks = [chunk async for chunk in await engine.chat(MESSAGES, stream=True, max_tokens=100)]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
            both = await engine.chat_all([MESSAGES, MESSAGES], sampling_params={"max_new_tokens": 100}, progress=True)
            assert "2/2" in capfd.readouterr().err
            assert [each.choices[0].message.content for each in both] == [ANSWER] * 2
            outputs = [output async for output in engine.generate("Hello", {"max_new_tokens": 100})]
            assert "".join(output.text for output in outputs) == ANSWER
            assert outputs[0].num_prompt_tokens == len(engine.tokenizer.encode("Hello"))
            with pytest.raises(InvalidValueError, match="no_such"):
                await engine.chat(MESSAGES, no_such=1)
            with pytest.raises(InvalidValueError, match="generate has no no_such"):
                engine.generate("Hello", no_such=1)  # type: ignore[call-arg]
            again = engine.generate(prompt="Hello", sampling_params={"max_tokens": 100}, request_id="x", priority=1)  # type: ignore[call-arg]
            assert "".join([output.text async for output in again]) == ANSWER
            with pytest.raises(InvalidValueError, match="not bytes"):
                engine.generate(b"x")  # type: ignore[arg-type]
            with pytest.raises(InvalidValueError, match="params and sampling_params"):
                await engine.chat(MESSAGES, {"max_tokens": 1}, sampling_params={"max_tokens": 1})
            link.delay = 0.05
            stream = await engine.chat(MESSAGES, stream=True, max_tokens=100)
            await anext(stream)
            await stream.aclose()
            while engine.num_live:
                await asyncio.sleep(0.01)
            link.delay = 0.0
            await told(engine, link, is_embedding=True)
            found = await engine.embed(["one", "two"], progress=True)
            assert "2/2" in capfd.readouterr().err
            assert found.shape == (2, engine.info.embedding_size)
            with pytest.raises(InvalidValueError, match="texts are"):
                await engine.embed({"a": 1})  # type: ignore[arg-type]
        with pytest.raises(ServerError, match="stopped"):
            await engine.chat(MESSAGES)

    before = set(threading.enumerate())
    asyncio.run(main())
    assert set(threading.enumerate()) <= before


def test_an_adapter_has_a_name() -> None:
    async def main() -> None:
        link = FakeLink()
        link.adapters = [AdapterStatus(name="sql", digest="1" * 32, rank=8, version=2)]
        async with AsyncEngine(Config(), link) as engine:
            assert await engine.load_adapter("sql", "adapters/sql", pinned=True) == "sql@2"
            link.say(Outputs([], EngineStats(adapters=link.adapters)))
            while not engine.stats().adapters:
                await asyncio.sleep(0.01)
            for name, digest in (("sql", "1" * 32), ("2" * 32, "2" * 32), ("", "")):
                outputs = [output async for output in engine.generate("Hello", adapter=name)]
                assert outputs and link.seen.pop().adapter == digest
            await engine.chat(MESSAGES, model="sql", max_tokens=100)
            assert link.seen.pop().adapter == "1" * 32
            await engine.unload_adapter("sql")
            with pytest.raises(InvalidValueError, match="another process"):
                await engine.load_adapter("sql", {})  # type: ignore[arg-type]
            loaded = LoadAdapter("sql", str(Path("adapters/sql").absolute()), replace=True, pinned=True)
            assert [each.call for each in link.calls] == [loaded, UnloadAdapter("sql")]

    asyncio.run(main())


def test_names_of_other_engines_are_answered_with_ours() -> None:
    async def main() -> None:
        engine = AsyncEngine(Config(), FakeLink())
        for name, ours in INSTEAD.items():
            with pytest.raises(AttributeError, match=f"AsyncEngine has no {name}: use {re.escape(ours)}"):
                getattr(engine, name)
            assert hasattr(AsyncEngine, re.split(r"\W", ours)[0]), name
        assert not hasattr(engine, "no_such")
        for ask in (lambda: engine.generate("Hello"), lambda: engine.generate([5, 6])):
            with pytest.raises(NotReadyError, match="not started: use `async with`"):
                ask()
        with pytest.raises(NotReadyError, match="not started"):
            await engine.chat(MESSAGES)

    asyncio.run(main())


def test_a_config_takes_no_other_arguments() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs beside it"):
        AsyncEngine(Config(), FakeLink(), max_num_seqs=4)
    with pytest.raises(ConfigError, match="model beside it"):
        AsyncEngine("DIR", FakeLink(), config=Config())
    assert AsyncEngine("DIR", FakeLink(), max_num_seqs=4).config.scheduler.max_num_seqs == 4
