"""The scheduler's decisions one at a time, on the fake device. What holds for any mixture is in test_core."""

import numpy as np
import pytest

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.errors import ConfigError, ContextLengthError, InvalidValueError, RequestError
from jaxserve.scheduler.pictures import PicturePool
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.types.page_keys import with_pictures
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.scheduling import SchedulerConfig, TowerLimits
from jaxserve.types.step import FinishReason, Request, SampledTokens, ScheduledRow, SchedulerOutput
from tests.fakes import VOCAB, FakeRunner, FakeStep, Transcripts, alone, make_core, make_request, run_all, small_config


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % VOCAB for i in range(length)]


class Recorder(FakeRunner):
    """Keeps every step that was dispatched."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.outputs: list[SchedulerOutput] = []

    def execute(self, output: SchedulerOutput) -> FakeStep:
        self.outputs.append(output)
        return super().execute(output)

    def rows(self, request_id: str) -> list[ScheduledRow]:
        return [row for output in self.outputs for row in output.rows if row.request_id == request_id]


def recording_core(eos_token_ids: tuple[int, ...] = (), **changes: object) -> tuple[EngineCore, Recorder]:
    config = small_config(**changes)
    recorder = Recorder(config)
    return EngineCore(recorder, config, CoreOptions(vocab_size=VOCAB, eos_token_ids=eos_token_ids)), recorder


def step(core: EngineCore, transcripts: Transcripts, times: int = 1) -> None:
    for _ in range(times):
        transcripts.take(core.step())
        core.scheduler.check_integrity()


def shapes(output: SchedulerOutput) -> list[tuple[str, int]]:
    return [(row.request_id, row.num_tokens) for row in output.rows]


def preempting(eos_token_ids: tuple[int, ...] = (), **changes: object) -> tuple[EngineCore, Recorder, Transcripts]:
    core, recorder = recording_core(eos_token_ids, policy="priority", **changes)
    return core, recorder, Transcripts()


# --- steps


def test_decode_rows_come_first_and_chunks_fill_the_budget() -> None:
    core, recorder = recording_core(max_num_batched_tokens=10)
    transcripts = Transcripts()
    core.add(make_request("a", prompt_of(4), max_tokens=20))
    step(core, transcripts)
    core.add(make_request("b", prompt_of(25, first=50), max_tokens=5))
    run_all(core, transcripts=transcripts)
    assert [shapes(output) for output in recorder.outputs[:6]] == [
        [("a", 4)],
        [("a", 1), ("b", 9)],
        [("a", 1), ("b", 9)],
        [("a", 1), ("b", 7)],
        [("a", 1), ("b", 1)],
        [("a", 1), ("b", 1)],
    ]
    assert [output.num_decode_rows for output in recorder.outputs[:5]] == [0, 1, 1, 1, 2]
    assert [row.samples for row in recorder.rows("b")[:4]] == [False, False, True, True]


def test_a_step_little_above_a_size_leaves_the_rest_of_its_last_prompt_for_the_next() -> None:
    core, recorder = recording_core(max_num_batched_tokens=64, step_sizes=(1, 8, 16, 32, 64))
    transcripts = Transcripts()
    core.add(make_request("a", prompt_of(16), max_tokens=20))
    step(core, transcripts)
    core.add(make_request("b", prompt_of(18, first=50), max_tokens=5))
    core.add(make_request("c", prompt_of(14, first=90), max_tokens=5))
    run_all(core, transcripts=transcripts)
    assert [shapes(output) for output in recorder.outputs[:4]] == [
        [("a", 16)],
        [("a", 1), ("b", 18), ("c", 13)],
        [("a", 1), ("b", 1), ("c", 1)],
        [("a", 1), ("b", 1), ("c", 1)],
    ]
    assert [row.samples for row in recorder.rows("c")[:2]] == [False, True]


def test_a_step_far_above_a_size_is_not_cut() -> None:
    core, recorder = recording_core(max_num_batched_tokens=64, step_sizes=(1, 8, 16, 32, 64))
    run_all(core, [make_request("a", prompt_of(21), max_tokens=2)])
    assert shapes(recorder.outputs[0]) == [("a", 21)]


def test_a_request_brings_its_pages_with_its_first_row_and_one_at_a_time_later() -> None:
    core, recorder = recording_core(max_num_batched_tokens=5)
    run_all(core, [make_request("a", prompt_of(10), max_tokens=12)])
    rows = recorder.rows("a")
    assert [len(row.new_page_ids) for row in rows] == [3, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1][: len(rows)]
    assert [row.first_new_page for row in rows if row.new_page_ids] == [0, 3, 4, 5][: len(rows)]


def test_the_length_of_an_answer_is_known_ahead_and_costs_no_extra_step() -> None:
    core, recorder = recording_core()
    run_all(core, [make_request("a", prompt_of(5), max_tokens=4)])
    assert len(recorder.outputs) == 4
    assert core.scheduler.counters.dropped_tokens == 0


def test_a_stop_is_seen_one_step_late_and_the_extra_token_is_dropped() -> None:
    prompt = prompt_of(5)
    tokens, _ = alone(prompt, SamplingParams(temperature=0.0, max_tokens=10))
    core, recorder = recording_core(eos_token_ids=(tokens[2],))
    transcripts = run_all(core, [make_request("a", prompt, max_tokens=10)])
    assert transcripts["a"].token_ids == tokens[:3] and transcripts["a"].reason is FinishReason.STOP
    assert transcripts["a"].last and transcripts["a"].last.stop_token_id == tokens[2]
    assert len(recorder.outputs) == 4 and core.scheduler.counters.dropped_tokens == 1


def test_a_long_prompt_makes_no_stream_wait_for_more_than_a_chunk() -> None:
    """16 requests decode while a prompt of 400 tokens arrives: each has a row in every step until it ends."""
    core, recorder = recording_core(num_pages=400, max_num_seqs=20, max_num_batched_tokens=48, max_model_len=512)
    transcripts = Transcripts()
    for i in range(16):
        core.add(make_request(f"stream-{i}", prompt_of(4, first=i), max_tokens=40))
    step(core, transcripts, times=6)
    core.add(make_request("long", prompt_of(400), max_tokens=2))
    run_all(core, transcripts=transcripts)
    mixed = [output for output in recorder.outputs if any(row.request_id == "long" for row in output.rows)][:12]
    assert all((output.num_decode_rows, output.num_tokens) == (16, 48) for output in mixed)


def test_fewer_slots_than_asked_where_a_step_has_no_room_for_more() -> None:
    core, recorder = recording_core(max_num_seqs=8, max_num_batched_tokens=4)
    requests = [make_request(f"r{i}", prompt_of(6, first=i), max_tokens=6) for i in range(6)]
    transcripts = run_all(core, requests)
    assert max(len(output.rows) for output in recorder.outputs) <= 4
    assert all(len(transcripts[request.request_id].token_ids) == 6 for request in requests)


def test_prefill_chunk_size_bounds_the_prompt_tokens_of_a_step() -> None:
    core, recorder = recording_core(prefill_chunk_size=3)
    run_all(core, [make_request("a", prompt_of(10), max_tokens=2), make_request("b", prompt_of(4, 50), max_tokens=2)])
    chunks = [sum(row.num_tokens for row in output.rows[output.num_decode_rows :]) for output in recorder.outputs]
    assert [chunk for chunk in chunks if chunk] == [3, 3, 3, 3, 2]


def test_end_of_sequence_is_named_to_the_device_unless_ignored() -> None:
    core, recorder = recording_core((5, 6))
    run_all(core, [make_request("a", [1], max_tokens=2), make_request("b", [2], max_tokens=2, ignore_eos=True)])
    inits = {init.token_ids[0]: init.eos_token_ids for output in recorder.outputs for init in output.slot_inits}
    assert inits == {1: (5, 6), 2: ()}


def test_max_tokens_zero_computes_the_prompt_and_nothing_else() -> None:
    core, recorder = recording_core()
    transcripts = run_all(core, [make_request("a", prompt_of(6), max_tokens=0, prompt_logprobs=1)])
    assert transcripts["a"].token_ids == [] and transcripts["a"].reason is FinishReason.LENGTH
    assert transcripts["a"].last and len(transcripts["a"].last.prompt_logprobs or []) == 6
    assert len(recorder.outputs) == 1


def test_steps_are_read_in_the_order_of_their_dispatch() -> None:
    config = small_config()
    scheduler, runner = Scheduler(config), FakeRunner(config)
    add(scheduler, "a", prompt_of(4))
    first = schedule(scheduler)
    handle = runner.execute(first)
    second = schedule(scheduler)
    runner.execute(second)
    with pytest.raises(ValueError, match="step 2 is not the oldest"):
        scheduler.update(second, handle.result(), 0.0)


def add(scheduler: Scheduler, request_id: str, prompt: list[int], **params: object) -> Request:
    sampling = SamplingParams(**({"max_tokens": 8} | params))  # type: ignore[arg-type]
    request = Request(request_id, prompt, sampling, arrival=0.0, seed=0, max_tokens=sampling.max_tokens or 0)
    scheduler.add(request)
    return request


def schedule(scheduler: Scheduler) -> SchedulerOutput:
    output = scheduler.schedule(0.0)
    assert output is not None
    return output


# --- the prefix cache


def computed(core: EngineCore, recorder: Recorder, *requests: object) -> int:
    """Prompt tokens that running the requests has cost."""
    before = core.scheduler.counters.prefill_tokens
    run_all(core, requests)  # type: ignore[arg-type]
    return core.scheduler.counters.prefill_tokens - before


def test_a_full_hit_computes_at_least_one_token() -> None:
    core, recorder = recording_core()
    for length, again in ((8, 4), (9, 1), (12, 4), (11, 3)):
        prompt = prompt_of(length, first=length)
        assert computed(core, recorder, make_request("a", prompt, max_tokens=3)) == length
        assert computed(core, recorder, make_request("b", prompt, max_tokens=3)) == again


def test_an_answer_is_cached_for_the_next_turn() -> None:
    core, _ = recording_core()
    prompt = prompt_of(6)
    answer = run_all(core, [make_request("a", prompt, max_tokens=7)])["a"].token_ids
    turn = make_request("b", prompt + answer + [5], max_tokens=1)
    assert run_all(core, [turn])["b"].outputs[0].num_cached_tokens == 12


def test_cached_tokens_are_reported_with_the_first_and_the_last_output() -> None:
    core, _ = recording_core()
    run_all(core, [make_request("a", prompt_of(10), max_tokens=2)])
    outputs = run_all(core, [make_request("b", prompt_of(10), max_tokens=4)])["b"].outputs
    assert [output.num_cached_tokens for output in outputs] == [8, 0, 0, 8]
    assert core.scheduler.counters.cached_tokens == 8 and core.scheduler.counters.prompt_tokens == 20


def test_namespaces_and_the_switch() -> None:
    core, recorder = recording_core()
    assert computed(core, recorder, make_request("a", prompt_of(10), namespace="salt", max_tokens=1)) == 10
    assert computed(core, recorder, make_request("b", prompt_of(10), max_tokens=1)) == 10
    core, recorder = recording_core(prefix_cache=False)
    for name in "ab":
        assert computed(core, recorder, make_request(name, prompt_of(10), max_tokens=1)) == 10
    assert core.scheduler.stats().num_pages_free == 64


def test_siblings_share_one_prefill() -> None:
    core, recorder = recording_core()
    siblings = [
        make_request(f"s{i}", prompt_of(30), max_tokens=4, group="s", temperature=1.0, seed=i) for i in range(8)
    ]
    assert computed(core, recorder, *siblings) == 30 + 7 * 2
    assert len({tuple(shapes(output)) for output in recorder.outputs[:1]}) == 1


def test_siblings_follow_when_the_first_is_aborted() -> None:
    core, _ = recording_core(max_num_batched_tokens=9)
    transcripts = Transcripts()
    for i in range(3):
        core.add(make_request(f"s{i}", prompt_of(30), max_tokens=4))
    step(core, transcripts, times=2)
    transcripts.take(core.abort(["s0"]))
    run_all(core, transcripts=transcripts)
    assert [len(transcripts[f"s{i}"].token_ids) for i in range(3)] == [0, 4, 4]


def test_requests_behind_a_waiting_sibling_are_not_held_up() -> None:
    core, recorder = recording_core(max_num_batched_tokens=16)
    for name, prompt in (("a", prompt_of(12)), ("b", prompt_of(12)), ("c", prompt_of(3, first=40))):
        core.add(make_request(name, prompt, max_tokens=2))
    run_all(core)
    assert shapes(recorder.outputs[0]) == [("a", 12), ("c", 3)]


def test_prompt_logprobs_read_no_prefix_and_cover_the_prompt() -> None:
    core, recorder = recording_core(max_num_batched_tokens=9)
    prompt = prompt_of(20)
    run_all(core, [make_request("a", prompt, max_tokens=1)])
    transcript = run_all(core, [make_request("b", prompt, max_tokens=3, prompt_logprobs=2)])["b"]
    assert recorder.rows("b")[0].start == 0
    entries = transcript.outputs[0].prompt_logprobs
    assert entries is not None and entries[0] is None and len(entries) == 20
    for token, entry in zip(prompt[1:], entries[1:], strict=True):
        assert entry is not None
        assert (entry.token_id, entry.logprob, entry.rank) == (token, -float(token), token)
        assert entry.top_ids == [token, (token + 1) % VOCAB] and len(entry.top_logprobs) == 2
    assert all(output.prompt_logprobs is None for output in transcript.outputs[1:])


def test_log_probabilities_stand_beside_their_tokens() -> None:
    core, _ = recording_core()
    asking, other = make_request("a", prompt_of(5), max_tokens=6, logprobs=3), make_request("b", prompt_of(7))
    transcripts = run_all(core, [asking, other])
    for output in transcripts["a"].outputs:
        assert [entry.token_id for entry in output.logprobs or []] == output.token_ids
        assert [entry.logprob for entry in output.logprobs or []] == [-float(token) for token in output.token_ids]
        assert all(len(entry.top_ids) == 3 for entry in output.logprobs or [])
    assert all(output.logprobs is None for output in transcripts["b"].outputs)


def test_flush_takes_nothing_from_running_requests() -> None:
    core, recorder = recording_core()
    prompt = prompt_of(12)
    run_all(core, [make_request("a", prompt, max_tokens=2)])
    transcripts = Transcripts()
    core.add(make_request("b", prompt, max_tokens=10))
    step(core, transcripts, times=3)
    core.flush_prefix_cache()
    core.scheduler.check_integrity()
    run_all(core, transcripts=transcripts)
    assert transcripts["b"].token_ids == alone(prompt, SamplingParams(temperature=0.0, max_tokens=10))[0]
    assert core.scheduler.stats().num_pages_free == 64
    assert computed(core, recorder, make_request("c", prompt, max_tokens=1)) == 12


# --- too little memory


def test_retraction_keeps_the_furthest_and_every_token() -> None:
    core, recorder = recording_core((1000,), num_pages=8, max_model_len=32, new_token_ratio=0.01)
    requests = [make_request(name, prompt_of(6, first), max_tokens=20) for name, first in (("a", 1), ("b", 30))]
    transcripts, ratios = Transcripts(), []
    for request in requests:
        core.add(request)
    while core.has_work:
        step(core, transcripts)
        ratios.append(core.scheduler.stats().new_token_ratio)
    for request in requests:
        assert transcripts[request.request_id].token_ids == alone(request.prompt_token_ids, request.params)[0]
    counters = core.scheduler.counters
    assert (counters.retractions, counters.retraction_events) == (1, 1)
    lasts = [transcripts[name].last for name in "ab"]
    assert [last.num_preemptions for last in lasts if last is not None] == [0, 1]
    inits = [init for output in recorder.outputs for init in output.slot_inits]
    assert [len(init.token_ids) > init.num_prompt_tokens for init in inits] == [False, False, True]
    assert inits[2].token_ids[:6] == prompt_of(6, 30), "b had as much output and came later"
    assert max(ratios) == 1.0, "one request stays, with 9 of 20 tokens made and 20 of margin"


def test_what_was_computed_before_a_retraction_can_be_a_prefix_hit_after_it() -> None:
    core, _ = recording_core((1000,), num_pages=8, max_model_len=32, new_token_ratio=0.01)
    run_all(core, [make_request(name, prompt_of(6, first), max_tokens=20) for name, first in (("a", 1), ("b", 30))])
    counters = core.scheduler.counters
    assert counters.prefill_tokens == 12 + counters.recomputed_tokens
    assert counters.cached_tokens == 0, "a prefix hit after a retraction is none of the client's cached tokens"


def test_admission_leaves_room_for_what_is_running() -> None:
    requests = [make_request(f"r{i}", prompt_of(4, first=9 * i), max_tokens=28) for i in range(6)]
    core, recorder = recording_core(eos_token_ids=(1000,), num_pages=16, max_model_len=64, new_token_ratio=1.0)
    run_all(core, requests)
    assert core.scheduler.counters.retractions == 0
    assert max(len(output.rows) for output in recorder.outputs) == 2


def test_a_page_held_twice_does_not_keep_the_last_request_from_its_end() -> None:
    """Both compute the same page; the cache keeps the first one's, and later the second needs all six pages."""
    core = make_core(small_config(num_pages=6, max_model_len=128, new_token_ratio=0.01), eos_token_ids=(1000,))
    requests = [make_request("first", [1] * 4, max_tokens=3), make_request("second", [1] * 4, max_tokens=20)]
    transcripts = run_all(core, requests, max_steps=200)
    assert [len(transcripts[request.request_id].token_ids) for request in requests] == [3, 20]


def test_nobody_is_retracted_while_pages_are_about_to_come_free() -> None:
    """When the long one needs a fifth page, the last token of the short one is in flight."""
    core, _ = recording_core((1000,), num_pages=4, max_model_len=16, new_token_ratio=0.01)
    requests = [make_request("short", prompt_of(4), max_tokens=3), make_request("long", prompt_of(6, 50), max_tokens=9)]
    transcripts = run_all(core, requests)
    assert [len(transcripts[request.request_id].token_ids) for request in requests] == [3, 9]
    assert core.scheduler.counters.retractions == 0


def test_a_request_without_a_page_for_its_next_token_delays_no_other() -> None:
    """When the long one needs its third page, the pages of the short one are about to come free."""
    core, recorder = recording_core((1000,), num_pages=5, max_model_len=20, new_token_ratio=0.01)
    sizes = {"short": (1, 4), "long": (5, 7), "other": (3, 6)}
    run_all(core, [make_request(name, prompt_of(n, n), max_tokens=most) for name, (n, most) in sizes.items()])
    steps = {name: [o.step for o in recorder.outputs if name in o.request_ids] for name in ("long", "other")}
    assert core.scheduler.counters.retractions == 0
    assert {name: found[-1] - found[0] + 1 for name, found in steps.items()} == {"long": 8, "other": 6}


def test_no_more_are_retracted_than_the_pages_that_they_leave_and_no_longer_want() -> None:
    """Four share two pages, own one each and want one more, of which one is free: two retractions are enough."""
    core = make_core(small_config(num_pages=7, max_model_len=28, new_token_ratio=0.01), eos_token_ids=(1000,))
    shared = prompt_of(8)
    run_all(core, [make_request("shared", [*shared, 9], max_tokens=1)])
    for i in range(4):
        core.add(make_request(f"r{i}", [*shared, 20 + i, 30, 31], max_tokens=6))
    counters = core.scheduler.counters
    while not counters.retractions:
        core.step()
    assert (counters.admissions, counters.retractions) == (5, 2)


def test_a_retracted_request_comes_back_before_those_that_wait() -> None:
    core, recorder = recording_core((1000,), num_pages=8, max_model_len=32, new_token_ratio=0.01, max_num_seqs=2)
    names = "abcd"
    run_all(core, [make_request(name, prompt_of(6, 20 * i), max_tokens=20) for i, name in enumerate(names)])
    admitted = [row.request_id for output in recorder.outputs for row in output.rows if row.token_ids]
    assert admitted[:4] == ["a", "b", "b", "c"]


def test_the_ratio_starts_over_when_nothing_runs() -> None:
    core, _ = recording_core(new_token_ratio=0.5)
    run_all(core, [make_request("a", prompt_of(4), max_tokens=60)])
    assert core.scheduler.stats().new_token_ratio < 0.48
    run_all(core, [make_request("b", prompt_of(4), max_tokens=1)])
    assert core.scheduler.stats().new_token_ratio == 0.5


def test_a_prompt_computed_again_in_part_is_not_taken_for_whole() -> None:
    """Preempted, taken up again and aborted within its prompt: the pages it had not reached must not be cached."""
    core, _, transcripts = preempting(max_num_seqs=1, max_num_batched_tokens=9)
    long = prompt_of(40)
    core.add(make_request("low", long, priority=5, max_tokens=30))
    step(core, transcripts, times=9)
    assert transcripts["low"].token_ids
    core.add(make_request("high", prompt_of(5, 60), priority=0, max_tokens=2))
    step(core, transcripts, times=2)
    core.flush_prefix_cache()
    while not (transcripts.get("high") and transcripts["high"].last):
        step(core, transcripts)
    step(core, transcripts, times=2)
    transcripts.take(core.abort(["low"]))
    again = make_request("again", long + transcripts["low"].token_ids, max_tokens=4)
    assert run_all(core, [again])["again"].token_ids == alone(again.prompt_token_ids, again.params)[0]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "error", "param"),
    [
        ([], 1, InvalidValueError, "prompt"),
        ([1] * 24, 1, ContextLengthError, "prompt"),
        ([1] * 25, 0, ContextLengthError, "prompt"),
        ([1] * 20, 5, ContextLengthError, "max_tokens"),
    ],
)
def test_what_can_never_fit_is_refused_at_once(
    prompt: list[int], max_tokens: int, error: type[RequestError], param: str
) -> None:
    scheduler = Scheduler(small_config(num_pages=6, max_model_len=128))
    with pytest.raises(error) as refused:
        add(scheduler, "a", prompt, max_tokens=max_tokens)
    assert refused.value.param == param and not scheduler.has_work


@pytest.mark.parametrize(("prompt", "max_tokens"), [([1] * 23, 1), ([1] * 24, 0), ([1] * 4, 20)])
def test_what_just_fits_runs(prompt: list[int], max_tokens: int) -> None:
    core = make_core(small_config(num_pages=6, max_model_len=128))
    crowd = [make_request(f"r{i}", prompt, max_tokens=max_tokens) for i in range(3)]
    transcripts = run_all(core, crowd)
    assert [len(transcripts[f"r{i}"].token_ids) for i in range(3)] == [max_tokens] * 3


def test_a_live_request_id_is_refused() -> None:
    scheduler = Scheduler(small_config())
    add(scheduler, "a", [1])
    with pytest.raises(InvalidValueError, match="in use"):
        add(scheduler, "a", [1])
    scheduler.abort("a")
    add(scheduler, "a", [1])


@pytest.mark.parametrize(
    "changes", [{"num_pages": 0}, {"max_num_batched_tokens": 1}, {"aging_steps": 0}, {"prefill_chunk_size": -1}]
)
def test_numbers_that_cannot_work_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        small_config(**changes)


# --- pictures


def test_a_picture_stays_until_another_one_needs_its_rows() -> None:
    """The one that was used least recently goes first, and no more of them than must."""
    pool = PicturePool(TowerLimits(num_rows=6, merge=2, pieces={8: ("end",)}))

    def show(name: str) -> None:
        request = Request(name, prompt_of(4), SamplingParams(), 0.0, 0, 4)
        request.pictures = (Picture(name.encode() * 32, bytes(8), (1, 2, 4), 0, num_tokens=2),)
        pool.reach(request, 4)
        pool.plan()
        assert pool.reach(request, 4) == request.num_tokens, "it has its rows"
        request.num_computed_tokens = 4
        pool.release_passed(request)
        pool.check_integrity(set())

    for names, encoded, reused in (("abca", 3, 1), ("d", 4, 1), ("ca", 4, 3), ("b", 5, 3)):
        for name in names:
            show(name)
        assert (pool.num_encoded, pool.num_reused) == (encoded, reused)


def with_a_picture(start: int) -> Scheduler:
    """It has a request of 8 tokens with a token mask, of which those at `start` and behind it are a picture."""
    limits = TowerLimits(num_rows=8, merge=2, pieces={8: ("end",)})
    scheduler, prompt = Scheduler(small_config(pictures=limits)), prompt_of(8)
    request = Request("a", prompt, SamplingParams(temperature=0.0), 0.0, 0, 4, masked=True)
    request.pictures = (Picture(bytes(32), bytes(8), (1, 2, 4), start, num_tokens=2),)
    request.picture_keys = with_pictures(prompt, request.pictures, 4)
    scheduler.add(request)
    return scheduler


def test_a_step_works_for_the_requests_whose_pictures_it_encodes() -> None:
    scheduler = with_a_picture(start=0)
    output = schedule(scheduler)
    assert (output.rows, output.request_ids) == ([], ["a"])
    assert scheduler.recover() == ["a"], "if the device failed, its picture may be why"


def test_a_prompt_that_ends_with_a_picture_never_takes_the_picture_for_text() -> None:
    """Its first token has no mask in time. The row that computes the prompt's last token again has the picture too."""
    scheduler = with_a_picture(start=6)
    last: list[ScheduledRow] = []
    for _ in range(6):
        output = scheduler.schedule(0.0)
        if output is None:
            break
        count = len(output.rows)
        last += [row for row in output.rows if row.samples]
        if len(last) == 1:
            scheduler.take_back([0])
        scheduler.check_integrity()
        no_tokens = np.zeros((count, 1), np.int32), np.zeros(count, np.int32)
        scheduler.update(output, SampledTokens(*no_tokens, status=np.zeros(count, np.uint8)), 0.0)
        if len(last) > 1:
            break
    assert len(last) == 2 and all(row.pictures is not None and row.pictures.rows[-1] >= 0 for row in last)
