"""Requests of many choices: how many prompt tokens they may have, and turns for others while they are answered."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.api.generate.generation import MAX_CHOICE_TOKENS

from .conftest import LiveServer, reply_with
from .loop_meter import LoopMeter

IDS = [5 + number % 1500 for number in range(500)]


def test_more_prompt_tokens_than_a_request_may_have(server: LiveServer) -> None:
    body = {"input_ids": [IDS] * 17, "sampling_params": {"n": 127, "max_new_tokens": 1}}
    error = server.post("/generate", body).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "n")
    assert f"a request may have {MAX_CHOICE_TOKENS}" in error["message"]
    assert not server.link.seen
    body["sampling_params"]["n"] = 1
    assert len(server.post("/generate", body).json()) == 17


BIG: dict[str, tuple[str, dict[str, Any]]] = {
    "prompts with log-probabilities": (
        "/v1/completions",
        {"model": "demo", "prompt": [IDS] * 16, "max_tokens": 1, "echo": True, "prompt_logprobs": 20, "logprobs": 20},
    ),
    "the same natively": (
        "/generate",
        {
            "input_ids": [IDS] * 16,
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
            "top_logprobs_num": 20,
        },
    ),
    "choices with log-probabilities": (
        "/v1/completions",
        {"model": "demo", "prompt": "Hi", "n": 48, "max_tokens": 100, "logprobs": 20},
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BIG)
def test_others_have_turns_while_a_large_answer_is_made(server: LiveServer, name: str, stream: bool) -> None:
    path, body = BIG[name]
    link = server.link
    reply_with(server, [300 + number for number in range(100)])
    server.call(link.hold.clear)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(server.post, path, body | {"stream": stream})
        server.wait(lambda: len(link.seen) == max(16, body.get("n", 0)) == len(link.running), "the engine has it all")
        with LoopMeter(server) as meter:
            started = server.call(time.thread_time)
            server.call(link.hold.set)
            answer = asked.result()
            whole = server.call(time.thread_time) - started
    assert answer.status_code == 200 and len(answer.content) > 2**20
    assert meter.longest < whole / 2  # without turns it is all but a few percent of the prompts' two answers
