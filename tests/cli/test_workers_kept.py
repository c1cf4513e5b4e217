"""How the main process keeps its workers, with processes and relays that the test gives."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.api.process_group import GroupKeeper
from jaxserve.cli.workers import Workers
from jaxserve.client import supervisor
from jaxserve.client.async_engine import AsyncEngine, Load
from jaxserve.config import Config
from jaxserve.errors import UnexpectedEndError
from jaxserve.telemetry.metrics import Families
from tests.client.test_async_engine import HandLink


@contextlib.contextmanager
def one_worker() -> Iterator[Workers]:
    config = Config().replace(server={"workers": 1})
    with socket.socket() as listener:
        workers = Workers(config, AsyncEngine(config, HandLink()), listener, b"")
        try:
            yield workers
        finally:
            workers.close()


def test_a_worker_that_the_system_refuses_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []

    async def refused(*_: Any, **__: Any) -> None:
        tries.append(1)
        raise OSError("no more processes")

    async def main() -> None:
        with one_worker() as workers:
            keeper = GroupKeeper(workers.group, lambda: Load(0, 0), list)
            with pytest.raises(UnexpectedEndError, match=r"worker 1 cannot be started \(no more processes\) again"):
                await workers.run(keeper)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", refused)
    monkeypatch.setattr(supervisor, "RESTART_DELAYS", (0.0, 0.0))
    asyncio.run(main())
    assert len(tries) == 3


def test_a_worker_that_ends_while_metrics_are_read_is_counted_once() -> None:
    found: Families = [{"name": "x", "kind": "counter", "text": "", "samples": [("x_total", {}, 1.0)]}]

    async def main() -> None:
        with one_worker() as workers:

            class EndingRelay:
                ends = False

                async def call(self, method: str) -> Families:
                    if self.ends:
                        workers._forget(relay)
                    return found

            relay: Any = EndingRelay()
            workers._numbers[relay] = 1
            assert _total(await workers.metrics()) == 1.0
            relay.ends = True
            assert _total(await workers.metrics()) == 1.0 and _total(await workers.metrics()) == 1.0

    asyncio.run(main())


def _total(readings: list[Families]) -> float:
    return sum(value for families in readings for family in families for _, _, value in family["samples"])
