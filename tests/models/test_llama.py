"""Llama, Qwen2 and Mixtral against a trained model's logits, computed in float64 by two independent implementations."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from tests.models.dense import dense_logits

MODELS = [
    "stories260K-hf",
    "stories260K-as-qwen2-hf",
    "stories260K-as-mixtral-identical4top2-hf",
    "stories260K-padded-h256-d128-hf",
]


def run(model: LoadedModel, ids: list[int]) -> np.ndarray:
    return np.asarray(dense_logits(model.structure, model.leaves, jnp.asarray(ids, jnp.int32)))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_golden(name: str, shared_data: Path) -> None:
    golden = np.load(shared_data / "golden/generation/stories260K.logits.npz")
    model = load_model(shared_data / "models" / name, dtype=jnp.dtype("float32"))
    logits = run(model, golden["ids"].tolist())
    assert logits.dtype == np.float32
    assert np.abs(logits - golden["logits"]).max() < 2e-5


@pytest.mark.parametrize("name", MODELS[:3])
def test_greedy_equals_golden(name: str, shared_data: Path) -> None:
    cases = json.loads((shared_data / "golden/generation/stories260K.greedy.json").read_text())["cases"]
    model = load_model(shared_data / "models" / name, dtype=jnp.dtype("float32"))
    width = max(len(case["prompt_ids"]) + len(case["completion_ids"]) for case in cases)
    for case in cases:
        prompt, completion = case["prompt_ids"], case["completion_ids"]
        padded = [*prompt, *completion] + [0] * (width - len(prompt) - len(completion))
        chosen = run(model, padded).argmax(axis=-1)
        assert chosen[len(prompt) - 1 :][: len(completion)].tolist() == completion, case["prompt"]


def test_bfloat16_stays_near(shared_data: Path) -> None:
    golden = np.load(shared_data / "golden/generation/stories260K.logits.npz")
    model = load_model(shared_data / "models" / "stories260K-hf", dtype=jnp.dtype("bfloat16"))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in model.leaves)
    difference = np.abs(run(model, golden["ids"].tolist()) - golden["logits"])
    assert difference.max() < 0.5 and difference.mean() < 0.05
