"""Heads through an `Engine`, loaded and compiled as for a user: the output is that without drafts.

The demo model gets a head: as MiMo, which is it with biases of 0, one for multi-token prediction, whose layer is the
model's last one, and one of EAGLE-3, which examples/draft_model.py trains for a few steps.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from benchmarks.make_model import widen
from examples import draft_model
from examples.demo_model.data import SampleEncoder
from examples.demo_model.evaluate import load_params
from examples.demo_model.model import PackedBatch, Params
from jaxserve import Engine
from jaxserve.engine import factory
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_eagle
from jaxserve.models.checkpoint.loader import load_model
from tests.api.fakes import DEMO
from tests.e2e.test_draft_model import DRAFTS, KEYS, PAYS, STORY, answers, drafts
from tests.quick import quick_programs
from tests.runtime.test_draft_heads import FLOAT, LENGTH, guess_after

HF = json.loads((DEMO / "config.json").read_text())


@pytest.fixture(scope="module")
def as_mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp") / "with-head"
    shutil.copytree(DEMO, directory)
    hf = HF | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "attention_bias": True}
    (directory / "config.json").write_text(json.dumps(hf))
    tensors = load_file(DEMO / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace(".weight", ".bias")] = np.zeros(len(tensors[name]), tensors[name].dtype)
    start, size = "model.mtp_layers.0.", HF["hidden_size"]
    last = f"model.layers.{HF['num_hidden_layers'] - 1}."
    tensors |= {
        start + name.removeprefix(last): tensors[name].copy() for name in list(tensors) if name.startswith(last)
    }
    ones = np.ones(size, tensors["model.norm.weight"].dtype)
    tensors |= {f"{start}{name}.weight": ones for name in ("token_layernorm", "hidden_layernorm")}
    tensors[f"{start}final_layernorm.weight"] = tensors["model.norm.weight"]
    tensors[f"{start}input_proj.weight"] = np.eye(size, 2 * size, k=size, dtype=ones.dtype)
    save_file(tensors, directory / "model.safetensors")
    return directory


class Trained(NamedTuple):
    """A head after a few steps. batches: what it was trained on"""

    head: draft_model.Head
    params: Params
    teacher: Params
    batches: list[PackedBatch]
    losses: list[float]
    directory: Path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    teacher, encoder = load_params(DEMO), SampleEncoder(DEMO)
    batches = draft_model.batches_of(encoder, 2) * 4
    head = draft_model.Head(draft_model.frequent_tokens(batches))
    with jax.numpy_dtype_promotion("standard"):  # as in a process of its own
        params, losses = draft_model.distil(head.first_params(teacher, 0), head.loss, teacher, batches, 2e-3)
    directory = tmp_path_factory.mktemp("eagle3") / "an-eagle"
    head.write(directory, params, encoder)
    return Trained(head, params, teacher, batches, losses, directory)


@pytest.fixture(scope="module")
def eagle(trained: Trained) -> Path:
    return trained.directory


@pytest.mark.slow  # half a minute, for compiling
def test_a_few_steps_of_training_lower_the_loss(trained: Trained) -> None:
    assert trained.losses[-1] < 0.8 * trained.losses[0]


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1, 2])
def test_the_head_that_is_served_is_the_one_that_was_trained(trained: Trained, factor: int, tmp_path: Path) -> None:
    """The first guesses of a text and, from the head's own hidden states, the second ones.

    factor: the demo model's hidden states are as wide as `benchmarks.make_model --widen` makes them
    """
    batch = trained.batches[0]
    ends = [(row, int(np.argmax(segments != 1))) for row, segments in enumerate(np.asarray(batch.segments))]
    row, length = next((row, end) for row, end in ends if 16 < end <= LENGTH)
    rounded = {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in trained.params.items()}
    with jax.numpy_dtype_promotion("standard"):
        first, second, *_ = (own[row] for own, *_ in trained.head.guesses(rounded, trained.teacher, batch))
    text = jnp.zeros(LENGTH, jnp.int32).at[:length].set(batch.tokens[row, :length])
    directory, served = tmp_path / "head", tmp_path / "model"
    trained.head.write(directory, trained.params, SampleEncoder(DEMO), factor)
    widen(served, factor, HF["num_hidden_layers"] + 1)
    model = load_model(served, dtype=FLOAT)
    head = load_model(directory, dtype=FLOAT, config=read_eagle(ModelFiles.open(directory)))
    run = functools.partial(guess_after, model.structure, head.structure, (model.leaves, head.leaves), text)
    nothing = jnp.zeros((LENGTH, factor * HF["hidden_size"]))
    guesses, fed = run(nothing, LENGTH)

    def close(states: jax.Array, logits: jax.Array) -> np.ndarray:
        """Check the head's hidden states [N, D] by their logits [N, V'] and return the logits."""
        y = np.asarray(states)[:, : HF["hidden_size"]]
        y = y / np.sqrt((y * y).mean(axis=1, keepdims=True) + HF["rms_norm_eps"]) * rounded["norm.weight"][None, :]
        found = np.asarray(y @ rounded["lm_head.weight"].T)
        tolerance = 1e-4 if factor == 1 else 1e-2  # other norms are rounded to bfloat16
        np.testing.assert_allclose(found, logits, atol=tolerance * float(jnp.abs(logits).max()))
        return found

    best = np.argmax(close(fed[: length - 1], first[: length - 1]), axis=1)
    assert np.mean(guesses[: length - 1] == trained.head.tokens[best]) > 0.98
    for place in range(0, length - 2, 9):
        _, after = run(nothing.at[place + 1].set(fed[place]), place + 1)
        close(after[place + 1 : place + 2], second[place : place + 1])


@pytest.fixture(scope="module")
def plain(compile_cache: str) -> list[list[Any]]:
    with quick_programs(), Engine(compile_cache=compile_cache, **KEYS) as engine:
        return answers(engine)


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def engine(request: pytest.FixtureRequest, compile_cache: str) -> Iterator[Engine]:
    keys: dict[str, Any] = {"method": request.param, "num_speculative_tokens": DRAFTS}
    if request.param == "mtp":
        model = [str(request.getfixturevalue("as_mimo"))]
    else:
        model = []
        keys["draft_model"] = str(request.getfixturevalue("eagle"))
    warm_up = factory._warm_up
    with pytest.MonkeyPatch.context() as patch, quick_programs():
        patch.setattr(factory, "_warm_up", lambda *args: (warm_up(*args), PAYS)[1])
        with Engine(*model, compile_cache=compile_cache, **KEYS, **keys) as engine:
            yield engine


@pytest.mark.slow  # a minute, for compiling
def test_the_output_is_that_without_drafts(engine: Engine, plain: list[list[Any]]) -> None:
    """Greedy and sampled, with a stop string and a grammar, and again from cached prefixes and after a sleep."""
    assert answers(engine) == plain
    cached = engine.core.scheduler.counters.cached_tokens
    assert answers(engine) == plain
    assert engine.core.scheduler.counters.cached_tokens > cached + len(STORY) // 8
    assert drafts(engine).num_draft_tokens > 0
    engine.sleep(1)
    assert all(leaf.is_deleted() for leaf in (*engine.runner.leaves, *engine.runner.draft_leaves))
    engine.wake()
    assert answers(engine) == plain
    assert engine.core.stats().compiles == 0


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM in .* has no head that is served"):
        Engine(method="mtp", **KEYS)
