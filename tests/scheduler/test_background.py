"""Background work gives way to all other requests, under every policy."""

import itertools
from collections.abc import Iterable

import pytest

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.scheduler.background import BATCH_EVERY, ONLINE_MEMORY, PriorityOnly, YieldToOnline, make_policy
from jaxserve.types.sampling import BACKGROUND_PRIORITY, EngineRequest, SamplingParams
from jaxserve.types.scheduling import SchedulerConfig, StepTimes
from jaxserve.types.step import Request, SchedulerOutput
from tests.fakes import VOCAB, FakeRunner, FakeStep, Transcripts, alone, make_core, make_request, run_all, small_config

POLICIES = ("fcfs", "lpm", "priority")
BATCH_POLICIES = ("priority", "yield")
LINES = 4
# A decode step takes 1 ms and a prompt token 0.5, so a step of batch requests beside online ones has four tokens.
TIMES = StepTimes({8: 0.001}, {size: size / 2000 for size in (1, 2, 4, 8, 16, 32, 64, 256, 512)})
GREEDY = SamplingParams(temperature=0.0, max_tokens=4)


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
@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
@pytest.mark.parametrize("changes", [{}, {"num_pages": 12, "max_model_len": 48}])
def test_an_online_request_takes_the_place_of_a_line(
    policy: str, batch_policy: str, changes: dict[str, object]
) -> None:
    transcripts = Transcripts()
    core = busy_core(policy, transcripts, batch_policy=batch_policy, **changes)
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


def test_lines_that_cannot_make_room_do_not_stand_still() -> None:
    transcripts = Transcripts()
    core = busy_core("priority", transcripts, batch_policy="yield")
    for number in range(LINES):
        core.scheduler._live[f"line{number}"].aged = True  # as if it had waited long
    before = [len(transcripts[f"line{number}"].token_ids) for number in range(LINES)]
    core.add(make_request("online", prompt_of(60), max_tokens=3))
    for _ in range(12):  # beside online requests a step may be dispatched in one turn and read in the next
        transcripts.take(core.step())
    assert all(len(transcripts[f"line{number}"].token_ids) >= before[number] + 6 for number in range(LINES))
    run_all(core, transcripts=transcripts)
    assert len(transcripts["online"].token_ids) == 3


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
def test_waiting_online_requests_come_before_waiting_lines(policy: str, batch_policy: str) -> None:
    core = make_core(small_config(policy=policy, batch_policy=batch_policy, max_num_seqs=1))
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


# --- a step without lines


class Recorder(FakeRunner):
    """Keeps the rows of every step: (name, tokens)."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.steps: list[list[tuple[str, int]]] = []

    def execute(self, output: SchedulerOutput) -> FakeStep:
        self.steps.append([(row.request_id, row.num_tokens) for row in output.rows])
        return super().execute(output)


def recording(**changes: object) -> tuple[EngineCore, list[list[tuple[str, int]]]]:
    config = small_config(**({"batch_policy": "yield"} | changes))
    recorder = Recorder(config)
    return EngineCore(recorder, config, CoreOptions(vocab_size=VOCAB)), recorder.steps


def lines(count: int, length: int = 6, max_tokens: int = 30) -> list[EngineRequest]:
    sizes = {"priority": BACKGROUND_PRIORITY, "max_tokens": max_tokens}
    return [make_request(f"line{i}", [(i + 7 * k) % VOCAB for k in range(length)], **sizes) for i in range(count)]


def check_lines(transcripts: Transcripts, requests: Iterable[EngineRequest]) -> None:
    """Their tokens are those alone."""
    for line in requests:
        assert transcripts[line.request_id].token_ids == alone(line.prompt_token_ids, line.params)[0]


@pytest.mark.parametrize("policy", POLICIES)
def test_lines_sit_out_until_an_online_prompt_is_done(policy: str) -> None:
    core, steps = recording(policy=policy, max_num_batched_tokens=16)
    waiting = lines(3)
    transcripts = Transcripts()
    for line in waiting:
        core.add(line)
    for _ in range(6):
        transcripts.take(core.step())
    core.add(make_request("online", [(3 * i) % VOCAB for i in range(40)], max_tokens=4))
    begin = len(steps)
    run_all(core, transcripts=transcripts)
    assert steps[begin : begin + 3] == [[("online", 16)], [("online", 16)], [("online", 8)]]
    assert [name for name, _ in steps[begin + 3]] == ["online", "line0", "line1", "line2"]
    assert transcripts["online"].token_ids == alone([(3 * i) % VOCAB for i in range(40)], GREEDY)[0]
    check_lines(transcripts, waiting)


def test_no_line_starts_before_an_online_prompt_is_done() -> None:
    core, steps = recording(max_num_batched_tokens=16)
    core.add(make_request("online", list(range(1, 31)), max_tokens=2))
    for line in lines(2):
        core.add(line)
    run_all(core)
    assert steps[:2] == [[("online", 16)], [("online", 14)]]
    assert [name for name, _ in steps[2]] == ["online", "line0"]  # and then a small step: a token and six of a prompt


@pytest.mark.parametrize("step_sizes", [(), (1, 8, 16)])
def test_a_steady_stream_of_online_prompts_does_not_starve_lines(step_sizes: tuple[int, ...]) -> None:
    core, steps = recording(max_num_batched_tokens=16, step_sizes=step_sizes)
    waiting, transcripts = lines(2, max_tokens=5), Transcripts()
    for line in waiting:
        core.add(line)
    transcripts.take(core.step())
    for i in range(40 * BATCH_EVERY):
        core.add(make_request(f"online{i}", [i % VOCAB] * 17, max_tokens=1))
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        if all(line.request_id in transcripts and transcripts[line.request_id].last for line in waiting):
            break
    check_lines(transcripts, waiting)
    with_lines = [i for i, rows in enumerate(steps) if any(name.startswith("line") for name, _ in rows)]
    assert len(with_lines) > 3 and all(b - a == BATCH_EVERY for a, b in itertools.pairwise(with_lines[1:]))


def test_an_online_prompt_does_not_wait_for_the_same_prompt_of_a_line() -> None:
    core, steps = recording(max_num_batched_tokens=16)
    shared = list(range(1, 41))
    core.add(make_request("line", shared, priority=BACKGROUND_PRIORITY, max_tokens=2))
    core.step()
    core.add(make_request("online", shared, max_tokens=2))
    run_all(core)
    assert [rows[0][0] for rows in steps[1:4]] == ["online"] * 3


def test_steps_with_lines_are_small_while_online_requests_are_about() -> None:
    now = 0.0
    core, steps = recording(max_num_batched_tokens=32, max_model_len=128, step_times=TIMES)
    core._clock = lambda: now
    transcripts = Transcripts()
    run_all(core, [make_request("line", list(range(32)), priority=BACKGROUND_PRIORITY, max_tokens=1)], transcripts)
    run_all(core, [make_request("online", [1], max_tokens=1)], transcripts)
    for later, chunk in ((0.5 * ONLINE_MEMORY, 4), (1.6 * ONLINE_MEMORY, 32)):
        now, begin = later, len(steps)
        salted = {"priority": BACKGROUND_PRIORITY, "namespace": f"{later}", "max_tokens": 1}
        run_all(core, [make_request(f"line{later}", list(range(32)), **salted)])
        assert steps[begin] == [(f"line{later}", chunk)]


def test_beside_online_requests_little_is_dispatched_ahead() -> None:
    core, steps = recording(max_num_batched_tokens=16)
    waiting, transcripts, ahead = lines(3), Transcripts(), {}
    dispatch = core.runner.execute

    def execute(output: SchedulerOutput) -> FakeStep:
        ahead[len(steps)] = len(core.scheduler.in_flight) > 1
        return dispatch(output)  # type: ignore[return-value]

    core.runner.execute = execute  # type: ignore[method-assign]
    for line in waiting:
        core.add(line)
    for _ in range(8):
        transcripts.take(core.step())
    assert all(ahead[step] for step in range(1, len(steps)))  # lines alone
    begin = len(steps) + 1
    for number in range(4):
        core.add(make_request(f"online{number}", prompt_of(number + 9), max_tokens=6))
        came = len(steps)
        for _ in range(6):
            transcripts.take(core.step())
        assert (f"online{number}", 6) in steps[came]
    for step in range(begin, len(steps)):
        assert not (ahead[step] and any(tokens > 1 for _, tokens in steps[step - 1])), step
    assert sum(ahead[step] for step in range(begin, len(steps))) > 3
    run_all(core, transcripts=transcripts)
    check_lines(transcripts, waiting)


def test_where_tokens_cost_alike_a_prompt_of_a_line_has_its_own_step() -> None:
    core, steps = recording(max_num_batched_tokens=32, step_sizes=(8, 16, 32), max_num_seqs=8)
    transcripts = Transcripts()
    core.add(make_request("online", prompt_of(50), max_tokens=40))
    waiting = lines(6, length=12, max_tokens=9)
    for line in waiting:
        core.add(line)
        for _ in range(5):
            transcripts.take(core.step())
        core.scheduler.check_integrity()
    run_all(core, transcripts=transcripts)
    check_lines(transcripts, waiting)
    for rows in steps:
        prompts = [name for name, tokens in rows if name.startswith("line") and tokens > 1]
        decoding = [name for name, tokens in rows if name.startswith("line") and tokens == 1]
        assert not (prompts and decoding), rows
    mixed = [rows for rows in steps if ("online", 1) in rows and any(tokens > 1 for _, tokens in rows)]
    assert len(mixed) > 3  # online requests go on decoding meanwhile


def batch_request() -> Request:
    return Request("batch", [1], SamplingParams(), 0.0, 0, 1, priority=1)


def policy_of(**changes: object) -> YieldToOnline:
    """A policy that knows of one batch request and one online request."""
    policy = YieldToOnline(small_config(**({"max_num_batched_tokens": 512, "batch_policy": "yield"} | changes)))
    policy.count(batch_request(), 1)
    policy.joins(2, online_prompts=False, now=0.0)
    return policy


def test_longer_online_prompts_allow_larger_steps_with_lines() -> None:
    """A step takes two decode steps, or a quarter of an average online prompt's own time if that is longer."""
    policy = policy_of(step_times=TIMES)
    online = Request("online", [1], SamplingParams(), 0.0, 0, 1, priority=0)
    budgets = []
    for length, times in ((16, 1), (500, 200), (2000, 200), (16, 200)):
        for _ in range(times):
            policy.started(online, length)
            policy.started(batch_request(), 10**6)
        budgets.append(policy.budget(0, batch=True, now=0.0))
    assert budgets == [4, 64, 256, 4]
    assert policy.budget(3, batch=True, now=0.0) == 1
    assert policy.budget(0, batch=False, now=0.0) == 512
    assert policy.budget(0, batch=True, now=ONLINE_MEMORY + 1) == 512


def test_what_is_cached_of_online_prompts_allows_no_larger_steps_with_lines() -> None:
    """One prompt in 16 is computed, and four tokens of each other one."""
    core, steps = recording(max_num_batched_tokens=512, max_model_len=512, num_pages=256, step_times=TIMES)
    for i in range(16):
        run_all(core, [make_request(f"online{i}", [7] * 400, max_tokens=1)])
    core.add(make_request("line", [8] * 400, priority=BACKGROUND_PRIORITY, max_tokens=1))
    core.step()
    assert steps[-1] == [("line", 4)]


def test_the_steps_of_a_slower_model_have_as_many_tokens_in_more_time() -> None:
    slow = StepTimes({rows: 100 * taken for rows, taken in TIMES.decode.items()}, {8: 0.4, 32: 1.6})
    assert policy_of(step_times=slow).budget(0, batch=True, now=0.0) == 8, "no size is smaller"
    assert policy_of().budget(0, batch=True, now=0.0) == 128, "nothing was measured"


def test_a_text_that_runs_whole_or_not_at_all_is_not_cut() -> None:
    policy = policy_of(whole_prompts=True, max_num_batched_tokens=128, step_times=TIMES)
    assert policy.budget(0, batch=True, now=0.0) == 128


# --- a platform on which batch requests give way by their priority only


def test_the_policy_is_that_of_the_configuration() -> None:
    assert type(make_policy(small_config())) is PriorityOnly
    assert type(make_policy(small_config(batch_policy="yield"))) is YieldToOnline


def test_lines_decode_beside_an_online_prompt_and_their_prompts_come_after_it() -> None:
    core, steps = recording(batch_policy="priority", max_num_batched_tokens=16)
    waiting, transcripts = lines(3), Transcripts()
    for line in waiting[:2]:
        core.add(line)
    for _ in range(4):
        transcripts.take(core.step())
    core.add(waiting[2])
    core.add(make_request("online", [(3 * i) % VOCAB for i in range(40)], max_tokens=4))
    begin = len(steps)
    run_all(core, transcripts=transcripts)
    both = [("line0", 1), ("line1", 1)]
    assert steps[begin : begin + 3] == [
        [*both, ("online", 14)],
        [*both, ("online", 14)],
        [*both, ("online", 12), ("line2", 2)],
    ]
    assert transcripts["online"].token_ids == alone([(3 * i) % VOCAB for i in range(40)], GREEDY)[0]
    check_lines(transcripts, waiting)


def test_steps_are_always_dispatched_ahead_where_lines_cost_little() -> None:
    core, _ = recording(batch_policy="priority")
    for request in (*lines(2), make_request("online", prompt_of(9), max_tokens=20)):
        core.add(request)
    for _ in range(10):
        core.step()
        assert len(core.scheduler.in_flight) == 1
    run_all(core)


# --- progress


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
@pytest.mark.parametrize("step_sizes", [(), (1, 8, 16)])
def test_lines_that_wait_behind_full_steps_of_online_prompts_begin(
    policy: str, batch_policy: str, step_sizes: tuple[int, ...]
) -> None:
    """More prompt tokens come than the steps have room for; a batch request has its turn after aging_steps."""
    core, steps = recording(
        policy=policy, batch_policy=batch_policy, step_sizes=step_sizes, max_num_batched_tokens=16, aging_steps=50,
        prefix_cache=False,
    )  # fmt: skip
    waiting, transcripts = lines(2, max_tokens=5), Transcripts()
    for i in range(3):
        core.add(make_request(f"early{i}", prompt_of(i) * 3, max_tokens=1))
    for line in waiting:
        core.add(line)
    for i in range(300):
        core.add(make_request(f"online{i}", prompt_of(i) * 3, max_tokens=1))
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        if all(line.request_id in transcripts and transcripts[line.request_id].last for line in waiting):
            break
    assert core.scheduler.stats().num_waiting > 5, "the steps were full"
    check_lines(transcripts, waiting)
    aged = [i for i, rows in enumerate(steps) for name, tokens in rows if name == "line0" and tokens > 1]
    assert aged[0] >= 16 and aged[-1] <= 70


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
def test_one_aged_line_comes_before_an_online_request_and_the_others_after_it(policy: str, batch_policy: str) -> None:
    core, steps = recording(policy=policy, batch_policy=batch_policy, max_num_seqs=1, aging_steps=5)
    transcripts = Transcripts()
    core.add(make_request("early", prompt_of(50), max_tokens=20))
    waiting = lines(12, max_tokens=3)
    for line in waiting:
        core.add(line)
    for _ in range(10):
        transcripts.take(core.step())
    core.add(make_request("online", prompt_of(60), max_tokens=2))
    run_all(core, transcripts=transcripts)
    order = list(dict.fromkeys(name for rows in steps for name, _ in rows))
    assert order[:4] == ["early", "line0", "online", "line1"]
    check_lines(transcripts, waiting)
