"""Drafts that the device proposes: how long they count, and after which steps they are asked for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.scheduler.speculation import PROBE
from jaxserve.speculation.device import DeviceDrafts, Size, speedup
from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import Request, SchedulerOutput
from tests.fakes import (
    VOCAB,
    FakeRunner,
    FakeStep,
    OracleDrafter,
    alone,
    make_core,
    make_request,
    run_all,
    small_config,
)

TIMES = StepTimes({1: 1.0, 8: 1.0}, {}, {2: 1.1, 4: 1.1, 8: 1.1, 16: 1.2, 32: 1.2}, {1: 0.2, 8: 0.2})


def test_drafts_count_as_long_as_new_tokens_are_the_drafts() -> None:
    params = make_request("a", [1, 2]).params
    request = Request("a", [1, 2], params, 0.0, 0, max_tokens=8)
    drafts = DeviceDrafts(VOCAB)
    assert drafts.propose(request, 3) == []
    drafts.take(request, [5, 6, 7, -1])
    assert drafts.propose(request, 2) == [5, 6]
    request.output_token_ids = [5]
    assert drafts.propose(request, 3) == [6, 7]
    request.output_token_ids = [5, 6, 7]
    assert drafts.propose(request, 3) == []
    request.output_token_ids = [5, 9]
    assert drafts.propose(request, 3) == []
    for wrong in (-1, -2, VOCAB, 2**31 - 1):
        drafts.take(request, [4, wrong, 5, 6, 7, 8])
        assert drafts.propose(request, 9) == [4]
    drafts.take(request, [-1, -1])
    assert drafts.propose(request, 3) == []
    drafts.forget("a")
    assert drafts.propose(request, 3) == []


@pytest.mark.parametrize(
    ("platform", "served", "draft", "gain"),
    [
        ("gpu", Size(36, 15_100_000_000), Size(28, 1_190_000_000), 1.23),  # Qwen3-8B and 0.6B
        ("gpu", Size(80, 140_000_000_000), Size(32, 15_000_000_000), 1.6),  # Llama 70B and 8B
        ("gpu", Size(48, 60_000_000_000, (128, 8)), Size(28, 1_190_000_000), 0.57),  # more tokens read more experts
        ("gpu", Size(2, 10_000_000), Size(2, 10_000_000), 0.45),
        ("cpu", Size(24, 270_000_000), Size(2, 2_000_000), 1.9),
        ("cpu", Size(4, 13_200_000), Size(4, 13_200_000), 0.44),
    ],
)
def test_the_speedup_follows_from_the_sizes(platform: str, served: Size, draft: Size, gain: float) -> None:
    assert speedup(platform, served, draft, 4) == pytest.approx(gain, rel=0.1)


def run(
    right: float, tokens: int, monkeypatch: pytest.MonkeyPatch, times: StepTimes = TIMES, **params: object
) -> tuple[EngineCore, int]:
    """Run one request -> the core, and the number of steps after which the device proposed drafts."""
    oracle, asked = OracleDrafter(random.Random(1), right), []
    execute = FakeRunner.execute

    def counting(self: FakeRunner, output: SchedulerOutput) -> FakeStep:
        asked.append(bool(output.draft_room))
        return execute(self, output)

    monkeypatch.setattr(FakeRunner, "execute", counting)
    sizes = {
        "max_model_len": 512,
        "page_size": 16,
        "num_pages": 128,
        "max_drafts": 4,
        "verify_sizes": (2, 4, 8, 16, 32),
    }
    config = small_config(draft_rows=8, step_times=times, **sizes)
    core = make_core(config, drafter=DeviceDrafts(VOCAB), guess=oracle.guess)
    request = make_request("a", [1, 2, 3], max_tokens=tokens, **params)
    oracle.outputs["a"], _ = alone(request.prompt_token_ids, request.params)
    assert run_all(core, [request])["a"].token_ids == oracle.outputs["a"]
    return core, sum(asked)


def test_right_drafts_are_asked_for_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    core, asked = run(1.0, 200, monkeypatch)
    steps = core.scheduler.counters.steps
    assert steps < 60 and asked > 0.9 * steps


def test_wrong_drafts_are_asked_for_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the rate can rise again."""
    core, asked = run(0.0, 400, monkeypatch)
    assert core.scheduler.counters.steps > 380
    assert 400 // PROBE - 2 < asked < 40


def test_drafts_that_are_there_cost_only_their_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model as slow as the model is asked now and then, and what it proposed then is used."""
    core, asked = run(1.0, 400, monkeypatch, replace(TIMES, draft={8: 4.0}))
    assert 400 // PROBE - 2 < asked < 400 // PROBE + 1
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_accepted_tokens == drafts.num_draft_tokens >= asked


def test_a_request_without_speculation_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    core, asked = run(1.0, 100, monkeypatch, speculate=False)
    assert asked == 0 and core.scheduler.counters.steps >= 100
