"""The device fails in the middle of a step: the engine rebuilds its cache, and nobody's answer changes."""

import asyncio
import functools
from collections.abc import Iterator

import pytest

from jaxserve import launch_server
from jaxserve.client.link import ProcessLink
from jaxserve.engine.server import MAX_REBUILDS
from jaxserve.library.serving import RunningServer
from tests.conftest import SMALL
from tests.faults.engine import HAPPENED
from tests.faults.helpers import ask_all, check_goldens, engine_process, golden, stats, wait_for
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def server(compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    make_link = functools.partial(ProcessLink, module="tests.faults.engine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(HAPPENED, str(tmp_path_factory.mktemp("faults")))
        with launch_server(make_link=make_link, compile_cache=compile_cache, **SMALL) as running:
            yield running


@pytest.mark.parametrize("kind", ["before", "after", "memory"])
def test_a_failed_step_changes_no_answer(server: RunningServer, kind: str) -> None:
    """At a step with prompts, and in the middle of decoding. The engine process lives on and compiles nothing."""
    expected, engine, before = golden(server), engine_process().pid, stats(server)["jaxserve:rebuilds"]
    step = {"before": 1, "after": 4, "memory": 6}[kind]
    assert asyncio.run(ask_all(server, first_id=f"fault-{kind}-{step}")) == expected
    wait_until(lambda: stats(server)["jaxserve:rebuilds"] > before, "the rebuild is counted")
    after = stats(server)
    assert engine_process().pid == engine
    assert after["jaxserve:rebuilds"] == before + 1 and after["jaxserve:xla_compilations_total"] == 0
    check_goldens(server)


@pytest.mark.parametrize(("kind", "most"), [("read", MAX_REBUILDS + 1), ("rebuild", 1)])
def test_where_no_rebuild_helps_a_new_process_does(server: RunningServer, kind: str, most: int) -> None:
    """One failure more than a process may have within ten minutes, and one that leaves no device behind."""
    expected, engine = golden(server), engine_process().pid
    for step in range(5, 5 + most):
        assert asyncio.run(ask_all(server, first_id=f"fault-{kind}-{step}")) == expected
        wait_for(server, 200)
        if engine_process().pid != engine:  # the process has had failures from the tests before
            break
    assert engine_process().pid != engine
    check_goldens(server)


@pytest.mark.parametrize("kind", ["before", "read"])
def test_a_request_that_always_fails_the_device_ends_alone(server: RunningServer, kind: str) -> None:
    """It is told so; the others get their texts, of the same process. (One that has had its rebuilds is not asked.)"""
    expected, engine = golden(server), engine_process().pid
    texts = asyncio.run(ask_all(server, first_id=f"poison-{kind}-4", first_may_fail=True))
    assert "the device fails whenever it computes this request" in texts[0]
    assert texts[1:] == expected[1:]
    assert engine_process().pid == engine
    check_goldens(server)
