"""/tokenize, /detokenize, /tokenizer_info and the admin routes."""

import asyncio
from typing import Any

from jaxserve.api.limits import MAX_CHOICES
from jaxserve.api.prompts import encode
from jaxserve.config import Config
from jaxserve.text.tokenizer import Tokenizer

from .conftest import LiveServer
from .fakes import DEMO


def test_tokenize_and_back(server: LiveServer) -> None:
    ids_of = server.link.tokenizer.encode
    answer = server.post("/tokenize", {"prompt": "one two", "return_token_strs": True}).json()
    assert answer["tokens"] == ids_of("one two") and answer["count"] == len(answer["tokens"])
    assert "".join(answer["token_strs"]) == "one two" and answer["max_model_len"] == 512
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
    body = {"messages": [{"role": "user", "content": "Hello"}], "tools": [tool] * (MAX_CHOICES + 1)}
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
        other, tokenizer = asyncio.create_task(others()), Tokenizer.from_directory(DEMO)
        for _ in range(50):
            await encode(tokenizer, "a few words", add_special_tokens=False)
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
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [10**7]}, "tokens"),
    ):
        response = server.post(path, body)
        assert response.status_code == 400 and response.json()["error"]["param"] == param, path


def test_admin_routes_are_off_without_a_key(server: LiveServer) -> None:
    for path in ("/flush_cache", "/abort_request"):
        assert server.post(path, {}).status_code == 403


def test_admin_routes() -> None:
    config = Config().replace(server={"admin_api_key": "root"})
    with LiveServer(config) as server:
        headers = {"authorization": "Bearer root"}
        assert server.post("/flush_cache", {}, headers={"authorization": "Bearer no"}).status_code == 401
        assert server.post("/flush_cache", {}, headers=headers).json() == {"success": True}
        assert [call.method for call in server.link.calls] == ["flush_cache"]
        assert server.post("/abort_request", {}, headers=headers).status_code == 400
        server.link.delay = 0.05
        body: dict[str, Any] = {"model": "demo", "prompt": "x", "request_id": "mine-1", "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body | {"max_tokens": 400}) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            answer = server.post("/abort_request", {"rid": "mine"}, headers=headers).json()
            assert answer == {"success": True, "aborted": ["mine-1"]}
            assert any('"finish_reason":"abort"' in line for line in lines)
