"""Background work gives way to all other requests, under every policy."""

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.engine.request import BACKGROUND_PRIORITY, SamplingParams
from tests.fakes import VOCAB, Transcripts, alone, make_core, make_request, run_all, small_config

POLICIES = ("fcfs", "lpm", "priority")
LINES = 4


def prompt_of(first: int) -> list[int]:
    return [(first + 7 * i) % VOCAB for i in range(6)]


def busy_core(policy: str, transcripts: Transcripts, **changes: object) -> EngineCore:
    """A core whose slots are all taken by background requests."""
    core = make_core(small_config(policy=policy, max_num_seqs=LINES, **changes))
    for number in range(LINES):
        line = make_request(f"line{number}", prompt_of(number), priority=BACKGROUND_PRIORITY + number, max_tokens=30)
        core.add(line)
    for _ in range(6):
        transcripts.take(core.step())
    return core


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"num_pages": 12, "max_model_len": 48}])
def test_an_online_request_takes_the_place_of_a_line(policy: str, changes: dict[str, object]) -> None:
    transcripts = Transcripts()
    core = busy_core(policy, transcripts, **changes)
    core.add(make_request("online", prompt_of(60), max_tokens=3))
    steps = 0
    while "online" not in transcripts:
        transcripts.take(core.step())
        steps += 1
    assert steps <= 5
    run_all(core, transcripts=transcripts)
    params = SamplingParams(temperature=0.0, max_tokens=30)
    for number in range(LINES):  # those that gave way lose nothing
        assert transcripts[f"line{number}"].token_ids == alone(prompt_of(number), params)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_waiting_online_requests_come_before_waiting_lines(policy: str) -> None:
    core = make_core(small_config(policy=policy, max_num_seqs=1))
    names = [("line", BACKGROUND_PRIORITY), ("a", 0), ("b", 0)]
    order: list[str] = []
    for name, priority in names:
        core.add(make_request(name, prompt_of(len(name)), priority=priority, max_tokens=2))
    while core.has_work:
        order += [output.request_id for output in core.step() if output.finish_reason]
    assert order == ["a", "b", "line"]


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_other_priorities_have_no_effect_without_the_policy(policy: str) -> None:
    transcripts = Transcripts()
    core = make_core(small_config(policy=policy, max_num_seqs=1))
    run_all(core, [make_request("a", prompt_of(1), priority=9, max_tokens=9)], transcripts, max_steps=10_000)
    core.add(make_request("worse", prompt_of(1), priority=9, max_tokens=9))
    transcripts.take(core.step())
    core.add(make_request("better", prompt_of(2), priority=0, max_tokens=2))
    run_all(core, transcripts=transcripts)
    assert core.scheduler.counters.priority_preemptions == 0


def test_lines_do_not_preempt_lines_without_the_policy() -> None:
    transcripts = Transcripts()
    core = busy_core("fcfs", transcripts)
    core.add(make_request("late", prompt_of(50), priority=BACKGROUND_PRIORITY, max_tokens=2))
    run_all(core, transcripts=transcripts)
    assert core.scheduler.counters.priority_preemptions == 0
