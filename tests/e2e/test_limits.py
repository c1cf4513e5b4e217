"""The table of tests/api/test_limits.py on the real engine: never a 5xx, and the canary's tokens never change."""

import json
from typing import Any

import httpx2
import pytest

from jaxserve.library.serving import RunningServer
from tests.api.test_limits import CASES, HEADS, HUGE, LISTS, ODD, allowed, edges, raw_body, schema_of

HEADERS = {"content-type": "application/json"}
CANARY = {"model": "demo", "prompt": "The capital of France is", "temperature": 0, "max_tokens": 6, "logprobs": 1}


def canary(http: httpx2.Client) -> Any:
    choice = http.post("/v1/completions", json=CANARY | {"return_token_ids": True}).json()["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.parametrize("step", [32, pytest.param(1, marks=pytest.mark.slow)])
def test_nothing_that_a_body_holds_harms_the_engine(server: RunningServer, step: int) -> None:
    cases = [case for case in CASES if case[0] not in HEADS]  # the demo model has no classification head
    with httpx2.Client(base_url=server.url, timeout=120) as http:
        canary(http)
        golden = canary(http)  # the first one filled the prefix cache
        for route, model, name in cases[::step]:
            for value in dict.fromkeys([*edges(schema_of(model, name)), *ODD, *HUGE, *LISTS]):
                reply = http.post(route, content=raw_body(route, name, value), headers=HEADERS)
                assert reply.status_code in allowed(name), (route, name, value[:60], reply.text[:200])
                if reply.status_code >= 400:
                    assert name.rpartition(".")[2] in json.dumps(reply.json()["error"]), (route, value[:60], reply.text)
            assert canary(http) == golden, (route, name)
