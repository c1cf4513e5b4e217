"""A real trained model through the whole runner: the greedy tokens of two independent float64 implementations."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve.models.checkpoint.loader import load_model
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.sampling import SamplingParams
from tests.conftest import SharedData
from tests.runtime.hand_scheduler import HandScheduler


@pytest.fixture(scope="module")
def stories(shared_data: SharedData, mesh: DeviceMesh, make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    directory = Path(shared_data / "models/stories260K-hf")
    model = load_model(directory, dtype=jnp.dtype("float32"), mesh=mesh.mesh)
    return make_runner(model, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=256, num_pages=400)


def test_golden_greedy(stories: ModelRunner, shared_data: SharedData) -> None:
    """Eight prompts in two crowds, every step: the ids, and all log-probabilities within 1e-4."""
    cases = json.loads((shared_data / "golden/generation/stories260K.greedy.json").read_text())["cases"]
    params, seqs = SamplingParams(temperature=0, logprobs=5, prompt_logprobs=0), []
    for crowd in (cases[:4], cases[4:]):
        scheduler = HandScheduler(stories)
        added = [scheduler.add(case["prompt_ids"], params) for case in crowd]
        scheduler.generate(added, max(len(case["completion_ids"]) for case in crowd))
        seqs += added
    for seq, case in zip(seqs, cases, strict=True):
        steps = case["steps"]
        assert seq.output[: len(steps)] == case["completion_ids"] == [step["id"] for step in steps]
        for (logprob, _, _, top), step in zip(seq.logprobs, steps, strict=False):
            assert logprob == pytest.approx(step["logprob"], abs=1e-4)
            assert top[:5] == pytest.approx([value for _, value in step["top5"]], abs=1e-4)
        assert seq.prompt_logprobs == pytest.approx(case["prompt_logprobs"][1:], abs=1e-4)
