"""Drafts that the device proposes: how long they count, after which steps they are asked for, and when it rests."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from jaxserve.scheduler.speculation import PATIENCE, TRIAL
from jaxserve.speculation.device import DeviceDrafts, Size, speedup
from jaxserve.types.sampling import EngineRequest
from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import DraftCounters, Request, SchedulerOutput
from tests.fakes import (
    VOCAB,
    FakeRunner,
    FakeStep,
    OracleDrafter,
    Transcripts,
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


class Steps(list[SchedulerOutput]):
    """The steps of an engine with a draft model, as dispatched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, oracle: OracleDrafter, times: StepTimes = TIMES) -> None:
        execute = FakeRunner.execute

        def record(runner: FakeRunner, output: SchedulerOutput) -> FakeStep:
            self.append(output)
            return execute(runner, output)

        monkeypatch.setattr(FakeRunner, "execute", record)
        sizes = {"max_model_len": 1024, "page_size": 16, "num_pages": 640, "max_drafts": 4}
        config = small_config(draft_rows=8, verify_sizes=(2, 4, 8, 16, 32), step_times=times, **sizes)
        self.core = make_core(config, drafter=DeviceDrafts(VOCAB), guess=oracle.guess)
        self._oracle = oracle

    def run(self, name: str, tokens: int, guessed: int = 10**6, **params: object) -> None:
        """Run one request alone. guessed: tokens of its output that the draft model may know"""
        request = self.request(name, tokens, guessed, **params)
        expected, _ = alone(request.prompt_token_ids, request.params)
        assert run_all(self.core, [request])[name].token_ids == expected

    def request(self, name: str, tokens: int, guessed: int = 10**6, **params: object) -> EngineRequest:
        request = make_request(name, [1, 2, len(self) % VOCAB], max_tokens=tokens, **params)
        output, _ = alone(request.prompt_token_ids, request.params)
        wrong = [(token + 1) % VOCAB for token in output[guessed:]]
        self._oracle.outputs[name] = output[:guessed] + wrong
        return request

    @property
    def asked(self) -> int:
        return sum(bool(step.draft_room) for step in self)

    @property
    def rests(self) -> list[bool]:
        return [step.rests for step in self]

    @property
    def drafts(self) -> DraftCounters:
        found = self.core.scheduler.stats().drafts
        assert found is not None and found.num_rest_steps == sum(self.rests)
        return found


def oracle(right: float) -> OracleDrafter:
    return OracleDrafter(random.Random(1), right)


def test_right_drafts_are_asked_for_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, oracle(1.0))
    steps.run("a", 200)
    assert len(steps) < 60 and steps.asked > 0.9 * len(steps)
    assert not any(steps.rests)


def test_a_draft_model_that_is_never_right_rests_after_64_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, oracle(0.0))
    steps.run("a", 400)
    assert len(steps) > 395
    assert 3 < steps.asked < 8
    assert not any(steps.rests[:TRIAL]) and all(steps.rests[64:])
    assert steps.drafts.num_draft_tokens <= 3 * 4


def test_drafts_that_become_wrong_are_awaited_for_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, oracle(1.0))
    steps.run("a", 600, guessed=300)
    first = steps.rests.index(True)
    assert 60 + TRIAL < first < 60 + 64 + 40  # 300 tokens take 60 steps, and the rate falls slowly
    assert all(steps.rests[first:])


def test_each_request_is_tried_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its prompt is computed by the draft model, which rested before."""
    steps = Steps(monkeypatch, oracle(1.0))
    steps.run("a", 200, guessed=0)
    assert steps.rests[-1]
    done, before = len(steps), steps.drafts.num_accepted_tokens
    steps.run("b", 200)
    assert not any(steps.rests[done:]) and len(steps) - done < 60
    assert steps.drafts.num_accepted_tokens > before + 140


def test_a_draft_model_as_slow_as_the_model_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    """No rate makes its drafts worth it, so nothing is tried."""
    steps = Steps(monkeypatch, oracle(1.0), replace(TIMES, draft={8: 4.0}))
    steps.run("a", 200)
    assert steps.asked == 0 and all(steps.rests[PATIENCE + 1 :])
    steps.run("b", 100)
    assert all(step.rests for step in steps[200:] if not step.slot_inits)


def test_a_draft_model_rests_beside_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one begins. Once fewer rows run, it goes on with the rates that it had."""
    times = StepTimes({1: 1.0, 8: 1.0}, {}, {2: 1.1, 4: 1.1, 8: 1.1, 16: 9.0, 32: 9.0}, {1: 0.2, 8: 0.2})
    steps = Steps(monkeypatch, oracle(1.0), times)
    core = steps.core
    first = steps.request("first", 800)
    core.add(first)
    transcripts = Transcripts()
    while core.scheduler.counters.steps < 20:
        transcripts.take(core.step())
    for i in range(60):
        core.add(steps.request(f"{i}", 12 + i))
    busy = len(steps)
    while core.scheduler.stats().num_waiting or core.scheduler.stats().num_running > 3:
        transcripts.take(core.step())
    alone_again = len(steps)
    rests = [step.rests for step in steps[busy:alone_again] if len(step.rows) > 4]
    assert sum(rests) > 0.7 * len(rests) > 50
    before = steps.drafts.num_draft_tokens
    while core.has_work:
        transcripts.take(core.step())
    assert transcripts["first"].token_ids == alone(first.prompt_token_ids, first.params)[0]
    assert steps.drafts.num_draft_tokens > before


def test_a_request_without_speculation_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, oracle(1.0))
    steps.run("a", 100, speculate=False)
    assert steps.asked == 0 and len(steps) >= 100
    assert all(steps.rests[PATIENCE + 1 :])
