"""Embeddings over real sockets with real models: an encoder, the real MiniLM, and a decoder's last token."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import openai
import pytest

from jaxserve import Engine, SamplingParams, launch_server
from jaxserve.library.serving import RunningServer
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.models.checkpoint.sentence_files import read_pooling
from tests.conftest import ONE_ROW, SMALL
from tests.models.checkpoints import random_tensors, write_checkpoint, write_modules, write_words
from tests.models.dense import dense_embedding
from tests.models.families import CASES, ENCODERS, SENTENCES, VOCAB
from tests.quick import quick_processes, quick_programs

GOLDENS = Path(__file__).parent.parent / "models" / "goldens"


def dense(directory: Path, texts: list[list[int]]) -> np.ndarray:
    """The same by the plain forward, a text at a time, without engine and pages."""
    model = load_model(directory, dtype=jnp.dtype("float32"))
    pooling = read_pooling(ModelFiles.open(directory), model.config)
    ids = [jnp.asarray(text, jnp.int32) for text in texts]
    return np.stack([dense_embedding(model.structure, pooling, model.leaves, each) for each in ids])


def embed(client: Any, model: str, inputs: Any, **keys: Any) -> np.ndarray:
    return np.array([row.embedding for row in client.embeddings.create(model=model, input=inputs, **keys).data])


def compiles(client: openai.OpenAI) -> int:
    return client.get(str(client.base_url).replace("/v1/", "/server_info"), cast_to=object)["stats"].get("compiles", 0)  # type: ignore[index]


# --- a decoder -------------------------------------------------------------------------------------------------


def test_a_decoders_last_token(client: Any, server: RunningServer) -> None:
    """The demo model, over chunks and beside generation; a second time from the prefix cache."""
    directory = Path(server.config.model.path or DEMO)
    texts = [[5, 9, 300], list(range(20, 420)), [7] * 33]
    expected = dense(directory, texts)
    np.testing.assert_allclose(embed(client, "demo", texts), expected, atol=2e-5)
    np.testing.assert_allclose(embed(client, "demo", texts), expected, atol=2e-5)
    assert client.models.retrieve("demo").task == "generate"
    assert client.completions.create(model="demo", prompt=texts[1], max_tokens=3).usage.completion_tokens > 0
    assert compiles(client) == 0


DEMO = Path(__file__).parent.parent.parent / "jaxserve" / "assets" / "demo"


def test_a_decoder_published_for_embeddings(tmp_path: Path) -> None:
    """The form of Qwen3-Embedding: a bare Qwen3, sentence-transformers' files, a last token that the tokenizer adds."""
    hf = CASES["qwen3"] | {"num_hidden_layers": 1}
    full = random_tensors(hf)
    bare = {name.removeprefix("model."): tensor for name, tensor in full.items() if name != "lm_head.weight"}
    write_words(write_checkpoint(tmp_path, hf, bare), VOCAB)
    write_modules(tmp_path, ["Transformer", "Pooling", "Normalize"], {"pooling_mode_lasttoken": True})
    with quick_programs():
        engine = Engine(str(tmp_path), compile_cache=None, num_pages=64, **ONE_ROW)
    assert (engine.info.is_embedding, engine.info.embedding_size) == (True, 32)
    texts = [[4, 5, 6], list(range(4, 64))]
    found = engine.generate(texts, SamplingParams(embed=True))
    vectors = [np.frombuffer(completion.embedding or b"", "<f4") for [completion] in found]
    np.testing.assert_allclose(vectors, dense(tmp_path, texts), atol=1e-5)


# --- an encoder ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-bert")
    return write_words(write_checkpoint(directory, ENCODERS["bert"], random_tensors(ENCODERS["bert"])), VOCAB)


@pytest.fixture(scope="module")
def encoder(bert: Path, compile_cache: str) -> Iterator[openai.OpenAI]:
    with (
        quick_processes(),
        launch_server(str(bert), served_name="bert", compile_cache=compile_cache, **SMALL) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def test_an_encoder_is_served(encoder: Any, bert: Path) -> None:
    texts = ["w5 w6 w7", "w9", " ".join(f"w{i}" for i in range(4, 60)), "w5 w6"]
    ids = [[2, *(int(word[1:]) for word in text.split()), 3] for text in texts]
    expected = dense(bert, ids)
    np.testing.assert_allclose(embed(encoder, "bert", texts), expected, atol=1e-5)
    np.testing.assert_allclose(embed(encoder, "bert", ids), expected, atol=1e-5)
    many = embed(encoder, "bert", texts * 60)
    np.testing.assert_allclose(many, np.tile(expected, (60, 1)), atol=1e-5)
    assert compiles(encoder) == 0


def test_what_an_encoder_refuses(encoder: Any) -> None:
    assert encoder.models.list().data[0].task == "embed"
    with pytest.raises(openai.BadRequestError, match="makes embeddings and generates no text"):
        encoder.completions.create(model="bert", prompt="w5")
    with pytest.raises(openai.BadRequestError, match="65 tokens > 64 maximum") as caught:
        embed(encoder, "bert", " ".join(["w5"] * 63))
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
    fitting = {"extra_body": {"truncate_prompt_tokens": -1}}
    np.testing.assert_allclose(
        embed(encoder, "bert", " ".join(["w5"] * 90), **fitting), embed(encoder, "bert", " ".join(["w5"] * 62))
    )


def test_the_real_minilm_is_served(minilm: Path, compile_cache: str) -> None:
    golden = np.load(GOLDENS / "minilm.npz")["embeddings"]
    sizes: dict[str, Any] = SMALL | {"max_num_seqs": 1}  # of rows the tiny encoder has more
    with (
        launch_server(str(minilm), served_name="minilm", compile_cache=compile_cache, **sizes) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        got = embed(client, "minilm", list(SENTENCES))
        assert np.abs(got - golden).max() < 1e-4
        nearest = (got[:6] @ got[:6].T - 2 * np.eye(6)).argmax(axis=1)
        assert nearest.tolist() == [1, 0, 3, 2, 5, 4]  # the sentences come in pairs of one meaning
        assert client.models.retrieve("minilm").model_dump()["max_model_len"] == 256
        assert compiles(client) == 0
