"""Runners that the tests of this room share: each compiles its programs once a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.runner_config import RunnerConfig
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.quick import quick_programs

CONFIG = RunnerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_model_len=128,
    page_size=8,
    num_pages=2048,
    cache_dtype=jnp.dtype("float32"),
)

# tests whose oracles compile something of their own
COMPILING = (
    "test_sampling_through_the_whole_step",
    "test_decode_fn_is_the_same_step_as_a_plain_function",
    "test_no_program_leaves_a_sum_to_the_library_that_gets_it_wrong",
)


@pytest.fixture(scope="session")
def mesh() -> DeviceMesh:
    return make_mesh("cpu")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, mesh: DeviceMesh) -> LoadedModel:
    """Two layers, four heads over two kv heads, 96 tokens of vocabulary, random weights."""
    hf = TINY_LLAMA | {"vocab_size": 96, "max_position_embeddings": 128}
    directory = write_checkpoint(tmp_path_factory.mktemp("tiny"), hf, random_tensors(hf, seed=1))
    return load_model(directory, dtype=jnp.dtype("float32"), mesh=mesh.mesh)


@pytest.fixture(scope="session")
def make_runner(mesh: DeviceMesh, compile_cache: str) -> Callable[..., ModelRunner]:
    """make_runner(model, **changes of CONFIG); see `quick_programs` for its compiler's options"""

    def make(model: LoadedModel, draft: LoadedModel | None = None, **changes: object) -> ModelRunner:
        config = dataclasses.replace(CONFIG, compile_cache=Path(compile_cache), **changes)  # type: ignore[arg-type]
        with quick_programs():
            return ModelRunner(model, config, mesh, draft=draft)

    return make


@pytest.fixture(scope="session")
def runner(tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner(tiny_model)


@pytest.fixture(scope="session")
def dense(tiny_model: LoadedModel) -> Callable[[list[int]], np.ndarray]:
    """tokens -> float32 logits [len, V], by the model's plain forward, padded to one shape."""

    def logits(tokens: list[int]) -> np.ndarray:
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        return np.asarray(dense_logits(tiny_model.structure, tiny_model.leaves, jnp.asarray(padded)))[: len(tokens)]

    return logits


@pytest.fixture
def no_compilation(runner: ModelRunner, dense: object, request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test asks of the runner, nothing is compiled for it."""
    dense([0])  # type: ignore[operator]
    before = runner.num_compiles()
    yield
    if request.function.__name__ not in COMPILING:
        assert runner.num_compiles() == before
