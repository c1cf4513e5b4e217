"""Classification heads of encoders and decoders against transformers."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.sentence_files import is_embedder, read_pooling
from jaxserve.runtime.encoder_runner import EncoderRunner
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.types.step import ScheduledRow, SchedulerOutput
from tests.models.checkpoints import write_checkpoint
from tests.models.dense import dense_scores
from tests.models.families import CLASSIFIERS, GOLDENS, PAIR_SECOND, golden_tensors
from tests.quick import quick_programs
from tests.runtime.conftest import CONFIG

FLOAT32 = jnp.dtype("float32")
TOLERANCE = 1e-4


def loaded(case: str, directory: Path) -> LoadedModel:
    tensors = golden_tensors(case)
    return load_model(write_checkpoint(directory, CLASSIFIERS[case], tensors), dtype=FLOAT32)


@pytest.mark.parametrize("case", CLASSIFIERS)
def test_a_head_equals_transformers(case: str, tmp_path: Path) -> None:
    model, golden = loaded(case, tmp_path), np.load(GOLDENS / f"{case}.npz")
    second = PAIR_SECOND if case == "bert_classifier" else 0
    got = dense_scores(model.structure, model.leaves, jnp.asarray(golden["ids"]), second)
    assert np.abs(np.asarray(got) - golden["scores"]).max() < TOLERANCE
    assert not is_embedder(ModelFiles.open(tmp_path), model.config)
    assert len(model.config.labels) == len(golden["scores"])


def test_what_the_heads_depend_on(tmp_path: Path) -> None:
    """Token types of BERT and the first position of RoBERTa change the numbers by far more than the tolerance."""
    bert, golden = loaded("bert_classifier", tmp_path / "bert"), np.load(GOLDENS / "bert_classifier.npz")
    got = dense_scores(bert.structure, bert.leaves, jnp.asarray(golden["ids"]), 0)
    assert np.abs(np.asarray(got) - golden["scores"]).max() > 30 * TOLERANCE
    roberta, golden = loaded("roberta_classifier", tmp_path / "roberta"), np.load(GOLDENS / "roberta_classifier.npz")
    assert roberta.config.position_offset == 2 and roberta.config.max_position_embeddings == 64
    got = dense_scores(roberta.structure, roberta.leaves, jnp.asarray(golden["ids"][1:]), 0)
    assert np.abs(np.asarray(got) - golden["scores"]).max() > 30 * TOLERANCE


@pytest.mark.parametrize("case", ["bert_classifier", "roberta_classifier"])
def test_the_runner_gives_each_pair_its_numbers(case: str, tmp_path: Path) -> None:
    """Pairs of several lengths in a step, each with the token types of its own second text."""
    model = loaded(case, tmp_path)
    mesh: DeviceMesh = make_mesh("cpu")
    config = dataclasses.replace(CONFIG, max_num_batched_tokens=96, max_model_len=48)
    with quick_programs():
        runner = EncoderRunner(model, read_pooling(ModelFiles.open(tmp_path), model.config), config, mesh)
    rng = np.random.default_rng(3)
    pairs = [(rng.integers(3, 90, length).tolist(), second) for length, second in ((5, 2), (40, 7), (9, 0), (30, 29))]
    rows = [
        ScheduledRow(f"r{i}", i, 0, len(ids), True, ids, 0, [i], embed=True, second_text=second)
        for i, (ids, second) in enumerate(pairs)
    ]
    found = runner.execute(SchedulerOutput(1, rows, 0, [])).result().embeddings
    assert found is not None and runner.num_compiles() == 0
    for row, (ids, second) in enumerate(pairs):
        alone = dense_scores(model.structure, model.leaves, jnp.asarray(ids, jnp.int32), second)
        np.testing.assert_allclose(found[row], alone, atol=1e-5)
    runner.close()


def test_labels(tmp_path: Path) -> None:
    hf = CLASSIFIERS["bert_classifier"]
    assert from_hf(hf).labels == ("bad", "so so", "good") and not from_hf(hf).multi_label
    bare = {key: value for key, value in hf.items() if key not in ("id2label", "label2id")}
    assert from_hf(bare).labels == ("LABEL_0", "LABEL_1")
    assert from_hf(bare | {"num_labels": 1}).labels == ("LABEL_0",)
    assert from_hf(hf | {"problem_type": "multi_label_classification"}).multi_label
    for wrong in ([], {}, {"1": "a"}, {"0": 5}, {"0": "x" * 2000}):
        (tmp_path / "config.json").write_text(json.dumps(hf | {"id2label": wrong}))
        with pytest.raises(ModelLoadError, match="'id2label'"):
            read_config(tmp_path)
