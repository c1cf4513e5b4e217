"""The encoder's runner: every text as alone, whatever shares its step; few shapes, none compiled later."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.pooling import PoolingConfig
from jaxserve.runtime.compilation.buckets import EncodeBuckets
from jaxserve.runtime.encoder_runner import EncoderRunner, longest_text
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.types.step import RowStatus, ScheduledRow, SchedulerOutput
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.dense import dense_embedding
from tests.models.families import ENCODERS, VOCAB
from tests.runtime.conftest import CONFIG

POOLING = PoolingConfig("mean")
SMALL = dataclasses.replace(CONFIG, max_num_batched_tokens=96, max_model_len=48)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory, mesh: DeviceMesh) -> LoadedModel:
    hf = ENCODERS["bert"]
    directory = write_checkpoint(tmp_path_factory.mktemp("bert"), hf, random_tensors(hf))
    return load_model(directory, dtype=jnp.dtype("float32"), mesh=mesh.mesh)


def step_of(texts: list[list[int]]) -> SchedulerOutput:
    rows = [ScheduledRow(f"r{i}", i, 0, len(t), True, t, 0, [i], embed=True) for i, t in enumerate(texts)]
    return SchedulerOutput(1, rows, 0, [])


def embeddings(runner: EncoderRunner, texts: list[list[int]]) -> list[np.ndarray]:
    result = runner.execute(step_of(texts)).result()
    assert not result.status.any() and result.embeddings is not None
    return [result.embeddings[i] for i in range(len(texts))]


def random_texts(seed: int, lengths: list[int]) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, length).tolist() for length in lengths]


def test_each_text_as_alone(bert: LoadedModel, mesh: DeviceMesh) -> None:
    runner = EncoderRunner(bert, POOLING, SMALL, mesh)
    texts = random_texts(0, [3, 40, 1, 32, 5])
    got = embeddings(runner, texts)
    assert runner.num_compiles() == 0 and runner.num_dispatches == 3  # 3 and 1 of 32 tokens at most, one of 48
    for text, embedding in zip(texts, got, strict=True):
        alone = dense_embedding(bert.structure, POOLING, bert.leaves, jnp.asarray(text, jnp.int32))
        np.testing.assert_allclose(embedding, alone, atol=1e-6)
    runner.close()


def test_deterministic_bits_do_not_depend_on_the_others(bert: LoadedModel, mesh: DeviceMesh) -> None:
    runner = EncoderRunner(bert, POOLING, dataclasses.replace(SMALL, deterministic=True), mesh)
    texts = random_texts(1, [7, 30, 2, 12])
    alone = [embeddings(runner, [text])[0] for text in texts]
    for order in itertools.permutations(range(4), 3):
        for index, embedding in zip(order, embeddings(runner, [texts[i] for i in order]), strict=True):
            assert np.array_equal(embedding, alone[index])
    runner.close()


def test_an_embedding_that_is_not_finite_is_reported(bert: LoadedModel, mesh: DeviceMesh) -> None:
    leaves = tuple(jax.tree.map(lambda x: x * jnp.nan, leaf) for leaf in bert.leaves)
    runner = EncoderRunner(dataclasses.replace(bert, leaves=leaves), POOLING, SMALL, mesh)
    assert runner.execute(step_of([[5, 6]])).result().status.tolist() == [RowStatus.NOT_FINITE]
    runner.close()


@pytest.mark.parametrize(("seqs", "tokens", "longest"), [(64, 512, 512), (8, 96, 48), (512, 8192, 512), (3, 20, 20)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_buckets_hold_every_step(seqs: int, tokens: int, longest: int, deterministic: bool) -> None:
    buckets = EncodeBuckets.of(seqs, tokens, longest, deterministic=deterministic)
    assert len(buckets.shapes()) <= 24 and all(rows * length <= tokens for rows, length in buckets.shapes())
    rng = np.random.default_rng(0)
    for _ in range(50):
        lengths = rng.integers(1, longest + 1, rng.integers(1, seqs + 1)).tolist()
        packed = buckets.pack(lengths)
        assert sorted(i for _, members in packed for i in members) == list(range(len(lengths)))
        for (rows, length), members in packed:
            assert (rows, length) in buckets.shapes() and len(members) <= rows
            assert all(lengths[i] <= length for i in members)


def test_the_longest_text() -> None:
    auto = dataclasses.replace(CONFIG, max_num_batched_tokens=512, max_model_len=512, shrink_context=True)
    assert longest_text(auto, PoolingConfig("mean", True, 256)) == 256
    assert longest_text(dataclasses.replace(auto, max_num_batched_tokens=100), POOLING) == 100
    asked = dataclasses.replace(auto, shrink_context=False)
    assert longest_text(asked, PoolingConfig("mean", True, 256)) == 512
    with pytest.raises(ConfigError, match="must run in one step, which has 100"):
        longest_text(dataclasses.replace(asked, max_num_batched_tokens=100), POOLING)
