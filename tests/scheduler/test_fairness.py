"""Short requests behind long prompts, better requests behind worse ones, and long prompts beside a stream of others."""

import random

import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.scheduler.admission import MAX_LOOKUPS, MAX_PAGES_TAKEN
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from tests.fakes import VOCAB, Transcripts, alone, make_core, make_request, small_config

POLICIES = ("fcfs", "lpm", "priority")
BUDGET = 16
RNG = random.Random(0)


def prompt(length: int) -> list[int]:
    return RNG.choices(range(VOCAB), k=length)


def core_of(policy: str, **changes: object) -> EngineCore:
    sizes = {"num_pages": 8192, "max_num_batched_tokens": BUDGET, "max_model_len": 4096, "max_num_seqs": 32}
    return make_core(small_config(**(sizes | {"policy": policy} | changes)))


def steps_to_first_token(core: EngineCore, name: str, transcripts: Transcripts) -> int:
    """Calls of `step` from now on until a token of this request is read."""
    steps = 0
    while not (transcripts.get(name) and transcripts[name].token_ids):
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        steps += 1
        assert steps < 2000
    return steps


def steps_beside(core: EngineCore, name: str, length: int, transcripts: Transcripts, every: int = 1) -> int:
    """Calls of `step` until a request has a token. Every so many steps a prompt of this length comes."""
    steps = 0
    while name not in transcripts:
        if steps % every == 0:
            core.add(make_request(f"beside{steps}", prompt(length), max_tokens=1))
        transcripts.take(core.step())
        steps += 1
        assert steps < 500
    return steps


def watch_lookups(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the requests that are looked up in the prefix cache from now on."""
    found = list[str]()
    match = core.scheduler.kv.match
    monkeypatch.setattr(core.scheduler.kv, "match", lambda each: (found.append(each.request_id), match(each))[1])
    return found


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("priority", [0, 5, BACKGROUND_PRIORITY])
@pytest.mark.parametrize("changes", [{}, {"batch_policy": "yield", "step_sizes": (1, 8, 16)}], ids=["gpu", "cpu"])
def test_a_short_request_behind_long_prompts_starts_at_once(
    policy: str, count: int, priority: int, changes: dict[str, object]
) -> None:
    """`count` prompts of 800 tokens take 50 steps each."""
    core, transcripts = core_of(policy, **changes), Transcripts()
    for i in range(count):
        core.add(make_request(f"long{i}", prompt(800), max_tokens=2, priority=priority))
    for _ in range(5):
        transcripts.take(core.step())
    core.add(make_request("short", prompt(6), max_tokens=3))
    assert steps_to_first_token(core, "short", transcripts) == 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("num_shared", [0, 800])
def test_a_short_request_behind_many_long_prompts_starts_at_once(
    policy: str, num_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than are looked up in a step, where they wait for room, and where they wait for the first one's prefill."""
    core, transcripts, stem = core_of(policy), Transcripts(), prompt(num_shared)
    looked_up = watch_lookups(core, monkeypatch)
    for i in range(100):
        core.add(make_request(f"long{i}", [*stem, *prompt(802 - num_shared)], max_tokens=2))
    transcripts.take(core.step())
    assert len(set(looked_up)) <= MAX_LOOKUPS or policy == "lpm", "which sorts a window by what is cached of each"
    for _ in range(4):
        transcripts.take(core.step())
    core.add(make_request("short", prompt(6), max_tokens=3))
    assert steps_to_first_token(core, "short", transcripts) <= 4
    assert core.scheduler.counters.prefill_tokens < 200


def test_a_step_starts_requests_of_a_bounded_number_of_pages() -> None:
    """20 siblings of 2,000 pages each do not start all at once when the first one's prompt is there."""
    sizes = {"num_pages": 2**14, "max_model_len": 2**14, "max_num_batched_tokens": 8192}
    core, tokens = core_of("fcfs", **sizes), prompt(8000)
    core.add(*(make_request(f"s{i}", tokens, max_tokens=40, group="s") for i in range(20)))
    started = []
    while core.has_work and sum(started) < 20:
        core.step()
        started.append(len(core.admitted))
    assert sum(started) == 20 and max(started) * 2000 <= MAX_PAGES_TAKEN + 2000


@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_is_full_while_prompts_wait(policy: str) -> None:
    core, transcripts = core_of(policy, prefix_cache=False), Transcripts()
    lengths = [RNG.randrange(1, 200) for _ in range(40)]
    for i, length in enumerate(lengths):
        core.add(make_request(f"r{i}", prompt(length), max_tokens=0))
    while core.has_work:
        transcripts.take(core.step())
    counters = core.scheduler.counters
    assert (counters.prefill_tokens, counters.steps) == (sum(lengths), -(-sum(lengths) // BUDGET))


def test_a_better_request_does_not_wait_for_the_chunks_of_a_worse_one() -> None:
    core, transcripts = core_of("priority"), Transcripts()
    core.add(make_request("worse", prompt(800), max_tokens=2, priority=5))
    transcripts.take(core.step())
    core.add(make_request("better", prompt(64), max_tokens=2))
    assert steps_to_first_token(core, "better", transcripts) == 64 // BUDGET + 1, "its own four chunks, and the read"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_beside_a_stream_of_short_ones_takes_at_most_twice_as_long(policy: str) -> None:
    core, transcripts = core_of(policy, prefix_cache=False), Transcripts()
    long = prompt(800)
    core.add(make_request("long", long, max_tokens=1))
    steps = steps_beside(core, "long", BUDGET, transcripts)
    assert steps <= 2 * len(long) // BUDGET + 2
    assert transcripts["long"].token_ids == alone(long, make_request("", long, max_tokens=1).params)[0]
    assert len(transcripts) > 40, "and the short ones went on"


def test_a_worse_long_prompt_beside_a_stream_of_better_ones_ends_once_it_is_aged() -> None:
    """The better requests fill every step and nothing else would be left for it."""
    core, transcripts = core_of("priority", prefix_cache=False, aging_steps=40), Transcripts()
    core.add(make_request("long", prompt(200), max_tokens=1, priority=5))
    steps = steps_beside(core, "long", BUDGET + 2, transcripts)
    assert 40 < steps <= 40 + 2 * 200 // BUDGET + 3


@pytest.mark.parametrize("policy", POLICIES)
def test_a_long_prompt_that_came_earlier_is_not_passed_for_ever_by_shorter_ones(policy: str) -> None:
    """Every ten steps comes a prompt of 160 tokens, which takes ten steps. All of them are shorter than this one."""
    core, transcripts = core_of(policy, prefix_cache=False), Transcripts()
    core.add(make_request("first", prompt(160), max_tokens=1))
    core.add(make_request("long", prompt(640), max_tokens=1))
    steps = steps_beside(core, "long", 160, transcripts, every=10)
    assert steps <= 2 * (160 + 640) // BUDGET + 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_full_engine_looks_at_no_waiting_request(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(policy, max_num_seqs=2)
    for i in range(40):
        core.add(make_request(f"r{i}", prompt(8), max_tokens=100, priority=i))
    for _ in range(10):
        core.step()
    looked_up = watch_lookups(core, monkeypatch)
    for _ in range(10):
        core.step()
    assert looked_up == [] and core.scheduler.stats().num_waiting == 38
