"""An engine process from its start to its end, whether an event loop runs already or not."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from jaxserve.client import link as link_module
from jaxserve.client.link import ProcessLink
from jaxserve.config import Config
from jaxserve.transport.engine_child import EngineChild
from jaxserve.transport.socket_directory import SocketDirectory
from tests.waiting import LAST_RESORT, wait_until

MODULE = "tests.transport.waiting_child"


def test_it_reads_its_configuration_and_its_end_is_seen() -> None:
    child = EngineChild(MODULE, "end 3")

    async def status() -> int:
        return await asyncio.wait_for(child.ended(), LAST_RESORT)

    assert asyncio.run(status()) == 3 and not child.is_running
    assert (child.directory.path / "read").read_text() == "end 3\n"
    child.send_signal(signal.SIGKILL)  # it has ended
    child.close()
    child.close()
    assert not child.directory.path.exists()


def test_close_ends_it() -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    child = EngineChild(MODULE, "wait", environment={"A": "b"}, cores=cores, niceness=3)
    wait_until((child.directory.path / "read").exists, "it read its configuration")
    assert os.sched_getaffinity(child.pid) == set(cores)
    assert os.getpriority(os.PRIO_PROCESS, child.pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)
    child.close()
    assert not child.is_running and not child.directory.path.exists()


def test_a_start_removes_the_pages_that_a_killed_server_left_in_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one with prefill apart, whatever the next one is."""
    monkeypatch.setattr(link_module, "SHARED_MEMORY", tmp_path)
    left = SocketDirectory(tmp_path)
    (left.path / "pages-0").write_bytes(b"pages")
    os.close(left._lock)  # as the end of its process does

    async def run() -> None:
        link = ProcessLink(Config(), MODULE)
        await link.start()
        await link.stop()

    asyncio.run(run())
    assert not left.path.exists()
