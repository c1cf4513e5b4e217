"""Log-probabilities of chosen ids, candidates and hidden states of the real model, against what it says otherwise."""

import math
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import openai
import pytest

from jaxserve.library.serving import RunningServer

PROMPT = "The capital of France is"
BODY: dict[str, Any] = {"model": "demo", "prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}


@pytest.fixture
def http(server: RunningServer) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=server.url, timeout=120) as http:
        yield http
        lines = [
            line for line in http.get("/metrics").text.splitlines() if line.startswith("jaxserve:xla_compilations")
        ]
        assert [float(line.split()[-1]) for line in lines] == [0], "something was compiled while serving"


def completion(http: httpx2.Client, **keys: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json=BODY | {"return_tokens_as_token_ids": True} | keys)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def test_chosen_ids_have_the_values_of_the_likeliest(http: httpx2.Client) -> None:
    likeliest = completion(http, temperature=0, logprobs=20)["logprobs"]
    ids = [int(name.removeprefix("token_id:")) for name in likeliest["top_logprobs"][0]]
    chosen = completion(http, temperature=0, logprobs=0, logprob_token_ids=ids)["logprobs"]
    assert chosen["tokens"] == likeliest["tokens"]
    assert chosen["top_logprobs"][0] == pytest.approx(likeliest["top_logprobs"][0], abs=1e-4)
    every = range(0, 2048, 16)
    table = completion(http, temperature=0, logprobs=0, logprob_token_ids=list(every))["logprobs"]["top_logprobs"][0]
    assert len(table) >= 128 and sum(math.exp(value) for value in table.values()) <= 1.0001


def test_candidates_are_the_renormalised_likeliest(http: httpx2.Client) -> None:
    keys: dict[str, Any] = {"temperature": 1.0, "top_k": 6, "seed": 3, "logprobs": 20}
    plain = completion(http, **keys)
    choice = completion(http, **keys, return_sampling_mask=True, sampling_logprobs_mode="support")
    assert choice["logprobs"]["tokens"] == plain["logprobs"]["tokens"]
    meta = choice["meta_info"]
    rows = zip(
        choice["logprobs"]["tokens"],
        choice["logprobs"]["top_logprobs"],
        meta["output_token_sampling_mask"],
        meta["output_token_sampling_logprobs"],
        strict=True,
    )
    for token, table, ids, values in rows:
        known = [table[f"token_id:{i}"] for i in ids]
        assert token in {f"token_id:{i}" for i in ids} and len(ids) == 6
        norm = math.log(sum(map(math.exp, known)))
        assert values == pytest.approx([value - norm for value in known], abs=1e-4)


def test_the_hidden_state_is_what_embeddings_are_made_of(http: httpx2.Client, client: openai.OpenAI) -> None:
    vector = np.array(completion(http, max_tokens=1, return_hidden_states=True)["hidden_states"])
    embedding = np.array(client.embeddings.create(model="demo", input=PROMPT).data[0].embedding)
    np.testing.assert_allclose(vector / np.linalg.norm(vector), embedding, atol=1e-4)
    body = {"text": PROMPT, "return_hidden_states": True, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    whole, second, third = http.post("/generate", json=body).json()["meta_info"]["hidden_states"]
    np.testing.assert_allclose(whole[-1], vector, atol=1e-3)
    longer = completion(http, max_tokens=3, temperature=0, ignore_eos=False, return_hidden_states="last")
    np.testing.assert_allclose(longer["hidden_states"], third, atol=1e-3)
    assert len(second) == len(vector)


def test_streamed_is_the_same_with_the_official_client(client: openai.OpenAI) -> None:
    extra = {"return_hidden_states": True, "return_sampling_mask": True, "top_k": 4, "logprob_token_ids": [300, 301]}
    keys: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "seed": 4}
    keys |= {"max_tokens": 12, "logprobs": True, "extra_body": extra}
    whole: Any = client.chat.completions.create(**keys).choices[0]
    chunks: list[Any] = [chunk.choices[0] for chunk in client.chat.completions.create(**keys, stream=True)]
    streamed = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    values = [[t.logprob for t in e.top_logprobs] for e in whole.logprobs.content]
    assert [[t.logprob for t in e.top_logprobs] for e in streamed] == [pytest.approx(row, abs=1e-4) for row in values]
    states = [chunk.delta.hidden_states for chunk in chunks if getattr(chunk.delta, "hidden_states", None)]
    assert len(states) == 1 and states[0] == pytest.approx(whole.hidden_states, abs=1e-3)
    mask = "output_token_sampling_mask"
    assert chunks[-1].meta_info[mask] == whole.meta_info[mask] and len(whole.meta_info[mask][0]) == 4


def test_more_candidates_than_can_be_told_fail_that_request_alone(http: httpx2.Client) -> None:
    response = http.post(
        "/v1/completions", json=BODY | {"top_p": 0.9999, "temperature": 2, "return_sampling_mask": True}
    )
    assert response.status_code == 400 and "candidates" in response.json()["error"]["message"]
    assert completion(http, temperature=0)["finish_reason"] == "length"


def test_a_session_goes_on_as_if_all_had_been_sent(http: httpx2.Client) -> None:
    session = http.post("/open_session", json={}).json()
    greedy: dict[str, Any] = {"sampling_params": {"temperature": 0, "max_new_tokens": 20, "ignore_eos": True}}
    first = greedy | {"text": PROMPT * 4, "rid": "one", "session_params": {"id": session}}
    start = (
        http.post("/tokenize", json={"prompt": PROMPT * 4}).json()["tokens"]
        + http.post("/generate", json=first).json()["output_ids"]
    )
    second = greedy | {"input_ids": [300, 301], "session_params": {"id": session, "rid": "one"}}
    answer = http.post("/generate", json=second).json()
    whole = http.post("/generate", json=greedy | {"input_ids": [*start, 300, 301]}).json()
    assert answer["output_ids"] == whole["output_ids"]
    assert answer["meta_info"]["prompt_tokens"] == len(start) + 2 and answer["meta_info"]["cached_tokens"] >= 16
    http.post("/close_session", json={"session_id": session})
