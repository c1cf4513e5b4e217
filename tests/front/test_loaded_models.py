"""Loads that are given up and servers that stop while they load, with processes that only a test ends."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jaxserve.config import Config, ModelEntry
from jaxserve.front import loaded_models as module
from jaxserve.front.loaded_models import LoadedModels, ModelPlan


class FakeProcess:
    """Stands for ModelProcess. It loads once `may_load` is set, and takes a moment to end once it is killed."""

    started: ClassVar[list[str]] = []
    pid = 1
    since = 0.0
    progress = ""

    def __init__(self, config: Config, socket: Path) -> None:
        self._name = config.model.served_name[0]
        self._killed = asyncio.Event()
        self.may_load = asyncio.Event()

    async def start(self) -> None:
        self.started.append(self._name)

    async def loaded(self) -> list[dict[str, Any]]:
        await self.may_load.wait()
        return []

    async def ended(self) -> int:
        await self._killed.wait()
        await asyncio.sleep(0.02)
        return -9

    async def is_idle(self) -> bool:
        return True

    def kill(self) -> None:
        self._killed.set()

    async def stop(self, seconds: float) -> None:
        self.kill()
        await self.ended()


def run(test: Callable[[LoadedModels], Awaitable[None]], monkeypatch: pytest.MonkeyPatch, **models: Any) -> list[str]:
    """Run a test with the models a, b and c; return the names of the processes that were started."""
    monkeypatch.setattr(module, "ModelProcess", FakeProcess)
    monkeypatch.setattr(FakeProcess, "started", started := [])

    async def main() -> None:
        config = Config().replace(models=models)
        plans = []
        for name in "abc":
            entry = ModelEntry.model_validate({"name": name, "load": "start"})
            plans.append(ModelPlan(entry, config.replace(model={"served_name": [name]}), (name,)))
        await test(LoadedModels(plans, config.models, config.server, Path()))

    asyncio.run(asyncio.wait_for(main(), 20))
    return started


def test_a_load_that_is_given_up_twice_leaves_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(loaded_models: LoadedModels) -> None:
        first, second, _ = loaded_models.all
        loaded_models.load(first)
        await asyncio.sleep(0.01)
        loaded_models.unload(first)
        await asyncio.sleep(0.01)
        loaded_models.unload(first)
        await asyncio.sleep(0.05)
        assert (first.state, first.process) == ("unloaded", None)
        loaded_models.load(second)
        await asyncio.sleep(0.05)
        assert isinstance(second.process, FakeProcess)
        second.process.may_load.set()
        await asyncio.sleep(0.01)
        assert second.state == "loaded"
        await loaded_models.stop()

    assert run(test, monkeypatch, max_loaded=1) == ["a", "b"]


def test_a_server_that_stops_while_it_starts_loads_no_further_model(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(loaded_models: LoadedModels) -> None:
        start = asyncio.create_task(loaded_models.run())
        await asyncio.sleep(0.01)
        await loaded_models.stop()
        await asyncio.sleep(0.05)
        start.cancel()
        assert [(each.state, each.process) for each in loaded_models.all] == [("unloaded", None)] * 3

    assert run(test, monkeypatch) == ["a"]
