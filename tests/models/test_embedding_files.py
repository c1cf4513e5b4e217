"""The files beside a model's weights: read once, and the default prompt as sentence-transformers' `encode` reads it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve import model_files
from jaxserve.engine.factory import has_raw_scores, is_regression
from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.chosen_form import choose_quantization
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.sentence_files import embedding_prompt, is_embedder, read_pooling, text_limit
from jaxserve.models.pooling import PoolingConfig
from jaxserve.text.tokenizer import Tokenizer
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_modules, write_words
from tests.models.families import ENCODERS

PROMPTS = {"query": "query: ", "document": ""}
TYPES = ["Transformer", "Pooling"]


def write(directory: Path, name: Any, prompts: Any = PROMPTS) -> Path:
    settings = {"prompts": prompts, "default_prompt_name": name}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return directory


@pytest.mark.parametrize(("name", "prompt"), [(None, ""), ("query", "query: "), ("document", "")])
def test_the_default_prompt(name: str | None, prompt: str, tmp_path: Path) -> None:
    files = ModelFiles.open(write(tmp_path, name))
    assert embedding_prompt(files, PoolingConfig("mean")) == ""  # no model of sentence-transformers
    write_modules(tmp_path, TYPES, {"include_prompt": True})
    assert embedding_prompt(ModelFiles.open(tmp_path), PoolingConfig("mean")) == prompt


@pytest.mark.parametrize(("name", "prompts"), [("passage", PROMPTS), ("query", {}), ("query", None), ([], PROMPTS)])
def test_a_default_prompt_that_is_not_there(name: Any, prompts: Any, tmp_path: Path) -> None:
    write_modules(write(tmp_path, name, prompts), TYPES, {})
    with pytest.raises(ModelLoadError, match="'default_prompt_name'"):
        embedding_prompt(ModelFiles.open(tmp_path), PoolingConfig("mean"))


def test_a_mean_without_the_prompt_is_refused(tmp_path: Path) -> None:
    write_modules(write(tmp_path, "query"), TYPES, {"include_prompt": False})
    with pytest.raises(ModelLoadError, match="'include_prompt'"):
        embedding_prompt(ModelFiles.open(tmp_path), PoolingConfig("mean"))
    assert embedding_prompt(ModelFiles.open(tmp_path), PoolingConfig("last")) == "query: "


SETTINGS = [
    f"sentence_{name}_config.json"
    for name in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
]


@pytest.mark.parametrize("name", SETTINGS)
def test_every_name_of_the_settings_is_read(name: str, tmp_path: Path) -> None:
    write_words(write_modules(tmp_path, TYPES, {"pooling_mode": "mean"}), 8)
    (tmp_path / name).write_text(json.dumps({"max_seq_length": 12.0, "do_lower_case": True}))
    pooling = read_pooling(ModelFiles.open(tmp_path), from_hf(ENCODERS["bert"]))
    assert pooling.max_tokens == text_limit(ModelFiles.open(tmp_path), pooling) == 12
    assert Tokenizer.from_directory(tmp_path).encode("W4 w5") == [2, 4, 5, 3]
    (tmp_path / name).write_text(json.dumps({"max_seq_length": 1.5}))
    with pytest.raises(ModelLoadError, match=f"{name}: 'max_seq_length'"):
        read_pooling(ModelFiles.open(tmp_path), from_hf(ENCODERS["bert"]))


def test_the_first_name_wins(tmp_path: Path) -> None:
    write_modules(tmp_path, TYPES, {"pooling_mode": "mean"})
    for length, name in enumerate(SETTINGS, 10):
        (tmp_path / name).write_text(json.dumps({"max_seq_length": length}))
    for length, name in enumerate(SETTINGS, 10):
        assert read_pooling(ModelFiles.open(tmp_path), from_hf(ENCODERS["bert"])).max_tokens == length
        (tmp_path / name).unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 9.0}))
    files = ModelFiles.open(tmp_path)
    assert text_limit(files, read_pooling(files, from_hf(ENCODERS["bert"]))) == 9


def test_each_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also files that several readers need, and with a quantization that lies beside config.json."""
    write_checkpoint(tmp_path, TINY_LLAMA, random_tensors(TINY_LLAMA))
    write(write_modules(tmp_path, TYPES, {"pooling_mode": "lasttoken"}), "query")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 32}))
    seen: Counter[str] = Counter()
    read_text = model_files.read_text

    def counted(path: Path, max_bytes: int = model_files.MAX_BYTES) -> str:
        seen[str(path.relative_to(tmp_path))] += 1
        return read_text(path, max_bytes)

    monkeypatch.setattr(model_files, "read_text", counted)
    files = ModelFiles.open(tmp_path)
    for _ in range(2):
        config = read_config(files)
        assert config.eos_token_ids == (5,) and config.stored_form is not None and config.stored_form.method == "gptq"
        assert choose_quantization("auto", config, files) == "stored"
        assert embedding_prompt(files, read_pooling(files, config)) == "query: "
        assert is_embedder(files, config) and not is_regression(files) and not has_raw_scores(files)
    names = ("config.json", "generation_config.json", "quantize_config.json", "modules.json", "1_Pooling/config.json")
    assert seen == dict.fromkeys((*names, "config_sentence_transformers.json"), 1)


@pytest.mark.parametrize("kind", ["Pooling", "LogitScore"])
def test_a_module_outside_the_directory_is_refused(kind: str, tmp_path: Path) -> None:
    modules = [{"type": "x.Transformer", "path": ""}, {"type": f"x.{kind}", "path": f"../1_{kind}"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelLoadError, match=f"the path of {kind} must be a directory beside it"):
        read_pooling(ModelFiles.open(tmp_path), from_hf(TINY_LLAMA))
