"""How a reranker is recognised: by the configuration, by sentence-transformers' files, by its chat template."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from jaxserve.config import Config
from jaxserve.engine.factory import has_raw_scores, is_regression, label_token_ids
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.sentence_files import is_embedder, read_pooling
from jaxserve.text.tokenizer import Tokenizer
from tests.api.fakes import DEMO
from tests.models.checkpoints import TINY_LLAMA

ROLES = "{% if m['role'] == 'query' %}{% endif %}{% if m['role'] == 'document' %}{% endif %}\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(DEMO)


def found(directory: Path, tokenizer: Tokenizer, **section: Any) -> tuple[int, ...]:
    return label_token_ids(Config().replace(model=section).model, ModelFiles.open(directory), tokenizer)


def write_logit_score(directory: Path, settings: Any, path: str = "1_LogitScore") -> Path:
    modules = [{"type": "sentence_transformers.x.Transformer", "path": ""}, {"type": "x.LogitScore", "path": path}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_LogitScore").mkdir()
    (directory / "1_LogitScore" / "config.json").write_text(json.dumps(settings))
    return directory


def test_the_configuration_decides(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert found(tmp_path, tokenizer) == ()
    ids = tokenizer.token_to_id("0"), tokenizer.token_to_id("1")
    write_logit_score(tmp_path, {"true_token_id": 7, "false_token_id": 5})
    assert found(tmp_path, tokenizer, classifier_from_token=["0", "1"]) == ids
    for words in (["0"], ["0", "0"], ["0", "no such token"], ["0", "1", "2"]):
        with pytest.raises(ConfigError, match="must be two words"):
            found(tmp_path, tokenizer, classifier_from_token=words)
    assert found(tmp_path, tokenizer, classifier_from_token="0,1") == ids


def test_sentence_transformers_files(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_logit_score(tmp_path, {"true_token_id": 7, "false_token_id": 5})
    assert found(tmp_path, tokenizer) == (5, 7)
    config, files = from_hf(TINY_LLAMA), ModelFiles.open(tmp_path)
    assert not is_embedder(files, config) and read_pooling(files, config).kind == "last"


@pytest.mark.parametrize(
    "settings", [{}, {"true_token_id": 7}, {"true_token_id": 7, "false_token_id": 10**9}, {"true_token_id": "7"}]
)
def test_damaged_files_are_named(settings: Any, tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_logit_score(tmp_path, settings)
    with pytest.raises(ModelLoadError, match="expected false_token_id and true_token_id"):
        found(tmp_path, tokenizer)


def test_a_module_outside_its_directory_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    write_logit_score(tmp_path, {}, path="../1_LogitScore")
    with pytest.raises(ModelLoadError, match="must be a directory beside it"):
        found(tmp_path, tokenizer)


def test_a_template_with_the_roles(tmp_path: Path, tokenizer: Tokenizer) -> None:
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.add_tokens(["no", "yes"])
    words = Tokenizer(backend)
    template = ROLES + 'answer "yes" or "no"'
    assert found(tmp_path, words, chat_template=template) == (words.token_to_id("no"), words.token_to_id("yes"))
    with pytest.raises(ConfigError, match="must be two words"):
        found(tmp_path, tokenizer, chat_template=template)
    assert found(tmp_path, tokenizer, chat_template=ROLES) == ()
    assert found(tmp_path, tokenizer, chat_template='answer "yes" or "no"\n') == ()


@pytest.mark.parametrize(
    ("file", "content", "raw"),
    [
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, True),
        ("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, True),
        ("config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.linear.Identity"}, True),
        ("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, False),
        ("config.json", {"sentence_transformers": None}, False),
    ],
)
def test_scores_without_a_sigmoid(file: str, content: Any, raw: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(content))
    assert has_raw_scores(ModelFiles.open(tmp_path)) is raw


@pytest.mark.parametrize("problem", [None, "regression", "multi_label_classification"])
def test_a_head_of_values_is_known(problem: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"problem_type": problem}))
    assert is_regression(ModelFiles.open(tmp_path)) == (problem == "regression")
