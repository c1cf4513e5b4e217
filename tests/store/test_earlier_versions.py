"""Stores that 0.2.0 and 0.3.0 themselves wrote (`earlier/`): they are checked, upgraded and served, and lead back."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import main
from jaxserve.store.database import SCHEMA_VERSION
from jaxserve.store.maintenance import backup, check
from tests.api.conftest import LiveServer, reply_with
from tests.waiting import wait_until

EARLIER = Path(__file__).parent / "earlier"


@pytest.fixture(params=sorted(path.stem for path in EARLIER.glob("*.json")))
def said(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """What was asked of the earlier version. Its store is in tmp_path / "store"."""
    found = json.loads((EARLIER / f"{request.param}.json").read_text(encoding="utf-8"))
    store = tmp_path / "store"
    for name in ("files", "tmp"):
        (store / name).mkdir(parents=True)
    for name, text in found["files"].items():
        (store / name).write_bytes(bytes.fromhex(text) if name.endswith("-key") else text.encode())
    with contextlib.closing(sqlite3.connect(store / "store.db")) as connection:
        connection.executescript(found["dump"] + f"PRAGMA user_version = {found['schema']};")
    store.chmod(0o700)
    return found


def dump(path: Path) -> list[str]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return list(connection.iterdump())


def test_it_is_checked_and_upgraded_and_a_copy_leads_back(
    said: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, before = tmp_path / "store", dump(tmp_path / "store" / "store.db")
    found = check(store)
    assert (found.version, found.damage, found.missing, found.unknown) == (said["schema"], None, [], [])
    assert found.rows["batches"] == 3 and found.rows.get("responses", 0) == len(said["responses"])
    assert backup(store, tmp_path / "copy").rows == found.rows
    assert main(["store", "upgrade", str(store)]) == 0
    assert f"version {said['schema']} is now {SCHEMA_VERSION}" in capsys.readouterr().out
    after = check(store)
    assert (after.version, after.damage, after.missing) == (SCHEMA_VERSION, None, [])
    assert {table: after.rows[table] for table in found.rows} == found.rows
    assert dump(store / f"store.db.version-{said['schema']}") == before


def test_its_batches_and_responses_go_on(said: dict[str, Any], tmp_path: Path) -> None:
    with LiveServer(store=tmp_path / "store", clock=lambda: said["now"] + 60.0) as server:

        def get(path: str) -> Any:
            answer = server.http.get(path)
            assert answer.status_code == 200, answer.text
            return answer.json()

        done, failed = get(f"/v1/batches/{said['done']}"), get(f"/v1/batches/{said['failed']}")
        assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}
        assert done["metadata"] == {"of": said["version"]}
        assert server.http.get(f"/v1/files/{done['output_file_id']}/content").text == said["results"]
        assert failed["status"] == "failed" and failed["errors"]["data"][0]["line"] == 1
        wait_until(lambda: get(f"/v1/batches/{said['running']}")["status"] == "completed", "what ran goes on")
        assert get(f"/v1/batches/{said['running']}")["request_counts"]["completed"] == 4
        if said["responses"]:
            reply_with(server, "7")
            *_, last = [get(f"/v1/responses/{each}") for each in said["responses"]]
            assert last["status"] == "completed" and last["conversation"]["id"] == said["conversation"]
            body = {"model": "demo", "input": "Which?", "previous_response_id": said["responses"][1]}
            assert server.post("/v1/responses", body).status_code == 200
            prompt = server.engine.tokenizer.decode(server.link.seen[-1].prompt_token_ids)
            assert prompt.index("Remember 7") < prompt.index("And now?") < prompt.index("Which?")
            assert len(get(f"/v1/conversations/{said['conversation']}/items")["data"]) == 3
