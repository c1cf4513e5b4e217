"""Rerank, score and classify with real models: an encoder's head, a decoder's head, and a reranker's words."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxserve import Engine, SamplingParams, launch_server
from jaxserve.library.serving import RunningServer
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO
from tests.conftest import ONE_ROW, SMALL
from tests.models.checkpoints import random_tensors, write_checkpoint, write_words
from tests.models.dense import dense_logits, dense_scores
from tests.models.families import CASES, CLASSIFIERS, VOCAB
from tests.quick import quick_processes, quick_programs

FLOAT32 = jnp.dtype("float32")
ONE = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
QUERY, DOCUMENTS = "w5 w6", ["w7 w8 w9", "w5 w6", " ".join(f"w{i}" for i in range(10, 40)), "w9"]


def post(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    answer = httpx2.post(f"{server.url}{path}", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def numbers(directory: Path, pairs: list[tuple[list[int], int]]) -> np.ndarray:
    model = load_model(directory, dtype=FLOAT32)
    ids = [(jnp.asarray(token_ids, jnp.int32), second) for token_ids, second in pairs]
    return np.stack([dense_scores(model.structure, model.leaves, *each) for each in ids])


def words(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    hf = CLASSIFIERS["bert_classifier"] | ONE
    return write_words(write_checkpoint(tmp_path_factory.mktemp("cross"), hf, random_tensors(hf)), VOCAB)


@pytest.fixture(scope="module")
def server(cross_encoder: Path, compile_cache: str) -> Iterator[RunningServer]:
    with (
        quick_processes(),
        launch_server(str(cross_encoder), served_name="cross", compile_cache=compile_cache, **SMALL) as server,
    ):
        yield server


def test_a_cross_encoder(server: RunningServer, cross_encoder: Path) -> None:
    query = [2, *words(QUERY), 3]
    expected = numbers(cross_encoder, [([*query, *words(text), 3], len(query)) for text in DOCUMENTS])[:, 0]
    body = {"query": QUERY, "documents": DOCUMENTS, "use_activation": False}
    results = post(server, "/v1/rerank", body)["results"]
    assert [each["index"] for each in results] == np.argsort(-expected).tolist()
    found = {each["index"]: each["relevance_score"] for each in results}
    np.testing.assert_allclose([found[i] for i in range(4)], expected, atol=1e-5)
    scores = post(server, "/score", {"queries": QUERY, "documents": DOCUMENTS})["data"]
    np.testing.assert_allclose([each["score"] for each in scores], 1 / (1 + np.exp(-expected)), atol=1e-5)
    alone = numbers(cross_encoder, [(query, 0)])[0]
    row = post(server, "/classify", {"input": QUERY, "use_activation": False})["data"][0]
    np.testing.assert_allclose(row["probs"], alone, atol=1e-5)
    assert httpx2.get(f"{server.url}/server_info").json()["stats"].get("compiles", 0) == 0
    assert httpx2.get(f"{server.url}/health_generate", timeout=60).status_code == 200
    generated = httpx2.post(f"{server.url}/v1/completions", json={"model": "cross", "prompt": "w5"})
    assert generated.status_code == 400 and "classifies texts" in generated.text


def test_the_same_in_process(cross_encoder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    query = [2, *words(QUERY), 3]
    logits = numbers(cross_encoder, [([*query, *words(text), 3], len(query)) for text in DOCUMENTS])[:, 0]
    expected = 1 / (1 + np.exp(-logits))
    with quick_programs(), Engine(str(cross_encoder), compile_cache=None, **SMALL) as engine:
        np.testing.assert_allclose(engine.score(QUERY, DOCUMENTS, progress=True), expected, atol=1e-5)
        best = engine.rerank(QUERY, DOCUMENTS, top_n=2, progress=True)
        assert capfd.readouterr().err.count("4/4") >= 2
        assert [each.index for each in best] == np.argsort(-expected)[:2].tolist()
        assert best[0].document == {"text": DOCUMENTS[best[0].index]}
        [label] = engine.classify("w5", progress=True)
        assert "1/1" in capfd.readouterr().err
        assert label.label == "LABEL_0" and len(label.probs) == 1


def test_a_decoders_head(tmp_path: Path) -> None:
    """The last token's number per label, also of a prompt over several chunks."""
    hf = CASES["qwen3"] | {"architectures": ["Qwen3ForSequenceClassification"], "num_hidden_layers": 1}
    write_words(write_checkpoint(tmp_path, hf, random_tensors(hf)), VOCAB)
    with quick_programs():
        engine = Engine(str(tmp_path), compile_cache=None, num_pages=64, **ONE_ROW)
    assert (engine.info.task, engine.info.labels) == ("classify", ["LABEL_0", "LABEL_1"])
    texts = [[4, 5, 6], list(range(4, 64))]
    found = engine.generate(texts, SamplingParams(embed=True))
    got = [np.frombuffer(completion.embedding or b"", "<f4") for [completion] in found]
    np.testing.assert_allclose(got, numbers(tmp_path, [(text, 0) for text in texts]), atol=1e-5)


PAIRS = (
    "{% for m in messages %}{% if m['role'] == 'query' %}Query: {{ m['content'] }}{% endif %}"
    "{% if m['role'] == 'document' %} Document: {{ m['content'] }} Answer: {% endif %}{% endfor %}"
)


def test_a_rerankers_words(compile_cache: str) -> None:
    """The demo model answers 0 or 1 for prompts that share their start, which is computed once."""
    query = "What is the capital of France? " * 4
    options = {"classifier_from_token": ("0", "1"), "chat_template": PAIRS, "compile_cache": compile_cache}
    with launch_server(**options, **ONE_ROW) as server:  # programs of this test alone
        data = post(server, "/score", {"queries": query, "documents": ["Paris", "a banana"]})["data"]
        cached = httpx2.get(f"{server.url}/server_info").json()["stats"].get("cached_tokens", 0)
    tokenizer, model = Tokenizer.from_directory(DEMO), load_model(DEMO, dtype=FLOAT32)
    zero, one = tokenizer.token_to_id("0"), tokenizer.token_to_id("1")
    assert zero is not None and one is not None
    for row, document in zip(data, ["Paris", "a banana"], strict=True):
        ids = tokenizer.encode(f"Query: {query} Document: {document} Answer: ", add_special_tokens=False)
        logits = np.asarray(dense_logits(model.structure, model.leaves, jnp.asarray(ids, jnp.int32))[-1], float)
        assert row["score"] == pytest.approx(1 / (1 + math.exp(logits[zero] - logits[one])), abs=1e-4)
    assert cached >= len(tokenizer.encode(query)) // 16 * 16


def test_decisions_share_their_input(compile_cache: str) -> None:
    """Thirty questions about a long input compute it about once, and have the answer of a question alone."""
    text = "The cat sits on the warm windowsill and looks at the birds. " * 8
    question = {"type": "choice", "instructions": "What is it?", "choices": [{"value": "cat"}, {"value": "dog"}]}
    with (
        launch_server(compile_cache=compile_cache, **SMALL) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        made = client.decisions.create(model="demo", input=text, questions=[question] * 30)  # type: ignore[list-item]
        alone = client.decisions.create(model="demo", input=text, questions=[question])  # type: ignore[list-item]
    usage = made.usage
    assert usage.input_tokens_details.cached_tokens > 0.8 * usage.input_tokens * 29 / 30
    [first] = alone.answers
    assert first.type == "choice" and sum(each.probability for each in first.probabilities) == pytest.approx(1)
    for answer in made.answers:
        assert answer.type == "choice" and answer.confidence == pytest.approx(first.confidence, abs=1e-4)
