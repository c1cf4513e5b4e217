"""What the bodies of requests may cost: refused by their bytes, decoded off the loop, bounded in their sum."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import field_validator

from jaxserve.api.body_cost import (
    BODIES_IN_SUM,
    BYTES_A_TOKEN,
    EMBEDDING_VALUES,
    LARGE_BYTES,
    LARGE_STRUCTURES,
    MAX_BODY_BYTES,
    MIN_BODY_BYTES,
    MIN_SUM_BYTES,
    OBJECTS,
    SPARE_VALUES,
    STRUCTURES,
    VALUES,
    BodyLimits,
)
from jaxserve.api.fields import Body
from jaxserve.api.http.body import read_body
from jaxserve.config import Config, ServerSection
from jaxserve.text.json_cost import MAX_DIGITS, SMALL_BYTES
from tests.waiting import wait_until

from .conftest import LiveServer, reply_with
from .test_connection import connect, error_of

MIB = 2**20
CHAT = b'{"model":"demo","messages":[{"role":"user","content":"hi"}],"max_tokens":1,'
TEXT = b'{"model":"demo","prompt":"hi","max_tokens":1,'
CALLS = b'{"model":"demo","messages":[{"role":"user","content":"hi","tool_calls":['
NATIVE = b'{"text":"hi","sampling_params":{"max_new_tokens":1},'


def filled(head: bytes, item: bytes, tail: bytes, size: int = 2 * MIB) -> bytes:
    return head + b",".join([item] * (size // (len(item) + 1))) + tail


BOMBS: dict[str, tuple[str, bytes]] = {
    "sampling parameters": ("/generate", filled(b'{"text":"hi","sampling_params":[', b"{}", b"]}")),
    "request ids": ("/generate", filled(NATIVE + b'"rid":[', b'"a"', b"]}")),
    "switches": ("/generate", filled(NATIVE + b'"return_logprob":[', b"true", b"]}")),
    "lists in an unknown field": ("/v1/chat/completions", filled(CHAT + b'"x":[', b"[]", b"]}")),
    "documents": ("/v1/chat/completions", filled(CHAT + b'"documents":[', b"{}", b"]}")),
    "template arguments": ("/v1/chat/completions", filled(CHAT + b'"chat_template_kwargs":{"a":[', b"[]", b"]}}")),
    "tool calls": ("/v1/chat/completions", filled(CALLS, b"{}", b"]}]}")),
    "modalities": ("/v1/chat/completions", filled(CHAT + b'"modalities":[', b'"text"', b"]}")),
    "choices of a grammar": ("/v1/completions", filled(TEXT + b'"guided_choice":[', b'"a"', b"]}")),
    "unknown fields": ("/v1/completions", filled(TEXT, b'"some_name":0', b"}")),
    "enum": ("/v1/completions", filled(TEXT + b'"json_schema":{"enum":[', b"1", b"]}}")),
    "numbers of 4,000 digits": ("/v1/completions", filled(TEXT + b'"x":[', b"9" * 4000, b"]}")),
    "stop tokens": ("/v1/completions", filled(TEXT + b'"stop_token_ids":[', b"1", b"]}")),
    "lists of ids": ("/detokenize", filled(b'{"tokens":[', b"[9,9,9,9,9,9,9]", b"]}")),
}


def post(server: LiveServer, path: str, raw: bytes) -> Any:
    return server.http.post(path, content=raw, headers={"content-type": "application/json"})


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_of_many_small_things_is_refused_before_it_is_decoded(server: LiveServer, name: str) -> None:
    path, raw = BOMBS[name]
    answer = post(server, path, raw)
    assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith("The body has more than ")


@pytest.mark.parametrize("name", BOMBS)
def test_a_body_within_the_limits_is_answered(server: LiveServer, name: str) -> None:
    """By the field's own limit or at all: a small one of the same kind is no 413."""
    path, raw = BOMBS[name]
    head, tail = raw[: raw.index(b",", 200)], raw[-8:]
    closing = tail[tail.rindex(b",") + 1 :] if b"," in tail else tail
    small = head + closing[closing.index(b"]") if b"]" in closing else closing.index(b"}") :]
    assert post(server, path, small).status_code in (200, 400), small


def test_a_large_body_of_text_is_no_bomb(server: LiveServer) -> None:
    """Commas and brackets in texts do not count, nor do the ids of a long prompt."""
    text = json.dumps({"model": "demo", "prompt": "a, [b], {c}: \\" * 20_000, "truncate_prompt_tokens": 5}).encode()
    assert post(server, "/v1/completions", text).status_code == 200
    ids = {"model": "demo", "prompt": [5] * 100_000, "truncate_prompt_tokens": 5}
    assert server.post("/v1/completions", ids).status_code == 200


def tool(number: int) -> dict[str, Any]:
    """Of eight parameters, with what agents' clients write beside them."""
    properties = {f"p{i}": {"type": "string", "description": "what it is"} for i in range(8)}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": f"f{number}", "description": "what it does", "parameters": schema}}


def turn(number: int, calls: int) -> list[dict[str, Any]]:
    ids = [f"call_{number}_{i}" for i in range(calls)]
    made = [{"id": i, "type": "function", "function": {"name": "f", "arguments": '{"p0": "x"}'}} for i in ids]
    results = [{"role": "tool", "tool_call_id": i, "content": [{"type": "text", "text": "done"}]} for i in ids]
    return [{"role": "assistant", "content": None, "tool_calls": made}, *results]


@pytest.mark.parametrize(("turns", "calls", "tools"), [(500, 1, 128), (200, 4, 512), (1, 1, 800), (1000, 2, 0)])
def test_what_agents_send_is_within_the_limits(server: LiveServer, turns: int, calls: int, tools: int) -> None:
    """Histories of a thousand messages and more, and the tools of many servers."""
    messages = [message for number in range(turns) for message in turn(number, calls)]
    body = {"model": "demo", "messages": messages, "tools": [tool(number) for number in range(tools)]}
    server.app.state.server.body_limits().check_json(json.dumps(body).encode(), "/v1/chat/completions")


def test_limits_follow_the_context() -> None:
    section = ServerSection.model_validate({})
    small, large, huge = (BodyLimits.of(section, context) for context in (2048, 2**20, 10**7))
    assert (small.max_bytes, small.max_sum) == (MIN_BODY_BYTES, MIN_SUM_BYTES)
    assert large.max_bytes == BYTES_A_TOKEN * 2**20
    assert huge.max_bytes == MAX_BODY_BYTES
    assert small.json_limits("/v1/completions").values == VALUES
    assert large.json_limits("/v1/completions").values > 2**20  # its whole context as ids
    assert small.json_limits("/v1/embeddings").values > 300_000
    given = BodyLimits.of(ServerSection.model_validate({"max_body_bytes": 2048}), 2**20)
    assert (given.max_bytes, given.max_sum) == (2048, MIN_SUM_BYTES)


def test_the_document_says_the_same() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    mib = {name: number // MIB for name, number in (("floor", MIN_BODY_BYTES), ("top", MAX_BODY_BYTES))}
    for row in (
        f"{mib['floor']} MiB, or {BYTES_A_TOKEN} per token of the context if that is more, up to {mib['top']} MiB |",
        f"| objects | {OBJECTS} |",
        f"| objects, lists and names | {STRUCTURES} |",
        f"| values | {VALUES}, or the context and {SPARE_VALUES} if that is more |",
        f"| values of /v1/embeddings | {EMBEDDING_VALUES}, or the context and {SPARE_VALUES} if that is more |",
        f"| digits of a number, in a body over {SMALL_BYTES // 1024} KiB | {MAX_DIGITS} |",
        f"| {MIN_SUM_BYTES // MIB} MiB, or {BODIES_IN_SUM} of the largest if that is more; over it a 429 |",
        f"a body over {LARGE_BYTES // 1024} KiB or {LARGE_STRUCTURES} objects, lists and names is decoded in a thread",
    ):
        assert row in text, row


class Watched(Body):
    text: str

    @field_validator("text")
    @classmethod
    def _note(cls, text: str) -> str:
        THREADS.append(threading.current_thread().name)
        return text


THREADS: list[str] = []


@pytest.mark.parametrize(
    ("size", "lists", "large"),
    [
        (10, 0, False),
        (LARGE_BYTES, 0, True),
        (LARGE_BYTES // 2, LARGE_STRUCTURES - 10, False),
        (10, LARGE_STRUCTURES, True),
    ],
)
def test_a_large_body_is_decoded_off_the_loop(server: LiveServer, size: int, lists: int, large: bool) -> None:
    THREADS.clear()
    raw = json.dumps({"text": "x" * size, "some_field": [[]] * lists}).encode()

    class Incoming:
        app, headers, scope = server.app, {"content-type": "application/json"}, {"path": "/x"}

        async def body(self) -> bytes:
            return raw

    async def read() -> tuple[str, Watched]:
        return threading.current_thread().name, await read_body(cast(Any, Incoming()), Watched)

    loop, body = asyncio.run(read())
    assert body.text == "x" * size
    assert (THREADS != [loop]) == large


def test_all_bodies_together_have_a_bound() -> None:
    with LiveServer(Config()) as server, connect(server) as slow:
        reply_with(server, "fine")
        state = server.app.state.server
        limits = BodyLimits(max_bytes=MIB, max_sum=MIB, context=512)
        server.call(lambda: state.__dict__.__setitem__("_body_limits", limits))
        head = b"POST /v1/completions HTTP/1.1\r\nhost:\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        body = json.dumps({"model": "demo", "prompt": "hi", "user": "x" * (MIB - 200)}).encode()
        slow.sendall(head % len(body) + body[:-9])
        small = {"model": "demo", "prompt": "hi", "user": "x" * 1000}
        server.wait(lambda: state.bodies.held == len(body) - 9, "most of the large body has come")
        assert _status(server, small) == 429
        with connect(server) as other:
            other.sendall(head % len(json.dumps(small)) + b"{")
            status, error = error_of(read_all_now(other))
            assert (status, error["code"]) == (429, "rate_limit_exceeded")
        slow.sendall(body[-9:])  # it is let in all the same
        assert read_all_now(slow).startswith(b"HTTP/1.1 200")
        wait_until(lambda: _status(server, small) == 200, "there is room again")


def _status(server: LiveServer, body: dict[str, Any]) -> int:
    return server.post("/v1/completions", body).status_code


def read_all_now(connection: Any) -> bytes:
    """Headers and body of an answer whose connection stays open."""
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        part = connection.recv(65536)
        assert part, data
        data += part
    return data
