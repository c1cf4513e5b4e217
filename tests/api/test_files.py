"""The Files API as the official client and as hostile clients use it."""

import io
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from jaxserve.api.openai import files
from tests.api.conftest import LiveServer
from tests.waiting import LAST_RESORT

HOUR = 3600


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.fixture
def api(live: LiveServer) -> Any:
    for file in live.client.files.list():
        live.client.files.delete(file.id)
    return live.client.files


def send(api: Any, data: bytes = b"{}\n", name: str = "in.jsonl", purpose: str = "batch", **keys: Any) -> Any:
    return api.create(file=(name, data), purpose=purpose, **keys)


def disk(live: LiveServer) -> list[Path]:
    assert live.store is not None
    return [*(live.store / "files").iterdir(), *(live.store / "tmp").iterdir()]


def post(live: LiveServer, fields: dict[str, str], file: bytes | None = b"{}\n", name: str = "a.jsonl") -> Any:
    parts = None if file is None else {"file": (name, file)}
    return live.http.post("/v1/files", data=fields, files=parts)


def test_a_file_and_back(api: Any, live: LiveServer) -> None:
    data = bytes(range(256)) * 10_000
    file = send(api, data, "a ☂ b.bin", "user_data")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(data), "a ☂ b.bin", "user_data", "file")
    assert (file.status, file.expires_at) == ("processed", None)
    assert api.retrieve(file.id) == file
    answer = api.content(file.id)
    assert answer.read() == data
    assert answer.response.headers["content-type"] == "application/octet-stream"
    assert answer.response.headers["content-length"] == str(len(data))
    assert api.list().data == [file]
    deleted = api.delete(file.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (file.id, "file", True)
    for action in (api.retrieve, api.content, api.delete):
        with pytest.raises(openai.NotFoundError) as error:
            action(file.id)
        assert error.value.body == {
            "message": f"No such File object: {file.id}",
            "type": "invalid_request_error",
            "param": "id",
            "code": None,
        }
    assert disk(live) == []


def test_every_way_to_hand_a_file_over(api: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"{}\n")
    with open(path, "rb") as handle:
        assert api.create(file=handle, purpose="batch").filename == "in.jsonl"
    assert api.create(file=path, purpose="batch").bytes == 3
    assert api.create(file=("in.jsonl", io.BytesIO(b"abc"), "application/jsonl"), purpose="batch").bytes == 3
    assert send(api, b"").bytes == 0


def test_expiry(api: Any) -> None:
    file = send(api, expires_after={"anchor": "created_at", "seconds": HOUR})
    assert file.expires_at == file.created_at + HOUR
    file = send(api)
    assert file.expires_at == file.created_at + 30 * 24 * HOUR


def test_lists(api: Any) -> None:
    ids = [send(api, purpose="batch" if i % 2 else "user_data").id for i in range(5)]
    page = api.list(limit=2)
    assert [file.id for file in page.data] == [ids[4], ids[3]]
    assert (page.has_more, page.first_id, page.last_id) == (True, ids[4], ids[3])
    assert [file.id for file in api.list(limit=2)] == ids[::-1]  # follows the pages
    assert [file.id for file in api.list(order="asc", limit=1)] == ids
    assert [file.id for file in api.list(purpose="batch")] == [ids[3], ids[1]]
    for file in api.list(limit=2):
        api.delete(file.id)  # paging goes on from files that are gone
    empty = api.list()
    assert (empty.data, empty.has_more, empty.first_id) == ([], False, None)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        *((path, "GET, HEAD, POST") for path in ("/v1/files", "/v1/batches")),
        *((path, "DELETE, GET, HEAD") for path in ("/v1/files/file-1", "/v1/responses/resp_1")),
    ],
)
def test_allow_names_the_methods_of_all_routes_of_a_path(live: LiveServer, path: str, methods: str) -> None:
    answer = live.http.request("PATCH", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 10_001}, "limit"),
        ({"limit": "x"}, "limit"),
        ({"limit": 2**63}, "limit"),
        ({"order": "up"}, "order"),
        ({"after": "file-none"}, "after"),
        ({"after": "\0"}, "after"),
    ],
)
def test_bad_lists(live: LiveServer, query: dict[str, Any], param: str) -> None:
    answer = live.http.get("/v1/files", params=query)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "purpose"),
        ({"purpose": "batch_output"}, "purpose"),
        ({"purpose": ""}, "purpose"),
        ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after"),
        ({"purpose": "batch", "expires_after[anchor]": "x", "expires_after[seconds]": "3600"}, "expires_after[anchor]"),
        *(
            (
                {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": seconds},
                "expires_after[seconds]",
            )
            for seconds in ("3599", "2592001", "x", "-1", "NaN", str(2**63))
        ),
    ],
)
def test_bad_forms(live: LiveServer, api: Any, fields: dict[str, str], param: str) -> None:
    answer = post(live, fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert disk(live) == []


def test_a_form_without_a_file(live: LiveServer, api: Any) -> None:
    answer = live.http.post("/v1/files", files={"purpose": (None, "batch")})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "missing_required_parameter")
    assert live.http.post("/v1/files", json={"purpose": "batch"}).status_code == 400
    assert live.http.post("/v1/files").status_code == 400
    assert disk(live) == []


def test_names(live: LiveServer, api: Any) -> None:
    assert post(live, {"purpose": "batch"}, name="a.txt").json()["error"]["param"] == "file"
    assert post(live, {"purpose": "batch"}, name="x" * 600 + ".jsonl").json()["error"]["param"] == "file"
    name = '../../etc/"pass\twd.jsonl'
    file = send(api, name=name)
    assert api.content(file.id).read() == b"{}\n"
    assert {path.name for path in disk(live)} == {file.id}


def test_sizes(live: LiveServer, api: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BATCH_FILE_BYTES", 2_000_000)
    monkeypatch.setattr(files, "MAX_FILE_BYTES", 3_000_000)
    assert send(api, b"x" * 2_000_000).bytes == 2_000_000
    assert send(api, b"x" * 3_000_000, purpose="user_data").bytes == 3_000_000
    before = disk(live)
    for size, purpose in ((2_000_001, "batch"), (3_000_001, "user_data"), (5_000_000, "batch")):
        with pytest.raises(openai.APIStatusError) as error:
            send(api, b"x" * size, purpose=purpose)
        assert error.value.status_code == 413
    late = live.http.post("/v1/files", files=[("file", ("a.jsonl", b"x" * 2_000_001)), ("purpose", (None, "batch"))])
    assert late.status_code == 413
    assert sorted(disk(live)) == sorted(before)


def test_an_upload_that_announces_too_much_is_refused_at_once(live: LiveServer, api: Any) -> None:
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
        connection.settimeout(LAST_RESORT)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_client_that_goes_away_leaves_nothing(live: LiveServer, api: Any) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000\r\n"
        b"Content-Type: multipart/form-data; boundary=XX\r\n\r\n"
        b'--XX\r\nContent-Disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
    )
    with socket.create_connection(("127.0.0.1", int(live.url.rpartition(":")[2]))) as connection:
        connection.sendall(head + b"x" * 3_000_000)
        live.wait(lambda: len(disk(live)) == 1, "the upload did not begin")
        assert api.list().data == []
    live.wait(lambda: disk(live) == [], "the cut upload left bytes")


@pytest.mark.parametrize("file_id", ["..%2f..%2fstore.db", "%00", "file-%ff", "x" * 5000, "..", "%2e%2e"])
def test_ids_of_clients_are_only_looked_up(live: LiveServer, api: Any, file_id: str) -> None:
    for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content"):
        assert live.http.get(path).status_code == 404
