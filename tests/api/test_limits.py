"""Every numeric and list field at and over its limits: 200, or a 400 that names it. Never a 5xx."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from jaxserve.api.protocol.chat import ChatCompletionRequest
from jaxserve.api.protocol.completions import CompletionRequest
from jaxserve.api.protocol.generate import NativeSampling

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
    properties = model.model_json_schema()["properties"]
    plain = ("model", "messages", "prompt", "input_ids", "stream", "request_id", "rid")
    return [name for name in properties if name not in plain]


CASES = [
    *(("/v1/chat/completions", ChatCompletionRequest, name) for name in fields(ChatCompletionRequest)),
    *(("/v1/completions", CompletionRequest, name) for name in fields(CompletionRequest)),
    *(("/generate", NativeSampling, name) for name in fields(NativeSampling)),
]


def raw_body(route: str, name: str, value: str) -> bytes:
    if route == "/generate":
        return f'{{"text": "Hi", "sampling_params": {{"max_new_tokens": 2, "{name}": {value}}}}}'.encode()
    prompt = '"messages": [{"role": "user", "content": "Hi"}]' if "chat" in route else '"prompt": "Hi"'
    limit = "" if name in ("max_tokens", "min_tokens") else '"max_tokens": 2, '
    return f'{{"model": "demo", {prompt}, {limit}"{name}": {value}}}'.encode()


@pytest.mark.parametrize(("route", "model", "name"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_field_at_and_over_its_limits(server: LiveServer, route: str, model: type[BaseModel], name: str) -> None:
    reply_with(server, "fine")
    schema = model.model_json_schema()["properties"][name]
    for value in dict.fromkeys([*edges(schema), *ODD, *HUGE, *LISTS]):
        headers = {"content-type": "application/json"}
        response = server.http.post(route, content=raw_body(route, name, value), headers=headers)
        assert response.status_code in (200, 400), (value[:60], response.text)
        if response.status_code == 400:
            param = response.json()["error"]["param"] or ""
            assert name in param or name in response.json()["error"]["message"], (value[:60], response.text)
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
