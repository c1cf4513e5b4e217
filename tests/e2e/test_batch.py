"""A batch on the real engine: the answers are those of online requests, and the reference pages' calls work."""

import json
import time
from typing import Any

import openai
import pytest

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


def wait(client: openai.OpenAI, batch: Any, seconds: float) -> Any:
    deadline = time.monotonic() + seconds
    while batch.status not in ("completed", "failed", "cancelled"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


@pytest.mark.parametrize("count", [2, 100])
def test_answers_are_those_of_online_requests(client: openai.OpenAI, count: int) -> None:
    batch = wait(client, start(client, count), 120)
    assert batch.request_counts.model_dump() == {"total": count, "completed": count, "failed": 0}
    lines = [json.loads(line) for line in client.files.content(batch.output_file_id).read().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"request-{n}" for n in range(count)]
    for number, line in list(enumerate(lines))[:26]:
        online = client.chat.completions.create(**body(number))
        assert line["response"]["body"]["choices"][0]["message"]["content"] == online.choices[0].message.content
    client.files.delete(batch.output_file_id)


def test_cancel_leaves_nothing_running(client: openai.OpenAI) -> None:
    """Long answers that fill all pages, so that requests are being retracted when the cancel comes."""
    batch = start(client, 500, max_tokens=500, ignore_eos=True)
    time.sleep(2)
    started = time.monotonic()
    cancelled = client.batches.cancel(batch_id=batch.id)
    assert cancelled.status == "cancelling"
    cancelled = wait(client, cancelled, 10)
    assert cancelled.status == "cancelled" and time.monotonic() - started < 10
    assert client.files.delete(batch.input_file_id).deleted
    started = time.monotonic()
    assert client.chat.completions.create(**body(0)).choices[0].message.content
    assert time.monotonic() - started < 5
