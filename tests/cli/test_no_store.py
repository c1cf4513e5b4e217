"""A store that nobody asked for does not stop a server: it serves without files and batches and says so."""

import asyncio
from pathlib import Path

import pytest

from jaxserve.cli.launch import open_store
from jaxserve.config import DEFAULT_STORE, Config, StoreSection
from jaxserve.errors import ConfigError
from jaxserve.store import Store
from tests.api.conftest import LiveServer


def section(path: object = "auto") -> StoreSection:
    return Config().replace(store={"path": path}).store


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("cause", ["another server", "a home that cannot be written", "damage"])
def test_the_default_store_cannot_be_used(home: Path, cause: str, caplog: pytest.LogCaptureFixture) -> None:
    directory = Path(DEFAULT_STORE).expanduser()
    other = None
    if cause == "another server":
        other = Store(directory)
    elif cause == "damage":
        asyncio.run(Store(directory).close())
        (directory / "store.db").write_bytes(b"x" * 10_000)
    else:
        (home / ".local").write_text("")
    store, reason = open_store(section())
    assert store is None and "log says why" in reason
    (warning,) = caplog.messages
    assert "no files and no batches" in warning and "--store.path DIR" in warning
    with pytest.raises(ConfigError):  # asked for by name
        open_store(section(directory))
    if other is not None:
        asyncio.run(other.close())


def test_the_default_store(home: Path) -> None:
    store, _ = open_store(section())
    assert store is not None and Path(DEFAULT_STORE).expanduser().is_relative_to(home)
    asyncio.run(store.close())


def test_a_server_without_a_store_says_so() -> None:
    assert open_store(section(None)) == (None, "This server runs without a store: store.path is null.")
    with LiveServer() as server:
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/batches/batch_1"),
            ("POST", "/v1/batches"),
        ):
            response = server.http.request(method, path)
            assert response.status_code == 503 and response.json()["error"]["code"] == "store_unavailable", path
            assert "without a store" in response.json()["error"]["message"]
        assert server.http.get("/v1/models").status_code == 200
        assert "/v1/files" not in server.http.get("/openapi.json").json()["paths"]
