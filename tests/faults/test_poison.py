"""A request that kills the engine's process whenever it is computed, among others: it alone ends with an error.

And an engine that finds less memory when it is started again: it goes on with the pages that the first one had.
"""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.errors import ServerError
from jaxserve.types.sampling import SamplingParams
from tests.fakes import alone
from tests.faults.fake_engine import EXIT, HANG, OUT_OF_MEMORY, SEGFAULT

PARAMS = SamplingParams(max_tokens=100, temperature=0.0)
INNOCENT = [[i, 2, 3, 5, *range(i)] for i in range(1, 17)]


async def answer(engine: AsyncEngine, prompt: list[int], n: int = 1) -> list[list[int]]:
    """The tokens of each choice, as they were streamed."""
    tokens: list[list[int]] = [[] for _ in range(n)]
    params = PARAMS if n == 1 else SamplingParams(max_tokens=100, temperature=0.0, n=n)
    async for output in engine.generate(prompt, params):
        tokens[output.index] += output.token_ids
    return tokens


async def beside(engine: AsyncEngine, bad: list[int]) -> None:
    """16 streams, one of them of three choices, beside one that kills."""
    sizes = [3 if i == 7 else 1 for i in range(len(INNOCENT))]
    streams = [asyncio.create_task(answer(engine, *each)) for each in zip(INNOCENT, sizes, strict=True)]
    with pytest.raises(ServerError, match="died each time") as caught:
        await answer(engine, bad)
    assert caught.value.status == 500
    expected = [[alone(prompt, PARAMS)[0]] * size for prompt, size in zip(INNOCENT, sizes, strict=True)]
    assert await asyncio.gather(*streams) == expected


@pytest.mark.parametrize(
    ("mark", "at"),
    [
        (SEGFAULT, 1),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((EXIT, 30), (OUT_OF_MEMORY, 7))),
        (HANG, 12),
    ],
)
def test_a_request_that_kills_the_process_ends_alone(mark: int, at: int) -> None:
    """At its first step or in mid-stream; also where it never comes back, and the watchdog kills the process."""

    async def work(engine: AsyncEngine, link: ProcessLink) -> None:
        await beside(engine, [mark, at])
        assert engine.restarts <= 3  # the first death, and one or two of the search; in halves there would be six
        assert await answer(engine, [1, 2, 3]) == [alone([1, 2, 3], PARAMS)[0]]

    with_engine(work)


def with_engine(work: Callable[[AsyncEngine, ProcessLink], Awaitable[None]]) -> None:
    config = Config().replace(server={"watchdog_timeout": 1.5})

    async def run() -> None:
        link = ProcessLink(config, module="tests.faults.fake_engine")
        engine = AsyncEngine(config, link)
        await engine.start()
        try:
            await work(engine, link)
        finally:
            await engine.stop()

    asyncio.run(run())


def test_a_new_engine_keeps_the_plan_of_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt alone needs twice the pages that there is memory for at the second start."""
    monkeypatch.setenv("FAKE_ENGINE_MARK", str(tmp_path / "mark"))
    prompt = [1, 2, 3, *range(60)]

    async def work(engine: AsyncEngine, link: ProcessLink) -> None:
        pages, tokens = engine.info.num_pages, list[int]()
        async for output in engine.generate(prompt, SamplingParams(max_tokens=50, temperature=0.0)):
            tokens += output.token_ids
            if len(tokens) == 10:
                link.kill()
        assert tokens == alone(prompt, PARAMS)[0][:50]
        assert engine.restarts == 1 and engine.info.num_pages == pages

    with_engine(work)
