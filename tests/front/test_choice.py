"""The model of a request: from its body, its query or by default; what no model can be read from is refused."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from jaxserve.api.body_cost import BodyLimits
from jaxserve.config import Config, ModelEntry
from jaxserve.errors import HTTPError
from jaxserve.front.app import choose
from jaxserve.front.loaded_models import LoadedModels, ModelPlan

LIMITS = BodyLimits(max_bytes=2**23, max_sum=2**29, context=2**21)


def plan(*names: str, **lora: Any) -> ModelPlan:
    return ModelPlan(ModelEntry.model_validate({"name": names[0]}), Config().replace(lora=lora), names)


SQL = {"name": "sql", "path": "sql"}
PLANS = plan("a", "alias"), plan("org/b:7", slots=1, adapters=[SQL]), plan("c", slots=1, keep=True)


def chosen(body: Any, query: str = "") -> str:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = Request({"type": "http", "path": "/v1/completions", "query_string": query.encode(), "headers": []})

    async def choice() -> str:
        models = LoadedModels(PLANS, Config().models, Config().server, Path())
        found = await choose(models, request, raw, LIMITS)
        return "" if found is None else found.plan.name

    return asyncio.run(choice())


@pytest.mark.parametrize(
    ("body", "query", "expected"),
    [
        (b"", "", ""),
        ({}, "", ""),
        ({"model": None}, "", ""),
        ({"model": "alias"}, "", "a"),
        ({"model": "org/b:7"}, "", "org/b:7"),
        ({"model": "org/b:7:latest"}, "", "org/b:7"),
        ({"prompt": {"model": "org/b:7"}}, "", ""),
        ({"prompt": "x" * 100_000, "model": "org/b:7"}, "", "org/b:7"),
        (b"", "model=org/b:7", "org/b:7"),
        ({"input_file_id": "f"}, "model=org%2Fb%3A7&after=x", "org/b:7"),
        ({"model": "a"}, "model=alias", "a"),
        ({"model": "sql"}, "", "org/b:7"),
        ({"model": "org/b:7:sql"}, "model=sql", "org/b:7"),
        ({"model": "sql:latest"}, "", "org/b:7"),
        ({"model": "c:sql"}, "", "c"),  # its store may have one
    ],
)
def test_the_model_of_a_request(body: Any, query: str, expected: str) -> None:
    assert chosen(body, query) == expected


MANY = b'{"model": "a", "x": [' + b"{}," * 20_000 + b"{}]}"
DEEP = b'{"model": "a", "x": ' + b"[" * 10_000 + b"]" * 10_000 + b"}"


@pytest.mark.parametrize(
    ("body", "query", "status", "code", "param"),
    [
        (b"hello", "", 400, "invalid_json", None),
        (b'{"model": "a"', "", 400, "invalid_json", None),
        (b'{"model": "a"} x', "", 400, "invalid_json", None),
        (DEEP, "", 400, "invalid_json", None),
        (b"\xff\xfe", "", 400, "invalid_json", None),
        ([1], "", 400, "invalid_type", None),
        (b"null", "", 400, "invalid_type", None),
        ({"model": 5}, "", 400, "invalid_type", "model"),
        ({"model": ["a"]}, "", 400, "invalid_type", "model"),
        ({"model": {"a": "a"}}, "", 400, "invalid_type", "model"),
        ({"model": "none"}, "", 404, "model_not_found", "model"),
        ({"model": ""}, "", 404, "model_not_found", "model"),
        ({"model": "a:sql"}, "", 404, "model_not_found", "model"),
        ({"model": "org/b:7:prose"}, "", 404, "model_not_found", "model"),
        ({"model": "a"}, "model=sql", 400, "invalid_value", "model"),
        (b"", "model=none", 404, "model_not_found", "model"),
        ({"model": "a"}, "model=org/b:7", 400, "invalid_value", "model"),
        (MANY, "", 413, None, None),
        (b'{"model": "a", "x": "' + b"x" * 2**23 + b'"}', "", 413, None, None),
    ],
)
def test_what_names_no_model_is_refused(body: Any, query: str, status: int, code: str | None, param: str) -> None:
    with pytest.raises(HTTPError) as refused:
        chosen(body, query)
    assert (refused.value.status, refused.value.code or None, refused.value.param) == (status, code, param)
