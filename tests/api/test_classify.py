"""/v1/classify over an engine whose numbers are known: labels, activations, inputs, errors."""

from typing import Any

import numpy as np
import pytest

from jaxserve.api.scoring.protocol import Classified

from .conftest import LiveServer, serving
from .fakes import MAX_MODEL_LEN, VECTOR, vector_of

LABELS = [f"label {i}" for i in range(VECTOR)]


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x) / np.exp(x).sum()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.mark.parametrize("path", ["/classify", "/v1/classify"])
def test_labels_of_texts(path: str, server: LiveServer) -> None:
    texts = ["good", "bad news", "so so"]
    numbers = [vector_of(server.link.tokenizer.encode(text)).astype(float) for text in texts]
    with serving(server, labels=LABELS):
        answer = server.post(path, {"model": "demo", "input": texts}).json()
    Classified.model_validate(answer, strict=True)
    assert answer["object"] == "list" and answer["id"].startswith("classify-")
    assert [row["label"] for row in answer["data"]] == [LABELS[int(x.argmax())] for x in numbers]
    np.testing.assert_allclose([row["probs"] for row in answer["data"]], [softmax(x) for x in numbers], atol=1e-6)
    assert [(row["index"], row["num_classes"]) for row in answer["data"]] == [(i, VECTOR) for i in range(3)]
    tokens = sum(len(server.link.tokenizer.encode(text)) for text in texts)
    assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize(
    ("facts", "body", "expected"),
    [
        ({"labels": LABELS}, {"use_activation": True}, softmax),
        ({"labels": LABELS}, {"use_activation": False}, lambda x: x),
        ({"labels": LABELS, "multi_label": True}, {}, sigmoid),
        ({"labels": LABELS, "regression": True}, {}, lambda x: x),
    ],
)
def test_activations(facts: dict[str, Any], body: dict[str, Any], expected: Any, server: LiveServer) -> None:
    with serving(server, **facts):
        row = server.post("/classify", {"input": [5, 6, 7]} | body).json()["data"][0]
    np.testing.assert_allclose(row["probs"], expected(vector_of([5, 6, 7]).astype(float)), atol=1e-6)


def test_long_texts(server: LiveServer) -> None:
    ids = [7] * (MAX_MODEL_LEN + 1)
    with serving(server, labels=LABELS):
        refused = server.post("/classify", {"input": ids})
        assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
        row = server.post("/classify", {"input": ids, "truncate_prompt_tokens": 3}).json()["data"][0]
    np.testing.assert_allclose(row["probs"], softmax(vector_of(ids[:3]).astype(float)), atol=1e-6)


def test_other_models_do_not_classify(server: LiveServer) -> None:
    for facts in ({}, {"is_embedding": True}):
        with serving(server, **facts):
            answer = server.post("/classify", {"input": "a"})
        assert answer.status_code == 400 and "does not support classification" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [10**6]}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"input": "a", "use_activation": "yes"}, "use_activation"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"input": "a", "model": "nobody"}, "model"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, server: LiveServer) -> None:
    with serving(server, labels=LABELS):
        answer = server.post("/classify", body)
    assert answer.status_code == (404 if "model" in body else 400)
    assert answer.json()["error"]["param"] == param
