"""Requests end once, in any phase: abort, deadline, values that are not finite, a lost device."""

import numpy as np
import pytest

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason, SampledTokens
from tests.fakes import VOCAB, FakeRunner, Transcripts, alone, drain, make_core, make_request, run_all, small_config
from tests.scheduler.test_scheduler import add, prompt_of, recording_core, schedule, shapes, step

# --- ends


def phases() -> dict[str, int]:
    return {"waiting": 0, "prefilling": 1, "last chunk in flight": 3, "decoding": 5, "last token in flight": 12}


@pytest.mark.parametrize("steps", phases().values(), ids=phases().keys())
def test_an_abort_ends_a_request_in_any_phase(steps: int) -> None:
    core, _ = recording_core(max_num_batched_tokens=9)
    transcripts = Transcripts()
    core.add(make_request("a", prompt_of(22), max_tokens=10))
    core.add(make_request("b", prompt_of(5, 60), max_tokens=12))
    step(core, transcripts, times=steps)
    assert "a" not in transcripts or transcripts["a"].last is None
    transcripts.take(core.abort(["a", "unknown"]))
    core.scheduler.check_integrity()
    assert transcripts["a"].reason is FinishReason.ABORT
    assert core.abort(["a"]) == []
    run_all(core, transcripts=transcripts)
    expected = alone(prompt_of(22), SamplingParams(temperature=0.0, max_tokens=10))[0]
    assert transcripts["a"].token_ids == expected[: len(transcripts["a"].token_ids)]
    assert transcripts["b"].token_ids == alone(prompt_of(5, 60), SamplingParams(temperature=0.0, max_tokens=12))[0]
    assert core.scheduler.stats().num_pages_held == 0


def test_slot_and_pages_stay_until_the_last_step_with_them_was_read() -> None:
    config = small_config(max_num_seqs=1, prefix_cache=False)
    scheduler, runner = Scheduler(config), FakeRunner(config)
    add(scheduler, "a", prompt_of(6))
    add(scheduler, "b", prompt_of(6, 50))
    first = schedule(scheduler)
    handle = runner.execute(first)
    second = schedule(scheduler)
    late = runner.execute(second)
    assert scheduler.abort("a")
    assert scheduler.schedule(0.0) is None and scheduler.stats().num_pages_held == 2
    assert scheduler.update(first, handle.result(), 0.0) == []
    assert scheduler.schedule(0.0) is None and scheduler.stats().num_pages_held == 2
    assert scheduler.update(second, late.result(), 0.0) == []
    assert scheduler.stats().num_pages_held == 0
    assert shapes(schedule(scheduler)) == [("b", 6)]
    scheduler.check_integrity()


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed_core(**changes: object) -> tuple[EngineCore, Clock, Transcripts]:
    clock = Clock()
    return make_core(small_config(max_num_seqs=1, **changes), clock=clock), clock, Transcripts()


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    core, clock, transcripts = timed_core()
    core.add(make_request("running", prompt_of(4), max_tokens=50, deadline=5.0))
    core.add(make_request("waiting", prompt_of(4), max_tokens=50, deadline=5.0))
    core.add(make_request("free", prompt_of(4, 9), max_tokens=3))
    step(core, transcripts, times=4)
    clock.now += 5.0
    step(core, transcripts)
    for name in ("running", "waiting"):
        last = transcripts[name].last
        assert last and (last.finish_reason, last.error_status) == (FinishReason.ERROR, 504)
        assert last.error == "the deadline of 5 s has passed"
    assert len(transcripts["running"].token_ids) == 3
    assert core.scheduler.counters.finished_error == 2
    transcripts.take(drain(core))
    assert transcripts["free"].reason is FinishReason.LENGTH


def test_the_queue_timeout_spares_those_that_ran() -> None:
    core, clock, transcripts = timed_core(queue_timeout=2.0)
    core.add(make_request("first", prompt_of(4), max_tokens=6))
    step(core, transcripts)
    core.add(make_request("second", prompt_of(4), max_tokens=6))
    clock.now += 2.0
    transcripts.take(drain(core))
    assert transcripts["first"].reason is FinishReason.LENGTH
    last = transcripts["second"].last
    assert last and (last.error, last.error_status) == ("waited 2 s in the queue", 504)


def test_times_are_reported_once() -> None:
    core, clock, transcripts = timed_core()
    core.add(make_request("a", prompt_of(4), max_tokens=3))
    clock.now += 1.5
    step(core, transcripts)
    clock.now += 0.5
    step(core, transcripts)
    transcripts.take(drain(core))
    times = [(output.queue_seconds, output.first_token_seconds) for output in transcripts["a"].outputs]
    assert times == [(1.5, 2.0), (0.0, 0.0), (0.0, 0.0)]
    counters = core.scheduler.counters
    assert (counters.queue_seconds, counters.first_token_seconds, counters.first_tokens) == (1.5, 2.0, 1)


def test_a_row_that_is_not_finite_ends_its_request_only_and_caches_nothing() -> None:
    config = small_config()
    core = EngineCore(FakeRunner(config, not_finite={"bad"}), config, CoreOptions(vocab_size=VOCAB))
    prompt = prompt_of(12)
    requests = [make_request("bad", prompt, max_tokens=5), make_request("good", prompt_of(9, 3), max_tokens=5)]
    transcripts = run_all(core, requests)
    last = transcripts["bad"].last
    assert last and (last.finish_reason, last.token_ids) == (FinishReason.ERROR, []) and "finite" in (last.error or "")
    assert transcripts["good"].token_ids == alone(prompt_of(9, 3), SamplingParams(temperature=0.0, max_tokens=5))[0]
    assert run_all(core, [make_request("again", prompt, max_tokens=5)])["again"].outputs[0].num_cached_tokens == 0


def test_a_cached_prefix_that_led_to_a_bad_row_is_forgotten() -> None:
    config = small_config()
    core = EngineCore(FakeRunner(config, not_finite={"bad"}), config, CoreOptions(vocab_size=VOCAB))
    prompt = prompt_of(12)
    run_all(core, [make_request("a", prompt, max_tokens=5)])
    run_all(core, [make_request("bad", prompt, max_tokens=5)])
    assert run_all(core, [make_request("b", prompt, max_tokens=5)])["b"].outputs[0].num_cached_tokens == 0


def test_a_chunk_that_is_not_finite_ends_its_request_before_the_prompt_ends() -> None:
    config = small_config(max_num_batched_tokens=4)
    core = EngineCore(FakeRunner(config, not_finite={"bad"}, nan_from=5), config, CoreOptions(vocab_size=VOCAB))
    prompt = prompt_of(40)
    last = run_all(core, [make_request("bad", prompt, max_tokens=5)])["bad"].last
    assert last and last.error_status == 500 and "finite" in (last.error or "")
    assert core.scheduler.counters.steps <= 3, "the second chunk shows it, while the third is in flight"
    assert run_all(core, [make_request("again", prompt, max_tokens=1)])["again"].outputs[0].num_cached_tokens == 0


# --- the device is lost


def test_after_a_lost_device_everything_is_computed_again() -> None:
    config = small_config(max_num_batched_tokens=9)
    core = EngineCore(FakeRunner(config), config, CoreOptions(vocab_size=VOCAB))
    requests = [make_request(f"r{i}", prompt_of(5 + 3 * i, i), max_tokens=12) for i in range(4)]
    transcripts = Transcripts()
    for request in requests:
        core.add(request)
    for _ in range(3):
        step(core, transcripts, times=5)
        core.recover()
        core.scheduler.check_integrity()
        assert core.scheduler.stats().num_pages_free == config.num_pages
    run_all(core, transcripts=transcripts)
    for request in requests:
        assert transcripts[request.request_id].token_ids == alone(request.prompt_token_ids, request.params)[0]


def test_a_slot_that_its_request_left_before_the_device_was_lost_is_free() -> None:
    """The step that would have freed it is never read."""
    core = make_core(small_config(max_num_seqs=1))
    core.add(make_request("a", prompt_of(4), max_tokens=9), make_request("b", prompt_of(4, 9), max_tokens=2))
    core.step()
    core.abort(["a"])
    core.recover()
    assert len(run_all(core, max_steps=9)["b"].token_ids) == 2


def test_arrays_of_another_shape_are_an_error() -> None:
    config = small_config()
    scheduler = Scheduler(config)
    add(scheduler, "a", [1, 2])
    output = schedule(scheduler)
    sampled = SampledTokens(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint8))
    with pytest.raises((ValueError, IndexError)):
        scheduler.update(output, sampled, 0.0)
