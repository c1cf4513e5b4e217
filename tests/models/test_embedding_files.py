"""The default prompt of an embedding model's files, as sentence-transformers' `encode` reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.read_config import embedding_prompt, text_limit
from jaxserve.models.pooling import PoolingConfig, read_pooling
from jaxserve.text.tokenizer import Tokenizer
from tests.models.checkpoints import write_modules, write_words
from tests.models.families import ENCODERS

PROMPTS = {"query": "query: ", "document": ""}
TYPES = ["Transformer", "Pooling"]


def write(directory: Path, name: Any, prompts: Any = PROMPTS) -> Path:
    settings = {"prompts": prompts, "default_prompt_name": name}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(("name", "prompt"), [(None, ""), ("query", "query: "), ("document", "")])
def test_the_default_prompt(name: str | None, prompt: str, tmp_path: Path) -> None:
    assert embedding_prompt(write(tmp_path, name), PoolingConfig("mean")) == ""  # no model of sentence-transformers
    write_modules(tmp_path, TYPES, {"include_prompt": True})
    assert embedding_prompt(tmp_path, PoolingConfig("mean")) == prompt


@pytest.mark.parametrize(("name", "prompts"), [("passage", PROMPTS), ("query", {}), ("query", None), ([], PROMPTS)])
def test_a_default_prompt_that_is_not_there(name: Any, prompts: Any, tmp_path: Path) -> None:
    write_modules(write(tmp_path, name, prompts), TYPES, {})
    with pytest.raises(ModelLoadError, match="'default_prompt_name'"):
        embedding_prompt(tmp_path, PoolingConfig("mean"))


def test_a_mean_without_the_prompt_is_refused(tmp_path: Path) -> None:
    write_modules(write(tmp_path, "query"), TYPES, {"include_prompt": False})
    with pytest.raises(ModelLoadError, match="'include_prompt'"):
        embedding_prompt(tmp_path, PoolingConfig("mean"))
    assert embedding_prompt(tmp_path, PoolingConfig("last")) == "query: "


SETTINGS = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_name_of_the_settings_is_read(name: str, tmp_path: Path) -> None:
    write_words(write_modules(tmp_path, TYPES, {"pooling_mode": "mean"}), 8)
    (tmp_path / name).write_text(json.dumps({"max_seq_length": 12.0, "do_lower_case": True}))
    pooling = read_pooling(tmp_path, from_hf(ENCODERS["bert"]))
    assert pooling.max_tokens == text_limit(tmp_path, pooling) == 12
    assert Tokenizer.from_directory(tmp_path).encode("W4 w5") == [2, 4, 5, 3]
    (tmp_path / name).write_text(json.dumps({"max_seq_length": 1.5}))
    with pytest.raises(ModelLoadError, match=f"{name}: 'max_seq_length'"):
        read_pooling(tmp_path, from_hf(ENCODERS["bert"]))


def test_the_first_name_wins(tmp_path: Path) -> None:
    write_modules(tmp_path, TYPES, {"pooling_mode": "mean"})
    for length, name in enumerate(SETTINGS, 10):
        (tmp_path / name).write_text(json.dumps({"max_seq_length": length}))
    for length, name in enumerate(SETTINGS, 10):
        assert read_pooling(tmp_path, from_hf(ENCODERS["bert"])).max_tokens == length
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 9.0}))
    assert text_limit(tmp_path, read_pooling(tmp_path, from_hf(ENCODERS["bert"]))) == 9
