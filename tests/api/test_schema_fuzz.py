"""schemathesis over the whole OpenAPI document, no route and no field left out: requests that follow it and requests
that break it. Never a 5xx, and every answer is one that the document describes."""

import random
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

from jaxserve.api.app import create_app
from jaxserve.config import Config
from jaxserve.store import Store

from .conftest import LiveServer
from .fakes import fake_engine

CHECKS: Any = (
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
)
CONFIG = Config().replace(server={"admin_api_key": "root"}, logging={"level": "error"})
KEY = {"authorization": "Bearer root"}


def document() -> dict[str, Any]:
    """Of a server with all its routes."""
    with tempfile.TemporaryDirectory() as directory:
        app = create_app(fake_engine(CONFIG)[0], CONFIG, store=Store(Path(directory)))
        return app.openapi()


SCHEMA: Any = schemathesis.openapi.from_dict(document())
OPERATIONS = {result.ok().label: result.ok() for result in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(CONFIG, store=tmp_path_factory.mktemp("store")) as server:
        yield server


def existing(server: LiveServer) -> dict[str, str]:
    """Names that exist, by the parameter that takes them: with drawn ones every answer would be a 404."""
    upload = {"file": ("a.jsonl", b'{"custom_id": "1"}\n'), "purpose": (None, "batch")}
    file_id = server.http.post("/v1/files", files=upload, headers=KEY).json()["id"]
    item = {"role": "user", "content": "x"}
    response_id = server.http.post("/v1/responses", json={"input": "x"}, headers=KEY).json()["id"]
    conversation_id = server.http.post("/v1/conversations", json={"items": [item]}, headers=KEY).json()["id"]
    kept = {"response_id": response_id, "previous_response_id": response_id, "conversation_id": conversation_id}
    return {"model": "demo", "file_id": file_id, "input_file_id": file_id} | kept


def aim(case: schemathesis.Case, names: dict[str, str]) -> None:
    """Let a drawn request meet what exists, where it names anything at all."""
    for place in (case.body, case.path_parameters):
        if isinstance(place, dict):
            place.update({name: value for name, value in names.items() if isinstance(place.get(name), str)})


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["positive", "negative"])
@pytest.mark.parametrize("count", [4, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_as_documented(fuzzed: LiveServer, label: str, count: int, mode: GenerationMode) -> None:
    operation, names, rng = OPERATIONS[label], existing(fuzzed), random.Random(0)
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(
        max_examples=count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=cast("Any", list(HealthCheck)), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: schemathesis.Case) -> None:
        if rng.random() < 0.7:
            aim(case, names)
        response = case.call(base_url=fuzzed.url, headers=KEY, timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    try:
        ask()
    except Unsatisfiable:  # there is nothing to break: no body, no query, and any text is a path
        assert mode is GenerationMode.NEGATIVE and not operation.body and not operation.query
    if mode is GenerationMode.NEGATIVE and operation.body:
        assert all(400 <= status < 500 for status in statuses), statuses
    assert fuzzed.post("/v1/completions", {"model": "demo", "prompt": "Hi"}).status_code == 200


def test_every_route_of_the_document_is_there() -> None:
    paths = document()["paths"]
    assert len(OPERATIONS) == sum(len(operations) for operations in paths.values()) > 20
