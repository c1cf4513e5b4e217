"""SGLang's sessions: a request goes on with an earlier one's tokens."""

import time
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.api import sessions
from jaxserve.api.fields import SessionParams
from jaxserve.api.sessions import OpenSessionRequest
from jaxserve.client.async_engine import AbortSignal
from jaxserve.errors import InvalidValueError, QueueFullError
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.step import FinishReason

from .conftest import LiveServer, reply_with
from .fakes import DEMO

A, B, C = [7, 8, 9], [20, 21], [30]
REPLY = [11, 12]


@pytest.fixture
def session(server: LiveServer) -> Iterator[str]:
    reply_with(server, REPLY)
    opened = server.post("/open_session", {"capacity_of_str_len": 0}).json()
    yield opened
    server.post("/close_session", {"session_id": opened})


def said(server: LiveServer, name: str, ids: list[int], **params: Any) -> list[int]:
    """The prompt that the engine sees of a request."""
    body = {"input_ids": ids, "rid": name, "session_params": params}
    response = server.post("/generate", body)
    assert response.status_code == 200, response.text
    assert response.json()["meta_info"]["id"] == name
    return server.link.seen[-1].prompt_token_ids


def output(server: LiveServer) -> list[int]:
    return [*REPLY, server.link.info.eos_token_ids[0]]


def test_a_tree_of_turns(server: LiveServer, session: str) -> None:
    out = output(server)
    assert said(server, "a", A, id=session) == A
    assert said(server, "b", B, id=session, rid="a") == A + out + B
    assert said(server, "c", C, id=session, rid="a") == A + out + C
    assert said(server, "d", C, id=session, rid="b") == A + out + B + out + C
    assert said(server, "e", C, id=session, rid="b", offset=2) == A[:2] + C
    assert said(server, "f", C, id=session, rid="a", offset=-1) == A + REPLY + C
    assert said(server, "g", C, id=session, rid="b", drop_previous_output=True) == A + out + B + C
    assert said(server, "h", C, id=session) == C


def test_replacing(server: LiveServer, session: str) -> None:
    for rid, before in (("a", None), ("b", "a"), ("c", "b")):
        said(server, rid, A, id=session, rid=before)
    assert said(server, "b2", B, id=session, rid="a", replace=True) == A + output(server) + B
    for gone in ("b", "c"):
        body = {"input_ids": C, "session_params": {"id": session, "rid": gone}}
        assert server.post("/generate", body).json()["error"]["param"] == "session_params.rid"
    said(server, "z", A, id=session, replace=True)
    assert server.post("/generate", {"input_ids": C, "session_params": {"id": session, "rid": "a"}}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_chat_and_completions_go_on_too(server: LiveServer, session: str, stream: bool) -> None:
    out, keys = output(server), {"model": "demo", "stream": stream}
    body = keys | {"prompt": A, "rid": "a", "session_params": {"id": session}}
    assert server.post("/v1/completions", body).status_code == 200
    chat = keys | {"messages": [{"role": "user", "content": "Hi"}]}
    server.post("/v1/chat/completions", chat)
    alone = server.link.seen[-1].prompt_token_ids
    response = server.post("/v1/chat/completions", chat | {"rid": "b", "session_params": {"id": session, "rid": "a"}})
    assert response.status_code == 200 and server.link.seen[-1].prompt_token_ids == A + out + alone
    echoed = keys | {"prompt": C, "echo": True, "session_params": {"id": session, "rid": "b"}, "stream": False}
    text = server.post("/v1/completions", echoed).json()["choices"][0]["text"]
    assert text.startswith(server.link.tokenizer.decode(A + out + alone + out + C))


def test_a_streaming_session_only_goes_on(server: LiveServer) -> None:
    reply_with(server, REPLY)
    name = server.post("/open_session", {"session_id": "line", "streaming": True, "timeout": 60}).json()
    assert name == "line" and said(server, "a", A, id=name) == A
    assert said(server, "b", B, id=name) == A + output(server) + B
    for wrong in ({"offset": 2}, {"replace": True}, {"drop_previous_output": True}):
        error = server.post("/generate", {"input_ids": C, "session_params": {"id": name} | wrong}).json()["error"]
        assert error["param"] == f"session_params.{next(iter(wrong))}"
    assert server.post("/close_session", {"session_id": name}).json() == {"success": True}


def test_a_turn_that_runs(server: LiveServer, session: str) -> None:
    """It cannot be gone on from, but it can be replaced: then it ends, and what it said so far counts."""
    server.link.delay = 0.2
    body = {"input_ids": A, "rid": "slow", "session_params": {"id": session}, "stream": True}
    with server.http.stream("POST", "/generate", json=body) as response:
        wanted: dict[str, Any] = {"input_ids": B, "rid": "next", "session_params": {"id": session, "rid": "slow"}}
        error = server.post("/generate", wanted).json()["error"]
        assert error["param"] == "session_params.rid" and "has not ended" in error["message"]
        wanted["session_params"]["replace"] = True
        assert server.post("/generate", wanted).status_code == 200
        prompt = server.link.seen[-1].prompt_token_ids
        assert prompt[:3] == A and prompt[-2:] == B and 0 < len(prompt) - 5 < 3
        assert '"type":"abort"' in "".join(response.iter_text())


def test_a_turn_that_is_replaced_ends_no_other_request_of_its_id(server: LiveServer, session: str) -> None:
    server.link.delay = 60  # after the first token
    stream = {"input_ids": A, "rid": "same", "stream": True}
    turn = stream | {"session_params": {"id": session}}
    with (
        server.http.stream("POST", "/generate", json=stream) as other,
        server.http.stream("POST", "/generate", json=turn) as replaced,
    ):
        server.wait(lambda: len(server.link.running) == 2, "they do not run")
        assert other.status_code == 200
        wanted = {"input_ids": B, "rid": "next", "session_params": {"id": session, "rid": "same", "replace": True}}
        assert server.post("/generate", wanted | {"sampling_params": {"max_new_tokens": 1}}).status_code == 200
        assert '"type":"abort"' in "".join(replaced.iter_text())
        first = server.link.seen[0].request_id
        assert list(server.link.running) == [first] and server.engine.num_live == 1


@pytest.mark.parametrize("leaves", [False, True])
def test_a_streaming_session_goes_on_from_its_last_whole_turn(server: LiveServer, leaves: bool) -> None:
    """A turn that was aborted, or whose client left, never was: neither its prompt nor its output is kept."""
    reply_with(server, REPLY)
    name = server.post("/open_session", {"streaming": True}).json()
    for before, rid in ([], "a"), ([*A, *output(server)], "b"):
        server.link.delay = 60  # after the first token
        body = {"input_ids": B, "rid": f"cut-{rid}", "session_params": {"id": name}, "stream": True}
        with server.http.stream("POST", "/generate", json=body) as response:
            lines = response.iter_lines()
            assert '"output_ids":[11]' in next(lines)
            if not leaves:
                server.call(lambda: [server.link._abort(each) for each in list(server.link.running)])
                assert '"type":"abort"' in "".join(lines)
        server.wait(lambda: not server.app.state.server.live._running, "the turn did not end")
        server.link.delay = 0
        assert said(server, rid, A, id=name) == before + A
    server.post("/close_session", {"session_id": name})


@pytest.mark.parametrize("streaming", [False, True])
def test_a_request_that_fails_can_be_sent_again(server: LiveServer, streaming: bool) -> None:
    reply_with(server, REPLY)
    name = server.post("/open_session", {"streaming": streaming}).json()
    said(server, "a", A, id=name)
    wanted = {"input_ids": B, "rid": "b", "session_params": {"id": name} | ({} if streaming else {"rid": "a"})}
    engine: Any = server.engine
    generate = engine.generate

    async def full(*args: Any, **keys: Any) -> Any:
        raise QueueFullError("full")
        yield

    server.call(lambda: setattr(engine, "generate", full))
    assert server.post("/generate", wanted).status_code == 429
    server.call(lambda: setattr(engine, "generate", generate))
    assert server.post("/generate", wanted).status_code == 200
    assert server.link.seen[-1].prompt_token_ids == A + output(server) + B
    server.post("/close_session", {"session_id": name})


def test_what_was_only_scored_leaves_no_output(server: LiveServer, session: str) -> None:
    body = {"input_ids": A, "rid": "a", "session_params": {"id": session}, "sampling_params": {"max_new_tokens": 0}}
    assert server.post("/generate", body).status_code == 200
    assert said(server, "b", B, id=session, rid="a") == A + B
    text = {"model": "demo", "prompt": A, "max_tokens": 0, "rid": "c", "session_params": {"id": session}}
    assert server.post("/v1/completions", text).status_code == 200
    assert said(server, "d", B, id=session, rid="c") == A + B


BAD: list[tuple[str, Any, str]] = [
    ("/open_session", {"capacity_of_str_len": -1}, "capacity_of_str_len"),
    ("/open_session", {"capacity_of_str_len": "9"}, "capacity_of_str_len"),
    ("/open_session", {"session_id": ""}, "session_id"),
    ("/open_session", {"session_id": "x" * 129}, "session_id"),
    ("/open_session", {"timeout": 0}, "timeout"),
    ("/open_session", {"timeout": 1e300}, "timeout"),
    ("/close_session", {}, "session_id"),
    ("/close_session", {"session_id": 5}, "session_id"),
    ("/generate", {"session_params": {}}, "session_params.id"),
    ("/generate", {"session_params": "x"}, "session_params"),
    ("/generate", {"session_params": {"id": "none"}}, "session_params.id"),
    ("/generate", {"session_params": {"id": "S", "rid": "none"}}, "session_params.rid"),
    ("/generate", {"session_params": {"id": "S", "offset": 2**31}}, "session_params.offset"),
    ("/generate", {"session_params": {"id": "S", "replace": "yes"}}, "session_params.replace"),
    ("/generate", {"session_params": {"id": "S"}, "session_id": "S"}, "session_id"),
    ("/generate", {"session_params": {"id": "S"}, "sampling_params": {"n": 2}}, "n"),
    ("/generate", {"session_params": {"id": "S"}, "input_ids": [[5], [6]]}, "session_params"),
]


@pytest.mark.parametrize(("path", "body", "param"), BAD)
def test_bad_values_are_named(server: LiveServer, session: str, path: str, body: dict[str, Any], param: str) -> None:
    if body.get("session_params", None) and isinstance(body["session_params"], dict):
        params = body["session_params"]
        body = body | {"session_params": params | ({"id": session} if params.get("id") == "S" else {})}
    response = server.post(path, {"input_ids": C} | body if path == "/generate" else body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param


def test_an_id_is_used_once(server: LiveServer, session: str) -> None:
    assert server.post("/open_session", {"session_id": session}).json()["error"]["param"] == "session_id"
    said(server, "a", A, id=session)
    body = {"input_ids": A, "rid": "a", "session_params": {"id": session}}
    assert server.post("/generate", body).json()["error"]["param"] == "rid"
    assert server.post("/close_session", {"session_id": "none"}).status_code == 404


def test_limits(server: LiveServer, session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    small = server.post("/open_session", {"capacity_of_str_len": 3}).json()
    tight = {"text": "one two", "session_params": {"id": small}}
    assert "more than the session's 3 characters" in server.post("/generate", tight).json()["error"]["message"]
    monkeypatch.setattr(sessions, "MAX_SESSION_TOKENS", 4)
    assert said(server, "a", A, id=session) == A
    full = server.post("/generate", {"input_ids": A, "session_params": {"id": session}})
    assert full.status_code == 429 and "Retry-After" in full.headers
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    assert server.post("/open_session", {}).status_code == 429
    long = {"input_ids": [5] * 508, "session_params": {"id": session, "rid": "a"}, "rid": "b"}
    assert server.post("/generate", long).json()["error"]["code"] == "context_length_exceeded"
    server.post("/close_session", {"session_id": small})


def test_an_idle_session_is_closed_after_its_timeout(server: LiveServer) -> None:
    name = server.post("/open_session", {"timeout": 0.02}).json()
    time.sleep(0.05)
    assert server.post("/close_session", {"session_id": name}).status_code == 200  # nobody looked
    name = server.post("/open_session", {"timeout": 0.02}).json()
    time.sleep(0.05)
    error = server.post("/generate", {"input_ids": A, "session_params": {"id": name}}).json()["error"]
    assert error["param"] == "session_params.id"


def test_a_session_is_not_idle_while_its_request_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, tokenizer = [0.0], Tokenizer.from_directory(DEMO)
    monkeypatch.setattr(sessions.time, "monotonic", lambda: clock[0])
    kept = sessions.Sessions()
    name = kept.open(OpenSessionRequest.model_validate({"timeout": 10.0}))
    continued = SessionParams.model_validate({"id": name, "rid": "a"})
    turn = kept.begin(SessionParams.model_validate({"id": name}), "a", A, AbortSignal())
    clock[0] = 15.0
    kept.open(OpenSessionRequest.model_validate({}))  # looks for idle ones
    kept.extend(turn, REPLY)
    kept.end(turn, FinishReason.STOP)
    clock[0] = 24.0  # 9 seconds without a request
    assert kept.context(continued, B, tokenizer) == A + REPLY + B
    clock[0] = 26.0
    with pytest.raises(InvalidValueError):
        kept.context(continued, B, tokenizer)
