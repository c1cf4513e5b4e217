import asyncio
import json
from typing import Any

import pytest

from jaxserve.api.batch import request
from jaxserve.api.batch.failure_log import FailureLog
from jaxserve.api.batch.job import NOT_RUN
from jaxserve.api.batch.request import Answered, RequestRunner, engine_ready, read_usage, unexecuted_line
from jaxserve.errors import (
    ContextLengthError,
    EngineDeadError,
    NotReadyError,
    QueueFullError,
    RequestTimeoutError,
    ServerError,
)
from jaxserve.store import BatchLine, BatchStatus, TokenCounts


def run(outcomes: list[Any], ready: Any = lambda: True) -> tuple[dict[str, Any], bool, int]:
    """Run one line whose attempts end as told; its line of the output, success, and the attempts."""
    attempts = 0

    async def handler(body: bytes, request_id: str, owner: str) -> Answered:
        nonlocal attempts
        attempts += 1
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    line = BatchLine('id \u2028 "x"\n', "POST", "/v1/completions", b'{"a": 1}')  # type: ignore[arg-type]
    result = asyncio.run(RequestRunner(handler, ready, FailureLog("batch_1"), retry_delay=0.001).run(7, line))
    assert result.line == 7 and b"\n" not in result.payload and not outcomes
    return json.loads(result.payload), result.succeeded, attempts


OK = Answered(200, b'{"x":1}')


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MAX_WAIT", 0.001)
    monkeypatch.setattr(request, "READY_POLL", 0.001)


def test_success() -> None:
    line, succeeded, _ = run([Answered(200, b'{\n"x":1}')])
    assert succeeded and line["error"] is None and line["custom_id"] == 'id \u2028 "x"\n'
    assert line["id"].startswith("batch_req_")
    response = line["response"]
    assert response["request_id"].startswith("req-")
    assert (response["status_code"], response["body"]) == (200, {"x": 1})


def test_a_fault_of_the_line_is_its_answer() -> None:
    line, succeeded, attempts = run([ContextLengthError("too long", param="messages")])
    assert not succeeded and attempts == 1 and line["error"] is None
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert not run([Answered(404, b'{"error":{}}')])[1]


def test_a_full_queue_or_an_engine_that_loads_never_fails_a_line() -> None:
    assert run([*(QueueFullError("full") for _ in range(20)), *(NotReadyError("busy") for _ in range(20)), OK])[1]


@pytest.mark.parametrize(
    "error", [EngineDeadError("gone"), RequestTimeoutError("late"), ServerError("bug"), KeyError()]
)
def test_faults_of_the_server_are_tried_again_a_few_times(error: Exception) -> None:
    assert run([error, error, OK])[1:] == (True, 3)
    line, succeeded, attempts = run([error] * 3)
    assert (succeeded, attempts) == (False, 3)
    assert line["response"]["status_code"] == getattr(error, "status", 500)
    assert "KeyError" not in json.dumps(line)


def test_while_the_engine_is_down_no_attempt_is_made() -> None:
    states = [False] * 30 + [True] * 9
    assert run([EngineDeadError("gone"), OK], ready=lambda: states.pop(0))[2] == 2


def test_engine_ready() -> None:
    def check(error: Exception) -> bool:
        def raises() -> None:
            raise error

        return engine_ready(raises)

    assert engine_ready(lambda: None)
    assert not check(NotReadyError("loading"))
    assert not check(EngineDeadError("dead"))


def test_a_line_that_never_ran() -> None:
    line = json.loads(unexecuted_line("c1", NOT_RUN[BatchStatus.EXPIRED]))
    assert line["id"].startswith("batch_req_")
    del line["id"]
    message = "This request could not be executed before the completion window expired."
    assert line == {"custom_id": "c1", "response": None, "error": {"code": "batch_expired", "message": message}}


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (None, TokenCounts()),
        ({"prompt_tokens": 5, "total_tokens": 5}, TokenCounts(5)),
        (
            {
                "prompt_tokens": 5,
                "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 2},
                "completion_tokens_details": {"reasoning_tokens": 1},
            },
            TokenCounts(5, 2, 3, 1),
        ),
        (
            {
                "input_tokens": 5,
                "output_tokens": 3,
                "input_tokens_details": {"cached_tokens": 2},
                "output_tokens_details": {"reasoning_tokens": 1},
            },
            TokenCounts(5, 2, 3, 1),
        ),
        ({"prompt_tokens": 5, "prompt_tokens_details": None, "extra": []}, TokenCounts(5)),
    ],
)
def test_usage_in_any_routes_words(usage: Any, expected: TokenCounts) -> None:
    assert read_usage(json.dumps({"id": "x", "usage": usage}).encode()) == expected


def test_an_answer_without_usage() -> None:
    assert read_usage(b'{"data":[1,2]}') == TokenCounts()
