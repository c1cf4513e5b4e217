"""Encoders and pooling: against transformers, against plain numpy, and a real MiniLM where its package is installed."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.models.checkpoint.sentence_files import read_pooling
from jaxserve.models.checkpoint.structure import LoadedModel
from jaxserve.models.encoder import Texts
from jaxserve.models.pooling import Kind, PoolingConfig, pool
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_modules
from tests.models.dense import dense_embedding, dense_hidden
from tests.models.families import CASES, ENCODERS, GOLDENS, golden_tensors

FLOAT32 = jnp.dtype("float32")


@pytest.fixture
def bert(tmp_path: Path) -> LoadedModel:
    tensors = golden_tensors("bert")
    return load_model(write_checkpoint(tmp_path, ENCODERS["bert"], tensors), dtype=FLOAT32)


def test_bert_equals_transformers(bert: LoadedModel) -> None:
    golden = np.load(GOLDENS / "bert.npz")
    ids = jnp.asarray(golden["ids"])[None, :]
    hidden = bert.structure.bind_encoder(bert.leaves)(Texts(ids, jnp.full(1, ids.shape[1], jnp.int32)))[0]
    assert np.abs(hidden - golden["hidden"]).max() < 1e-5 * np.abs(golden["hidden"]).max()


def test_rows_of_a_batch_do_not_see_each_other_nor_padding(bert: LoadedModel) -> None:
    encoder = jax.jit(lambda ids, lengths: bert.structure.bind_encoder(bert.leaves)(Texts(ids, lengths)))
    texts = [[5, 9, 4], [7], [8, 8, 30, 2, 11], []]
    ids = jnp.asarray([text + [50] * (8 - len(text)) for text in texts], jnp.int32)
    lengths = jnp.asarray([len(text) for text in texts], jnp.int32)
    pooling = PoolingConfig("mean")
    together = pool(encoder(ids, lengths), lengths, pooling)
    for row, text in enumerate(texts[:3]):
        alone = dense_embedding(bert.structure, pooling, bert.leaves, jnp.asarray(text, jnp.int32))
        assert jnp.allclose(together[row], alone, atol=1e-5)
    assert not together[3].any()


def test_an_encoder_generates_no_text(bert: LoadedModel) -> None:
    with pytest.raises(ModelLoadError, match="BertModel is an encoder"):
        bert.bind(bert.leaves)


@pytest.mark.parametrize("kind", ["mean", "cls", "last", "max", "mean_sqrt_len"])
@pytest.mark.parametrize("normalize", [True, False])
def test_pooling(kind: Kind, normalize: bool) -> None:
    lengths = [3, 1, 0, 4]
    x = np.random.default_rng(0).normal(size=(4, 5, 6)).astype(np.float32)
    got = jax.jit(pool, static_argnums=2)(x, np.array(lengths, np.int32), PoolingConfig(kind, normalize))
    for row, length in enumerate(lengths):
        part = x[row, :length]
        if length == 0:
            assert not got[row].any()
            continue
        expected = {
            "mean": part.mean(0),
            "cls": part[0],
            "last": part[-1],
            "max": part.max(0),
            "mean_sqrt_len": part.sum(0) / length**0.5,
        }[kind]
        expected = expected / np.linalg.norm(expected) if normalize else expected
        np.testing.assert_allclose(got[row], expected, atol=1e-6)


def test_a_decoder_published_bare_and_without_a_head(tmp_path: Path) -> None:
    hf = CASES["qwen3"]
    full = random_tensors(hf)
    bare = {name.removeprefix("model."): tensor for name, tensor in full.items() if name != "lm_head.weight"}
    model = load_model(write_checkpoint(tmp_path / "full", hf, full), dtype=FLOAT32)
    embedder = load_model(write_checkpoint(tmp_path / "bare", hf, bare), dtype=FLOAT32)
    ids = jnp.asarray([5, 6, 7, 8], jnp.int32)
    hidden = dense_hidden(model.structure, model.leaves, ids)
    pooling = read_pooling(ModelFiles.open(embedder.directory), embedder.config)
    assert pooling == PoolingConfig("last")
    embedding = dense_embedding(embedder.structure, pooling, embedder.leaves, ids)
    assert jnp.allclose(embedding, hidden[-1] / jnp.linalg.norm(hidden[-1]), atol=1e-6)


# --- sentence-transformers files -------------------------------------------------------------------------------


def test_files_of_sentence_transformers(tmp_path: Path) -> None:
    modes = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    write_modules(tmp_path, ["Transformer", "Pooling"], modes)
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 256}))
    assert read_pooling(ModelFiles.open(tmp_path), from_hf(ENCODERS["bert"])) == PoolingConfig("cls", False, 256)
    with pytest.raises(ModelLoadError, match="a decoder's embedding is its last token's state, not 'cls'"):
        read_pooling(ModelFiles.open(tmp_path), from_hf(TINY_LLAMA))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("cls", "cls"), (["max"], "max"), ("lasttoken", "last"), ("mean_sqrt_len_tokens", "mean_sqrt_len")],
)
def test_files_of_newer_sentence_transformers(mode: str | list[str], kind: Kind, tmp_path: Path) -> None:
    modes = {"embedding_dimension": 32, "pooling_mode": mode, "include_prompt": True}
    write_modules(tmp_path, ["Transformer", "Pooling", "Normalize"], modes)
    assert read_pooling(ModelFiles.open(tmp_path), from_hf(ENCODERS["bert"])) == PoolingConfig(kind)


@pytest.mark.parametrize(
    ("types", "modes", "cause"),
    [
        (["Transformer", "Pooling"], {"pooling_mode": "weightedmean"}, "expected one pooling mode"),
        (["Transformer", "Pooling"], {"pooling_mode": ["cls", "mean"]}, "expected one pooling mode"),
        (["Transformer", "Pooling"], {"pooling_mode": 5}, "expected one pooling mode"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_mean_tokens": True, "pooling_mode_weightedmean_tokens": True},
            "expected one pooling mode",
        ),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "cannot serve the modules Dense"),
        (["Transformer"], {}, "cannot serve the modules"),
        (["Transformer", "Pooling"], {}, "expected one pooling mode"),
        (["Transformer", "Pooling"], {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True}, "expected one"),
    ],
)
def test_what_cannot_be_served_is_named(types: list[str], modes: dict[str, Any], cause: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=cause):
        read_pooling(ModelFiles.open(write_modules(tmp_path, types, modes)), from_hf(TINY_LLAMA))


# --- a real one ------------------------------------------------------------------------------------------------


def test_real_minilm(minilm: Path) -> None:
    model = load_model(minilm, dtype=FLOAT32)
    pooling = read_pooling(ModelFiles.open(minilm), model.config)
    assert pooling == PoolingConfig("mean", True, 256)
    golden = np.load(GOLDENS / "minilm.npz")
    texts = np.split(golden["ids"], np.cumsum(golden["lengths"])[:-1])
    got = np.stack([dense_embedding(model.structure, pooling, model.leaves, jnp.asarray(t)) for t in texts])
    assert np.abs(got - golden["embeddings"]).max() < 1e-4
    nearest = (got[:6] @ got[:6].T - 2 * np.eye(6)).argmax(axis=1)
    assert nearest.tolist() == [1, 0, 3, 2, 5, 4]  # the sentences come in pairs of one meaning


def test_a_decoder_that_sentence_transformers_saved_without_its_head(tmp_path: Path) -> None:
    hf = TINY_LLAMA | {"architectures": ["LlamaModel"]}
    whole = random_tensors(TINY_LLAMA)
    bare = {name.removeprefix("model."): tensor for name, tensor in whole.items() if name != "lm_head.weight"}
    directory = write_checkpoint(tmp_path / "bare", hf, bare)
    with pytest.raises(ModelLoadError, match="'LlamaModel' is not supported"):
        read_config(directory)  # it would generate text with its table of embeddings as the head
    write_modules(directory, ["Transformer", "Pooling"], {"pooling_mode": "lasttoken"})
    plain = load_model(write_checkpoint(tmp_path / "plain", TINY_LLAMA, whole), dtype=jnp.dtype("float32"))
    got = load_model(directory, dtype=jnp.dtype("float32"))
    pooling, text = read_pooling(ModelFiles.open(directory), got.config), jnp.array([3, 1, 4], jnp.int32)
    found, wanted = (dense_embedding(each.structure, pooling, each.leaves, text) for each in (got, plain))
    np.testing.assert_array_equal(found, wanted)
