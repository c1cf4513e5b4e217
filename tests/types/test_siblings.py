"""Seeds of requests that bring none: another sequence at each start, the same one where it is configured."""

import asyncio

import pytest

from jaxserve.client.async_engine import AsyncEngine
from jaxserve.config import Config
from jaxserve.engine import engine as engine_module
from jaxserve.engine.server import BuiltEngine
from jaxserve.errors import ConfigError
from jaxserve.types.sampling import SamplingParams, request_seed
from tests.client.test_async_engine import HandLink


def seeds_of_a_start(configured: int | None) -> list[int | None]:
    """Of three requests, the last of two choices."""

    async def run() -> list[int | None]:
        link = HandLink()
        engine = AsyncEngine(Config().replace(runtime={"random_seed": configured}), link)
        await engine.start()
        streams = [engine.generate([1], SamplingParams(n=n)) for n in (1, 1, 2)]
        tasks = [asyncio.ensure_future(anext(stream)) for stream in streams]
        while len(link.requests) < 4:
            await asyncio.sleep(0)
        await engine.stop()
        await asyncio.gather(*tasks, return_exceptions=True)
        return [request.params.seed for request in link.requests]

    return asyncio.run(run())


def test_each_start_has_a_sequence_of_its_own() -> None:
    first, second = seeds_of_a_start(None), seeds_of_a_start(None)
    assert len({*first, *second}) == 8


@pytest.mark.parametrize("configured", [0, 7])
def test_a_configured_seed_repeats_the_sequence(configured: int) -> None:
    assert seeds_of_a_start(configured) == seeds_of_a_start(configured)


def test_a_drawn_seed_is_in_the_log_so_that_a_run_can_be_repeated(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    seed = request_seed(None)
    assert f"runtime.random_seed: {seed} was drawn" in caplog.text and 0 <= seed < 2**63
    caplog.clear()
    assert request_seed(5) == 5 and not caplog.text


@pytest.mark.parametrize(("configured", "expected"), [(7, {7}), (None, None)])
def test_the_engine_in_process_too(
    configured: int | None, expected: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def build(config: Config, send: object, seed: int = 0) -> BuiltEngine:
        seen.append(seed)
        raise ConfigError("far enough")

    monkeypatch.setattr(engine_module, "build_engine", build)
    for _ in range(2):
        with pytest.raises(ConfigError, match="far enough"):
            engine_module.TextEngine(config=Config().replace(runtime={"random_seed": configured}))
    assert set(seen) == expected if expected else len(set(seen)) == 2
