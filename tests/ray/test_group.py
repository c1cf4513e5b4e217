"""An engine over two hosts under Ray Serve: two bundles on this machine, of a replica and of a follower's actor.

Skipped by name without the extra `ray`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.faults.group import TINY
from tests.ray.serve_run import ENGINE_PROCESS, ENGINES, ServeRun, serve_run
from tests.ray.test_serve import REQUESTS, content, killed, load, outcome

pytest.importorskip("ray", reason="needs the extra ray", exc_type=ImportError)
pytestmark = pytest.mark.xdist_group("ray")

PORT = 20731 + os.getpid() % 1000
FOLLOWER = "ray::FollowerActor"
FOLLOWER_PROCESS = "jaxserve.engine.hosts.follower_process"
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."


@pytest.fixture(scope="module")
def run() -> Iterator[ServeRun]:
    limits = {name: TINY[name] for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len")}
    keys = {
        "engine_kwargs": {**limits, "tensor_parallel_size": 2, "max_queued_requests": 100},
        "placement_group_config": {"bundles": [{"CPU": 0.5}, {"CPU": 0.5}]},
    }
    with serve_run(PORT, keys, num_replicas=1, max_ongoing_requests=100) as running:
        yield running


def test_two_hosts_answer(run: ServeRun) -> None:
    assert content(asyncio.run(run.chat(QUESTION))) == ANSWER
    found = [len(run.processes(name)) for name in (ENGINES, FOLLOWER, ENGINE_PROCESS, FOLLOWER_PROCESS)]
    assert found == [1, 1, 1, 1]


@pytest.mark.parametrize("victim", [FOLLOWER, FOLLOWER_PROCESS, ENGINE_PROCESS])
def test_every_stream_is_whole_when_a_host_is_lost(run: ServeRun, victim: str) -> None:
    """The replica stays and replays; Ray starts an actor again, and it joins."""
    assert asyncio.run(killed(run, victim, stream=True, delay=1)) == ["whole"] * REQUESTS
    assert content(asyncio.run(run.chat(QUESTION))) == ANSWER


def test_the_hosts_of_a_lost_replica_end_with_it(run: ServeRun) -> None:
    before = run.processes(FOLLOWER) + run.processes(FOLLOWER_PROCESS)
    assert asyncio.run(killed(run, ENGINES, stream=False, delay=1)) == ["whole"] * REQUESTS
    assert not any(each.is_running() for each in before)
    assert [outcome(answer) for answer in asyncio.run(load(run, stream=True))] == ["whole"] * REQUESTS
