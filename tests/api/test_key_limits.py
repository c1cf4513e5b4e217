"""Weights and limits of API keys: what a request tells the engine, 429 at a limit, and what each key has used."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from jaxserve.api.keys import KeyLimitError, KeyUsage, TokenBucket
from jaxserve.config import Config
from jaxserve.types.sampling import Tenant
from tests.api.batch.helpers import input_file
from tests.scrape import values

from .conftest import LiveServer, reply_with, serving

KEYS = [
    {"name": "queue", "value": "k-queue", "max_running": 2, "max_queued": 1},
    {"name": "tokens", "value": "k-tokens", "tokens_per_minute": 60},
    {"name": "heavy", "value": "k-heavy", "weight": 3},
]
TEXT = {"model": "demo", "prompt": "one two three", "max_tokens": 4}


@pytest.fixture
def keyed() -> Iterator[LiveServer]:
    section: dict[str, Any] = {"keys": KEYS, "admin_api_key": "k-admin", "metrics_auth": False}
    with LiveServer(Config().replace(server=section)) as server:
        yield server


def ask(server: LiveServer, key: str, path: str = "/v1/completions", **body: Any) -> httpx2.Response:
    """Post `body` with what a completion needs; one with an input is of a route that refuses a prompt."""
    whole = {"model": "demo"} | body if "input" in body else TEXT | body
    return server.http.post(path, json=whole, headers={"authorization": f"Bearer {key}"})


def used(server: LiveServer, name: str) -> dict[str, Any]:
    data = server.http.get("/key_usage", headers={"authorization": "Bearer k-admin"}).json()["data"]
    return next(entry for entry in data if entry["name"] == name)


def test_the_engine_is_told_the_tenant(keyed: LiveServer) -> None:
    for key, tenant in {
        "k-queue": Tenant("queue", max_running=2),
        "k-heavy": Tenant("heavy", weight=3.0),
    }.items():
        assert ask(keyed, key).status_code == 200
        assert keyed.link.seen[-1].tenant == tenant


def test_a_server_without_named_keys_has_no_tenants(server: LiveServer) -> None:
    assert server.post("/v1/completions", TEXT).status_code == 200
    assert server.link.seen[-1].tenant is None


def test_more_requests_than_may_wait_are_refused(keyed: LiveServer) -> None:
    keyed.call(keyed.link.hold.clear)
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(ask, keyed, "k-queue", max_tokens=2) for _ in range(3)]
        keyed.wait(lambda: keyed.engine.num_live == 3, "three are in hand")
        refused = ask(keyed, "k-queue")
        other = pool.submit(ask, keyed, "k-heavy")
        keyed.wait(lambda: keyed.engine.num_live >= 4, "another key is not held up")
        keyed.call(keyed.link.hold.set)
        assert all(each.result().status_code == 200 for each in (*held, other))
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "rate_limit_exceeded" and "'queue'" in error["message"]
    assert "3 requests in hand: 2 may run, and max_queued lets 1 wait" in error["message"]
    assert used(keyed, "queue")["refused"] == 1
    assert ask(keyed, "k-queue").status_code == 200  # there is room again
    for more in ({}, {"priority": 2**30}):  # also with the priority of a batch
        refused = ask(keyed, "k-queue", n=4, **more)  # more at once than there ever is: waiting would not help
        assert refused.status_code == 400 and "'queue' may have 3" in refused.json()["error"]["message"]


def test_tokens_of_a_minute(keyed: LiveServer) -> None:
    reply_with(keyed, "word " * 400)
    first = ask(keyed, "k-tokens", max_tokens=70)  # it may run to its end
    assert first.status_code == 200
    refused = ask(keyed, "k-tokens")
    assert refused.status_code == 429 and "tokens_per_minute" in refused.json()["error"]["message"]
    usage = first.json()["usage"]
    assert 1 <= int(refused.headers["retry-after"]) <= usage["total_tokens"] - 60 + 2
    assert ask(keyed, "k-heavy").status_code == 200


def test_headers_of_the_limits(keyed: LiveServer) -> None:
    """As openai's own server has them: its client reads them from the raw response."""
    reply_with(keyed, "word " * 400)
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="k-tokens", max_retries=0) as client:
        raw = client.completions.with_raw_response.create(model="demo", prompt="one two three", max_tokens=70)
        assert raw.headers["x-ratelimit-limit-tokens"] == "60"
        assert 0 <= int(raw.headers["x-ratelimit-remaining-tokens"]) <= 60
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="demo", prompt="one two three")
    headers = caught.value.response.headers
    assert headers["x-ratelimit-remaining-tokens"] == "0" and float(headers["x-ratelimit-reset-tokens"][:-1]) > 60
    found = ask(keyed, "k-queue").headers
    assert (found["x-ratelimit-limit-requests"], "x-ratelimit-limit-tokens" in found) == ("3", False)
    assert 2 <= int(found["x-ratelimit-remaining-requests"]) <= 3
    assert not [name for name in ask(keyed, "k-heavy").headers if name.startswith("x-ratelimit")]


def test_what_a_key_has_used(keyed: LiveServer) -> None:
    total = [ask(keyed, "k-heavy", n=2).json()["usage"] for _ in range(2)]
    found = used(keyed, "heavy")
    assert found == {
        "name": "heavy",
        "weight": 3.0,
        "requests": 4,
        "prompt_tokens": 2 * sum(usage["prompt_tokens"] for usage in total),
        "cached_tokens": found["cached_tokens"],
        "completion_tokens": sum(usage["completion_tokens"] for usage in total),
        "refused": 0,
        "num_live": 0,
    }
    text = keyed.http.get("/metrics", headers={"authorization": "Bearer k-admin"}).text
    assert values(text)['jaxserve:key_completion_tokens_total{key="heavy"}'] == found["completion_tokens"]
    assert "k-heavy" not in text  # the name is shown, never the key


def test_embeddings_count_for_their_key(keyed: LiveServer) -> None:
    with serving(keyed, is_embedding=True):
        for path in ("/v1/embeddings", "/api/embed"):
            assert ask(keyed, "k-heavy", path, input=["a", "b"]).status_code == 200
            assert keyed.link.seen[-1].tenant == Tenant("heavy", weight=3.0)
        assert ask(keyed, "k-queue", "/v1/embeddings", input=["a"] * 4).status_code == 400
    assert used(keyed, "heavy")["requests"] == 4 and used(keyed, "default")["requests"] == 0


def test_a_client_that_leaves_gives_its_place_back(keyed: LiveServer) -> None:
    keyed.link.delay = 0.05
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="k-queue", max_retries=0) as client:
        for _ in range(6):
            stream = client.completions.create(model="demo", prompt="x", max_tokens=400, stream=True)
            next(iter(stream))
            stream.close()
            keyed.wait(lambda: keyed.engine.num_live == 0, "its client has left")
    keyed.wait(lambda: keyed.app.state.server.key_usages.of("queue").num_live == 0, "the place is given back")


def test_usage_is_for_the_admin(keyed: LiveServer) -> None:
    assert keyed.http.get("/key_usage", headers={"authorization": "Bearer k-heavy"}).status_code == 403


@pytest.mark.parametrize(
    "wrong", [{"weight": 0}, {"weight": float("nan")}, {"max_running": 0}, {"max_queued": -1}, {"tokens_per_minute": 0}]
)
def test_limits_have_a_range(wrong: dict[str, Any]) -> None:
    with pytest.raises(Exception, match=next(iter(wrong))):
        Config().replace(server={"keys": [{"name": "a", "value": "a-secret-key"} | wrong]})


def test_a_bucket_refills_evenly_and_its_wait_is_true() -> None:
    now = 0.0
    bucket = TokenBucket(120, lambda: now)
    assert bucket.seconds_until_some == 0
    bucket.take(180)
    wait = bucket.seconds_until_some
    assert wait == pytest.approx(30.5)
    now = wait - 0.01
    assert bucket.seconds_until_some > 0
    now = wait
    assert bucket.seconds_until_some == pytest.approx(0, abs=1e-6)
    now = 10_000.0
    bucket.take(120)
    assert bucket.seconds_until_some > 0  # it never holds more than a minute's


def test_the_wait_for_a_place_follows_the_time_of_requests() -> None:
    usage = KeyUsage(Tenant("a"), max_live=2)
    for _ in range(100):
        usage.begin(1, 5)
        usage.end(1, seconds=8.0, cached_tokens=0)
    usage.begin(2, 5)
    with pytest.raises(KeyLimitError) as refused:
        usage.check()
    assert refused.value.retry_after == pytest.approx(4.0, rel=0.05)


def test_limits_of_a_key_refuse_no_line_of_its_batch(tmp_path: Path) -> None:
    with LiveServer(Config().replace(server={"keys": KEYS}), store=tmp_path) as server:
        server.http.headers["authorization"] = "Bearer k-queue"
        parts = {"file": ("in.jsonl", input_file(3, n=4))}  # its online requests may have 3 choices
        file = server.http.post("/v1/files", data={"purpose": "batch"}, files=parts).json()
        asked = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        path = f"/v1/batches/{server.post('/v1/batches', asked).json()['id']}"
        batch: dict[str, Any] = {}
        for _ in range(600):
            if (batch := server.http.get(path).json())["status"] == "completed":
                break
            time.sleep(0.05)
        assert batch["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
