"""The default prompt of an embedding model's files, as sentence-transformers' `encode` reads it."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.loading.embedding_files import embedding_prompt
from jaxserve.models.pooling import PoolingConfig
from tests.models.checkpoints import write_modules

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
