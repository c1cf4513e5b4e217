"""Every numeric and list field at and over its limits: 200, or a refusal that names it. Never a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from jaxserve.api.anthropic.protocol import MessagesRequest
from jaxserve.api.fields import RepetitionDetection
from jaxserve.api.ollama.protocol import OllamaChatRequest, OllamaGenerateRequest
from jaxserve.api.openai.protocol import ChatCompletionRequest, CompletionRequest
from jaxserve.api.responses.protocol import (
    AddItemsRequest,
    CreateConversationRequest,
    ResponsesRequest,
    UpdateConversationRequest,
)
from jaxserve.api.scoring.protocol import ClassifyRequest, DecisionRequest, RerankRequest, ScoreRequest
from jaxserve.api.sglang.protocol import DetokenizeRequest, NativeSampling, TokenizeRequest

from .conftest import LiveServer, reply_with, serving
from .fakes import VECTOR

ODD = ["NaN", "Infinity", "-Infinity", "1e400", '"1"', "true", "null", "[]", "{}", '""', "[null]", "[[]]", "0.5"]
HUGE = [str(2**31), str(2**63), str(-(2**63) - 1), "9" * 400, "9" * 5000, "-1"]
LISTS = ["[" + ",".join(["1"] * 5000) + "]", '["' + "x" * 100_000 + '"]', '["\\u0000"]', "[1e9]", "[-1]", "[1.5]"]


def edges(schema: dict[str, Any]) -> Iterator[str]:
    """Minimum - 1, minimum, maximum, maximum + 1 of every branch of a field."""
    for branch in [schema, *schema.get("anyOf", [])]:
        for name, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 1), ("exclusiveMaximum", -1)):
            if name in branch:
                yield from (json.dumps(branch[name]), json.dumps(branch[name] + step))
        for name in ("maxItems", "minItems"):
            if 0 < branch.get(name, 0) < 5000:
                item = 1 if "integer" in json.dumps(branch.get("items")) else "ab"
                yield from (json.dumps([item] * branch[name]), json.dumps([item] * (branch[name] + 1)))


def fields(model: type[BaseModel]) -> list[str]:
    """Every field, and those of an object that is made of numbers."""
    names = [name for name in model.model_json_schema()["properties"] if name != "model"]
    nested = [f"repetition_detection.{name}" for name in RepetitionDetection.model_fields]
    return names + (nested if "repetition_detection" in names else [])


def schema_of(model: type[BaseModel], name: str) -> dict[str, Any]:
    outer, _, inner = name.partition(".")
    return (RepetitionDetection if inner else model).model_json_schema()["properties"][inner or outer]


CASES = [
    *(("/v1/chat/completions", ChatCompletionRequest, name) for name in fields(ChatCompletionRequest)),
    *(("/v1/completions", CompletionRequest, name) for name in fields(CompletionRequest)),
    *(("/v1/responses", ResponsesRequest, name) for name in fields(ResponsesRequest)),
    *(("/v1/messages", MessagesRequest, name) for name in fields(MessagesRequest)),
    *(("/api/chat", OllamaChatRequest, name) for name in fields(OllamaChatRequest)),
    *(("/api/generate", OllamaGenerateRequest, name) for name in fields(OllamaGenerateRequest)),
    *(("/v1/rerank", RerankRequest, name) for name in fields(RerankRequest)),
    *(("/v1/score", ScoreRequest, name) for name in fields(ScoreRequest)),
    *(("/v1/classify", ClassifyRequest, name) for name in fields(ClassifyRequest)),
    *(("/v1/decisions", DecisionRequest, name) for name in fields(DecisionRequest)),
    *(("/generate", NativeSampling, name) for name in fields(NativeSampling)),
    *(("/tokenize", TokenizeRequest, name) for name in fields(TokenizeRequest) if name != "text"),  # a second prompt
    *(("/detokenize", DetokenizeRequest, name) for name in fields(DetokenizeRequest)),
]
# routes of models with a classification head: its labels
HEADS = {"/v1/rerank": ["LABEL_0"], "/v1/score": ["LABEL_0"], "/v1/classify": [f"LABEL_{i}" for i in range(VECTOR)]}
BODIES: dict[str, dict[str, str]] = {
    "/v1/chat/completions": {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": "2"},
    "/v1/completions": {"prompt": '"Hi"', "max_tokens": "2"},
    "/v1/responses": {"input": '"Hi"', "max_output_tokens": "2"},
    "/v1/messages": {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": "2"},
    "/api/chat": {"messages": '[{"role": "user", "content": "Hi"}]', "options": '{"num_predict": 2}'},
    "/api/generate": {"prompt": '"Hi"', "options": '{"num_predict": 2}'},
    "/v1/rerank": {"query": '"Hi"', "documents": '["Hi"]'},
    "/v1/score": {"queries": '"Hi"', "documents": '"Hi"'},
    "/v1/classify": {"input": '"Hi"'},
    "/v1/decisions": {"input": '"Hi"', "questions": '[{"type": "predicate", "instructions": "true?"}]'},
    "/generate": {"max_new_tokens": "2"},
    "/tokenize": {"prompt": '"Hi"'},
    "/detokenize": {"tokens": "[5]"},
}


def raw_body(route: str, name: str, value: str) -> bytes:
    """Written by hand: NaN and numbers of 5,000 digits are no JSON that a client makes."""
    outer, _, inner = name.partition(".")
    parts = BODIES[route] | {outer: f'{{"{inner}": {value}}}' if inner else value}
    for one, other in (("min_tokens", "max_tokens"), ("min_tokens", "max_output_tokens"), ("messages", "prompt")):
        if name == one:
            parts.pop(other, None)
    text = ", ".join(f'"{key}": {part}' for key, part in parts.items())
    return (
        f'{{"text": "Hi", "sampling_params": {{{text}}}}}' if route == "/generate" else f'{{"model": "demo", {text}}}'
    ).encode()


def allowed(name: str) -> tuple[int, ...]:
    """The statuses of a value of field `name`. A well-formed id that nothing has is a 404."""
    return (200, 400, 404) if name in {"conversation", "previous_response_id"} else (200, 400)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.mark.parametrize(
    ("path", "model", "name"),
    [
        ("", CreateConversationRequest, "items"),
        ("", CreateConversationRequest, "metadata"),
        ("/conv_none", UpdateConversationRequest, "metadata"),
        ("/conv_none/items", AddItemsRequest, "items"),
    ],
)
def test_a_field_of_a_conversation_at_and_over_its_limits(
    kept: LiveServer, path: str, model: type[BaseModel], name: str
) -> None:
    statuses = set()
    for value in dict.fromkeys([*edges(schema_of(model, name)), *ODD, *HUGE, *LISTS]):
        raw = f'{{"{name}": {value}}}'.encode()
        answer = kept.http.post(f"/v1/conversations{path}", content=raw, headers={"content-type": "application/json"})
        statuses.add(answer.status_code)
        if answer.status_code == 400:
            assert name in json.dumps(answer.json()["error"]), (value[:60], answer.text)
    assert 400 in statuses and statuses <= {200, 400, 404}


@pytest.mark.parametrize(("route", "model", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_at_and_over_its_limits(server: LiveServer, route: str, model: type[BaseModel], name: str) -> None:
    reply_with(server, "fine")
    schema, headers = schema_of(model, name), {"content-type": "application/json"}
    for value in dict.fromkeys([*edges(schema), *ODD, *HUGE, *LISTS]):
        with serving(server, labels=HEADS.get(route, [])):
            response = server.http.post(route, content=raw_body(route, name, value), headers=headers)
        assert response.status_code in allowed(name), (value[:60], response.text)
        if response.status_code >= 400:
            named = name.rpartition(".")[2]
            assert named in json.dumps(response.json()["error"]), (value[:60], response.text)
    canary = server.post("/v1/completions", {"model": "demo", "prompt": "Hi"}).json()
    assert canary["choices"][0]["text"] == "fine"


def test_the_table_is_not_too_lenient(server: LiveServer) -> None:
    """The cases above could pass with 200 everywhere; these must not."""
    for name, value in (("temperature", "NaN"), ("top_p", "0"), ("n", "129"), ("seed", str(2**63)), ("n", '"1"')):
        response = server.http.post(
            "/v1/completions",
            content=raw_body("/v1/completions", name, value),
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 400 and response.json()["error"]["param"] == name
