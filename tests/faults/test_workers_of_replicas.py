"""Two workers over two engines, real processes all: what a server's parts for more load do together."""

import time
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from jaxserve.library.serving import RunningServer
from tests.faults.test_workers import ENGINE, Stream, children, client, complete, expected, idle, launched, on_both
from tests.waiting import LAST_RESORT, wait_until

PAGE = 4  # tokens, of the fake engine
SESSIONS, TURNS = 6, 5


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with launched(tmp_path_factory.mktemp("store"), replicas=2) as running:
        yield running


def live(server: RunningServer) -> list[int]:
    """The sequences of each engine."""
    with client(server) as http:
        return [each["num_live"] for each in http.get("/server_info").json()["engines"]]


def turn(http: httpx2.Client, session: str, rid: str | None, ids: list[int]) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": 2 * PAGE, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "session_params": {"id": session, "rid": rid}}
    answer = http.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_turns_of_a_session_stay_in_one_engine_whichever_worker_gets_them(server: RunningServer) -> None:
    """Every later turn finds all full pages of the ones before, which only one engine has."""
    idle(server)
    with client(server) as http:
        sessions = [http.post("/open_session", json={"capacity_of_str_len": 10_000}).json() for _ in range(SESSIONS)]
        contexts: list[list[int]] = [[] for _ in sessions]
        last: list[str | None] = [None] * SESSIONS
        for count in range(TURNS):
            busy = Stream(server, [80, count], data_parallel_rank=count % 2)  # the load would choose the other engine
            for number, session in enumerate(sessions):
                ids = [number + 2, 3, 4, 5, 9]
                known = max(0, len(contexts[number]) - 1) // PAGE * PAGE  # the last token was never computed
                answer = turn(http, session, last[number], ids)
                contexts[number] += ids
                assert answer["output_ids"] == expected(contexts[number], 2 * PAGE, ignore_eos=True)
                assert answer["meta_info"]["cached_tokens"] >= known
                contexts[number] += answer["output_ids"]
                last[number] = answer["meta_info"]["id"]
            assert busy.is_whole


def test_a_request_to_any_worker_may_name_its_engine(server: RunningServer) -> None:
    idle(server)
    streams = [Stream(server, [number + 1, 8, 8], data_parallel_rank=1) for number in range(6)]
    assert live(server)[0] == 0
    assert all(stream.is_whole for stream in streams)
    refused = complete(server, [1, 2], data_parallel_rank=2)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "data_parallel_rank"


def test_an_engine_dies_under_the_streams_of_both_workers(server: RunningServer) -> None:
    streams = on_both(server, 4)
    deadline = time.monotonic() + LAST_RESORT
    while min(live(server)) < 2:  # on a busy machine some have ended
        assert time.monotonic() < deadline
        streams += on_both(server, 4)
    restarts = server.launch.engine.restarts
    children(ENGINE)[0].kill()
    assert all(stream.is_whole for stream in streams)
    assert server.launch.engine.restarts == restarts + 1
    wait_until(lambda: all(state.alive for state in server.launch.engine.replicas), "both serve again")
