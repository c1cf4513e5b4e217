"""/tokenize, /detokenize, /tokenizer_info and the admin routes."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxserve.api.ranges import MAX_TOOLS
from jaxserve.api.work_pool import TextEncoder, TextWork
from jaxserve.config import Config
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.calls import FlushCache

from .conftest import LiveServer
from .fakes import DEMO


def test_tokenize_and_back(server: LiveServer) -> None:
    ids_of = server.link.tokenizer.encode
    answer = server.post("/tokenize", {"prompt": "one two", "return_token_strs": True}).json()
    assert answer["tokens"] == ids_of("one two") and answer["count"] == len(answer["tokens"])
    spelled = [server.link.tokenizer.id_to_token(i) for i in answer["tokens"]]
    assert answer["token_strs"] == spelled and "\u0120" in "".join(
        answer["token_strs"]
    )  # a space as the vocabulary has it
    assert answer["max_model_len"] == 512
    bare = server.post("/tokenize", {"prompt": "one two"}).json()
    assert bare == {"tokens": answer["tokens"], "count": answer["count"], "max_model_len": 512, "token_strs": None}
    assert server.post("/detokenize", {"tokens": answer["tokens"]}).json()["prompt"] == "one two"
    many = server.post("/tokenize", {"prompt": ["a", "b c"]}).json()
    assert many["tokens"] == [ids_of("a"), ids_of("b c")] and many["count"] == [len(x) for x in many["tokens"]]
    assert server.post("/detokenize", {"tokens": many["tokens"]}).json()["text"] == ["a", "b c"]


def test_a_conversation_is_rendered_as_for_chat(server: LiveServer) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    tokens = server.post("/tokenize", {"messages": messages}).json()["tokens"]
    server.post("/v1/chat/completions", {"model": "demo", "messages": messages})
    assert tokens == server.link.seen[-1].prompt_token_ids


def test_more_tools_than_a_chat_may_have(server: LiveServer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool] * (MAX_TOOLS + 1)}
    answer = server.post("/tokenize", body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"


def test_others_have_a_turn_between_two_texts() -> None:
    """A request of two thousand texts held up the server for two seconds."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def run() -> None:
        other, encoder = asyncio.create_task(others()), TextEncoder(Tokenizer.from_directory(DEMO), TextWork())
        for _ in range(50):
            await encoder.encode("a few words", add_special_tokens=False)
        other.cancel()

    asyncio.run(run())
    assert turns >= 50


def test_tokenizer_info_is_what_lm_eval_needs(server: LiveServer) -> None:
    info = server.http.get("/tokenizer_info").json()
    assert info["eos_token"] == "<|im_end|>" and "bos_token" in info and info["pad_token"]
    assert "<|im_start|>" in info["chat_template"]


def test_bad_tokens(server: LiveServer) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "x", "text": "x"}, "text"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
        ("/detokenize", {"ids": [10**7]}, "ids"),
    ):
        response = server.post(path, body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, path


def test_admin_routes_are_off_without_a_key(server: LiveServer) -> None:
    for path in ("/flush_cache", "/abort_request"):
        assert server.post(path, {}).status_code == 403


def test_waiting_requests_are_for_the_admin_key_alone() -> None:
    """Also on a server that asks for no other key, and while the engine does not answer."""
    with LiveServer(Config().replace(server={"admin_api_key": "root"})) as server:
        admin = {"authorization": "Bearer root"}
        assert server.http.get("/server_info", headers=admin).json()["waiting_requests"] == []
        for headers in ({}, {"authorization": "Bearer other"}):
            assert "waiting_requests" not in server.http.get("/server_info", headers=headers).json()
        server.link.answers_calls = False
        assert server.http.get("/server_info", headers=admin).json()["waiting_requests"] is None


def test_admin_routes() -> None:
    config = Config().replace(server={"admin_api_key": "root"})
    with LiveServer(config) as server:
        headers = {"authorization": "Bearer root"}
        assert server.post("/flush_cache", {}, headers={"authorization": "Bearer no"}).status_code == 401
        assert server.post("/flush_cache", {}, headers=headers).json() == {"success": True}
        assert [each.call for each in server.link.calls] == [FlushCache()]
        assert server.post("/abort_request", {}, headers=headers).status_code == 400
        server.link.delay = 0.05
        body: dict[str, Any] = {"model": "demo", "prompt": "x", "request_id": "mine-1", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body | {"max_tokens": 400}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            answer = server.post("/abort_request", {"rid": "mine"}, headers=headers).json()
            assert answer == {"success": True, "aborted": ["mine-1"]}
            assert any('"finish_reason":"abort"' in line for line in lines)


ABORTABLE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "two prompts": ("/v1/completions", {"prompt": ["a", "b"], "request_id": "it"}, ["it"]),
    "two choices": ("/v1/completions", {"prompt": "a", "n": 2, "request_id": "it"}, ["it"]),
    "beam search": ("/v1/completions", {"prompt": "a", "n": 2, "use_beam_search": True, "request_id": "it"}, ["it"]),
    "repetitions": (
        "/v1/completions",
        {"prompt": "a", "n": 2, "repetition_detection": {"max_pattern_size": 9, "min_count": 9}, "request_id": "it"},
        ["it"],
    ),
    "thinking budget": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "n": 2, "thinking_token_budget": 9, "request_id": "it"},
        ["it"],
    ),
    "native, one id": ("/generate", {"text": ["a", "b"], "rid": "it"}, ["it_0", "it_1"]),
    "native, two ids": ("/generate", {"text": ["a", "b"], "rid": ["it", "its"]}, ["it", "its"]),
}


@pytest.fixture
def held() -> Iterator[LiveServer]:
    """A server with an admin key whose engine makes no token until the test's end."""
    with LiveServer(Config().replace(server={"admin_api_key": "root"})) as server:
        server.call(server.link.hold.clear)
        yield server


def ask_and_abort(server: LiveServer, path: str, bodies: list[dict[str, Any]], sequences: int) -> tuple[Any, list[Any]]:
    """Send the bodies, abort "it" once so many sequences run; the answer of the abort, and those of the requests."""
    with ThreadPoolExecutor() as threads:
        try:
            model = {} if path == "/generate" else {"model": "demo"}
            answers = [threads.submit(server.post, path, model | body) for body in bodies]
            server.wait(lambda: len(server.link.running) == sequences, "they did not start")
            found = server.post("/abort_request", {"rid": "it"}, headers={"authorization": "Bearer root"}).json()
        finally:
            server.call(server.link.hold.set)
        return found, [answer.result(20).json() for answer in answers]


@pytest.mark.parametrize("kind", ABORTABLE)
def test_an_abort_ends_all_of_a_request_however_it_is_generated(held: LiveServer, kind: str) -> None:
    path, body, ids = ABORTABLE[kind]
    found, (answer,) = ask_and_abort(held, path, [body], 1 if kind == "beam search" else 2)
    assert found == {"success": True, "aborted": ids}
    if path == "/generate":
        reasons = [each["meta_info"]["finish_reason"]["type"] for each in answer]
    else:
        reasons = [each["finish_reason"] for each in answer["choices"]]
    assert reasons == ["abort", "abort"]
    held.wait(lambda: not held.link.running and held.engine.num_live == 0, "something is left")


def test_an_abort_ends_every_request_of_its_id_and_no_other(held: LiveServer) -> None:
    bodies = [{"prompt": "a", "request_id": name} for name in ("it", "it", "other")]
    found, answers = ask_and_abort(held, "/v1/completions", bodies, 3)
    assert found == {"success": True, "aborted": ["it"]}
    assert [answer["choices"][0]["finish_reason"] for answer in answers] == ["abort", "abort", "length"]
