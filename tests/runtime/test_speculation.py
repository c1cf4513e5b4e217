"""Drafts change the number of steps and no token: the engine's core over real programs of a tiny model."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.runtime.mesh import DeviceMesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.speculation.ngram import Drafter, NGramDrafter
from jaxserve.types.extras import ExtraParams
from jaxserve.types.sampling import EngineRequest, GrammarSpec
from jaxserve.types.scheduling import SchedulerConfig, StateSizes
from jaxserve.types.step import TokenLogprobs
from tests.fake_grammar import CountingMatcher
from tests.fakes import OracleDrafter, Transcripts, make_request, run_all
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import CASES, STATE_CASES

V, DRAFTS, TOKENS = 96, 5, 24
RNG = random.Random(7)
PROMPTS = [[RNG.randrange(V) for _ in range(length)] for length in (3, 20, 33, 7)]
# every parameter of the sampler
FEATURES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "random": {"temperature": 1.0},
    "filters": {"temperature": 0.6, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "greedy penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.7},
    "bias": {"temperature": 1.0, "logit_bias": {4: 3.0, 9: -100.0, 11: 2.5}},
    "allowed": {"temperature": 0.7, "allowed_token_ids": tuple(range(0, 40, 3))},
    "bad words": {"temperature": 0.8, "bad_words_token_ids": ((5,), (6, 7), (30, 31, 32))},
    "min tokens": {"temperature": 1.0, "min_tokens": 14, "stop_token_ids": tuple(range(0, 96, 4))},
    "stop tokens": {"temperature": 1.2, "stop_token_ids": (1, 2, 3)},
    "watermark": {"temperature": 1.0, "watermark_key": 12345},
    "log-probabilities": {"temperature": 1.0, "logprobs": 20},
    "own log-probability": {"logprobs": 0},
    "grammar": {"temperature": 1.0, "grammar": GrammarSpec(kind="regex", source="17"), "logprobs": 3},
    "no drafts": {"speculate": False},
    "details": {"extras": ExtraParams(sampling_mask=True), "logprobs": 1, "top_k": 8, "temperature": 1.0},
}
MakeRunner = Callable[..., ModelRunner]
Seen = tuple[list[int], list[TokenLogprobs], object]


@pytest.fixture(
    scope="module", params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["fast", "deterministic"]
)
def speculating(request: pytest.FixtureRequest, tiny_model: LoadedModel, make_runner: MakeRunner) -> ModelRunner:
    return make_runner(tiny_model, deterministic=request.param, max_drafts=DRAFTS, max_num_batched_tokens=16)


def make_core(runner: ModelRunner, drafter: Drafter | None, **changes: object) -> EngineCore:
    runner.rebuild()
    sizes: dict[str, object] = {
        "num_pages": 2048,
        "page_size": 8,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 16,
        "max_model_len": 128,
        "max_drafts": DRAFTS,
        "verify_sizes": runner.buckets.verify,
        "groups": runner.plan.group_sizes,
    }
    config = SchedulerConfig(**(sizes | changes))  # type: ignore[arg-type]
    options = CoreOptions(
        vocab_size=V,
        eos_token_ids=(V - 1,),
        drafter=drafter,
        make_matcher=lambda spec: CountingMatcher(3, int(spec.source)),
    )
    return EngineCore(runner, config, options)


def requests_of(features: Iterable[str]) -> list[EngineRequest]:
    return [
        make_request(f"{name} {i}", prompt, **({"max_tokens": TOKENS, "seed": i} | FEATURES[name]))
        for name in features
        for i, prompt in enumerate(PROMPTS)
    ]


def seen(transcripts: Transcripts) -> dict[str, Seen]:
    """All that a client sees of each request, to the bit."""
    return {
        name: (each.token_ids, [entry for output in each.outputs for entry in output.logprobs or []], each.reason)
        for name, each in transcripts.items()
    }


def assert_same(runner: ModelRunner, found: dict[str, Seen], plain: dict[str, Seen]) -> None:
    """Log-probabilities too: to the bit in deterministic mode."""
    for name, (token_ids, logprobs, reason) in found.items():
        assert (token_ids, reason) == (plain[name][0], plain[name][2]), name
        if runner.config.deterministic:
            assert logprobs == plain[name][1], name
        else:
            own = [entry.logprob for entry in logprobs]
            assert own == pytest.approx([entry.logprob for entry in plain[name][1]], abs=1e-5), name


def oracle(plain: dict[str, Seen], right: float, seed: int = 0) -> OracleDrafter:
    drafter = OracleDrafter(random.Random(seed), right)
    drafter.outputs = {name: list(each[0]) for name, each in plain.items()}
    return drafter


def accepted(core: EngineCore) -> int:
    drafts = core.scheduler.stats().drafts
    assert drafts is not None
    return drafts.num_accepted_tokens


@pytest.fixture(scope="module")
def plain(speculating: ModelRunner) -> dict[str, Seen]:
    return seen(run_all(make_core(speculating, None), requests_of(FEATURES)))


@pytest.mark.parametrize("name", FEATURES)
def test_tokens_are_those_without_drafts(speculating: ModelRunner, plain: dict[str, Seen], name: str) -> None:
    """Alone, with a drafter that is right three times in four."""
    for request in requests_of([name]):
        core = make_core(speculating, oracle(plain, 0.75))
        assert_same(speculating, seen(run_all(core, [request])), plain)
        long = len(plain[request.request_id][0]) > 12
        assert not long or (accepted(core) > 0) == (name not in ("no drafts", "details"))


@pytest.mark.parametrize("right", [1.0, 0.6, 0.0])
def test_tokens_in_a_crowd(speculating: ModelRunner, plain: dict[str, Seen], right: float) -> None:
    """All features at once, eight at a time, and prompts between them."""
    core = make_core(speculating, oracle(plain, right))
    found = seen(run_all(core, requests_of(FEATURES)))
    assert found.keys() == plain.keys()
    assert_same(speculating, found, plain)
    assert speculating.num_compiles() == 0


def test_tokens_after_preemption(speculating: ModelRunner, plain: dict[str, Seen]) -> None:
    core = make_core(speculating, oracle(plain, 0.9), num_pages=12, new_token_ratio=0.01)
    assert_same(speculating, seen(run_all(core, requests_of(FEATURES))), plain)
    assert core.scheduler.counters.retractions > 0 and accepted(core) > 0


@pytest.mark.parametrize("done", [1, 9, 23])
def test_tokens_after_a_restart(speculating: ModelRunner, plain: dict[str, Seen], done: int) -> None:
    """Another engine goes on where one died, with the tokens that its client has."""
    whole = [request for request in requests_of(FEATURES) if len(plain[request.request_id][0]) > done]
    begun = [msgspec.structs.replace(each, resumed_token_ids=plain[each.request_id][0][:done]) for each in whole]
    found = run_all(make_core(speculating, oracle(plain, 0.9)), begun)
    for each in whole:
        token_ids, _, reason = plain[each.request_id]
        assert (found[each.request_id].token_ids, found[each.request_id].reason) == (token_ids[done:], reason)


def test_pages_of_a_prefix_have_no_rejected_token(speculating: ModelRunner) -> None:
    """Outputs become prefixes of the next prompts, after steps with drafts that were mostly wrong."""
    outputs = []
    for drafter in (None, OracleDrafter(random.Random(1), 0.6)):
        core, texts = make_core(speculating, drafter), [list(PROMPTS[1])]
        for turn in range(5):
            request = make_request(f"{turn}", texts[-1], max_tokens=15, logprobs=0)
            if isinstance(drafter, OracleDrafter):
                drafter.outputs[f"{turn}"] = outputs[0][turn + 1][len(texts[-1]) :]
            transcript = run_all(core, [request])[f"{turn}"]
            assert turn == 0 or transcript.outputs[0].num_cached_tokens >= len(texts[-2]) // 8 * 8
            texts.append([*texts[-1], *transcript.token_ids])
        outputs.append(texts)
    assert outputs[0] == outputs[1] and accepted(core) > 0


def test_drafts_of_the_own_text(speculating: ModelRunner) -> None:
    """Greedy outputs of random weights repeat themselves, so an n-gram drafter is soon right."""
    requests = [make_request(f"{i}", prompt, max_tokens=60) for i, prompt in enumerate(PROMPTS)]
    core = make_core(speculating, NGramDrafter(2, 4))
    steps = core.scheduler.counters
    found = seen(run_all(core, requests))
    assert steps.steps < 60
    assert found == seen(run_all(make_core(speculating, None), requests))


@pytest.mark.parametrize("end", [{"max_tokens": 5}, {"stop_token_ids": "sixth"}, {"max_tokens": 125}])
def test_an_end_among_drafts(speculating: ModelRunner, plain: dict[str, Seen], end: dict[str, object]) -> None:
    """max_tokens, a stop token or the end of the context in the middle of right drafts. Usage counts what was used."""
    prompt, tokens = PROMPTS[0], plain["random 0"][0]
    if "stop_token_ids" in end:
        end = {"stop_token_ids": (tokens[5],)}
    request = make_request("random 0", prompt, **({"max_tokens": TOKENS, "temperature": 1.0, "seed": 0} | end))
    expected = run_all(make_core(speculating, None), [request])["random 0"]
    drafter = OracleDrafter(random.Random(0), 1.0)
    drafter.outputs["random 0"] = expected.token_ids + tokens  # more than the output has
    found = run_all(make_core(speculating, drafter), [request])["random 0"]
    assert (found.token_ids, found.reason) == (expected.token_ids, expected.reason)
    counts = [(each.num_accepted_drafts, len(each.token_ids)) for each in found.outputs]
    assert sum(accepted for accepted, _ in counts) > 0
    assert all(accepted <= count for accepted, count in counts)


@pytest.mark.parametrize("case", ["gemma3", "deepseek_v3", "qwen3_5", "lfm2"])
@pytest.mark.slow  # 25 s a case, for compiling; all of these without drafts have tests of their own
def test_windows_experts_latent_attention_and_states(
    case: str, case_model: LoadedModel, make_runner: MakeRunner
) -> None:
    sizes: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 8}
    states = {"num_state_pages": 4, "state_interval": 64, "state_border": 64} if case_model.config.layer_states else {}
    runner = make_runner(case_model, max_drafts=DRAFTS, **sizes, **states)
    if states:
        sizes["states"] = StateSizes(4, 64, 64)
    requests = [make_request(f"{i}", prompt, max_tokens=40) for i, prompt in enumerate(PROMPTS)]
    plain = seen(run_all(make_core(runner, None, **sizes), requests))
    core = make_core(runner, oracle(plain, 0.8), **sizes)
    assert seen(run_all(core, requests)) == plain
    assert accepted(core) > 0
    longest = PROMPTS[2] + plain["2"][0]
    again = [make_request("again", longest, max_tokens=5)]
    found = seen(run_all(core, again))
    assert core.scheduler.counters.cached_tokens >= 64  # with states, from the one that rows with drafts have written
    assert found == seen(run_all(make_core(runner, None, **sizes), again))


@pytest.fixture
def case_model(case: str, tmp_path: Path, mesh: DeviceMesh) -> LoadedModel:
    hf = (CASES | STATE_CASES)[case]
    directory = write_checkpoint(tmp_path, hf, random_tensors(hf, seed=3))
    return load_model(directory, dtype=jnp.dtype("float32"), mesh=mesh.mesh)
