"""`models.served` as an operator writes it: what a model's processes get, and what is refused before a start."""

from pathlib import Path
from typing import Any

import pytest

from jaxserve.cli.main import main
from jaxserve.cli.options import load_config
from jaxserve.cli.several import make_plans
from jaxserve.config import Config
from jaxserve.config_types import reveal
from jaxserve.errors import ConfigError

SQL = {"slots": 1, "adapters": [{"name": "sql", "path": "adapters/sql"}]}


def several(*entries: dict[str, Any], **sections: Any) -> Config:
    return Config.parse({"models": {"served": list(entries)}, "store": {"path": None}, **sections})


def test_a_model_has_the_common_sections_and_its_own(tmp_path: Path) -> None:
    file = tmp_path / "one.yaml"
    file.write_text("scheduler: {max_num_seqs: 4}\nmodel: {served_name: [second]}\n")
    server = {"host": "0.0.0.0", "port": 9, "api_key": "k", "cors_origins": ["*"], "request_timeout": 5}
    server["allowed_hosts"] = ["llm.lan"]
    config = several(
        {"name": "org/a"},
        {"name": "b", "config": str(file)},
        scheduler={"max_num_seqs": 8, "policy": "lpm"},
        server=server,
        store={"path": str(tmp_path)},
    )
    first, second = make_plans(config)
    assert first.names == ("org/a",) and second.names == second.config.model.served_name == ("b", "second")
    assert [each.config.scheduler.max_num_seqs for each in (first, second)] == [8, 4]
    assert second.config.scheduler.policy == "lpm"
    assert first.config.store.path == tmp_path / "org%2Fa" and not first.config.models.served
    own = first.config.server
    assert (own.port, own.host, own.cors_origins, own.request_timeout) == (8000, "127.0.0.1", (), 5)
    assert own.allowed_hosts == ("*",), "the front has checked the name that the request is for"
    assert reveal(own.api_key) == "k" and len(reveal(own.admin_api_key)) >= 32


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"name": "a b"}], r"models\.served\.0\.name"),
        ([{"name": "a"}, {"name": "a"}], "the name 'a' is given twice"),
        ([{"name": "a", "config": {"model": {"served_name": ["b"]}}}, {"name": "b"}], "two models have the name 'b'"),
        ([{"name": "a", "config": {"server": {"api_key": "k-12345"}}}], "the section 'server' is for all models"),
        ([{"name": "a"}, {"name": "b", "config": {"lora": SQL}}, {"name": "sql"}], "two models or adapters have the"),
        ([{"name": name, "config": {"lora": SQL}} for name in "ab"], "two models or adapters have the name 'sql'"),
        ([{"name": "a", "config": 5}], "should be the path of a YAML file, or sections"),
        ([{"name": "a", "config": {"model": ["p"]}}], "the section 'model' should be a mapping"),
        ([{"name": "a", "config": "none.yaml"}], "models.served, a: cannot read the configuration none.yaml"),
        ([{"name": "a", "config": {"model": {"path": "./none"}}}], "models.served, a: model directory none does not"),
        ([{"name": "a", "config": {"scheduler": {"max_num_seqs": 0}}}], r"models.served, a: scheduler\.max_num_seqs"),
        ([{"name": "a", "config": {"modell": {}}}], "the section 'modell' is for all models"),
        ([{"name": "a", "load": "later"}], r"models\.served\.0\.load"),
        ([{"name": "a", "idle_seconds": 0}], r"models\.served\.0\.idle_seconds"),
        ("a", r"models\.served: should be a list"),
    ],
)
def test_a_wrong_list_is_refused_by_name(entries: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        make_plans(Config.parse({"models": {"served": entries}, "store": {"path": None}}))
    assert "12345" not in str(error.value) and "\n" not in str(error.value)


def test_more_models_at_the_start_than_there_is_room_for() -> None:
    entries = [{"name": name, "load": "start"} for name in "ab"]
    with pytest.raises(ConfigError, match=r"models\.max_loaded: 2 models are loaded at the start"):
        Config.parse({"models": {"served": entries, "max_loaded": 1}})


def test_a_model_beside_the_list_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path is set beside models\.served"):
        make_plans(several({"name": "a"}, model={"path": "DIR"}))


def test_commands_for_one_model_refuse_a_list(tmp_path: Path) -> None:
    path = tmp_path / "models.yaml"
    path.write_text("models: {served: [{name: a}]}\n")
    with pytest.raises(ConfigError, match="this command is for one model"):
        load_config(["--config", str(path)], {})
    assert main(["config", "validate", str(path)]) == 0
