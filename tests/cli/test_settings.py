"""One Config from a file, the environment and flags."""

from pathlib import Path

import pytest
import yaml

from jaxserve.cli.config import dump
from jaxserve.cli.help import launch_help
from jaxserve.cli.main import main
from jaxserve.cli.settings import ALIASES, known_keys, load_config
from jaxserve.config import Config
from jaxserve.errors import ConfigError

PRESETS = sorted((Path(__file__).parent.parent.parent / "configs").glob("*.yaml"))


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


def test_every_alias_names_a_key() -> None:
    assert set(ALIASES.values()) <= set(known_keys())


def test_a_flag_alone_is_true_only_for_a_switch() -> None:
    assert load_config(["--log-requests", "--port", "1"], {}).logging.requests
    with pytest.raises(ConfigError, match="--port needs a value"):
        load_config(["--port"], {})


def test_a_list_is_given_by_repeating_the_flag() -> None:
    assert load_config(["--served-model-name", "a"], {}).model.served_name == ("a",)
    config = load_config(["--served-model-name", "a", "--served-model-name", "b", "--served-model-name", "c"], {})
    assert config.model.served_name == ("a", "b", "c")


def test_null_unsets() -> None:
    assert load_config(["--runtime.compile-cache", "null"], {}).runtime.compile_cache is None


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--prot", "1"], "unknown flag --prot, did you mean --port?"),
        (["--port", "70000"], "server.port: .*not '70000'"),
        (["--dtype", "int3"], "model.dtype"),
        (["--enable-metrics"], "no flag of jaxserve"),
        (["stray"], "unknown flag stray"),
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
        ("a: [", "is no YAML"),
    ],
)
def test_a_wrong_file_is_explained(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(["--config", write(tmp_path, text)], {})


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(ConfigError, match="did you mean JAXSERVE_SERVER__PORT"):
        load_config([], {"JAXSERVE_SERVER__PROT": "1"})


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.name)
def test_every_preset_is_valid(path: Path) -> None:
    assert load_config(["--config", str(path)], {}).model.served_name


def test_there_are_presets() -> None:
    assert {"demo.yaml", "llama.yaml", "qwen3.yaml"} <= {path.name for path in PRESETS}


def test_the_tree_survives_a_dump_and_hides_keys() -> None:
    config = Config.of(api_key="secret", port=5)
    text = dump(config)
    assert "secret" not in text
    assert yaml.safe_load(text)["server"]["port"] == 5


def test_config_of_takes_bare_names() -> None:
    config = Config.of("DIR", max_num_seqs=4, dtype="float32", num_pages=8)
    assert (config.model.path, config.model.dtype, config.cache.num_pages) == ("DIR", "float32", 8)
    with pytest.raises(ConfigError, match="no key 'max_seqs'"):
        Config.of(max_seqs=4)


def test_help_names_every_key() -> None:
    text = launch_help(everything=True)
    for key in known_keys():
        assert f"--{key.replace('_', '-')}" in text


def test_an_error_is_one_line_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "validate", "--trust-remote-code"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "leave it out" in error


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert "launch" in capsys.readouterr().err
