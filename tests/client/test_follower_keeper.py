"""The engine process of a follower's command: started again after each end."""

import asyncio
from typing import Any

import pytest

from jaxserve.client import link as follower_keeper
from jaxserve.client.link import FollowerKeeper
from jaxserve.config import Config
from jaxserve.errors import ConfigError, EngineDeadError
from tests.waiting import until

CONFIG = Config.parse({"mesh": {"hosts": 2, "host_rank": 1, "tensor": 2}})


class Link:
    """errors: of the starts, in order; the engine process of each start but the last ends at once"""

    def __init__(self, *errors: Exception | None) -> None:
        self._errors = errors
        self.starts = 0

    async def start(self) -> None:
        self.starts += 1
        if (error := self._errors[self.starts - 1]) is not None:
            raise error

    async def receive(self) -> object:
        if self.starts < len(self._errors):
            raise EngineDeadError("it was killed")
        return await asyncio.get_running_loop().create_future()

    def pulse(self) -> None: ...

    async def stop(self) -> None: ...


def keeper(link: Any) -> FollowerKeeper:
    made = FollowerKeeper(CONFIG)
    made._link = link
    return made


def test_a_start_that_the_system_refuses_after_a_death_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower_keeper, "RESTART_DELAY", 0.0)
    link = Link(None, OSError("no more processes"), ConfigError("the temporary folder is full"), None)

    async def run() -> None:
        task = asyncio.create_task(keeper(link).run())
        await until(lambda: link.starts == 4 or task.done(), "it was started again")
        assert not task.done()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(run())


def test_a_first_start_that_fails_ends_the_command() -> None:
    with pytest.raises(ConfigError, match="is full"):
        asyncio.run(keeper(Link(ConfigError("the temporary folder is full"))).run())
