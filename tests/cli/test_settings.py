"""One Config from a file, the environment and flags."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from docgen.configuration import reference
from jaxserve.cli.config import dump
from jaxserve.cli.http_server import warn_if_open
from jaxserve.cli.main import main
from jaxserve.cli.options import launch_help, load_config, validate
from jaxserve.config import Config, known_keys
from jaxserve.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
PRESETS = sorted(set((ROOT / "configs").glob("*.yaml")) - {ROOT / "configs" / "ray.yaml"})  # that is Serve's


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, "server: {port: 1, host: a}\nscheduler: {max_num_seqs: 3}\n")
    environ = {"JAXSERVE_SERVER__PORT": "2", "JAXSERVE_SCHEDULER__MAX_NUM_SEQS": "5", "PATH": "x"}
    config = load_config(["--config", path, "--scheduler.max-num-seqs", "7"], environ)
    assert (config.server.host, config.server.port, config.scheduler.max_num_seqs) == ("a", 2, 7)


@pytest.mark.parametrize("flag", ["--scheduler.max-num-seqs", "--scheduler.max_num_seqs", "--max-running-requests"])
def test_one_key_has_several_spellings(flag: str) -> None:
    assert load_config([flag, "9"], {}).scheduler.max_num_seqs == 9
    assert load_config([f"{flag}=9"], {}).scheduler.max_num_seqs == 9


@pytest.mark.parametrize("flag", ["--mesh.tensor", "--tensor", "--tp", "--tensor-parallel-size", "--ep"])
def test_a_mesh_may_be_auto(flag: str) -> None:
    mesh = load_config([flag, "auto"], {}).mesh
    assert (mesh.tensor, mesh.expert) == ("auto", "auto")


def test_a_flag_alone_is_true_only_for_a_switch() -> None:
    assert load_config(["--log-requests", "--port", "1"], {}).logging.requests
    with pytest.raises(ConfigError, match="--port needs a value"):
        load_config(["--port"], {})


def test_a_list_is_given_by_repeating_the_flag() -> None:
    assert load_config(["--served-model-name", "a"], {}).model.served_name == ("a",)
    config = load_config(["--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "c"], {})
    assert config.model.served_name == ("a", "b", "c")


def test_an_old_name_of_a_key_is_read_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    warning = "runtime.products is called runtime.activations now; the old name is read until version 0.5"
    path = write(tmp_path, "runtime: {products: exact}\n")
    flag, variable = "--runtime.products", "JAXSERVE_RUNTIME__PRODUCTS"
    for argv, environ in (([flag, "exact"], {}), ([], {variable: "exact"}), (["--config", path], {})):
        notices: list[str] = []
        config = load_config(argv, environ, notice=notices.append)
        assert config.runtime.activations == "exact"
        assert [line.removeprefix(f"{flag}: ") for line in notices] == [warning]
    assert load_config(["--config", path, flag, "rounded"], {}).runtime.activations == "rounded"
    assert not caplog.messages
    assert Config.of(products="exact").runtime.activations == "exact"
    assert caplog.messages == [warning]
    with pytest.raises(ConfigError, match=r"runtime.products and runtime.activations are the same key"):
        Config.parse({"runtime": {"products": "exact", "activations": "exact"}})


def test_a_section_of_comments_takes_flags(tmp_path: Path) -> None:
    path = write(tmp_path, "server:\n#  port: 1\n")
    assert load_config(["--config", path, "--port", "2"], {}).server.port == 2
    with pytest.raises(ConfigError, match=r"server in .* is not a mapping"):
        load_config(["--config", write(tmp_path, "server: 0"), "--port", "2"], {})


def test_a_section_may_take_over_keys_of_another_and_change_them(tmp_path: Path) -> None:
    text = "server: {<<: {port: 1, host: a}, port: 2}\n"
    config = load_config(["--config", write(tmp_path, text)], {})
    assert (config.server.port, config.server.host) == (2, "a")


def test_null_unsets() -> None:
    assert load_config(["--runtime.compile-cache", "null"], {}).runtime.compile_cache is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "unknown flag --prot, did you mean --port?"),
        (["--port", "70000"], "server.port: .*not '70000'"),
        (["--dtype", "int3"], "model.dtype"),
        (["--enable-lora"], "no flag of jaxserve"),
        (["--config", "missing.yaml"], "cannot read the configuration missing.yaml"),
    ],
)
def test_a_wrong_flag_is_named(argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(argv, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("schedular: {policy: lpm}", "unknown key schedular, did you mean scheduler"),
        ("scheduler: {max_num_seq: 3}", "unknown key scheduler.max_num_seq, did you mean scheduler.max_num_seqs"),
        ("- 1", "must hold a mapping"),
        ("a: [", "is not YAML"),
        ("model: {path: 2026-13-45}", "is not YAML: .* a date that is none"),
        ("server: {port: 0x_}", "is not YAML: .* a number"),
        ("[" * 5000, "is not YAML: .* nested too deeply"),
        ("server: {api_key: k-12345}\nserver: {port: 1}", "is not YAML: found a key twice in line 2, column 1"),
        ("server: {port: 1, 'port': 2}", "found a key twice in line 1, column 19"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--config", write(tmp_path, text)], {})


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("JAXSERVE_SERVER__PROT", "JAXSERVE_SERVER__PORT"),
        ("JAXSERVE_API_KEY", "JAXSERVE_SERVER__API_KEY"),  # else the server would be open
        ("JAXSERVE_ADMIN_API_KEY", "JAXSERVE_SERVER__ADMIN_API_KEY"),
        ("JAXSERVE_PORT", "JAXSERVE_SERVER__PORT"),
        ("JAXSERVE_STORE_PATH", "JAXSERVE_STORE__PATH"),
    ],
)
def test_a_wrong_variable_is_named(variable: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {variable}, did you mean {meant}"):
        load_config([], {variable: "1"})


def test_variables_that_are_not_the_operators() -> None:
    """The tests' own, and those that Kubernetes sets beside a Service of the server's name."""
    links = {
        "JAXSERVE_TEST_CACHE": "/x",
        "JAXSERVE_PORT": "tcp://10.0.0.1:8000",
        "JAXSERVE_SERVICE_HOST": "10.0.0.1",
        "JAXSERVE_SERVICE_PORT": "8000",
        "JAXSERVE_SERVICE_PORT_HTTP": "8000",
        "JAXSERVE_PORT_8000_TCP": "tcp://10.0.0.1:8000",
        "JAXSERVE_PORT_8000_TCP_ADDR": "10.0.0.1",
        "JAXSERVE_API_PORT": "tcp://10.0.0.1:8000",
        "JAXSERVE_API_SERVICE_HOST": "10.0.0.1",
    }
    assert load_config([], links) == Config()


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_every_preset_is_valid(path: Path) -> None:
    config = load_config(["--config", str(path)], {}, several=True)
    assert config.model.served_name or config.models.served


def test_there_are_presets() -> None:
    assert {"demo.yaml", "llama.yaml", "qwen3.yaml"} <= {path.name for path in PRESETS}


def test_a_key_that_is_null_in_the_file_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"):
        warn_if_open(load_config(["--config", write(tmp_path, "server: {api_key: null}")], {}).server)
        warn_if_open(load_config(["--config", write(tmp_path, "server: {port: 1}")], {}).server)
        warn_if_open(load_config(["--host", "::1"], {}).server)
        warn_if_open(load_config(["--host", "0.0.0.0", "--api-key", "k"], {}).server)
        assert len(caplog.messages) == 1 and "server.api_key is null" in caplog.messages[0]
        warn_if_open(load_config(["--host", "0.0.0.0"], {}).server)
        assert "listening on 0.0.0.0 without an API key" in caplog.messages[1]


def test_the_tree_survives_a_dump_and_hides_keys() -> None:
    config = Config.of(api_key="secret", port=5)
    text = dump(config)
    assert "secret" not in text
    assert yaml.safe_load(text)["server"]["port"] == 5


HASH = hashlib.sha256(b"the-key").hexdigest()
KEYS = [{"name": "alice", "value": "the-key"}]


def test_named_keys_come_from_a_file_the_environment_or_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path, yaml.safe_dump({"server": {"keys": KEYS}}))
    as_json = json.dumps([{"name": "alice", "sha256": HASH}])
    for argv, environ in (
        (["--config", path], {}),
        (["--server.keys", as_json], {}),
        ([], {"JAXSERVE_SERVER__KEYS": json.dumps(KEYS)}),
    ):
        config = load_config(argv, environ)
        assert [(key.name, key.digest.hex()) for key in config.server.keys] == [("alice", HASH)]
        assert config.replace(server={"port": 1}).server.keys == config.server.keys and config.server.needs_key
        assert "the-key" not in dump(config) + repr(config) and HASH not in dump(config) + repr(config)
        assert Config.parse(json.loads(config.without_secrets().model_dump_json())).server.keys == ()


@pytest.mark.parametrize(
    ("server", "message"),
    [
        ({"keys": [{"name": "a", "value": ""}]}, "server.keys.0.value: is empty"),
        ({"keys": [{"name": "a", "value": " "}]}, "server.keys.0"),
        ({"keys": [{"name": "a", "value": 5}]}, "server.keys.0"),
        ({"keys": [{"name": "a"}]}, "server.keys.0: give value or sha256"),
        ({"keys": [{"name": "a", "value": "none"}]}, "server.keys.0.value: is the word for no key"),
        ({"keys": [{"name": f"k{i}", "value": f"v{i}"} for i in range(300)]}, "server.keys"),
        ({"keys": [{"value": "the-key"}]}, "server.keys.0.name"),
        ({"keys": [{"name": "a b", "value": "the-key"}]}, "server.keys.0.name"),
        ({"keys": [{"name": "", "value": "the-key"}]}, "server.keys.0.name"),
        ({"keys": [{"name": "a", "value": "the-key", "sha256": HASH}]}, "one of them"),
        ({"keys": [{"name": "a", "sha256": "the-key"}]}, "server.keys.0.sha256"),
        ({"keys": [{"name": "a", "value": "the-key", "rank": 1}]}, "server.keys.0.rank: is no key here"),
        ({"keys": [*KEYS, {"name": "alice", "value": "other"}]}, "'alice' is given twice"),
        ({"keys": [*KEYS, {"name": "bob", "sha256": HASH}]}, "'alice' is the same"),
        ({"keys": KEYS, "api_key": "the-key"}, "'alice' is the same"),
        ({"keys": KEYS, "admin_api_key": "the-key"}, "'alice' is the same"),
        ({"keys": [{"name": "default", "value": "the-key"}], "api_key": "other"}, "'default' is given twice"),
        ({"keys": "the-key"}, "should be a list"),
        ({"keys": ""}, "should be a list"),
        ({"keys": None}, "server.keys"),
        ({"keys": {"alice": "the-key"}}, "server.keys"),
        ({"keys": ["the-key"]}, "server.keys.0"),
        ({"api_key": ["the-key"]}, "server.api_key"),
    ],
)
def test_wrong_keys_are_refused_and_not_shown(tmp_path: Path, server: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load_config(["--config", write(tmp_path, yaml.safe_dump({"server": server}))], {})
    assert "the-key" not in str(error.value) and HASH not in str(error.value)


def test_config_of_takes_bare_names() -> None:
    config = Config.of("DIR", max_num_seqs=4, dtype="float32", num_pages=8)
    assert (config.model.path, config.model.dtype, config.cache.num_pages) == ("DIR", "float32", 8)
    with pytest.raises(ConfigError, match="no key 'max_seqs', did you mean max_num_seqs"):
        Config.of(max_seqs=4)
    with pytest.raises(ConfigError, match="model and store have a key 'path'") as error:
        Config.of(path="DIR")
    assert "replace(store={'path': ...})" in str(error.value.fix)


def test_help_names_every_key() -> None:
    text = launch_help(everything=True)
    for key in known_keys():
        assert f"--{key.replace('_', '-')}" in text


def test_an_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "--speculative-config", "{}"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "should be a JSON object" in error


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lunch"]) == 2
    assert "launch" in capsys.readouterr().err


def test_the_page_of_the_keys_is_up_to_date() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference(), "run: python -m docgen.configuration > docs/configuration.md"
    assert all(f"| `{key}` |" in page for key in known_keys())


def test_the_schema_takes_what_a_file_may_have() -> None:
    """Editors show what a schema refuses as a mistake."""
    definitions = Config.model_json_schema()["$defs"]

    def kinds(entry: dict[str, Any]) -> set[str]:
        return {entry["type"]} if "type" in entry else {kind for each in entry["anyOf"] for kind in kinds(each)}

    assert kinds(definitions["CacheSection"]["properties"]["host_memory"]) == {"integer", "string", "null"}
    for section, key in (
        ("ModelSection", "served_name"),
        ("ModelSection", "classifier_from_token"),
        ("ServerSection", "allowed_hosts"),
        ("ServerSection", "cors_origins"),
        ("ServerSection", "weights_directories"),
    ):
        assert kinds(definitions[section]["properties"][key]) == {"array", "string"}


def test_a_masked_key_is_no_key(tmp_path: Path) -> None:
    shown = dump(load_config(["--api-key", "secret"], {}))
    with pytest.raises(ConfigError, match=r"server.api_key: is the mask of a key"):
        load_config(["--config", write(tmp_path, shown)], {})


@pytest.mark.parametrize("words", [["--help"], ["show", "--help"], ["validate", "-h"], ["schema", "--help"]])
def test_the_help_of_config(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", *words]) == 0
    assert capsys.readouterr().out.startswith("usage: jaxserve config show|validate|schema")


def test_schema_takes_no_flags(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema", "--port", "1"]) == 2
    assert "schema takes no --port" in capsys.readouterr().err


def test_all_wrong_variables_are_named() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([], {"JAXSERVE_PORT": "1", "JAXSERVE_SERVER__HOSTT": "2", "JAXSERVE_SERVER__HOST": "::1"})
    assert str(error.value).count("unknown variable") == 2
    assert "JAXSERVE_SERVER__PORT?" in str(error.value) and "JAXSERVE_SERVER__HOST?" in str(error.value)


@pytest.mark.parametrize(
    ("section", "told"),
    [
        ({"server": {"keys": [{"name": "a"}, 5]}}, "server.keys.1: should be a mapping"),
        ({"server": {"keys": {"a": "b"}}}, "server.keys: should be a list"),
        ({"server": {"keys": [{"value": "k-12345"}]}}, "server.keys.0.name: is missing"),
        ({"server": {"keys": [{"name": "a", "value": "k-12345", "x": 1}]}}, "server.keys.0.x: is no key here"),
        ({"server": {"keys": [{"name": "a b", "value": "k-12345"}]}}, "server.keys.0.name: should match pattern"),
        ({"models": {"served": [5]}}, "models.served.0: should be a mapping"),
        ({"models": {"served": {"a": {}}}}, "models.served: should be a list"),
    ],
)
def test_a_wrong_entry_of_a_list_is_explained_without_words_of_python(section: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        validate(section)
    text = str(error.value)
    assert told in text
    assert not any(word in text for word in ("tuple", "instance", "dictionary", "Input", "inputs", "String"))
