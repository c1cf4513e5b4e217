"""Every numeric and list field at and over its limits: 200, or a 400 that names it. Never a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.protocol.common import RepetitionDetection
from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.protocol.generate import NativeSampling
from jaxserve.api.protocol.messages import MessagesRequest
from jaxserve.api.protocol.tokens import DetokenizeRequest, TokenizeRequest

from .conftest import LiveServer, reply_with

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
    *(("/v1/messages", MessagesRequest, name) for name in fields(MessagesRequest)),
    *(("/generate", NativeSampling, name) for name in fields(NativeSampling)),
    *(("/tokenize", TokenizeRequest, name) for name in fields(TokenizeRequest) if name != "text"),  # a second prompt
    *(("/detokenize", DetokenizeRequest, name) for name in fields(DetokenizeRequest)),
]
BODIES: dict[str, dict[str, str]] = {
    "/v1/chat/completions": {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": "2"},
    "/v1/completions": {"prompt": '"Hi"', "max_tokens": "2"},
    "/v1/messages": {"messages": '[{"role": "user", "content": "Hi"}]', "max_tokens": "2"},
    "/generate": {"max_new_tokens": "2"},
    "/tokenize": {"prompt": '"Hi"'},
    "/detokenize": {"tokens": "[5]"},
}


def raw_body(route: str, name: str, value: str) -> bytes:
    """Written by hand: NaN and numbers of 5,000 digits are no JSON that a client makes."""
    outer, _, inner = name.partition(".")
    parts = BODIES[route] | {outer: f'{{"{inner}": {value}}}' if inner else value}
    for one, other in (("min_tokens", "max_tokens"), ("messages", "prompt")):
        if name == one:
            parts.pop(other, None)
    text = ", ".join(f'"{key}": {part}' for key, part in parts.items())
    return (
        f'{{"text": "Hi", "sampling_params": {{{text}}}}}' if route == "/generate" else f'{{"model": "demo", {text}}}'
    ).encode()


@pytest.mark.parametrize(("route", "model", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_at_and_over_its_limits(server: LiveServer, route: str, model: type[BaseModel], name: str) -> None:
    reply_with(server, "fine")
    schema = schema_of(model, name)
    for value in dict.fromkeys([*edges(schema), *ODD, *HUGE, *LISTS]):
        headers = {"content-type": "application/json"}
        response = server.http.post(route, content=raw_body(route, name, value), headers=headers)
        assert response.status_code in (200, 400), (value[:60], response.text)
        if response.status_code == 400:
            param = response.json()["error"].get("param") or ""
            named = name.rpartition(".")[2]
            assert named in param or named in response.json()["error"]["message"], (value[:60], response.text)
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
