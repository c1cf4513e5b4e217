"""Every key of the configuration at the edges of its type: refused by name, or harmless for a reason given here."""

import math
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from jaxserve.cli.config import dump
from jaxserve.cli.options import load_config, variable_of
from jaxserve.config import SECRETS, Config, known_keys
from jaxserve.config_types import reveal
from jaxserve.errors import ConfigError

VALUES = [math.nan, math.inf, -math.inf, 0, -1, 10**12, "", " ", "a\nb", "\0", True, [], {}, "é" * 3, "none", "null"]
WORDS = ["nan", "inf", "-inf", "0", "-1", "1000000000000", "", " ", "a\nb", "none", "null", "true", "9" * 5000]

TEXTS = (
    "model.path model.tokenizer model.chat_template model.tool_parser model.reasoning_parser model.revision "
    "model.served_name model.classifier_from_token server.host server.ssl_keyfile server.ssl_certfile "
    "runtime.compile_cache runtime.bundle store.path server.weights_directories mesh.leader_address "
    "mesh.group_key_file speculation.draft_model"
)
SWITCHES = [key for key, field in known_keys().items() if field.annotation is bool]
TEXT_KEYS = [str(key) for key in TEXTS.split()]
KEY = {"name": "tenant", "value": "t-12345"}
LISTS = (
    "model.served_name",
    "model.classifier_from_token",
    "server.allowed_hosts",
    "media.allowed_hosts",
    "server.cors_origins",
    "server.keys",
    "lora.adapters",
    "server.weights_directories",
    "models.served",
)
PLAIN_WORDS = [word for word in WORDS if word.strip() and "\n" not in word]

# (keys, values that are taken, why they do no harm)
HARMLESS: list[tuple[list[str], list[Any], str]] = [
    (TEXT_KEYS, ["é" * 3, "none", "null", *PLAIN_WORDS], "a name: no such file, host or parser is an error at start"),
    (["model.chat_template"], ["a\nb"], "a template may have several lines"),
    (
        ["server.allowed_hosts", "media.allowed_hosts"],
        [word for word in PLAIN_WORDS if word != "-inf"],
        "a name that nobody asks for",
    ),
    (SWITCHES, [True, 0, "0", "true"], "0 and true are how YAML and environments write a switch"),
    (["model.quantization"], ["none"], "the word for weights that are not quantized"),
    (["mesh.cluster"], ["none"], "the default"),
    (["lora.slots"], [0, "0"], "0: no adapters"),
    (["media.max_items"], [0, "0"], "0: no pictures"),
    (["mesh.host_rank"], [0, "0"], "0 is the only host"),
    (["mesh.prefill_replicas"], [0, "0"], "0: every engine computes prompts"),
    (["server.port"], [0, "0"], "0 takes a free port"),
    (["server.drain_timeout"], [0, "0"], "0 gives running requests no time"),
    (["models.wait_seconds"], [0, "0"], "0: no request waits for its model"),
    (["cache.host_memory"], [10**12, str(10**12)], "more than the machine has is an error at start"),
    (["media.cache", "media.memory"], [10**12, str(10**12)], "a limit that requests do not reach"),
    (["store.thread_quota"], [10**12, str(10**12)], "a disk without room drops threads"),
    (["runtime.random_seed", "server.watermark_key"], [0, "0", 10**12, str(10**12)], "any number is a seed"),
    (["server.api_key", "server.admin_api_key"], [w for w in PLAIN_WORDS if w != "none"], "visible ASCII is a key"),
]


def taken(key: str, value: Any) -> bool:
    """Whether a value that was not refused is harmless."""
    if value == [] and key in LISTS:
        return True  # the default
    known = [each for keys, values, _ in HARMLESS if key in keys for each in values]
    return any(value == each and type(value) is type(each) for each in known)


@pytest.mark.parametrize("key", known_keys())
def test_a_value_is_refused_by_name_or_harmless(key: str) -> None:
    section, _, name = key.partition(".")
    for value in VALUES:
        try:
            Config.parse({section: {name: value}})
        except ConfigError as error:
            assert str(error).startswith(f"{key}: "), (value, str(error))
            assert "\n" not in str(error) and len(str(error)) < 300
        else:
            assert taken(key, value), f"{key}: {value!r} is taken"


@pytest.mark.parametrize("key", known_keys())
def test_a_word_is_refused_by_name_or_harmless(key: str) -> None:
    """As a flag and as a variable, where all is text and null unsets."""
    may_be_unset = type(None) in get_args(known_keys()[key].annotation) or known_keys()[key].annotation is type(None)
    for word in WORDS:
        flag = f"--{key.replace('_', '-')}={word}"
        for argv, environ in (([flag], {}), ([], {variable_of(key): word})):
            try:
                config = load_config(argv, environ)
            except ConfigError as error:
                assert str(error).startswith(f"{key}: "), (word, str(error))
                assert "\n" not in str(error) and len(str(error)) < 300
            else:
                unset = word in ("none", "null") and may_be_unset and key.partition(".")[2] not in SECRETS
                assert unset or taken(key, word), f"{key}: {word!r} is taken"
                assert not unset or config == Config().replace(**{key.partition(".")[0]: {key.partition(".")[2]: None}})


@pytest.mark.parametrize("key", [f"server.{name}" for name in SECRETS])
@pytest.mark.parametrize("word", ["", " ", "none", "None", "NULL", "null", "sk-1\n", "sk 1", "sésame", "\t"])
def test_no_word_opens_the_server(key: str, word: str) -> None:
    name = key.partition(".")[2]
    for argv, environ in (([f"--{key.replace('_', '-')}", word], {}), ([], {variable_of(key): word})):
        with pytest.raises(ConfigError, match=f"^{key}: ") as error:
            load_config(argv, environ)
        assert not word.strip() or word.lower() in ("none", "null") or word.strip() not in str(error.value)
    with pytest.raises(ConfigError, match=f"^{key}: "):
        Config.of(**{name: word})


@pytest.mark.parametrize(
    "tree", [{"api_key": 12345}, {"api_key": "12345 6"}, {"watermark_key": "s12345"}, "x12345", {"keys": [KEY, KEY]}]
)
def test_a_secret_is_in_no_error(tree: Any) -> None:
    with pytest.raises(ConfigError) as error:
        Config.parse({"server": tree})
    assert "12345" not in str(error.value) and error.value.__cause__ is None


def test_a_secret_is_in_nothing_that_is_printed() -> None:
    config = Config.of(api_key="k-12345", admin_api_key="a-12345", keys=[KEY], watermark_key=12345)
    config = config.replace(logging={"otlp_endpoint": "http://me:k-12345@localhost:4318/v1/traces"})
    for text in (dump(config), repr(config.server), config.model_dump_json(), str(config.model_dump(mode="json"))):
        assert "12345" not in text
    assert "@localhost:4318/v1/traces" in dump(config)
    assert reveal(config.server.api_key) == "k-12345" and reveal(config.server.watermark_key) == 12345
    assert config.logging.otlp_endpoint is not None and "12345" in config.logging.otlp_endpoint


def test_the_engine_process_gets_no_secret() -> None:
    config = Config.of(api_key="k", admin_api_key="a", watermark_key=1, keys=[KEY], port=5, compile_cache=Path("/x"))
    sent = Config.model_validate_json(config.without_secrets().model_dump_json())
    assert not any(getattr(sent.server, name) for name in SECRETS)
    assert sent.server.port == 5 and sent.runtime.compile_cache == Path("/x")


def test_every_secret_is_named() -> None:
    hidden = [key for key, field in known_keys().items() if re.search("Secret|ApiKey", str(field.annotation))]
    assert hidden == [f"server.{name}" for name in SECRETS]


def test_every_key_is_described() -> None:
    assert [key for key, field in known_keys().items() if not field.description] == []


def test_a_broken_file_is_not_quoted(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("server:\n  api_key: 'sk-12345\n  port: [\n")
    with pytest.raises(ConfigError, match=r"is not YAML: .* in line") as error:
        load_config(["--config", str(path)], {})
    assert "12345" not in str(error.value)


def test_several_mistakes_are_all_named() -> None:
    with pytest.raises(ConfigError, match=r"cache\.page_size: .*or should be 'auto', not 0; server\.port: .*70000"):
        Config.parse({"cache": {"page_size": 0}, "server": {"port": 70000}})


@pytest.mark.parametrize("key", ["prompt_lookup_min", "prompt_lookup_max"])
@pytest.mark.parametrize("method", ["draft_model", "eagle3"])
def test_a_draft_model_looks_nothing_up(method: str, key: str) -> None:
    drafts: dict[str, Any] = {"method": method, "draft_model": "small"}
    wrong: dict[str, Any] = {**drafts, key: 5}
    with pytest.raises(ConfigError, match=f"^speculation.{key}: .*it is for the method ngram"):
        Config.of(**wrong)
    with pytest.raises(ConfigError, match=f"^speculation.{key}: .*it is for the method ngram"):
        Config.of(**(wrong | {"method": "auto"}))
    assert Config.parse(Config.of(**drafts).model_dump()).speculation.draft_model == "small"  # all keys are written


def test_a_draft_model_that_is_named_is_the_source_unless_a_method_is_chosen() -> None:
    assert Config().speculation.source == "off"
    section = Config.of(draft_model="small").speculation
    assert (section.method, section.source, section.max_drafts) == ("auto", "draft_model", 4)
    with pytest.raises(ConfigError, match="it is for the methods draft_model and eagle3"):
        Config.of(method="off", draft_model="small")
