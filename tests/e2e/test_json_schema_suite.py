"""JSON-Schema-Test-Suite over HTTP: as many schemas are taken as llguidance takes, and every whole answer validates.

`pytest -m slow tests/e2e/test_json_schema_suite.py` prints the report of the whole suite.
"""

import asyncio
import json
from typing import Any

import httpx2
import pytest
from jsonschema.validators import extend

from jaxserve.grammar.worker import build_tokenizer
from jaxserve.library.serving import RunningServer
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO
from tests.conftest import SharedData
from tests.grammar.test_json_schema_suite import DRAFTS, SUITE, Report, alone, ecma_pattern, is_valid, load

CONCURRENCY = 16
HOT: dict[str, Any] = {"temperature": 1.5, "max_tokens": 200, "seed": 1}


def body_of(schema: Any, samples: int) -> dict[str, Any]:
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    messages = [{"role": "user", "content": "Answer in JSON."}]
    return {"model": "demo", "messages": messages, "response_format": wanted, "n": samples} | HOT


async def ask(http: httpx2.AsyncClient, case: dict[str, Any], samples: int, report: Report) -> None:
    reply = await http.post("/v1/chat/completions", json=body_of(case["schema"], samples))
    if reply.status_code == 400:
        error = reply.json()["error"]
        assert error["param"] == "response_format" and error["code"] == "invalid_json_schema", error
        report.refused += 1
        report.reasons[error["message"].partition(": ")[2].split(":")[0][:60]] += 1
        return
    assert reply.status_code == 200, (case["schema"], reply.text)
    report.accepted += 1
    validator = extend(DRAFTS[case["draft"]], {"pattern": ecma_pattern})(case["schema"])
    for choice in reply.json()["choices"]:
        report.sampled += 1
        whole = choice["finish_reason"] == "stop"
        report.unfinished += not whole
        valid = is_valid(validator, choice["message"]["content"]) if whole else True
        report.unchecked += valid is None
        if valid is False:
            report.failed.append(f"{case['draft']} {case['file']}: {case['schema']} <- {choice['message']['content']}")


async def run(url: str, cases: list[dict[str, Any]], samples: int) -> Report:
    report, places = Report(), asyncio.Semaphore(CONCURRENCY)

    async def one(http: httpx2.AsyncClient, case: dict[str, Any]) -> None:
        async with places:
            await ask(http, case, samples, report)

    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        await asyncio.gather(*(one(http, case) for case in cases))
    return report


@pytest.mark.parametrize(("step", "samples"), [(16, 2), pytest.param(1, 4, marks=pytest.mark.slow)])
def test_the_suite(
    server: RunningServer, shared_data: SharedData, step: int, samples: int, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = load(shared_data / SUITE)[::step]
    report = asyncio.run(run(server.url, cases, samples))
    tokenizer = Tokenizer.from_directory(DEMO)
    backend = build_tokenizer(tokenizer.to_json(), tokenizer.vocab_size, list(tokenizer.eos_token_ids))
    report.alone = sum(isinstance(case["schema"], dict) and alone(backend, case["schema"]) for case in cases)
    with capsys.disabled():
        print(f"\n{len(cases)} schemas over HTTP: {report}", json.dumps(report.reasons.most_common(5)), sep="\n")
    assert report.failed == []
    assert report.accepted >= report.alone
    assert report.unfinished < report.sampled / 4
