"""Hub ids and directories, without a network: the library's own cache layout, and each of its failures."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint import hub


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert hub.resolve(tmp_path) == tmp_path


@pytest.mark.parametrize("path", ["./missing", "~/missing", "/nowhere/at/all", "a/b/c", "missing"])
def test_a_missing_directory_is_named(path: str) -> None:
    with pytest.raises(ModelLoadError, match=r"directory .* does not exist"):
        hub.resolve(path)


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ModelLoadError, match="is a file"):
        hub.resolve(tmp_path / "model.safetensors")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def cached(root: Path, commit: str = "a" * 40) -> Path:
    """The cache's own layout: refs name a commit, snapshots hold its files."""
    repo = root / "models--owner--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (repo / "snapshots" / commit).mkdir(parents=True)
    (repo / "snapshots" / commit / "config.json").write_text("{}")
    return repo / "snapshots" / commit


def test_a_cached_model_is_found_offline(offline: None, tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert hub.resolve("owner/name", cache_dir=tmp_path) == snapshot
    assert hub.resolve("owner/name", revision="a" * 40, cache_dir=tmp_path) == snapshot


def test_offline_and_not_cached(offline: None, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="hub is not reachable and owner/name is not cached") as caught:
        hub.resolve("owner/name", cache_dir=tmp_path)
    assert caught.value.fix is not None and "network" in caught.value.fix


def test_only_data_files_are_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr("jaxserve.models.checkpoint.download.snapshot_download", download)
    assert hub.resolve("owner/name", revision="v1") == tmp_path
    assert asked["repo_id"] == "owner/name" and asked["revision"] == "v1"
    assert not any(pattern.endswith((".py", ".bin", ".pt", "*")) for pattern in asked["allow_patterns"])


def test_a_name_that_is_no_id_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="neither a directory here nor a model on the hub"):
        hub.resolve("owner/na me")
