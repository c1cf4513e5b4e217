"""The experts that a step reports are those of the model's own forward pass, whatever the chunks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.library.dense import dense_attend, dense_logits
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.moe import take_choices
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.extras import ExtraParams
from jaxserve.types.sampling import SamplingParams
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.runtime.hand_scheduler import HandScheduler


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory, mesh: DeviceMesh) -> LoadedModel:
    """Three layers, of which the middle one is dense; the others give each token to 3 of 8 experts."""
    hf = CASES["qwen3_moe"]
    directory = write_checkpoint(tmp_path_factory.mktemp("sparse"), hf, random_tensors(hf, seed=2))
    return load_model(directory, dtype=jnp.dtype("float32"), mesh=mesh.mesh)


def chosen(model: LoadedModel, tokens: list[int]) -> np.ndarray:
    """int32 [T, L, K] of one dense forward."""

    @jax.jit
    def forward(leaves: tuple[jax.Array, ...], token_ids: jax.Array) -> jax.Array | None:
        bound = model.bind(leaves)
        positions = jnp.arange(token_ids.shape[0], dtype=jnp.int32)
        bound(token_ids, positions, (None,) * model.config.num_layers, dense_attend(model.config))
        return take_choices(bound)

    return np.asarray(forward(model.leaves, jnp.asarray(tokens, jnp.int32)))


def test_of_prompts_in_chunks_and_of_decoded_tokens(
    sparse: LoadedModel, make_runner: Callable[..., ModelRunner]
) -> None:
    runner = make_runner(sparse, max_num_seqs=2, max_num_batched_tokens=16, num_pages=64)
    before = runner.num_compiles()
    scheduler = HandScheduler(runner)
    plain = scheduler.add([7, 8, 9], SamplingParams(temperature=0))
    seq = scheduler.add(
        list(range(20, 42)), SamplingParams(temperature=0, logprobs=0, extras=ExtraParams(routed_experts=True))
    )
    scheduler.step([(plain, 3)])
    found = []
    for count in (13, 9, None, None, None):
        result = scheduler.step([(plain, None), (seq, count)] if count else [(plain, None), (seq, None)])
        assert result.extras is not None and result.extras.routed_experts is not None
        assert set(result.extras.routed_experts) == {1}
        found.append(result.extras.routed_experts[1])
    assert scheduler.step([(plain, None)]).extras is None
    assert runner.num_compiles() == before
    whole = np.concatenate(found)
    expected = chosen(sparse, seq.tokens[:-1])
    assert whole.shape == (25, 2, 3) and whole.dtype == np.int32
    assert (np.sort(whole, axis=-1) == np.sort(expected, axis=-1)).all()
    assert len(np.unique(whole)) == 8  # no constant
    runner.close()


def test_a_dense_model_keeps_nothing(tiny_model: LoadedModel) -> None:
    def forward(leaves: tuple[jax.Array, ...]) -> jax.Array:
        model = tiny_model.bind(leaves)
        dense_logits(tiny_model.structure, leaves, jnp.arange(4, dtype=jnp.int32))
        assert take_choices(model) is None
        return leaves[0]

    jax.eval_shape(forward, tiny_model.leaves)
