"""Hub ids and directories, without a network: the library's own cache layout, and each of its failures."""

import socket
from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli import doctor, plan
from jaxserve.config import Config, ModelSection
from jaxserve.errors import ModelLoadError
from jaxserve.model_files import read_object
from jaxserve.models import unserved
from jaxserve.models.checkpoint import hub
from jaxserve.models.checkpoint.download import CONFIG_FILES
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.families.registry import ARCHITECTURES, NESTED, family_of
from jaxserve.models.unserved import BY_ARCHITECTURE


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


def test_a_family_that_is_not_served_is_refused_before_its_weights_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the loader and by plan."""
    asked: list[str] = []

    def download(repo_id: str, **options: Any) -> str:
        asked.extend(options["allow_patterns"])
        (tmp_path / "config.json").write_text('{"architectures": ["DeepseekV4ForCausalLM"]}')
        return str(tmp_path)

    monkeypatch.setattr("jaxserve.models.checkpoint.download.snapshot_download", download)
    for ask in (lambda: hub.resolve("owner/name"), lambda: plan.run(["owner/name"])):
        with pytest.raises(ModelLoadError, match=r"DeepSeek-V4 .* is not served: its layers have .* streams") as caught:
            ask()
        assert caught.value.fix is not None and caught.value.fix.startswith("serve DeepSeek-V3.1")
    assert asked and not any("safetensors" in pattern or pattern == "tokenizer.json" for pattern in asked)


def section() -> ModelSection:
    return Config.parse({"model": {"path": "owner/name"}}).model


def test_doctor_asks_the_hub_for_nothing_but_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a model in the cache it reads the copy."""
    asked: list[str] = []
    monkeypatch.setattr(doctor, "try_to_load_from_cache", lambda *_, **__: None)
    monkeypatch.setattr(doctor.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(
        "jaxserve.models.checkpoint.download.snapshot_download",
        lambda _, **options: asked.extend(options["allow_patterns"]) or str(tmp_path),
    )
    (tmp_path / "config.json").write_text('{"architectures": ["KimiK3ForConditionalGeneration"]}')
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        monkeypatch.setattr(doctor.constants, "ENDPOINT", f"http://127.0.0.1:{listener.getsockname()[1]}")
        found = list(doctor.examined("hub", lambda: doctor.hub(section())))
    assert (
        [each.state for each in found] == ["ok", "bad"] and "Kimi-K3" in found[1].text and asked == list(CONFIG_FILES)
    )
    monkeypatch.setattr(doctor, "try_to_load_from_cache", lambda *_, **__: str(tmp_path / "config.json"))
    (only,) = doctor.examined("hub", lambda: doctor.hub(section()))
    assert only.state == "bad" and "Kimi-K3" in only.text


def test_no_family_is_both_served_and_refused() -> None:
    assert not BY_ARCHITECTURE.keys() & {*ARCHITECTURES, *NESTED}
    assert all(family.instead[1] in {*ARCHITECTURES, *NESTED} for family in unserved.FAMILIES)
    for name in BY_ARCHITECTURE:
        with pytest.raises(ModelLoadError, match=name):
            family_of(name)


def test_every_published_configuration_of_these_families_is_refused_with_its_reason(shared_data: Path) -> None:
    """Whatever else its config.json has."""
    found = set()
    for file in sorted((shared_data / "hf_configs").glob("*_config.json")):
        config = read_object(file)
        names = set(config.get("architectures") or ()) & BY_ARCHITECTURE.keys()
        if not names:
            continue
        found |= names
        with pytest.raises(ModelLoadError, match="is not served: its layers have"):
            read_config(ModelFiles.of_config(file))
    assert found >= {"DeepseekV4ForCausalLM", "KimiK3ForConditionalGeneration", "MiniMaxM3ForCausalLM"}


def test_a_name_that_is_no_id_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="neither a directory here nor a model on the hub"):
        hub.resolve("owner/na me")
