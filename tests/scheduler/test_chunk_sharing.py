"""Pages of a prompt are shared chunk by chunk: what an interrupted prompt leaves, and what none may leave."""

from collections.abc import Callable

import msgspec
import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.kv.groups.span_group import SpanGroup
from jaxserve.types.sampling import BACKGROUND_PRIORITY, SamplingParams
from jaxserve.types.scheduling import StepTimes
from jaxserve.types.step import FinishReason, Request
from tests.fakes import VOCAB, Transcripts, alone, make_core, make_request, run_all, small_config

BUDGET = 16
LENGTH = 400  # tokens: 25 chunks
PROMPT = [(3 * i + i * i) % VOCAB for i in range(LENGTH)]


def core_of(**changes: object) -> EngineCore:
    options = {key: changes.pop(key) for key in ("not_finite", "nan_from", "clock") if key in changes}
    sizes = {"num_pages": 512, "max_num_batched_tokens": BUDGET, "max_model_len": 512, "num_window_pages": 200}
    return make_core(small_config(**(sizes | changes)), **options)


def steps(core: EngineCore, count: int) -> Transcripts:
    transcripts = Transcripts()
    for _ in range(count):
        transcripts.take(core.step())
        core.scheduler.check_integrity()
    return transcripts


def computed(core: EngineCore, prompt: list[int], **params: object) -> int:
    """Prompt tokens that one more request costs; its tokens are those it has alone."""
    before = core.scheduler.counters.prefill_tokens
    request = make_request("again", prompt, **({"max_tokens": 2} | params))
    assert run_all(core, [request])["again"].token_ids == alone(prompt, request.params)[0]
    return core.scheduler.counters.prefill_tokens - before


# --- what an interrupted prompt leaves


def leave(core: EngineCore) -> None:
    core.abort(["a"])


def expire(core: EngineCore) -> None:
    core.scheduler.expire(1e9)


def failed_elsewhere(core: EngineCore) -> None:
    last = core.scheduler.fail("a", "its grammar broke")
    assert last is not None and last.error_status == 500


@pytest.mark.parametrize("window", [None, 10, 100])
@pytest.mark.parametrize("end", [leave, expire, failed_elsewhere])
def test_a_retry_goes_on_where_the_prompt_was_interrupted(
    end: Callable[[EngineCore], None], window: int | None
) -> None:
    """24 of 25 chunks are read when the request ends, and the last one is in flight."""
    core = core_of(window=window)
    core.add(make_request("a", PROMPT, max_tokens=2, deadline=1e6))
    steps(core, 25)
    end(core)
    core.scheduler.check_integrity()
    assert computed(core, PROMPT) <= BUDGET


def test_the_chunk_in_flight_at_the_end_is_shared_too() -> None:
    core = core_of()
    core.add(make_request("a", PROMPT, max_tokens=2))
    steps(core, 3)  # three chunks are dispatched, and two of them read
    core.abort(["a"])
    steps(core, 1)
    assert core.scheduler.kv.cache.num_pages == 3 * BUDGET // 4
    assert core.scheduler.stats().num_pages_held == 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
@pytest.mark.parametrize("batch_policy", ["priority", "yield"])
@pytest.mark.parametrize("gap", [10, 15])
def test_a_prompt_that_is_preempted_again_and_again_ends(policy: str, batch_policy: str, gap: int) -> None:
    """Two better requests take both slots every `gap` steps."""
    quick = StepTimes({2: 1.0}, {BUDGET: 1.0})
    core = core_of(policy=policy, batch_policy=batch_policy, step_times=quick, max_num_seqs=2)
    transcripts = Transcripts()
    core.add(make_request("long", PROMPT, max_tokens=2, priority=BACKGROUND_PRIORITY))
    count = 0
    while not (transcripts.get("long") and transcripts["long"].last):
        if count % gap == 0 and count:
            for k in range(2):
                prompt = [(count + i + 50 * k) % VOCAB for i in range(8)]
                core.add(make_request(f"o{count}.{k}", prompt, max_tokens=5))
        transcripts.take(core.step())
        count += 1
        assert count < 500, "long before it is aged"
    assert transcripts["long"].token_ids == alone(PROMPT, SamplingParams(temperature=0.0, max_tokens=2))[0]
    counters = core.scheduler.counters
    assert counters.priority_preemptions > 1 and counters.recomputed_tokens <= 4 * counters.priority_preemptions
    assert counters.prefill_tokens == counters.prompt_tokens - counters.cached_tokens + counters.recomputed_tokens


def test_a_prompt_that_makes_room_for_decoding_requests_keeps_what_it_has() -> None:
    core = core_of(num_pages=48, max_num_seqs=3, new_token_ratio=0.01, max_model_len=192, max_num_batched_tokens=10)
    requests = [make_request(f"d{i}", [i, 7, 9], max_tokens=80) for i in range(2)]
    requests.append(make_request("long", PROMPT[:140], max_tokens=3))
    transcripts = run_all(core, requests)
    for request in requests:
        assert transcripts[request.request_id].token_ids == alone(request.prompt_token_ids, request.params)[0]


def test_a_request_that_reads_no_prefix_leaves_its_own() -> None:
    core = core_of()
    core.add(make_request("a", PROMPT, max_tokens=2, prompt_logprobs=1))
    steps(core, 25)
    core.abort(["a"])
    assert computed(core, PROMPT) <= BUDGET


def test_two_that_compute_the_same_at_once_share_one_copy() -> None:
    core = core_of(max_num_batched_tokens=2 * BUDGET)
    pair = [make_request(f"r{i}", PROMPT, max_tokens=2, prompt_logprobs=1) for i in range(2)]
    transcripts = run_all(core, pair)
    assert all(transcripts[f"r{i}"].token_ids == alone(PROMPT, pair[0].params)[0] for i in range(2))
    assert core.scheduler.kv.cache.num_pages == LENGTH // 4
    assert core.scheduler.stats().num_pages_held == 0


# --- what none may leave


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    core = core_of(prefix_cache=False)
    core.add(make_request("a", PROMPT, max_tokens=2))
    steps(core, 20)
    core.abort(["a"])
    assert computed(core, PROMPT) == LENGTH
    assert core.scheduler.stats().num_pages_free == 512


@pytest.mark.parametrize("nan_from", [0, 1, 100, 399])
def test_a_prompt_that_becomes_not_finite_leaves_nothing(nan_from: int) -> None:
    core = core_of(not_finite={"bad"}, nan_from=nan_from)
    core.add(make_request("bad", PROMPT, max_tokens=2))
    transcripts = steps(core, nan_from // BUDGET + 3)
    assert transcripts["bad"].reason is FinishReason.ERROR, "it ends with the chunk, and not with the prompt"
    assert core.scheduler.kv.cache.num_pages == 0
    assert computed(core, PROMPT) == LENGTH
    assert core.runner.num_read_nan == 0  # type: ignore[attr-defined]


def test_what_follows_a_chunk_that_is_not_finite_is_not_shared() -> None:
    """The next chunk is in flight when the failure is read. Whatever its status says, its prompt is unsound."""
    core = core_of(not_finite={"bad"}, nan_from=0)
    runner = core.runner
    core.add(make_request("bad", PROMPT, max_tokens=2))
    steps(core, 2)
    runner.not_finite = ()  # type: ignore[attr-defined]
    steps(core, 3)
    assert core.scheduler.kv.cache.num_pages == 0 and not core.has_work


def test_a_flush_within_a_prompt_is_kept() -> None:
    core = core_of()
    core.add(make_request("a", PROMPT, max_tokens=2))
    steps(core, 10)
    core.flush_prefix_cache()
    steps(core, 8)
    core.abort(["a"])
    steps(core, 2)
    assert core.scheduler.stats().num_pages_free == 512
    assert computed(core, PROMPT) == LENGTH


# --- siblings


def test_a_follower_starts_once_the_common_part_is_computed() -> None:
    """It does not wait for the rest of the longer prompt."""
    core = core_of(max_num_batched_tokens=2 * BUDGET)
    core.add(make_request("long", PROMPT, max_tokens=2))
    core.add(make_request("short", [*PROMPT[:60], 1, 2], max_tokens=2))
    transcripts = steps(core, 5)
    assert len(transcripts["short"].token_ids) > 0 and "long" not in transcripts
    assert transcripts["short"].outputs[0].num_cached_tokens == 60
    assert core.scheduler.counters.prefill_tokens <= 5 * 2 * BUDGET
    run_all(core, transcripts=transcripts)


def test_many_siblings_do_not_hide_a_short_request() -> None:
    core = core_of(max_num_seqs=4)
    first = make_request("s0", PROMPT, max_tokens=1, group="g")
    for i in range(200):
        core.add(msgspec.structs.replace(first, request_id=f"s{i}"))
    transcripts = steps(core, 4)
    core.add(make_request("short", [5, 6, 7], max_tokens=1))
    transcripts = steps(core, 2)
    assert transcripts["short"].last
    run_all(core, transcripts=transcripts)
    assert core.scheduler.counters.prefill_tokens == LENGTH + 199 * 4 + 3


# --- cost


def test_the_tokens_of_a_prompt_are_copied_once_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = 0
    token_ids = Request.token_ids

    def counted(request: Request, start: int, end: int) -> list[int]:
        nonlocal copied
        copied += end - start
        return token_ids(request, start, end)

    monkeypatch.setattr(Request, "token_ids", counted)
    run_all(core_of(), [make_request("a", PROMPT, max_tokens=1)])
    assert copied <= 3 * LENGTH, "for the device's slot, for the chunks and for the cache"


# --- pages of layers with a window


def test_a_long_prompt_takes_no_windowed_pages_from_other_prefixes() -> None:
    """It goes on with the pages that it gave to the cache itself, so those of others stay."""
    core = core_of(window=10, num_window_pages=40)
    others = [[(first + 7 * i) % VOCAB for i in range(17)] for first in range(3)]
    for prompt in others:
        assert computed(core, prompt) == 17
    run_all(core, [make_request("long", PROMPT, max_tokens=2)])
    (group,) = core.scheduler.kv.groups
    assert isinstance(group, SpanGroup) and group.pool.num_free + group.cached.num_pages == 40
    assert [computed(core, prompt) for prompt in others] == [1, 1, 1]


def test_a_long_prompt_whose_windowed_pages_others_use_goes_on() -> None:
    """Each of the others begins with what the long prompt has computed by then, and decodes for long."""
    core = core_of(window=10, num_window_pages=12, max_num_seqs=8)
    core.add(make_request("long", PROMPT, max_tokens=2))
    transcripts, params = Transcripts(), SamplingParams(temperature=0.0, max_tokens=60)
    others = {f"o{i}": [*PROMPT[: 40 * (i + 1)], 1, 2, 3] for i in range(4)}
    for name, prompt in others.items():
        while core.scheduler.kv.cache.num_pages * 4 < len(prompt):
            transcripts.take(core.step())
            core.scheduler.check_integrity()
        core.add(make_request(name, prompt, max_tokens=60))
    run_all(core, transcripts=transcripts)
    assert sum(transcripts[name].outputs[0].num_cached_tokens > 0 for name in others) >= 2
    for name, prompt in (*others.items(), ("long", PROMPT)):
        assert transcripts[name].token_ids == alone(prompt, params)[0][: 2 if name == "long" else None]


@pytest.mark.parametrize("count", [2, 3])
def test_a_sibling_that_is_computed_again_shares_no_page_of_its_answer(count: int) -> None:
    """As after an update of the weights: all were preempted with long answers, and the cache is empty."""
    core = core_of()
    prompt = PROMPT[:9]
    params = [{"max_tokens": 120, "temperature": 1.0, "seed": seed} for seed in range(count)]
    siblings = [make_request(f"s{i}", prompt, group="s", **each) for i, each in enumerate(params)]
    core.add(*(msgspec.structs.replace(sibling, prompt_token_ids=prompt) for sibling in siblings))
    transcripts = steps(core, 60)
    core.scheduler.preempt_all()
    core.settle()
    core.flush_prefix_cache()
    run_all(core, transcripts=transcripts)
    for sibling in siblings:
        assert transcripts[sibling.request_id].token_ids == alone(prompt, sibling.params)[0]
