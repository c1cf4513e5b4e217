"""The longest text of an embedding model, where sentence-transformers cuts it."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.pooling import PoolingConfig
from tests.models.checkpoints import write_modules
from tests.runtime.conftest import CONFIG

CHOSEN = dataclasses.replace(CONFIG, max_model_len=512, shrink_context=True)


@pytest.mark.parametrize(
    ("of_its_own", "tokenizer", "longest"),
    [
        (None, {}, 512),
        (None, {"model_max_length": 256}, 256),  # as sentence-transformers 6 writes it
        (128, {"model_max_length": 256}, 128),
        (None, {"model_max_length": 10**30}, 512),
        (None, {"model_max_length": None}, 512),
    ],
)
def test_the_longest_text(of_its_own: int | None, tokenizer: dict[str, Any], longest: int, tmp_path: Path) -> None:
    pooling = PoolingConfig("cls", normalize=False, max_tokens=of_its_own)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert (
        CHOSEN.for_embeddings(pooling, ModelFiles.open(tmp_path)).max_model_len == 512
    )  # no model of sentence-transformers
    write_modules(tmp_path, ["Transformer", "Pooling"], {})
    found = CHOSEN.for_embeddings(pooling, ModelFiles.open(tmp_path))
    assert (found.max_model_len, found.normalize_embeddings) == (longest, False)
    configured = dataclasses.replace(CHOSEN, shrink_context=False)
    assert configured.for_embeddings(pooling, ModelFiles.open(tmp_path)).max_model_len == 512
