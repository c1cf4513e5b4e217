"""Threads of Messages over a real socket, by Anthropic's own client and its tool runner: with a store, with a full one
and without one.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import pytest

from jaxserve.cli.launch import open_store
from jaxserve.config import Config
from jaxserve.store import ThreadLimits
from tests.store.disks import FailingDisk
from tests.store.helpers import FakeClock

from .conftest import LiveServer, reply_with

QUESTION = {"role": "user", "content": "Weather in Paris?"}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CREATE = {"type": "create"}
KEY = "the-key"
HEADER = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.284; cch=%s;"}


@anthropic.beta_tool
def weather(city: str) -> str:
    """The weather.

    Args:
        city: A city.
    """
    return f"18 degrees in {city}"


@dataclass
class Client:
    """The SDK at one server, and what it sent and was answered."""

    sdk: Any
    sent: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)

    def note(self, response: httpx2.Response) -> None:
        self.sent.append(json.loads(response.request.content))
        self.statuses.append(response.status_code)

    @property
    def threads(self) -> list[str | None]:
        return [(body.get("thread") or {}).get("type") for body in self.sent]


@contextmanager
def client_of(server: LiveServer, key: str = KEY) -> Iterator[Client]:
    client = Client(None)
    http = anthropic.DefaultHttpxClient(event_hooks={"response": [client.note]})
    with anthropic.Anthropic(base_url=server.url, api_key=key, max_retries=0, http_client=http) as client.sdk:
        yield client


@pytest.fixture(scope="module")
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, clock: FakeClock) -> Iterator[LiveServer]:
    keys = [{"name": name, "value": f"key-of-{name}"} for name in ("ann", "bob")]
    config = Config.parse({"server": {"api_key": KEY, "keys": keys}})
    with LiveServer(config, store=tmp_path_factory.mktemp("store"), clock=clock) as server:
        server.http.headers["x-api-key"] = KEY
        yield server


@pytest.fixture
def server(live: LiveServer) -> Iterator[LiveServer]:
    script = live.link.script
    yield live
    live.call(live.link.hold.set)
    live.wait(lambda: not live.link.running and live.engine.num_live == 0, "requests were left behind")
    live.link.script = script
    live.link.seen.clear()


@pytest.fixture
def client(server: LiveServer) -> Iterator[Client]:
    with client_of(server) as client:
        yield client


def reply_in_turn(server: LiveServer, *texts: str) -> None:
    replies = iter(texts)
    server.link.script = lambda prompt, params: next(replies)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def prompts(server: LiveServer) -> list[list[int]]:
    """Of the requests since the last call."""
    found = [request.prompt_token_ids for request in server.link.seen]
    server.link.seen.clear()
    return found


def loop(client: Client, server: LiveServer, *, stream: bool, **keys: Any) -> list[list[int]]:
    """The prompts of one whole loop of the SDK's tool runner, which must come to its end."""
    reply_in_turn(server, f"I look.\n{CALL}", CALL, "Sunny.")
    asked = {"model": "demo", "max_tokens": 90, "system": "Be brief.", "tools": [weather], "messages": [QUESTION]}
    replies = list(client.sdk.beta.messages.tool_runner(stream=stream, **asked | keys))
    texts = [reply.get_final_message() if stream else reply for reply in replies]
    assert [reply.stop_reason for reply in texts] == ["tool_use", "tool_use", "end_turn"]
    assert texts[-1].content[0].text == "Sunny."
    return prompts(server)


def post(server: LiveServer, *messages: Any, path: str = "/v1/messages", key: str = KEY, **keys: Any) -> Any:
    """The answer of a request for a few tokens; `after`: a reply that it continues."""
    after = keys.pop("after", None)
    thread = {"type": "continue", "previous_message_id": after} if after else CREATE
    sent = [user(each) if isinstance(each, str) else each for each in messages]
    body = {"model": "demo", "messages": sent, "max_tokens": 60, "thread": thread} | keys
    return server.http.post(path, json=body, headers={"x-api-key": key})


def begin(server: LiveServer, *messages: Any, **keys: Any) -> dict[str, Any]:
    response = post(server, *messages or ("One",), **keys)
    assert response.status_code == 200, response.text
    return response.json()


def refused(response: Any, status: int, code: str, **more: Any) -> str:
    """The message of an error whose details are those that SDKs act on."""
    error = response.json()["error"]
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert (response.status_code, error["type"], error["details"]) == (status, kind, {"error_code": code, **more})
    return error["message"]


def unknown(server: LiveServer, reply_id: str, **keys: Any) -> None:
    message = refused(post(server, "Two", after=reply_id, **keys), 404, "thread_not_found")
    assert message == f"No thread was found for thread.previous_message_id '{reply_id}'."


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_runner_sends_each_message_once_and_the_model_sees_all(
    server: LiveServer, client: Client, stream: bool
) -> None:
    threaded = loop(client, server, stream=stream)
    assert client.threads == ["create", "continue", "continue"] and client.statuses == [200] * 3
    assert [len(body["messages"]) for body in client.sent] == [1, 1, 1]
    assert ["system" in body for body in client.sent] == ["tools" in body for body in client.sent] == [1, 0, 0]
    whole = loop(client, server, stream=stream, thread=False)
    assert client.threads[3:] == [None] * 3 and client.statuses == [200] * 6
    assert whole == threaded
    assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(whole))


def test_a_thread_of_the_sdk(server: LiveServer, client: Client) -> None:
    thread = client.sdk.beta.messages.thread(model="demo", max_tokens=60, system="Be brief.")
    first = thread.send(user("One"))
    with thread.stream(user("Two")) as stream:
        second = stream.get_final_message()
    third = thread.send(user("Three"))
    assert len({first.id, second.id, third.id}) == 3 and client.threads == ["create", "continue", "continue"]
    assert client.statuses == [200] * 3
    seen = prompts(server)
    client.sdk.beta.messages.create(
        model="demo", max_tokens=60, system="Be brief.", messages=list(thread.messages)[:-1]
    )
    assert prompts(server) == seen[-1:]


def test_every_kind_of_message_comes_back_as_it_was(server: LiveServer) -> None:
    """What continues a thread gives the prompt of the whole conversation."""
    tool = {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
    system = [HEADER | {"text": HEADER["text"] % "1"}, {"type": "text", "text": "Be brief."}]
    head = {"system": system, "tools": [tool, {"type": "web_search_20250305", "name": "web_search"}]}
    sent: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Look", "cache_control": {"type": "x"}}]}]
    reply_with(server, CALL)
    reply = begin(server, *sent, stop_sequences=["ris"], **head)
    assert reply["content"][-1]["input"] == {"INVALID_JSON": '{"city": "Pa'}
    result = {"type": "tool_result", "tool_use_id": reply["content"][-1]["id"], "content": [], "is_error": True}
    for new in (
        [result, {"type": "text", "text": "Again é 日本"}],
        "A text",
        [{"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A page"}}],
        [{"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}],
    ):
        sent += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": new}]
        reply_with(server, f"<think>Hm.</think>\n{CALL}" if new == "A text" else "")
        reply = begin(server, sent[-1], after=reply["id"])
        assert post(server, *sent, thread=None, **head).status_code == 200
        assert server.link.seen[-1].prompt_token_ids == server.link.seen[-2].prompt_token_ids
        counted = post(server, *sent, path="/v1/messages/count_tokens", thread=None, **head).json()
        assert counted == {"input_tokens": len(server.link.seen[-1].prompt_token_ids)}


def test_tokens_of_a_thread_are_counted_and_it_stays_as_it_is(server: LiveServer) -> None:
    first = begin(server, "One", system="Be brief.")
    count = lambda **keys: post(server, "Two", path="/v1/messages/count_tokens", **keys)
    counted = count(after=first["id"]).json()
    begin(server, "Two", after=first["id"])
    assert counted == {"input_tokens": len(server.link.seen[-1].prompt_token_ids)}
    assert count().json() == count(thread=None).json()
    refused(count(after=first["id"]), 400, "thread_already_continued")
    refused(count(after="msg_unknown"), 404, "thread_not_found")


def test_a_thread_is_stored_before_the_last_event(server: LiveServer) -> None:
    """Without waiting for the end of the stream, as soon as message_stop or message_delta is there."""
    for last in ("message_delta", "message_stop"):
        body = {"model": "demo", "messages": [QUESTION], "max_tokens": 9, "stream": True, "thread": CREATE}
        with server.http.stream("POST", "/v1/messages", json=body) as response:
            reply_id = ""
            for line in response.iter_lines():
                event: Any = json.loads(line.removeprefix("data: ")) if line.startswith("data: ") else {"type": ""}
                if event["type"] == "message_start":
                    reply_id = event["message"]["id"]
                if event["type"] == last:
                    break
            begin(server, "Two", after=reply_id)


def test_a_reply_is_continued_once(server: LiveServer) -> None:
    first = begin(server)
    second = begin(server, "Two", after=first["id"])
    message = refused(post(server, "Other", after=first["id"]), 400, "thread_already_continued")
    assert "already been continued" in message
    begin(server, "Three", after=second["id"])


def test_a_thread_is_continued_by_one_request_at_a_time(server: LiveServer) -> None:
    """A client that leaves, and a request that fails, leave the thread as it was."""
    first = begin(server, "FIRST")
    body = {"model": "demo", "messages": [QUESTION], "max_tokens": 9}
    thread = {"type": "continue", "previous_message_id": first["id"]}
    left = lambda: server.wait(lambda: server.engine.num_live == 0, "the request was not aborted")
    server.call(server.link.hold.clear)
    with server.http.stream("POST", "/v1/messages", json=body | {"thread": thread, "stream": True}) as response:
        assert response.status_code == 200
        refused(post(server, "Two", after=first["id"]), 400, "thread_continue_in_flight")
    left()
    with pytest.raises(httpx2.ReadTimeout):
        server.http.post("/v1/messages", json=body | {"thread": thread}, timeout=0.3)
    left()
    server.call(server.link.hold.set)
    long = post(server, "x " * 2000, after=first["id"])
    assert long.status_code == 400 and "prompt is too long" in long.json()["error"]["message"]
    wrong = post(server, {"role": "user", "content": [{"type": "video"}]}, after=first["id"])
    assert wrong.status_code == 400 and "messages.0.content.0.type" in wrong.json()["error"]["message"]
    begin(server, "Two", after=first["id"])
    assert "FIRST" in server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)


def test_system_and_tools_are_those_of_the_thread(server: LiveServer) -> None:
    tool: dict[str, Any] = {"name": "weather", "input_schema": {"type": "object"}}
    system = [HEADER | {"text": HEADER["text"] % "1"}, {"type": "text", "text": "Be brief."}]
    reply = begin(server, "One", system=system, tools=[tool])
    header = HEADER | {"text": HEADER["text"] % "2"}
    marked = {"tools": [tool | {"cache_control": {"type": "ephemeral"}}], "system": [header, *system[1:]]}
    changes: tuple[dict[str, Any], ...] = ({}, {"system": [header]}, {"system": "Be brief."}, marked)
    for keys in changes:
        reply = begin(server, "More", after=reply["id"], **keys)
        assert "Be brief." in server.link.tokenizer.decode(server.link.seen[-1].prompt_token_ids)
    other: dict[str, Any] = {"system": "Be long.", "tools": [tool | {"description": "Another"}]}
    for keys in ({"system": other["system"]}, {"tools": other["tools"]}, {"tools": []}, other):
        message = refused(post(server, "More", after=reply["id"], **keys), 400, "thread_fingerprint_mismatch")
        assert message.startswith(f"thread: differing field(s): {', '.join(keys)}. ")
    begin(server, "More", after=reply["id"])  # a refusal leaves it as it was


def test_a_thread_is_of_its_key(server: LiveServer) -> None:
    first = begin(server, key="key-of-ann")
    unknown(server, first["id"], key="key-of-bob")
    unknown(server, first["id"])
    second = begin(server, "Two", after=first["id"], key="key-of-ann")
    unknown(server, first["id"], key="key-of-bob")
    begin(server, "Three", after=second["id"], key="key-of-ann")


def test_an_expired_thread_is_an_unknown_one(server: LiveServer, client: Client, clock: FakeClock) -> None:
    first = begin(server)
    clock.now += 3599
    second = begin(server, "Two", after=first["id"])
    clock.now += 3600
    for reply_id in (second["id"], first["id"], "msg_unknown", "' OR 1"):
        unknown(server, reply_id)
    thread = client.sdk.beta.messages.thread(model="demo", max_tokens=60)
    thread.send(user("One"))
    clock.now += 3600
    thread.send(user("Two"))  # the SDK sends all of it again
    assert client.statuses == [200, 404, 200] and client.threads == ["create", "continue", "create"]
    assert len(client.sent[-1]["messages"]) == 3


@pytest.mark.parametrize(
    ("thread", "word"),
    [
        ({"type": "fork"}, "thread"),
        ({"type": "continue"}, "thread.previous_message_id"),
        ({"type": "continue", "previous_message_id": 3}, "thread.previous_message_id"),
        ({"type": "create", "previous_message_id": "msg_1"}, "thread.previous_message_id"),
        ({}, "thread"),
        ("create", "thread"),
    ],
)
def test_wrong_threads_are_named(server: LiveServer, thread: Any, word: str) -> None:
    response = post(server, "One", thread=thread)
    assert response.status_code == 400 and word in response.json()["error"]["message"], response.text
    assert post(server, after="msg_unknown").status_code == 400  # no messages


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_without_a_store_refuses_threads_and_sdks_go_on(stream: bool) -> None:
    with LiveServer() as server, client_of(server) as client:
        for keys in ({}, {"after": "msg_1"}, {"path": "/v1/messages/count_tokens"}):
            message = refused(post(server, "One", **keys), 400, "thread_unsupported_request", unsupported=["threads"])
            assert message.startswith("thread: this server runs without a store")
        threaded = loop(client, server, stream=stream)
        assert client.threads == ["create", None, None, None] and client.statuses == [400, 200, 200, 200]
        assert loop(client, server, stream=stream, thread=False) == threaded


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_disk_loses_no_answer(tmp_path: Path, stream: bool) -> None:
    """The thread is then an unknown one, and the SDK's runner goes on with the whole conversation."""
    disk = FailingDisk()
    with LiveServer(store=tmp_path, disk=disk) as server, client_of(server) as client:
        disk.failing.add("commit")
        loop(client, server, stream=stream)
        assert client.statuses == [200, 404, 200, 404, 200]
        assert client.threads == ["create", "continue", "create", "continue", None]


def test_the_limits_are_configured(tmp_path: Path) -> None:
    config = Config.parse({"store": {"path": str(tmp_path), "thread_expiry": 0.5, "thread_quota": "2 MiB"}})
    store, _ = open_store(config.store)
    assert store is not None and store.threads.limits == ThreadLimits(seconds=1, quota=2**21)
    default, limits = Config().store, ThreadLimits()
    assert (default.thread_expiry, default.thread_quota) == (limits.seconds, limits.quota)
