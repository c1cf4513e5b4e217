"""The OpenAPI document is complete, and the answers are what it says."""

import re
from typing import Any

import orjson
import pytest

from jaxserve.api import answers
from jaxserve.api.openai import models
from jaxserve.api.sglang import protocol as sglang

from .conftest import LiveServer

CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True}
CHAT |= {"top_logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}
NO_BODY = {"/flush_cache", "/reset_prefix_cache", "/pause", "/resume", "/sleep", "/wake_up"}
TEXT: dict[str, Any] = {"model": "demo", "prompt": "Hi", "logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1}


def test_every_reference_resolves_and_every_route_has_an_answer(server: LiveServer) -> None:
    document = server.http.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    for reference in re.findall(r'"#/components/schemas/([^"]+)"', orjson.dumps(document).decode()):
        assert reference in schemas
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["responses"]["200"]["content"], path
            assert "422" not in operation["responses"]
            assert (method == "post" and path not in NO_BODY) == ("requestBody" in operation), path


def test_docs_shows_every_route_and_shape_and_loads_nothing(server: LiveServer) -> None:
    document = server.http.get("/openapi.json").json()
    page = server.http.get("/docs")
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert all(f"<code>{path}</code>" in page.text for path in document["paths"])
    assert set(re.findall(r'href="#([^"]+)"', page.text)) <= set(re.findall(r'id="([^"]+)"', page.text))
    assert "ChatCompletionRequest" in page.text and "frequency_penalty" in page.text
    assert not re.search(r"""(src=|href=["'](?!#|openapi)|https?:|<script)""", page.text)


@pytest.mark.parametrize(
    ("path", "body", "whole", "chunk"),
    [
        ("/v1/chat/completions", CHAT, answers.ChatCompletion, answers.ChatCompletionChunk),
        ("/v1/completions", TEXT, answers.TextCompletion, answers.TextCompletion),
        ("/generate", {"text": "Hi", "return_logprob": True}, sglang.Generated, sglang.Generated),
    ],
)
def test_answers_have_the_documented_shape(
    server: LiveServer, path: str, body: dict[str, Any], whole: Any, chunk: Any
) -> None:
    whole.model_validate_json(server.post(path, body).content, strict=True)
    streamed = server.post(path, body | {"stream": True, "stream_options": {"include_usage": True}})
    if path == "/generate":
        streamed = server.post(path, body | {"stream": True})
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert events.pop() == "[DONE]" and len(events) > 3
    for data in events:
        chunk.model_validate_json(data, strict=True)


def test_the_other_answers(server: LiveServer) -> None:
    models.ModelList.model_validate_json(server.http.get("/v1/models").content)
    models.ModelAnswer.model_validate_json(server.http.get("/v1/models/demo").content)
    answers.Health.model_validate_json(server.http.get("/health").content)
    answers.Error.model_validate_json(server.http.get("/nowhere").content)
    sglang.Tokenized.model_validate_json(server.post("/tokenize", {"prompt": "x"}).content)
    sglang.Detokenized.model_validate_json(server.post("/detokenize", {"tokens": [5]}).content)
