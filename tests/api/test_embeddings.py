"""POST /v1/embeddings over an engine whose vectors are known: forms of input and output, limits, errors."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve.api.answers import Embeddings
from jaxserve.api.generate.planner import cut
from tests.api.conftest import LiveServer, serving
from tests.api.fakes import MAX_MODEL_LEN, vector_of
from tests.api.test_batches import results, upload, wait


def embed(server: LiveServer, **body: Any) -> Any:
    return server.post("/v1/embeddings", {"model": "demo", "input": "hello"} | body)


def vectors(answer: Any) -> list[list[float]]:
    return [row["embedding"] for row in answer.json()["data"]]


def test_the_official_client_reads_base64(client: Any, server: LiveServer) -> None:
    ids = server.link.tokenizer.encode("hello")
    answer = client.embeddings.create(model="demo", input="hello")  # the client asks for base64 of itself
    assert answer.data[0].embedding == pytest.approx(vector_of(ids).tolist())
    assert (answer.model, answer.object, answer.data[0].index) == ("demo", "list", 0)
    assert answer.usage.model_dump() == {"prompt_tokens": len(ids), "total_tokens": len(ids)}


def test_floats_equal_base64(server: LiveServer) -> None:
    numbers = vectors(embed(server))[0]
    raw = vectors(embed(server, encoding_format="base64"))[0]
    assert np.frombuffer(base64.b64decode(raw), "<f4").tolist() == np.float32(numbers).tolist()  # type: ignore[arg-type]
    Embeddings.model_validate(embed(server).json(), strict=True)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7], [8, 9, 10]], [[5, 6], [7], [8, 9, 10]]),
    ],
)
def test_token_ids(given: Any, expected: list[list[int]], server: LiveServer) -> None:
    answer = embed(server, input=given)
    np.testing.assert_allclose(vectors(answer), [vector_of(ids) for ids in expected], rtol=1e-6)
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_many_texts_keep_their_order(server: LiveServer) -> None:
    texts = [f"text number {i}" for i in range(200)]
    answer = embed(server, input=texts)
    expected = [vector_of(server.link.tokenizer.encode(text)) for text in texts]
    np.testing.assert_allclose(vectors(answer), expected, rtol=1e-6)
    assert [row["index"] for row in answer.json()["data"]] == list(range(200))
    follows = [request.partly_answered for request in server.link.seen[-200:]]
    assert not any(follows[:8]) and all(follows[-100:]), "a pause waits for what follows an answer"


def test_the_models_prompt_goes_before_texts_and_not_before_tokens(server: LiveServer) -> None:
    encode = server.link.tokenizer.encode
    with serving(server, embedding_prompt="query: "):
        answer = vectors(embed(server, input=["a", "b"])) + vectors(embed(server, input=[5, 6]))
    expected = [vector_of(ids) for ids in (encode("query: a"), encode("query: b"), [5, 6])]
    np.testing.assert_allclose(answer, expected, rtol=1e-6)


def test_dimensions_cut_and_scale_again(server: LiveServer) -> None:
    whole = np.array(vectors(embed(server))[0])
    short = np.array(vectors(embed(server, dimensions=3))[0])
    np.testing.assert_allclose(short, whole[:3] / np.linalg.norm(whole[:3]), rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({"input": ""}, "input", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": ["a", ""]}, "input", "invalid_value"),
        ({"input": [[]]}, "input", "invalid_value"),
        ({"input": None}, "input", None),
        ({"input": [10**6]}, "input", "invalid_value"),
        ({"input": [-1]}, "input.0", None),
        ({"input": {"image": "x"}}, "input", None),
        ({"input": list(range(5)) * 200}, "input", "context_length_exceeded"),
        ({"dimensions": 0}, "dimensions", None),
        ({"dimensions": 99}, "dimensions", "invalid_value"),
        ({"encoding_format": "hex"}, "encoding_format", None),
        ({"model": "nobody"}, "model", "model_not_found"),
        ({"embed_dtype": "float16"}, "embed_dtype", "unsupported_parameter"),
        ({"normalize": False}, "normalize", "unsupported_parameter"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, code: str | None, server: LiveServer) -> None:
    answer = embed(server, **body)
    error = answer.json()["error"]
    assert answer.status_code == (404 if code == "model_not_found" else 400)
    assert error["param"] == param and sorted(error) == ["code", "message", "param", "type"]
    assert code is None or error["code"] == code


def test_a_text_may_fill_the_context_and_a_longer_one_be_cut(server: LiveServer) -> None:
    ids = [7] * MAX_MODEL_LEN
    np.testing.assert_allclose(vectors(embed(server, input=ids))[0], vector_of(ids), rtol=1e-6)
    longer = [8, *ids, 9]
    cut_right = vectors(embed(server, input=longer, truncate_prompt_tokens=-1))[0]
    np.testing.assert_allclose(cut_right, vector_of([8, *ids[1:]]), rtol=1e-6)
    cut_left = vectors(embed(server, input=longer, truncate_prompt_tokens=4, truncation_side="left"))[0]
    np.testing.assert_allclose(cut_left, vector_of([7, 7, 7, 9]), rtol=1e-6)


def test_a_cut_keeps_the_tokens_around_a_text() -> None:
    framed, frame = [2, 10, 11, 12, 13, 3], [2, 3]
    assert cut(framed, frame, 4, "right") == [2, 10, 11, 3]
    assert cut(framed, frame, 4, "left") == [2, 12, 13, 3]
    assert cut([10, 11, 3], [3], 2, "right") == [10, 3]
    assert cut(framed, frame, 1, "right") == [2]
    assert cut(framed, frame, 6, "right") == framed


@pytest.fixture
def encoder(server: LiveServer) -> Iterator[LiveServer]:
    """The server as if it served an encoder."""
    with serving(server, is_embedding=True):
        yield server


def test_an_encoder_generates_nothing_and_says_so(encoder: LiveServer) -> None:
    for path, body in {
        "/v1/chat/completions": {"model": "demo", "messages": [{"role": "user", "content": "hi"}]},
        "/v1/completions": {"model": "demo", "prompt": "hi"},
        "/generate": {"text": "hi"},
    }.items():
        answer = encoder.post(path, body)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
        assert "makes embeddings and generates no text. Use /v1/embeddings" in answer.json()["error"]["message"]
    assert encoder.http.get("/v1/models").json()["data"][0]["task"] == "embed"
    assert encoder.http.get("/model_info").json()["is_generation"] is False
    assert embed(encoder).status_code == 200


def test_other_models_say_what_they_are_for(server: LiveServer) -> None:
    assert server.http.get("/v1/models").json()["data"][0]["task"] == "generate"


def test_an_aborted_one_is_an_error(server: LiveServer) -> None:
    server.call(server.link.hold.clear)
    try:
        timeout = 0.3
        while not server.link.seen:  # on a busy machine it has not come so far yet
            with pytest.raises(openai.APITimeoutError):
                server.client.with_options(timeout=timeout).embeddings.create(model="demo", input="hello")
            timeout *= 2
        server.wait(lambda: bool(server.link.aborted), "a client that leaves ends its request")
    finally:
        server.call(server.link.hold.set)


def test_lines_of_a_batch(tmp_path: Path) -> None:
    def line(number: int, **body: Any) -> dict[str, Any]:
        body = {"model": "demo", "input": [f"text {number}", "b"]} | body
        return {"custom_id": f"c{number}", "method": "POST", "url": "/v1/embeddings", "body": body}

    with LiveServer(store=tmp_path) as server:
        lines = [line(0), line(1, dimensions=2, encoding_format="base64"), line(2, dimensions=99)]
        created = server.client.batches.create(
            input_file_id=upload(server.client, lines).id, endpoint="/v1/embeddings", completion_window="24h"
        )
        batch = wait(server.client, created)
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
        good, bad = (results(server.client, file) for file in (batch.output_file_id, batch.error_file_id))
        encode = server.link.tokenizer.encode
        first = good[0]["response"]["body"]["data"]
        np.testing.assert_allclose(first[0]["embedding"], vector_of(encode("text 0")), rtol=1e-6)
        assert len(base64.b64decode(good[1]["response"]["body"]["data"][1]["embedding"])) == 8
        assert bad[0]["response"]["status_code"] == 400 and "dimensions" in json.dumps(bad[0])
        assert batch.usage.input_tokens == sum(len(encode(text)) for text in ("text 0", "b", "text 1", "b"))
