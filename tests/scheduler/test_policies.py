"""The order of the waiting queue, and who is preempted for whom."""

import pytest

from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason
from tests.fakes import Transcripts, alone, make_request, run_all
from tests.scheduler.test_scheduler import Recorder, computed, preempting, prompt_of, recording_core, step

# --- policies


def started(recorder: Recorder) -> list[str]:
    """Request ids in the order of their first rows."""
    return list(dict.fromkeys(row.request_id for output in recorder.outputs for row in output.rows))


def test_lpm_runs_the_longest_hit_first() -> None:
    core, recorder = recording_core(policy="lpm", max_num_seqs=1)
    run_all(core, [make_request("warm", prompt_of(16), max_tokens=1)])
    cold, half = make_request("cold", prompt_of(16, 40), max_tokens=2), [*prompt_of(8), *prompt_of(8, 77)]
    run_all(core, [cold, make_request("half", half, max_tokens=2), make_request("full", prompt_of(17), max_tokens=2)])
    assert started(recorder) == ["warm", "full", "half", "cold"]


def test_priority_runs_the_lowest_value_first() -> None:
    core, recorder = recording_core(policy="priority", max_num_seqs=1)
    run_all(core, [make_request(f"p{p}", prompt_of(4, p), priority=p, max_tokens=2) for p in (3, 1, 2)])
    assert started(recorder) == ["p1", "p2", "p3"]


def test_a_better_request_takes_the_place_of_a_worse_one() -> None:
    core, _, transcripts = preempting(max_num_seqs=2)
    for name, priority in (("worst", 5), ("mid", 3)):
        core.add(make_request(name, prompt_of(6, priority), priority=priority, max_tokens=30))
    step(core, transcripts, times=4)
    core.add(make_request("best", prompt_of(6, 60), priority=0, max_tokens=5))
    run_all(core, transcripts=transcripts)
    ends = [name for name, transcript in sorted(transcripts.items(), key=lambda item: len(item[1].outputs))]
    assert ends[0] == "best" and core.scheduler.counters.priority_preemptions == 1
    for name, priority in (("worst", 5), ("mid", 3)):
        params = SamplingParams(temperature=0.0, max_tokens=30)
        assert transcripts[name].token_ids == alone(prompt_of(6, priority), params)[0]


def test_an_equal_or_worse_request_preempts_nobody() -> None:
    core, _, transcripts = preempting(max_num_seqs=1)
    core.add(make_request("a", prompt_of(6), priority=2, max_tokens=9))
    step(core, transcripts, times=2)
    for name, priority in (("b", 2), ("c", 3)):
        core.add(make_request(name, prompt_of(6), priority=priority, max_tokens=2))
    run_all(core)
    assert core.scheduler.counters.priority_preemptions == 0


def test_preemption_for_pages_takes_the_worst_and_only_if_that_is_enough() -> None:
    core, recorder, transcripts = preempting((1000,), num_pages=12, max_model_len=48, new_token_ratio=1.0)
    for name, priority in (("worst", 9), ("bad", 8)):
        core.add(make_request(name, prompt_of(8, priority), priority=priority, max_tokens=8))
    step(core, transcripts, times=3)
    core.add(make_request("best", prompt_of(16, 60), priority=0, max_tokens=8))
    run_all(core, transcripts=transcripts)
    assert core.scheduler.counters.priority_preemptions == 1
    assert "worst" in {row.request_id for output in recorder.outputs[4:] for row in output.rows if row.token_ids}


@pytest.mark.parametrize(("max_tokens", "num_preempted"), [(7, 1), (8, 0)])
def test_nobody_is_preempted_in_vain(max_tokens: int, num_preempted: int) -> None:
    """A newcomer needs as much as the only worse request would give back, or one token more."""
    core, _, transcripts = preempting((1000,), num_pages=12, max_model_len=48, new_token_ratio=1.0)
    core.add(make_request("better", prompt_of(24), priority=0, max_tokens=8))
    core.add(make_request("worse", prompt_of(6, 50), priority=9, max_tokens=6))
    step(core, transcripts, times=3)
    core.add(make_request("new", prompt_of(8, 30), priority=1, max_tokens=max_tokens))
    run_all(core, transcripts=transcripts)
    assert core.scheduler.counters.priority_preemptions == num_preempted


@pytest.mark.parametrize("policy", ["lpm", "priority"])
def test_nothing_waits_for_ever(policy: str) -> None:
    """A stream of better requests passes the plain one until it has aged; it then gets the next slot."""
    core, recorder = recording_core(policy=policy, max_num_seqs=2, aging_steps=20)
    transcripts = Transcripts()
    warm = prompt_of(16)
    run_all(core, [make_request("warm", warm, max_tokens=1)])
    began = len(recorder.outputs)
    for i in range(3):
        core.add(make_request(f"first-{i}", warm, priority=0, max_tokens=3))
    core.add(make_request("plain", prompt_of(5, 50), priority=7, max_tokens=6))
    for i in range(200):
        core.add(make_request(f"better-{i}", warm, priority=0, max_tokens=3))
        step(core, transcripts)
        if "plain" in transcripts and transcripts["plain"].last:
            break
    first = next(i for i, output in enumerate(recorder.outputs) for row in output.rows if row.request_id == "plain")
    assert 20 <= first - began <= 20 + 6
    assert transcripts["plain"].reason is FinishReason.LENGTH
    inits = [init for output in recorder.outputs for init in output.slot_inits if init.token_ids == prompt_of(5, 50)]
    assert len(inits) == 1, "and nobody takes it away again"


def test_an_aged_request_is_not_preempted() -> None:
    core, recorder, transcripts = preempting(max_num_seqs=1, aging_steps=5)
    core.add(make_request("first", prompt_of(4), priority=0, max_tokens=12))
    step(core, transcripts)
    core.add(make_request("aged", prompt_of(5, 50), priority=7, max_tokens=9))
    while "aged" not in transcripts:
        step(core, transcripts)
    core.add(make_request("better", prompt_of(4, 80), priority=0, max_tokens=2))
    run_all(core, transcripts=transcripts)
    assert started(recorder) == ["first", "aged", "better"]
    assert core.scheduler.counters.priority_preemptions == 0


def test_an_aged_request_waits_for_no_prefill() -> None:
    core, recorder = recording_core(policy="lpm", aging_steps=1, max_num_batched_tokens=9)
    siblings = [make_request(f"s{i}", prompt_of(30), max_tokens=2) for i in range(2)]
    assert computed(core, recorder, *siblings) > 30 + 2, "what it computes beside its sibling is computed twice"
    assert recorder.rows("s1")[0].start < 28
