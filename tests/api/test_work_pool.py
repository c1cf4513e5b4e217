"""Texts that are too long are left early, and a pool that is full says so."""

import asyncio
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from jaxserve.api.work_pool import (
    CHARS_A_TOKEN,
    INLINE_CHARS,
    LONG_CHARS,
    MIN_WHOLE_CHARS,
    PIECE_CHARS,
    TextEncoder,
    TextWork,
    WorkPool,
)
from jaxserve.config import Config
from jaxserve.errors import ContextLengthError, QueueFullError
from jaxserve.text.tokenizer import Tokenizer
from tests.waiting import until

from .conftest import LiveServer
from .fakes import DEMO, MAX_MODEL_LEN


class CountingTokenizer(Tokenizer):
    """Counts the characters that it is given."""

    characters = 0

    def encode(self, text: str, *, add_special_tokens: bool = True, plain: bool = False) -> list[int]:
        self.characters += len(text)
        return super().encode(text, add_special_tokens=add_special_tokens, plain=plain)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(coroutine)


@pytest.mark.parametrize("text", ["a b." * 2**18, "word " * 2**18, "日本 " * 2**17, "<|im_start|>" * 2**16])
def test_a_text_that_is_too_long_is_not_encoded_to_its_end(text: str) -> None:
    tokenizer = CountingTokenizer.from_directory(DEMO)
    encoder = TextEncoder(tokenizer, TextWork())
    with pytest.raises(ContextLengthError) as caught:
        run(encoder.encode(text, add_special_tokens=True, limit=MAX_MODEL_LEN, param="messages"))
    assert caught.value.param == "messages"
    assert tokenizer.characters <= PIECE_CHARS


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": "TEXT"}, "prompt"),
        ("/tokenize", {"text": "TEXT"}, "text"),
        ("/v1/completions", {"model": "demo", "prompt": "TEXT", "truncate_prompt_tokens": 8}, "prompt"),
    ],
)
def test_a_text_that_would_be_encoded_whole_has_a_limit(
    server: LiveServer, path: str, body: dict[str, Any], param: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = server.app.state.server.encoder
    assert encoder.max_whole_chars == MIN_WHOLE_CHARS
    monkeypatch.setattr(encoder, "max_whole_chars", 8000)
    for size, status in ((8000, 200), (8001, 400)):
        sent = {
            name: "a " * (size // 2) + "b" * (size % 2) if value == "TEXT" else value for name, value in body.items()
        }
        answer = server.post(path, sent)
        assert answer.status_code == status
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "invalid_value") and "8001 characters" in error["message"]


def test_a_conversation_that_would_be_encoded_whole_has_it_too(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.app.state.server.encoder, "max_whole_chars", 8000)
    answer = server.post("/tokenize", {"messages": [{"role": "user", "content": "a " * 4000}]})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


@pytest.mark.parametrize("text", ["word " * 5000, " " * 100_000, " instructions" * 10_000])
@pytest.mark.parametrize("special", [False, True])
def test_a_text_that_fits_has_the_tokens_that_it_has_in_one_piece(text: str, special: bool) -> None:
    """Also one with so many characters a token that it is counted in pieces first."""
    tokenizer = Tokenizer.from_directory(DEMO)
    whole = tokenizer.encode(text, add_special_tokens=special)
    encoder = TextEncoder(tokenizer, TextWork())
    assert run(encoder.encode(text, add_special_tokens=special, limit=len(whole))) == whole
    assert run(encoder.encode(text, add_special_tokens=special)) == whole


def test_some_text_that_fits_is_counted_first() -> None:
    tokenizer = CountingTokenizer.from_directory(DEMO)
    text = " instructions" * 20_000
    whole = len(tokenizer.encode(text))
    tokenizer.characters = 0
    assert len(text) > CHARS_A_TOKEN * whole
    run(TextEncoder(tokenizer, TextWork()).encode(text, add_special_tokens=True, limit=whole))
    assert tokenizer.characters == 2 * len(text)


def test_a_full_pool_refuses_and_goes_on() -> None:
    async def scenario() -> None:
        pool, go = WorkPool("test", "texts", threads=1, max_jobs=3, max_size=100), threading.Event()
        held = [asyncio.ensure_future(pool.run(go.wait, 40)) for _ in range(2)]
        await until(lambda: pool.waiting.jobs == 2, "two jobs are in hand")
        with pytest.raises(QueueFullError) as caught:
            await pool.run(go.wait, 40)  # the sum of sizes
        assert caught.value.status == 429 and caught.value.retry_after
        held.append(asyncio.ensure_future(pool.run(go.wait, 1)))
        await until(lambda: pool.waiting.jobs == 3, "three jobs are in hand")
        with pytest.raises(QueueFullError):
            await pool.run(go.wait, 1)  # the number of jobs
        held[0].cancel()  # it runs: nobody waits for it, and it still counts
        await asyncio.sleep(0)
        assert pool.waiting.jobs == 3
        go.set()
        await asyncio.gather(*held[1:])
        await until(lambda: (pool.waiting.jobs, pool.waiting.size) == (0, 0), "nothing is in hand")
        assert await pool.run(lambda: "large", 10**9) == "large"  # alone, whatever its size
        pool.stop()

    run(scenario())


def test_long_texts_keep_no_others_from_their_threads() -> None:
    async def scenario() -> None:
        work, go = TextWork(), threading.Event()
        long = asyncio.ensure_future(work.run(go.wait, LONG_CHARS + 1))
        assert await work.run(lambda: "short", INLINE_CHARS + 1) == "short"
        go.set()
        await long
        work.stop()

    run(scenario())


def test_too_many_long_texts_are_a_429() -> None:
    """The routes say so in OpenAI's shape, and answer again once there is room."""
    body = {"model": "demo", "messages": [{"role": "user", "content": "word " * 1000}], "max_tokens": 1}
    with LiveServer(Config()) as server:
        waiting = server.app.state.server.text_work.short.waiting
        server.call(lambda: waiting.enter(10**9))
        answer = server.post("/v1/chat/completions", body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert answer.headers["retry-after"]
        server.call(lambda: waiting.leave(10**9))
        assert server.post("/v1/chat/completions", body).json()["error"]["code"] == "context_length_exceeded"


def test_too_many_pieces_of_files_are_a_429(tmp_path: Path) -> None:
    upload = {"files": {"file": ("a.txt", b"x" * 1000)}, "data": {"purpose": "user_data"}}
    with LiveServer(Config(), store=tmp_path / "store") as server:
        file_id = server.http.post("/v1/files", **upload).json()["id"]
        work = server.app.state.server.file_work
        server.call(lambda: work.enter(10**9))
        for answer in (server.http.post("/v1/files", **upload), server.http.get(f"/v1/files/{file_id}/content")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (429, "rate_limit_exceeded")
            assert answer.headers["retry-after"]
        server.call(lambda: work.leave(10**9))
        assert server.http.get(f"/v1/files/{file_id}/content").content == b"x" * 1000
        assert len(server.http.get("/v1/files").json()["data"]) == 1  # nothing of the refused one is left
        assert (work.jobs, work.size) == (0, 0)
