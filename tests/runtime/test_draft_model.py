"""A draft model changes the number of steps and no token. Its guesses are those of the model run alone.

One runner for all tests: its draft model has the shapes of the served model, and each test gives it other weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.runtime.draft_model import check_draft_model
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.speculation.device import DeviceDrafts
from jaxserve.types.step import Request
from tests.fakes import Transcripts, make_request, run_all
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import CASES
from tests.runtime.hand_scheduler import HandScheduler
from tests.runtime.test_speculation import (
    FEATURES,
    PROMPTS,
    Seen,
    V,
    accepted,
    assert_same,
    make_core,
    requests_of,
    seen,
)

DRAFTS, TOKENS, FLOAT = 3, 24, jnp.dtype("float32")
Leaves = tuple[jax.Array, ...]


class Recorder(DeviceDrafts):
    """Keeps every draft that arrived, with the tokens before it."""

    def __init__(self) -> None:
        super().__init__(V)
        self.found: list[tuple[list[int], list[int]]] = []

    def take(self, request: Request, drafts: Sequence[int]) -> None:
        self.found.append((request.token_ids(0, request.num_tokens), list(drafts)))
        super().take(request, drafts)


# without `deterministic` the tokens are compared by tests/e2e/test_draft_model.py too
@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["fast", "deterministic"]
)
def guessing(
    request: pytest.FixtureRequest, tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner]
) -> ModelRunner:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_drafts": DRAFTS}
    return make_runner(tiny_model, draft=tiny_model, deterministic=request.param, **sizes)


@pytest.fixture(autouse=True)
def own_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give the draft model the served model's weights again."""
    yield
    if "guessing" in request.fixturenames:
        runner: ModelRunner = request.getfixturevalue("guessing")
        runner.draft_leaves = runner.leaves


def core_of(runner: ModelRunner, drafter: DeviceDrafts | None, **changes: object) -> EngineCore:
    rows = max(runner.buckets.draft) if drafter is not None else 0
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_drafts": DRAFTS, "draft_rows": rows}
    return make_core(runner, drafter, **(sizes | changes))


@pytest.fixture(scope="module")
def plain(guessing: ModelRunner) -> dict[str, Seen]:
    return seen(run_all(core_of(guessing, None), requests_of(FEATURES)))


def other_weights(leaves: Leaves, spread: float) -> Leaves:
    """Weights of the same shapes, which differ by `spread` of their size; nan: nothing is finite."""
    rng, found = np.random.default_rng(5), []
    for leaf in leaves:
        values = np.asarray(leaf)
        noise = rng.standard_normal(values.shape).astype(np.float32) * np.std(values)
        found.append(jax.device_put(values + np.float32(spread) * noise, leaf.sharding))
    return tuple(found)


@pytest.mark.parametrize("spread", [0.0, 0.15, 3.0, np.nan], ids=["right", "often right", "wrong", "not finite"])
def test_tokens_are_those_without_drafts(guessing: ModelRunner, plain: dict[str, Seen], spread: float) -> None:
    """Every parameter of the sampler, masks among them, and prompts between the steps."""
    guessing.draft_leaves = other_weights(guessing.leaves, spread) if spread else guessing.leaves
    core = core_of(guessing, DeviceDrafts(V))
    assert_same(guessing, seen(run_all(core, requests_of(FEATURES))), plain)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_draft_tokens > 0
    assert not 0.0 <= spread < 1.0 or accepted(core) > 20
    assert guessing.num_compiles() == 0


RESTS_SOON: dict[str, Any] = {"PROBE": 1, "TRIAL": 2, "PATIENCE": 0}


def test_tokens_with_steps_in_which_the_draft_model_rests(guessing: ModelRunner, plain: dict[str, Seen]) -> None:
    """It is right, then wrong, then not finite, so it rests and works by turns. Some of its K and V are of others."""
    core, transcripts = core_of(guessing, DeviceDrafts(V)), Transcripts()
    weights = [guessing.leaves, *(other_weights(guessing.leaves, spread) for spread in (3.0, np.nan))]
    for request in requests_of(FEATURES):
        core.add(request)
    with patch.multiple("jaxserve.scheduler.speculation", **RESTS_SOON):
        for step in itertools.count():
            guessing.draft_leaves = weights[step // 25 % 3]
            transcripts.take(core.step())
            if not core.has_work:
                break
    assert_same(guessing, seen(transcripts), plain)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_rest_steps > 50 and accepted(core) > 20
    assert guessing.num_compiles() == 0


def test_a_resting_draft_model_leaves_its_pages_as_they_are(guessing: ModelRunner) -> None:
    """And the served model computes the same bits."""
    assert guessing.steps.guesses is not None
    first, found = guessing.steps.guesses.first_layer, list[tuple[Any, Any]]()
    for rests in (False, True):
        guessing.rebuild()
        hand = HandScheduler(guessing)
        sequence = hand.add(PROMPTS[0], make_request("0", PROMPTS[0], temperature=1.0, logprobs=2).params, seed=3)
        hand.step([(sequence, len(PROMPTS[0]))])
        before, hand.rests = jax.tree.map(np.array, guessing.caches), rests
        for _ in range(5):
            hand.step([(sequence, None)])
        after = jax.tree.map(np.array, guessing.caches)
        assert all(map(np.array_equal, jax.tree.leaves(before[first:]), jax.tree.leaves(after[first:]))) == rests
        found.append((sequence.logprobs, jax.tree.leaves(after[:first])))
    (logprobs, pages), (logprobs_rested, pages_rested) = found
    assert logprobs == logprobs_rested and len(logprobs) == 6
    assert all(map(np.array_equal, pages, pages_rested))


def test_drafts_are_what_the_draft_model_yields_alone(guessing: ModelRunner, tiny_model: LoadedModel) -> None:
    """Against the plain forward of the whole text: after chunks, rejected drafts, prefix hits and preemption."""
    leaves = guessing.draft_leaves = other_weights(guessing.leaves, 0.15)

    def next_token(tokens: list[int]) -> int:
        padded = np.zeros(128, np.int32)
        padded[: len(tokens)] = tokens
        logits = dense_logits(tiny_model.structure, leaves, jnp.asarray(padded))
        return int(np.argmax(np.asarray(logits)[len(tokens) - 1]))

    drafter = Recorder()
    core = core_of(guessing, drafter, num_pages=14, new_token_ratio=0.01)
    requests = [
        make_request(f"{name} {i}", [*prompt, *prompt][:30], max_tokens=TOKENS, seed=i, temperature=name)
        for name in (0.0, 1.0)
        for i, prompt in enumerate(PROMPTS)
    ]
    with patch("jaxserve.scheduler.speculation.PATIENCE", 10**9):  # drafts behind a rest differ
        transcripts = run_all(core, requests)
    assert core.scheduler.counters.cached_tokens and core.scheduler.counters.retractions
    assert accepted(core) and len(transcripts) == len(requests)
    ends = 0
    for tokens, drafts in drafter.found:
        for draft in drafts:
            if draft == -1:
                ends += 1
                break
            assert next_token(tokens) == draft
            tokens = [*tokens, draft]
    assert 0 < ends < len(drafter.found) / 2


def test_a_right_draft_model_saves_steps(guessing: ModelRunner, plain: dict[str, Seen]) -> None:
    """Its own drafts are all right if it is greedy: a step yields all drafts and one more token."""
    request = make_request("greedy 0", PROMPTS[0], max_tokens=TOKENS, seed=0)
    core = core_of(guessing, DeviceDrafts(V))
    assert run_all(core, [request])["greedy 0"].token_ids == plain["greedy 0"][0]
    assert core.scheduler.counters.steps <= 2 + TOKENS // (1 + DRAFTS)


def test_tokens_after_a_restart(guessing: ModelRunner, plain: dict[str, Seen]) -> None:
    """Another engine goes on where one died, with the tokens that its client has and other weights of the draft model.

    Its prompts are the old prompts and these tokens, so the draft model computes them again.
    """
    named = requests_of(("greedy", "penalties", "grammar"))
    whole = [request for request in named if len(plain[request.request_id][0]) > 9]
    begun = [msgspec.structs.replace(each, resumed_token_ids=plain[each.request_id][0][:9]) for each in whole]
    for spread in (0.0, 0.15):
        guessing.draft_leaves = other_weights(guessing.leaves, spread) if spread else guessing.leaves
        core = core_of(guessing, DeviceDrafts(V))
        found = run_all(core, begun)
        assert accepted(core) > 8
        for each in whole:
            token_ids, _, reason = plain[each.request_id]
            assert (found[each.request_id].token_ids, found[each.request_id].reason) == (token_ids[9:], reason)


def test_weights_of_the_draft_model_change_between_steps(guessing: ModelRunner, plain: dict[str, Seen]) -> None:
    """Its pages of both weights are then under the same prefixes, and only the guesses are worse."""
    core = core_of(guessing, DeviceDrafts(V))
    transcripts, weights = Transcripts(), (guessing.leaves, other_weights(guessing.leaves, 0.5))
    for request in requests_of(("greedy", "penalties")):
        core.add(request)
    for step in range(400):
        guessing.draft_leaves = weights[step // 5 % 2]
        transcripts.take(core.step())
        if not core.has_work:
            break
    found = seen(transcripts)
    assert found.keys() == {request.request_id for request in requests_of(("greedy", "penalties"))}
    assert_same(guessing, found, plain)
    assert accepted(core) > 0


# a family, changes of the runner
WITH: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("gemma3", {}),
    "windows in all layers": ("mistral", {}),
    "latent attention": ("deepseek_v3", {}),
    "int8 weights": ("qwen2", {}),
    "int8 pages": ("qwen2", {"cache_dtype": jnp.dtype("int8")}),
    "fp8 pages": ("gemma3", {"cache_dtype": jnp.dtype("float8_e4m3fn")}),
}


@pytest.mark.slow  # for compiling
@pytest.mark.parametrize("case", WITH)
def test_tokens_with(case: str, tmp_path: Path, mesh: DeviceMesh, make_runner: Callable[..., ModelRunner]) -> None:
    """A model that guesses for itself: right wherever it computes what it computes as the served one."""
    family, changes = WITH[case]
    path = write_checkpoint(tmp_path, CASES[family], random_tensors(CASES[family], 3))
    kind: Any = "int8" if case == "int8 weights" else "none"
    model = load_model(path, dtype=FLOAT, config=read_config(path).replace(quantization=kind), mesh=mesh.mesh)
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_drafts": DRAFTS}
    runner = make_runner(model, draft=model, **sizes, **changes)
    names = "greedy", "random", *(() if changes else ("grammar",))  # no log-probabilities over pages of 8 bits
    plain = seen(run_all(core_of(runner, None), requests_of(names)))
    core = core_of(runner, DeviceDrafts(V))
    assert_same(runner, seen(run_all(core, requests_of(names))), plain)
    assert accepted(core) > 20
    request = requests_of(["greedy"])[0]
    core = core_of(runner, DeviceDrafts(V))
    assert run_all(core, [request])[request.request_id].token_ids == plain[request.request_id][0]
    assert core.scheduler.counters.steps <= 3 + TOKENS // (1 + DRAFTS)
    assert runner.num_compiles() == 0


def test_models_that_cannot_guess_are_refused(tiny_model: LoadedModel) -> None:
    config = tiny_model.config
    with pytest.raises(ConfigError, match="has 97 tokens in its vocabulary, and the model 96"):
        check_draft_model(config.replace(vocab_size=97), config)
    with pytest.raises(ConfigError, match="cannot be a draft model"):
        check_draft_model(config.replace(labels=("a", "b")), config)
