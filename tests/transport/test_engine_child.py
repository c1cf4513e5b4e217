"""An engine process from its start to its end, whether an event loop runs already or not."""

import asyncio
import os
import signal

from jaxserve.transport.engine_child import EngineChild
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
