"""A batch on the real engine: the answers are those of online requests, and the reference pages' calls work."""

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from jaxserve import launch_server
from jaxserve.library.serving import RunningServer
from tests.conftest import FEW_PAGES
from tests.scrape import values
from tests.waiting import LAST_RESORT, wait_until

QUESTIONS = [f"What is the capital of {country}?" for country in ("France", "Japan", "Italy", "Spain", "Peru")]


def body(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": QUESTIONS[number % len(QUESTIONS)]}]
    return {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 4 + number % 13}


def start(client: openai.OpenAI, count: int, **changes: Any) -> Any:
    lines = [
        {"custom_id": f"request-{n}", "method": "POST", "url": "/chat/completions", "body": body(n) | changes}
        for n in range(count)
    ]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    file = client.files.create(file=("batch_requests.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")


def wait(client: openai.OpenAI, batch: Any) -> Any:
    while batch.status not in ("completed", "failed", "cancelled"):  # as long as the test's own limit allows
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("count", [2, 20, 100, pytest.param(5000, marks=pytest.mark.slow)])
def test_answers_are_those_of_online_requests(client: openai.OpenAI, count: int) -> None:
    batch = wait(client, start(client, count))
    assert batch.request_counts.model_dump() == {"total": count, "completed": count, "failed": 0}
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).read().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(count)]
    for number, line in list(enumerate(lines))[:26]:
        online = client.chat.completions.create(**body(number))
        assert line["response"]["body"]["choices"][0]["message"]["content"] == online.choices[0].message.content
    client.files.delete(batch.output_file_id)


def gauges(server: RunningServer) -> dict[str, float]:
    text = httpx2.get(f"{server.url}/metrics", timeout=LAST_RESORT).text
    return {name.removeprefix("jaxserve:"): value for name, value in values(text).items()}


def done(client: openai.OpenAI, batch_id: str) -> int:
    counts = client.batches.retrieve(batch_id).request_counts
    return counts.completed if counts is not None else 0


@pytest.fixture(scope="module")
def short_of_pages(compile_cache: str) -> Iterator[RunningServer]:
    """A server whose pool holds one of the answers that a batch writes two of at once."""
    with launch_server(compile_cache=compile_cache, new_token_ratio=0.05, **FEW_PAGES) as running:
        yield running


def test_cancel_of_5000_lines_while_requests_are_retracted(short_of_pages: RunningServer) -> None:
    server = short_of_pages
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=LAST_RESORT) as client:
        # lines that may stop, and do not: what nothing stops would have its room reserved
        batch = start(client, 5000, max_tokens=440, min_tokens=440)
        wait_until(lambda: gauges(server)["preemptions_total"] >= 2, "lines are preempted")
        wait_until(lambda: done(client, batch.id) >= 4, "four lines are done")
        cancelled = client.batches.cancel(batch_id=batch.id)
        assert cancelled.status == "cancelling"
        cancelled = wait(client, cancelled)
        assert cancelled.status == "cancelled"
        wait_until(lambda: not gauges(server)["num_requests_running"], "no line runs")
        now = gauges(server)
        assert now["num_requests_running"] == now["num_requests_waiting"] == now["requests_preempted"] == 0
        assert now["pages_free"] + now["pages_cached"] == now["pages_total"]
        lines = [json.loads(line) for line in client.files.content(cancelled.output_file_id).read().splitlines()]
        assert len(lines) == cancelled.request_counts.completed >= 4
        assert client.files.delete(batch.input_file_id).deleted
        assert client.chat.completions.create(**body(0)).choices[0].message.content
