"""The Batch API as the official client uses it, through the real routes and an engine whose tokens are known."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.api.batch.request import BATCH_PRIORITY, RouteHandler, with_batch_priority
from jaxserve.api.openai.routes import create_chat_completion
from jaxserve.config import Config
from jaxserve.errors import InvalidValueError
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from tests.api.conftest import LiveServer, reply_with
from tests.api.test_tools import STRICT
from tests.scrape import values
from tests.waiting import wait_until

ENDPOINTS = ("/v1/chat/completions", "/v1/completions")


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def client(live: LiveServer) -> Iterator[Any]:
    script = live.link.script
    yield live.client
    live.wait(lambda: not live.link.running and live.engine.num_live == 0, "requests were left behind")
    live.link.script, live.link.delay = script, 0.0
    live.link.seen.clear()


def chat_line(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": "demo", "messages": [{"role": "user", "content": f"Say {number}"}], "temperature": 0} | body
    return {"custom_id": f"request-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}


def upload(client: Any, lines: list[dict[str, Any]]) -> Any:
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    return client.files.create(file=("requests.jsonl", data), purpose="batch")


def create(client: Any, lines: list[dict[str, Any]], **keys: Any) -> Any:
    arguments = {"endpoint": ENDPOINTS[0], "completion_window": "24h"} | keys
    return client.batches.create(input_file_id=upload(client, lines).id, **arguments)


def wait(client: Any, batch: Any, *until: str) -> Any:
    deadline = time.monotonic() + 240  # on a machine that is busy with other things
    while batch.status not in (until or ("completed", "failed", "expired", "cancelled")):
        assert time.monotonic() < deadline, batch
        time.sleep(0.01)
        batch = client.batches.retrieve(batch.id)
    return batch


def results(client: Any, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in client.files.content(file_id).read().splitlines()]


@pytest.mark.parametrize("count", [2, 20, 100, 500])
def test_upload_create_poll_download_delete(client: Any, live: LiveServer, count: int) -> None:
    batch = create(client, [chat_line(number) for number in range(count)], metadata={"night": "1"})
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"night": "1"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    batch = wait(client, batch)
    assert batch.status == "completed" and batch.errors is None and batch.error_file_id is None
    assert batch.request_counts.model_dump() == {"total": count, "completed": count, "failed": 0}
    assert (batch.model, batch.endpoint) == ("demo", ENDPOINTS[0])
    stamps = [batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at]
    assert stamps == sorted(stamps)
    lines = results(client, batch.output_file_id)
    assert [line["custom_id"] for line in lines] == [f"request-{number}" for number in range(count)]
    online = client.chat.completions.create(**chat_line(0)["body"])
    body = lines[0]["response"]["body"]
    assert (
        body["choices"] == json.loads(online.model_dump_json())["choices"]
        or body["choices"][0]["message"]["content"] == online.choices[0].message.content
    )
    totals = [line["response"]["body"]["usage"] for line in lines]
    assert batch.usage.input_tokens == sum(usage["prompt_tokens"] for usage in totals) > 0
    assert batch.usage.output_tokens == sum(usage["completion_tokens"] for usage in totals) > 0
    assert batch.usage.total_tokens == batch.usage.input_tokens + batch.usage.output_tokens
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert client.files.delete(batch.output_file_id).deleted
    assert client.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_completions_and_urls_without_the_prefix(client: Any, prefix: str) -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "max_tokens": 4}
    line = {"custom_id": "x", "method": "POST", "url": f"{prefix}/completions", "body": body}
    batch = wait(client, create(client, [line], endpoint=f"{prefix}/completions"))
    assert (batch.status, batch.endpoint) == ("completed", "/v1/completions")
    choices = results(client, batch.output_file_id)[0]["response"]["body"]["choices"]
    assert isinstance(choices, list) and len(choices) == 2


def test_lines_meet_the_checks_of_online_requests(client: Any) -> None:
    bad = [
        chat_line(1, temperature=9),
        chat_line(2, messages=[]),
        chat_line(3, max_tokens=2**40),
        chat_line(4, audio={"voice": "x"}),
        chat_line(5, messages=[{"role": "user", "content": "long " * 5000}]),
    ]
    batch = wait(client, create(client, [chat_line(0), *bad]))
    assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, len(bad))
    for sent, line in zip(bad, results(client, batch.error_file_id), strict=True):
        with pytest.raises(openai.BadRequestError) as online:
            client.post("/chat/completions", body=sent["body"], cast_to=object)
        response = line["response"]
        assert (line["custom_id"], response["status_code"], line["error"]) == (sent["custom_id"], 400, None)
        assert response["body"]["error"] == online.value.body


def test_lines_with_odd_histories_and_stops_in_the_thinking(tmp_path: Path) -> None:
    """As online: arguments that are no object, ids of another form, and stops that sleep while the model thinks."""
    config = Config().replace(model={"chat_template": STRICT, "reasoning_parser": "qwen3"})
    with LiveServer(config, store=tmp_path) as server:
        reply_with(server, "<think>END hm</think><think>END so</think>Yes. END of it.")
        lines, user = [], {"role": "user", "content": "hi"}
        for given in ("", "null", "[1]", '{"city": "Pa', '{"a": 1}{"a": 2}'):
            call = {"id": "toolu_1", "type": "function", "function": {"name": "weather", "arguments": given}}
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            told = {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"}
            lines.append(chat_line(len(lines), messages=[user, called, told], stop=["END"]))
        batch = wait(server.client, create(server.client, lines))
        assert batch.request_counts.completed == len(lines), batch
        for line in results(server.client, batch.output_file_id):
            message = line["response"]["body"]["choices"][0]["message"]
            assert (message["content"], message["reasoning_content"]) == ("Yes. ", "END hm\nEND so"), message


def test_a_bad_file_fails_with_its_lines(client: Any) -> None:
    lines = [chat_line(1, stream=True), chat_line(1), chat_line(2, model="other"), chat_line(3) | {"url": "/v1/models"}]
    batch = wait(client, create(client, lines))
    assert batch.status == "failed" and batch.failed_at
    found = [(error.code, error.line, error.param) for error in batch.errors.data]
    assert found == [
        ("unsupported_parameter", 1, "body.stream"),
        ("duplicate_custom_id", 2, "custom_id"),
        ("model_mismatch", 3, "body.model"),
        ("url_mismatch", 4, "url"),
    ]


def test_lines_run_behind_online_requests(client: Any, live: LiveServer) -> None:
    wait(client, create(client, [chat_line(1), chat_line(2, priority=-5), chat_line(3, priority=-(2**31))]))
    client.chat.completions.create(**chat_line(4)["body"])
    priorities = [request.priority for request in live.link.seen]
    assert sorted(priorities[:-1]) == [BACKGROUND_PRIORITY, BATCH_PRIORITY - 5, BATCH_PRIORITY] and priorities[-1] == 0


def test_online_requests_find_room_beside_a_batch(client: Any, live: LiveServer) -> None:
    """The fake engine has 8 slots: lines take 7 at most, and give way to what is online."""
    live.link.delay = 0.003
    batch = create(client, [chat_line(number) for number in range(3000)])
    wait(client, batch, "in_progress")
    live.wait(lambda: live.engine.num_live >= 6, "the batch does not fill the engine")

    def online(number: int) -> None:
        client.chat.completions.create(**chat_line(number, max_tokens=1500)["body"], extra_body={"ignore_eos": True})

    with ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(online, number) for number in range(6)]
        live.wait(lambda: [request.priority for request in live.link.seen].count(0) == 6, "a request does not get in")
        live.wait(lambda: live.engine.num_live <= 6 + 1, "lines do not give way")
        live.link.delay = 0.0
        for answer in answers:
            answer.result()
    client.batches.cancel(batch.id)
    assert wait(client, batch).status == "cancelled"


def test_cancel_5000_midway(client: Any, live: LiveServer) -> None:
    live.link.delay = 0.002
    batch = create(client, [chat_line(number) for number in range(5000)])
    wait_until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 10, "ten lines are done")
    metrics = values(live.http.get("/metrics").text)
    assert (metrics["jaxserve:batches_requests"], metrics["jaxserve:batches_running"]) == (5000, 1)
    assert 10 <= metrics["jaxserve:batches_requests_finished"] < 5000
    assert client.batches.cancel(batch.id).status == "cancelling"
    client.files.delete(batch.input_file_id)
    batch = wait(client, batch)
    assert batch.status == "cancelled"
    assert not live.call(lambda: list(live.link.running)) and live.engine.num_live == 0
    output, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
    assert len(output) == batch.request_counts.completed >= 10
    assert len(output) + len(errors) == 5000
    assert {line["error"]["code"] for line in errors if line["response"] is None} == {"batch_cancelled"}
    assert client.batches.cancel(batch.id).status == "cancelled"
    wait_until(lambda: not values(live.http.get("/metrics").text)["jaxserve:batches_running"], "no batch runs")
    assert values(live.http.get("/metrics").text)["jaxserve:batches_requests"] == 0


@pytest.mark.parametrize("count", [1000, pytest.param(5000, marks=pytest.mark.slow)])
def test_more_lines_than_run_at_once(client: Any, count: int) -> None:
    batch = wait(client, create(client, [chat_line(number, max_tokens=1) for number in range(count)]))
    assert batch.request_counts.model_dump() == {"total": count, "completed": count, "failed": 0}
    assert len({line["custom_id"] for line in results(client, batch.output_file_id)}) == count


def test_a_finished_batch_cannot_be_cancelled(client: Any) -> None:
    batch = wait(client, create(client, [chat_line(1)]))
    with pytest.raises(openai.ConflictError) as error:
        client.batches.cancel(batch.id)
    assert error.value.response.headers["x-should-retry"] == "false"
    assert client.batches.retrieve(batch.id) == batch


def test_lists(client: Any) -> None:
    ids = [create(client, [chat_line(1)]).id for _ in range(5)]
    assert [batch.id for batch in client.batches.list(limit=2).data] == [ids[4], ids[3]]
    everything = [batch.id for batch in client.batches.list(limit=2)]
    assert everything[:5] == ids[::-1] and len(set(everything)) == len(everything)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
        ({"input_file_id": 7}, "input_file_id"),
        ({"endpoint": "/v1/moderations"}, "endpoint"),
        ({"endpoint": ""}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(i): "x" for i in range(17)}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 513}}, "metadata.k"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 2592001}}, "output_expires_after.seconds"),
        ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, "output_expires_after.anchor"),
    ],
)
def test_bad_creations(client: Any, live: LiveServer, changes: dict[str, Any], param: str) -> None:
    good = {"input_file_id": upload(client, [chat_line(1)]).id, "endpoint": ENDPOINTS[0], "completion_window": "24h"}
    answer = live.post("/v1/batches", good | changes)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


def test_the_input_must_be_a_batch_file(client: Any, live: LiveServer) -> None:
    file = client.files.create(file=("a.jsonl", b"{}"), purpose="user_data")
    with pytest.raises(openai.BadRequestError, match="purpose"):
        client.batches.create(input_file_id=file.id, endpoint=ENDPOINTS[0], completion_window="24h")
    for path in ("/v1/batches/none", "/v1/batches/..%2f"):
        assert live.http.get(path).status_code == 404
    assert live.http.post("/v1/batches/none/cancel").status_code == 404
    for query in ({"limit": 0}, {"limit": 101}, {"after": "none"}):
        assert live.http.get("/v1/batches", params=query).status_code == 400


def test_output_expires_after(client: Any) -> None:
    batch = wait(client, create(client, [chat_line(1)], output_expires_after={"anchor": "created_at", "seconds": 7200}))
    output = client.files.retrieve(batch.output_file_id)
    assert output.expires_at == output.created_at + 7200


def test_idempotency_key(client: Any, live: LiveServer) -> None:
    file_id = upload(client, [chat_line(1)]).id
    body = {"input_file_id": file_id, "endpoint": ENDPOINTS[0], "completion_window": "24h"}

    def post(key: str, **changes: Any) -> Any:
        return live.post("/v1/batches", body | changes, headers={"Idempotency-Key": key})

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(lambda _: post("night-1"), range(50)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    other = post("night-1", metadata={"a": "b"})
    assert (other.status_code, other.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert post("night-2").json()["id"] != answers[0].json()["id"]
    for key in ("", "k" * 256):
        assert post(key).status_code == 400


def test_a_restart_goes_on(tmp_path: Path) -> None:
    """A server is stopped in the middle and started again: a graceful end is an end like any other."""
    with LiveServer(store=tmp_path) as server:
        server.link.delay = 0.002
        batch = create(server.client, [chat_line(number) for number in range(300)])
        retrieve = server.client.batches.retrieve
        wait_until(lambda: retrieve(batch.id).request_counts.completed >= 20, "twenty lines are done")
        created = len(server.link.seen)
    with LiveServer(store=tmp_path) as server:
        batch = wait(server.client, batch)
        assert batch.request_counts.model_dump() == {"total": 300, "completed": 300, "failed": 0}
        assert len(server.link.seen) + created - 300 <= server.link.info.max_num_seqs
        assert len({line["custom_id"] for line in results(server.client, batch.output_file_id)}) == 300


def test_a_batch_waits_for_an_engine_that_loads(tmp_path: Path) -> None:
    with LiveServer(store=tmp_path) as server:
        server.link.delay = 10
        batch = create(server.client, [chat_line(1)])
        wait(server.client, batch, "in_progress")
    with LiveServer(store=tmp_path, ready=False) as server:
        assert server.http.get("/v1/batches").status_code == 503
        threading.Event().wait(0.3)
        assert not server.link.seen
        server.call(server.link.become_ready)
        server.wait(lambda: server.engine.alive, "not ready")
        assert wait(server.client, batch).request_counts.completed == 1


NEVER = {
    "more sequences than the queue can hold": ({"prompt": ["a"] * 2000, "n": 1, "best_of": 20}, "n"),
    "a number that is too large": ({"prompt": "a", "max_tokens": 4, "x": "HUGE"}, "x"),
    "a prompt that is too long": ({"prompt": "word " * 3000}, "prompt"),
    "a field that is refused by name": ({"prompt": "a", "typical_p": 0.5}, "typical_p"),
    "a constraint that cannot be read": ({"prompt": "a", "grammar": {"type": "regex"}}, "grammar.value"),
}


@pytest.mark.parametrize("name", NEVER)
def test_what_can_never_run_is_a_400_online_and_in_a_batch_at_once(client: Any, live: LiveServer, name: str) -> None:
    fields, param = NEVER[name]
    body = json.dumps({"model": "demo"} | fields).replace('"HUGE"', "1e999999")
    answer = live.http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    line = '{"custom_id": "never", "method": "POST", "url": "/v1/completions", "body": ' + body + "}"
    good = {"custom_id": "good", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "a"}}
    file = client.files.create(file=("in.jsonl", f"{line}\n{json.dumps(good)}".encode()), purpose="batch")
    new = {"input_file_id": file.id, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = wait(client, client.batches.create(**new))
    assert batch.request_counts.model_dump() == {"total": 2, "completed": 1, "failed": 1}
    (failed,) = results(client, batch.error_file_id)
    assert failed["custom_id"] == "never" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == param
    assert live.app.state.batches.window.num_running == 0


@pytest.mark.parametrize("number", ["18446744073709551617", "-123456789012345678901234567890", "0.1000000000000000055"])
def test_a_number_of_a_batch_keeps_its_digits(number: str) -> None:
    raw = b'{"tools": [{"const": %b}], "prompt": "\\u00e9 \\ud83d\\ude00"}' % number.encode()
    moved = with_batch_priority(raw)
    assert number.encode() in moved
    assert json.loads(moved) == json.loads(raw) | {"priority": BATCH_PRIORITY}


@pytest.mark.parametrize("priority", ["2147483648", "-2147483649", "1.0", "true", '"1"', "9e999"])
def test_a_priority_that_the_route_refuses_stays(priority: str) -> None:
    raw = b'{"prompt": "a", "priority": %b}' % priority.encode()
    assert with_batch_priority(raw) == raw


@pytest.mark.parametrize(("own", "moved"), [("null", 0), ("-7", -7), ("2147483647", 2**29 - 1)])
def test_a_priority_is_moved_into_that_of_batches(own: str, moved: int) -> None:
    raw = b'{"prompt": "a", "priority": %b}' % own.encode()
    assert json.loads(with_batch_priority(raw))["priority"] == BATCH_PRIORITY + moved


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "[1, NaN]", "-1e999"])
def test_a_number_that_is_none_of_json_is_a_400_wherever_it_stands(live: LiveServer, number: str) -> None:
    messages = [{"role": "user", "content": "hi, NaN and Infinity"}]
    good = {"model": "demo", "messages": messages, "max_tokens": 1, "chat_template_kwargs": {"x": "NaN"}}
    assert live.post("/v1/chat/completions", good).status_code == 200
    unknown, documents = good | {"some_field": {"x": "NaN"}}, good | {"documents": [{"x": "NaN"}]}
    call = {"type": "function", "function": {"name": "f", "parameters": {"x": "NaN"}}}
    for body in (good, unknown, documents, good | {"tools": [call]}):
        raw = json.dumps(body).replace('"NaN"', number)
        answer = live.http.post("/v1/chat/completions", content=raw, headers={"content-type": "application/json"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_json", "x"), raw
        handler = RouteHandler(live.app, "/v1/chat/completions", create_chat_completion)
        with pytest.raises(InvalidValueError, match="not valid JSON"):
            live.run(handler(raw.encode(), "req-1", ""))


def test_a_request_that_waits_for_room_sends_none_of_its_parts(live: LiveServer) -> None:
    live.call(live.link.hold.clear)
    with ThreadPoolExecutor(2) as pool:
        body = {"model": "demo", "prompt": ["a"] * 2000, "max_tokens": 1}
        first = [pool.submit(live.post, "/v1/completions", body) for _ in range(2)]
        live.wait(lambda: live.engine.num_live == 4000, "the first are live")
        seen = len(live.link.seen)
        refused = live.post("/v1/completions", {"model": "demo", "prompt": ["a"] * 500})
        assert (refused.status_code, len(live.link.seen)) == (429, seen)
        live.call(live.link.hold.set)
        assert [each.result().status_code for each in first] == [200, 200]
