"""EngineCore on a fake device that fails: no output changes, and a request that always fails is found and ends."""

from collections.abc import Callable

import pytest

from jaxserve.engine import core as core_module
from jaxserve.engine.core import EngineCore, StepError
from jaxserve.types.fault_isolator import DeviceFaultError
from jaxserve.types.sampling import GrammarSpec
from jaxserve.types.step import FinishReason, SchedulerOutput
from tests.engine.test_core import grammar_core
from tests.fake_grammar import HandExecutor
from tests.fakes import Transcripts, make_core, make_request, run_all, small_config
from tests.faults.faulty_runner import FaultyRunner


def test_outputs_survive_a_device_that_fails_at_dispatch() -> None:
    core = make_core(small_config())
    core.add(make_request("done", [1], max_tokens=2, resumed_token_ids=[3, 4]))
    core.add(make_request("late", [1], deadline=0.0))
    core.add(make_request("a", [1], max_tokens=3))
    core.runner = FaultyRunner(core.runner, lambda output: "before")
    with pytest.raises(StepError, match="on purpose"):
        core.step()
    core.runner = core.runner.inner
    core.recover()
    transcripts = run_all(core)
    assert [transcripts[name].reason for name in ("done", "late", "a")] == [
        FinishReason.LENGTH,
        FinishReason.ERROR,
        FinishReason.LENGTH,
    ]


@pytest.mark.parametrize("kind", ["before", "after", "sample", "read", "memory"])
def test_a_step_that_fails_changes_no_output(kind: str) -> None:
    """Each of the first twelve steps in turn, with chunks, decode rows, grammars and a retraction among them."""
    config = small_config(num_pages=14, max_num_batched_tokens=9)
    requests = [make_request(f"r{i}", range(i, i + 9), max_tokens=12, temperature=i % 2, seed=i) for i in range(4)]
    requests.append(make_request("g", [1, 2], max_tokens=12, grammar=GrammarSpec(kind="regex", source="4")))
    expected = {key: (value.token_ids, value.reason) for key, value in run_all(grammar_core(config), requests).items()}
    for failing in range(1, 13):
        core = grammar_core(config)
        core.runner = FaultyRunner(core.runner, lambda output, at=failing: kind if output.step == at else None)
        transcripts = Transcripts()
        for request in requests:
            core.add(request)
        while core.has_work:
            try:
                transcripts.take(core.step())
            except StepError:
                core.recover()
            core.scheduler.check_integrity()
        assert {key: (value.token_ids, value.reason) for key, value in transcripts.items()} == expected
        assert core.stats().details["rebuilds"] == 1


def test_an_abort_after_a_failed_step_returns_the_tokens_read_in_it_first() -> None:
    core = grammar_core()
    core.runner = FaultyRunner(core.runner, lambda output: "sample" if output.step == 3 else None)
    core.add(make_request("a", [1, 2, 3], max_tokens=12))
    core.add(make_request("g", [1, 2], max_tokens=12, grammar=GrammarSpec(kind="regex", source="4")))
    transcripts = Transcripts()
    with pytest.raises(StepError, match="on purpose"):
        while True:
            transcripts.take(core.step())
    core.recover()
    before = len(transcripts["a"].token_ids) if "a" in transcripts else 0
    transcripts.take(core.abort(["a"]))
    assert len(transcripts["a"].token_ids) > before and transcripts["a"].reason is FinishReason.ABORT
    while core.has_work:
        transcripts.take(core.step())
    assert transcripts["g"].reason is not None


def test_an_end_that_a_thread_found_is_kept_if_the_device_fails_in_that_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_module, "MAX_RESUMED", 0)  # the thread shows the grammar its two tokens
    threads = HandExecutor()
    core = grammar_core(mask_threads=threads)
    core.runner = FaultyRunner(core.runner, lambda output: "sample")
    grammar = GrammarSpec(kind="regex", source="2")
    core.add(make_request("a", [1, 2], max_tokens=50, grammar=grammar, resumed_token_ids=[3, 6]))
    threads.run(1)
    with pytest.raises(StepError, match="on purpose"):
        core.step()
    core.runner = core.runner.inner
    core.recover()
    transcript = run_all(core)["a"]
    assert (transcript.token_ids, transcript.reason) == ([], FinishReason.STOP)


def poisoned(core: EngineCore, plan: Callable[[SchedulerOutput], str | None]) -> tuple[Transcripts, int]:
    """What all its requests got from a device that fails as `plan` says, and how often it failed."""
    core.runner = FaultyRunner(core.runner, plan)
    transcripts, failures = Transcripts(), 0
    while core.has_work:
        try:
            transcripts.take(core.step())
        except StepError:
            core.recover()
            failures += 1
            assert failures < 100, "the search does not end"
        core.scheduler.check_integrity()
    return transcripts, failures


@pytest.mark.parametrize("kind", ["before", "after", "read"])
@pytest.mark.parametrize("bad", [{"r0"}, {"r11"}, {"r3", "r4"}, {"r2", "r9", "g"}])
def test_requests_that_always_fail_end_alone(kind: str, bad: set[str]) -> None:
    """At each step with them, from the moment on that they hold eleven tokens; the others' tokens are as ever."""
    config = small_config(num_pages=90, max_num_seqs=16, max_num_batched_tokens=40)
    requests = [make_request(f"r{i}", range(i, i + 9), max_tokens=12, temperature=i % 2, seed=i) for i in range(12)]
    requests.append(make_request("g", [1, 2], max_tokens=12, grammar=GrammarSpec(kind="regex", source="11")))
    expected = {key: value.token_ids for key, value in run_all(grammar_core(config), requests).items()}
    core = grammar_core(config)
    for request in requests:
        core.add(request)
    lengths = {request.request_id: len(request.prompt_token_ids) + 2 for request in requests}

    def plan(output: SchedulerOutput) -> str | None:
        ends = {row.request_id: row.start + row.num_tokens for row in output.rows}
        return kind if any(ends.get(name, 0) >= lengths[name] for name in bad) else None

    transcripts, failures = poisoned(core, plan)
    assert {key for key, value in transcripts.items() if value.reason is FinishReason.ERROR} == bad
    assert all(value.token_ids == expected[key] for key, value in transcripts.items() if key not in bad)
    assert failures <= len(bad) * 7 and not core.is_isolating


def test_a_request_that_always_fails_ends_when_it_is_alone() -> None:
    core = make_core(small_config())
    core.add(make_request("a", [1]))
    transcripts, failures = poisoned(core, lambda output: "read")
    assert (transcripts["a"].reason, failures) == (FinishReason.ERROR, 2)
    assert "device" in (transcripts["a"].last.error or "")  # type: ignore[union-attr]


def test_a_device_that_fails_for_all_ends_nobody() -> None:
    core = make_core(small_config())
    for i in range(8):
        core.add(make_request(f"r{i}", [i]))
    with pytest.raises(DeviceFaultError):
        poisoned(core, lambda output: "read")
    assert len(core.scheduler.live_ids) == 8


def test_who_leaves_while_it_is_tried_is_not_waited_for() -> None:
    core = make_core(small_config())
    for i in range(4):
        core.add(make_request(f"r{i}", [i], max_tokens=9))
    core.runner = FaultyRunner(core.runner, lambda output: "before" if output.step == 3 else None)
    transcripts = Transcripts()
    for _ in range(2):
        transcripts.take(core.step())
    with pytest.raises(StepError):
        core.step()
    core.recover()
    core.add(make_request("late", [9], max_tokens=3))
    core.step()
    assert core.is_isolating and core.stats().num_waiting == 1  # new requests wait for the outcome
    transcripts.take(core.abort([f"r{i}" for i in range(4)]))
    assert len(run_all(core, transcripts=transcripts)["late"].token_ids) == 3
