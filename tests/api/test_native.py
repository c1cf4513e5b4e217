"""What a hostile or exact client finds at the edges of /generate."""

from typing import Any

import orjson
import pytest

from .conftest import LiveServer, reply_with

BODY: dict[str, Any] = {"input_ids": [7, 8, 9]}


@pytest.mark.parametrize("keys", [{}, {"stream": True}, {"stream": True, "incremental": True}])
def test_no_output_is_made_where_none_is_asked_for(server: LiveServer, keys: dict[str, Any]) -> None:
    reply_with(server, [11, 12])
    body = BODY | keys | {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    text = server.post("/generate", body).text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line and "[DONE]" not in line]
    answer = orjson.loads(lines[-1])
    meta = answer["meta_info"]
    assert (answer["text"], answer["output_ids"], meta["completion_tokens"]) == ("", [], 0)
    assert meta["finish_reason"] == {"type": "length", "length": 0}
    assert len(meta["input_token_logprobs"]) == 3 and meta["output_token_logprobs"] == []


@pytest.mark.parametrize(
    ("keys", "ids"),
    [
        ({"rid": "q"}, ["q_0", "q_1"]),
        ({"rid": ["a", "b"]}, ["a", "b"]),
    ],
)
def test_each_prompt_of_a_batch_has_an_id(server: LiveServer, keys: dict[str, Any], ids: list[str]) -> None:
    answers = server.post("/generate", {"text": ["x", "y"]} | keys).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ids


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"rid": ["a"], "text": ["x", "y"]}, "rid"),
        ({"return_logprob": True, "logprob_start_len": 4, "input_ids": [7, 8, 9]}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": -2, "input_ids": [7, 8, 9]}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": [0, 2**31], "text": ["x", "y"]}, "logprob_start_len"),
    ],
)
def test_bad_values_are_named(server: LiveServer, keys: dict[str, Any], param: str) -> None:
    response = server.post("/generate", keys)
    assert response.status_code == 400 and response.json()["error"]["param"].split(".")[0] == param, response.text
