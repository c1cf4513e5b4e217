"""Several API keys: what belongs to one is an unknown id to the others; with one key or none nothing changes."""

import hashlib
import hmac
import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from starlette.types import Scope

from jaxserve.api import keys
from jaxserve.api.keys import KeyRing
from jaxserve.config import Config, ServerSection

from .conftest import LiveServer, reply_with

ALICE, BOB, SINGLE, ADMIN = "key-of-alice", "key-of-bob", "the-single-key", "the-admin-key"
KEYS = [{"name": "alice", "value": ALICE}, {"name": "bob", "sha256": hashlib.sha256(BOB.encode()).hexdigest()}]
SECTION = {"api_key": SINGLE, "admin_api_key": ADMIN, "keys": KEYS}
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "demo", "prompt": "x"}}

# a body that adds to a conversation, and changes its metadata
ADDED = {"items": [{"role": "user", "content": "x"}], "metadata": {}}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(Config().replace(server=SECTION), store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def several(shared: LiveServer) -> Iterator[LiveServer]:
    script = shared.link.script
    yield shared
    shared.link.hold.set()
    shared.wait(lambda: not shared.link.running and shared.engine.num_live == 0, "requests were left behind")
    shared.link.script = script
    shared.link.seen.clear()


def client_of(server: LiveServer, key: str) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=20)


def upload(server: LiveServer, key: str) -> str:
    data = json.dumps(LINE).encode() + b"\n"
    with client_of(server, key) as client:
        return client.files.create(file=("in.jsonl", data), purpose="batch").id


def finished_batch(server: LiveServer, key: str) -> dict[str, Any]:
    """A batch of one line, once it has an output file."""
    body = {"input_file_id": upload(server, key), "endpoint": "/v1/completions", "completion_window": "24h"}
    return completed(server, key, server.http.post("/v1/batches", json=body, headers=bearer(key)).json())


def completed(server: LiveServer, key: str, batch: dict[str, Any]) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        batch = server.http.get(f"/v1/batches/{batch['id']}", headers=bearer(key)).json()
        if batch["status"] == "completed":
            return batch
        time.sleep(0.01)
    raise AssertionError(batch)


def ids_of(answer: httpx2.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [each["id"] for each in answer.json()["data"]]


def routes_with_an_id(server: LiveServer) -> list[tuple[str, str]]:
    paths = server.app.openapi()["paths"]
    found = [(method.upper(), path) for path in paths if "{" in path for method in paths[path]]
    assert len(found) >= 5
    return [each for each in found if "model" not in each[1]]


def ids_of_responses(server: LiveServer, key: str) -> dict[str, list[str]]:
    with client_of(server, key) as client:
        response = client.responses.create(model="demo", input="x")
        return {"response_id": [response.id], "conversation_id": [client.conversations.create().id]}


def test_every_route_answers_another_key_as_if_the_id_were_unknown(several: LiveServer) -> None:
    batch = finished_batch(several, ALICE)
    ids = {
        "file_id": [batch["input_file_id"], batch["output_file_id"]],
        "batch_id": [batch["id"]],
        **ids_of_responses(several, ALICE),
    }
    for method, path in routes_with_an_id(several):
        name, known = next((name, known) for name, known in ids.items() if f"{{{name}}}" in path)
        path = path.replace("{item_id}", "msg_x")
        for object_id in known:
            unknown = "x" * len(object_id)
            sent: dict[str, Any] = (
                {"headers": bearer(BOB), "json": ADDED} if method == "POST" else {"headers": bearer(BOB)}
            )
            expected = several.http.request(method, path.format(**{name: unknown}), **sent)
            assert expected.status_code == 404
            for key in (BOB, SINGLE):
                sent["headers"] = bearer(key)
                answer = several.http.request(method, path.format(**{name: object_id}), **sent)
                assert answer.status_code == 404, (method, path, key)
                assert answer.text.replace(object_id, unknown) == expected.text
    for object_id in ids["file_id"]:
        for key in (ALICE, ADMIN):
            answer = several.http.get(f"/v1/files/{object_id}/content", headers=bearer(key))
            assert answer.status_code == 200, key
    assert several.http.get(f"/v1/batches/{batch['id']}", headers=bearer(ADMIN)).json() == batch
    assert "owner" not in batch


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_lists_hold_what_is_the_keys_own(several: LiveServer, path: str) -> None:
    made = {key: finished_batch(several, key) for key in (ALICE, BOB, SINGLE)}
    seen = {key: ids_of(several.http.get(path, headers=bearer(key))) for key in (*made, ADMIN)}
    for key, batch in made.items():
        own = {batch["id"]} if path == "/v1/batches" else {batch["input_file_id"], batch["output_file_id"]}
        assert own <= set(seen[key]) <= set(seen[ADMIN])
        for other in made:
            assert other == key or not set(seen[key]) & set(seen[other])
    cursor = seen[ALICE][0]
    own_page = several.http.get(path, params={"after": cursor}, headers=bearer(ALICE))
    assert ids_of(own_page) == seen[ALICE][1:]
    foreign = several.http.get(path, params={"after": cursor}, headers=bearer(BOB))
    unknown = several.http.get(path, params={"after": "x" * len(cursor)}, headers=bearer(BOB))
    assert foreign.status_code == 400 and foreign.text.replace(cursor, "x" * len(cursor)) == unknown.text


def test_no_batch_is_made_of_another_keys_file(several: LiveServer) -> None:
    file_id = upload(several, ALICE)
    body = {"endpoint": "/v1/completions", "completion_window": "24h"}
    answers = [
        several.http.post("/v1/batches", json=body | {"input_file_id": name}, headers=bearer(BOB))
        for name in (file_id, "x" * len(file_id))
    ]
    assert [answer.status_code for answer in answers] == [400, 400]
    assert answers[0].text.replace(file_id, "x" * len(file_id)) == answers[1].text


def test_idempotency_keys_are_each_keys_own(several: LiveServer) -> None:
    answers = {}
    for key in (ALICE, BOB):
        body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": upload(several, key)}
        headers = bearer(key) | {"idempotency-key": "the same"}
        first, again = (several.http.post("/v1/batches", json=body, headers=headers).json() for _ in range(2))
        assert first == again and first["object"] == "batch"
        answers[key] = completed(several, key, first)["id"]
    assert answers[ALICE] != answers[BOB]


def test_lines_of_a_batch_run_as_its_owner(several: LiveServer) -> None:
    finished_batch(several, ALICE)
    assert [request.client_id.rpartition(" of ")[2] for request in several.link.seen] == ["alice"]
    finished_batch(several, SINGLE)
    assert " of " not in several.link.seen[-1].client_id


def in_session(server: LiveServer, key: str, **params: Any) -> httpx2.Response:
    body = {"input_ids": [7, 8], "rid": params.pop("as_rid", "a"), "session_params": {"id": "mine"} | params}
    return server.http.post("/generate", json=body, headers=bearer(key))


def test_two_keys_may_have_sessions_of_one_id(several: LiveServer) -> None:
    reply_with(several, [11])
    opened = [
        several.http.post("/open_session", json={"session_id": "mine", "capacity_of_str_len": 0}, headers=bearer(key))
        for key in (ALICE, BOB)
    ]
    assert [answer.json() for answer in opened] == ["mine", "mine"]
    assert in_session(several, ALICE).status_code == 200
    assert in_session(several, BOB, rid="a", as_rid="b").json()["error"]["param"] == "session_params.rid"
    assert in_session(several, ALICE, rid="a", as_rid="b").status_code == 200
    assert len(several.link.seen[-1].prompt_token_ids) > 4
    assert in_session(several, SINGLE).json()["error"]["param"] == "session_params.id"
    for key, status in ((SINGLE, 404), (BOB, 200), (BOB, 404), (ALICE, 200)):
        answer = several.http.post("/close_session", json={"session_id": "mine"}, headers=bearer(key))
        assert answer.status_code == status


@pytest.mark.parametrize(
    ("how", "key", "ended"),
    [
        ("session", BOB, [False, True, False]),
        ("session", SINGLE, [False, False, True]),
        ("abort", BOB, [False, True, False]),
        ("abort", ALICE, [True, False, False]),
        ("abort", ADMIN, [True, True, True]),
    ],
)
def test_a_key_ends_its_own_requests_only(several: LiveServer, how: str, key: str, ended: list[bool]) -> None:
    """All have chosen one id: for an abort, and for a request in a session that another takes the place of."""
    owners = (ALICE, BOB, SINGLE)
    for each in owners:
        several.http.post("/open_session", json={"session_id": "mine", "capacity_of_str_len": 0}, headers=bearer(each))
    several.call(several.link.hold.clear)
    body = {"input_ids": [7, 8], "rid": "same", "session_params": {"id": "mine"}}
    with ThreadPoolExecutor(4) as pool:
        post = several.http.post
        running = [pool.submit(post, "/generate", json=body, headers=bearer(each)) for each in owners]
        several.wait(lambda: several.engine.num_live == 3, "not all run")
        if how == "abort":
            answer = several.http.post("/abort_request", json={"rid": "sa"}, headers=bearer(key))
            assert answer.json() == {"success": True, "aborted": ["same"]}
        else:
            body = {"input_ids": [9], "rid": "next", "session_params": {"id": "mine", "rid": "same", "replace": True}}
            running.append(pool.submit(post, "/generate", json=body, headers=bearer(key)))
        several.wait(lambda: len(several.link.aborted) == sum(ended), "they were not ended")
        several.call(several.link.hold.set)
        reasons = [each.result().json()["meta_info"]["finish_reason"]["type"] for each in running]
    assert [reason == "abort" for reason in reasons[:3]] == ended
    several.link.aborted.clear()
    for each in owners:
        several.http.post("/close_session", json={"session_id": "mine"}, headers=bearer(each))


def test_admin_routes_stay_the_admins(several: LiveServer) -> None:
    for key in (ALICE, BOB, SINGLE, "wrong"):
        assert several.http.post("/flush_cache", headers=bearer(key)).status_code == (401 if key == "wrong" else 403)
    assert several.http.post("/abort_request", json={"abort_all": True}, headers=bearer("wrong")).status_code == 401
    assert several.http.post("/flush_cache", headers=bearer(ADMIN)).status_code == 200


def test_every_key_is_compared_whichever_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing(ServerSection.model_validate(SECTION))
    seen: list[tuple[int, int]] = []
    real = hmac.compare_digest

    def watched(a: bytes, b: bytes) -> bool:
        seen.append((len(a), len(b)))
        return real(a, b)

    monkeypatch.setattr(keys.hmac, "compare_digest", watched)
    owners = {ALICE: "alice", BOB: "bob", SINGLE: "", ADMIN: "", "wrong": None, "": None}
    for number, (key, owner) in enumerate(owners.items(), 1):
        scope: Scope = {"type": "http", "headers": [(b"authorization", f"Bearer {key}".encode())]}
        caller = ring.find(scope)
        assert (caller and caller.owner) == owner and (caller is not None and caller.admin) == (key == ADMIN)
        assert len(seen) == 4 * number
    assert set(seen) == {(32, 32)}


def test_no_key_is_shown_anywhere(caplog: pytest.LogCaptureFixture) -> None:
    config = Config().replace(server=SECTION, logging={"requests": True})
    hashes = [hashlib.sha256(key.encode()).hexdigest() for key in (ALICE, BOB)]
    with caplog.at_level(logging.DEBUG), LiveServer(config) as server:
        texts = [repr(config), str(config), config.model_dump_json()]
        for path in ("/server_info", "/v1/models", "/v1/nothing", "/metrics"):
            for key in (ALICE, BOB, SINGLE, ADMIN, ALICE + "x"):
                texts.append(server.http.get(path, headers=bearer(key)).text)
    for text in (caplog.text, *texts):
        for secret in (ALICE, BOB, SINGLE, ADMIN, *hashes):
            assert secret not in text
    assert "alice" in texts[2]


def everything(server: LiveServer, key: str | None) -> list[list[str]]:
    headers = bearer(key) if key else {}
    return [ids_of(server.http.get(path, headers=headers)) for path in ("/v1/files", "/v1/batches")]


def test_with_one_key_or_none_the_same_is_seen(tmp_path: Path) -> None:
    """What was stored without a key, or with the single one, is the default key's; `default` may be its name too."""
    with LiveServer(store=tmp_path) as server:
        batch = finished_batch(server, "none at all")
        before = everything(server, None)
        assert {batch["input_file_id"], batch["output_file_id"]} == set(before[0]) and before[1] == [batch["id"]]
    for section, key in (
        ({"api_key": SINGLE}, SINGLE),
        ({"keys": [{"name": "default", "value": ALICE}]}, ALICE),
        (SECTION, SINGLE),
        (SECTION, ADMIN),
    ):
        with LiveServer(Config().replace(server=section), store=tmp_path) as server:
            assert everything(server, key) == before, section
    with LiveServer(Config().replace(server=SECTION), store=tmp_path) as server:
        assert everything(server, ALICE) == [[], []]
