"""Runners that the tests of this room share: each compiles its programs once a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.models.loading.loader import LoadedModel, load_model
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.runner_config import RunnerConfig
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint

CONFIG = RunnerConfig(
    max_num_seqs=8,
    max_num_batched_tokens=32,
    max_model_len=128,
    page_size=8,
    num_pages=2048,
    cache_dtype=jnp.dtype("float32"),
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
    """make_runner(model, **changes of CONFIG)"""

    def make(model: LoadedModel, **changes: object) -> ModelRunner:
        config = dataclasses.replace(CONFIG, compile_cache=Path(compile_cache), **changes)  # type: ignore[arg-type]
        return ModelRunner(model, config, mesh)

    return make


@pytest.fixture(scope="session")
def runner(tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner(tiny_model)
