"""The pages of windowed layers: how many a request holds, what the prefix cache keeps of them, and that the fake device
notices a page that goes too early. That any mixture of requests is right with them is test_core's."""

from collections.abc import Iterator

import pytest

from jaxserve.engine.core import EngineCore, StepError
from jaxserve.errors import ConfigError
from jaxserve.kv.groups.span_group import SpanGroup, WindowPages
from jaxserve.types.scheduling import SchedulerConfig, Span
from jaxserve.types.step import Request
from tests.fakes import Transcripts, alone, make_core, make_request, run_all, small_config

WINDOW, PAGE = 10, 4


def windowed(**changes: object) -> SchedulerConfig:
    """A window of 10 tokens over pages of 4: five pages at most of a request that decodes."""
    sizes: dict[str, object] = {"num_pages": 400, "max_model_len": 1024, "window": WINDOW, "num_window_pages": 64}
    return small_config(**(sizes | changes))


def prompt_of(length: int, first: int = 1) -> list[int]:
    return [(first + 7 * i) % 90 for i in range(length)]


def group(core: EngineCore) -> SpanGroup:
    (found,) = core.scheduler.kv.groups
    assert isinstance(found, SpanGroup)
    return found


def held(core: EngineCore) -> Iterator[tuple[Request, WindowPages]]:
    for request in core.scheduler._running:
        if request.holdings:
            yield request, request.holdings[1]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("chunk", [3, 32])
def test_a_request_holds_a_window_however_long_it_is(chunk: int, prefix_cache: bool) -> None:
    """1,000 tokens, of which 700 are prompt: at most two chunks and a window, and then a window and a little."""
    core = make_core(windowed(prefix_cache=prefix_cache, prefill_chunk_size=chunk))
    size = group(core).span
    core.add(make_request("a", prompt_of(700), max_tokens=300))
    core.add(make_request("b", prompt_of(9, 50), max_tokens=300))
    transcripts, longest = Transcripts(), 0
    while core.has_work:
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        for request, pages in held(core):
            longest = max(longest, len(request.page_ids))
            count = len(pages.pages) + len(pages.spare)
            assert count <= size.prefilling <= -(-(WINDOW + 2 * chunk) // PAGE) + 2
            assert count <= size.decoding <= -(-WINDOW // PAGE) + 2 or not request.prompt_done
    assert longest == 250, "and the layers that see everything have kept it all"
    for name, prompt in (("a", prompt_of(700)), ("b", prompt_of(9, 50))):
        request = make_request(name, prompt, max_tokens=300)
        assert transcripts[name].token_ids == alone(prompt, request.params)[0]
    assert group(core).num_available == 64


def mutants() -> dict[str, object]:
    """The first page that the next token sees is given away, always or where it holds but the first token of these."""
    return {
        "a page": lambda size, position: max(0, position - size.reach.tokens + 1) // size.page_size + 1,
        "a token": lambda size, position: max(0, (position - size.reach.tokens + 2) // size.page_size),
    }


@pytest.mark.parametrize("early", mutants().values(), ids=mutants().keys())
def test_a_page_given_away_too_early_is_noticed(early: object, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [make_request(f"r{i}", prompt_of(30 + i, i), max_tokens=60) for i in range(4)]
    config = windowed(window=11, num_window_pages=24)
    run_all(make_core(config), requests)
    monkeypatch.setattr(Span, "first_needed", early)
    with pytest.raises(StepError, match=r"reused too early|another's token in a window|never written"):
        run_all(make_core(config), requests)


def test_pages_of_a_step_in_flight_are_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant takes the tokens of the step in flight for read."""
    config = windowed(num_window_pages=12, prefill_chunk_size=16)
    requests = [make_request("a", prompt_of(200), max_tokens=3)]
    run_all(make_core(config), requests)
    reach = SpanGroup.reach

    def hasty(group: SpanGroup, request: Request, end: int) -> int:
        request.holdings[1].num_read = request.num_computed_tokens
        return reach(group, request, end)

    monkeypatch.setattr(SpanGroup, "reach", hasty)
    with pytest.raises(StepError, match="reused too early"):
        run_all(make_core(config), requests)


# --- the prefix cache


def cached(core: EngineCore, prompt: list[int]) -> int:
    """Prompt tokens that a request is spared."""
    name = f"request-{core.scheduler.counters.admissions}"
    transcript = run_all(core, [make_request(name, prompt, max_tokens=2)])[name]
    assert transcript.token_ids == alone(prompt, make_request("", prompt, max_tokens=2).params)[0]
    return transcript.outputs[0].num_cached_tokens


@pytest.mark.parametrize("length", [9, 12, 13, 23, 24, 25, 60])
def test_an_equal_prompt_is_a_hit(length: int) -> None:
    core = make_core(windowed())
    assert cached(core, prompt_of(length)) == 0
    assert cached(core, prompt_of(length)) == (length - 1) // PAGE * PAGE


def test_two_that_compute_one_prompt_at_once_use_their_own_windows() -> None:
    """With log-probabilities of the prompt neither reads the other's pages, and the cache takes those of the first."""
    core, transcripts = make_core(windowed()), Transcripts()
    requests = [make_request(name, prompt_of(40), max_tokens=4, prompt_logprobs=0) for name in "ab"]
    for request in requests:
        core.add(request)
    while core.has_work:
        transcripts.take(core.step())
        core.scheduler.check_integrity()
    assert transcripts["a"].token_ids == transcripts["b"].token_ids == alone(prompt_of(40), requests[0].params)[0]


def test_a_window_counts_the_same_whether_its_pages_are_cached_or_to_be_loaded() -> None:
    core = make_core(windowed())
    cached(core, prompt_of(40))
    core.add(make_request("next", prompt_of(40), max_tokens=9))
    request, spans = core.scheduler.find("next"), group(core)
    assert request is not None
    node = core.scheduler.kv.match(request)
    assert (node.depth, len(spans.cached.path(node)), spans.span.decoding) == (9, 3, 5)
    assert spans.num_to_grow(request, node) == 5 - 3 - 1
    while spans.cached.num_evictable:
        assert spans.num_new_with(request, node, 9) == 3 + 1
        spans.cached.evict(1)
    assert spans.num_new_with(request, node, 9) == 3 + 1


def test_a_common_beginning_is_a_hit_while_its_window_is_there() -> None:
    core = make_core(windowed())
    stem = prompt_of(40)
    assert cached(core, stem + prompt_of(9, 50)) == 0
    assert cached(core, stem + prompt_of(9, 60)) == 40
    group(core).cached.evict(1000)
    assert cached(core, stem + prompt_of(9, 70)) == 0, "the other layers still have it, these do not"
    assert cached(core, stem + prompt_of(9, 80)) == 40, "and now they do again"


def test_the_next_turn_is_a_hit_far_behind_the_window() -> None:
    core = make_core(windowed())
    prompt = prompt_of(150)
    answer = run_all(core, [make_request("a", prompt, max_tokens=90)])["a"].token_ids
    assert cached(core, [*prompt, *answer, 5, 6, 7]) == 236


def test_of_a_prefix_with_a_gap_the_part_before_it_is_used() -> None:
    """A prompt longer than what a request holds of it: the beginning has gone, and so has every prefix within."""
    core = make_core(windowed(prefill_chunk_size=4))
    long = prompt_of(200)
    assert cached(core, long) == 0
    assert cached(core, long[:100]) == 0
    assert cached(core, long) == 196
    assert cached(core, long[:100]) == 96, "but its own request has left one since"


def test_a_prefix_computed_again_is_as_good_as_new() -> None:
    """Of the first prompt's ten pages three are left; beside those computed again they must not go before others."""
    core = make_core(windowed())
    for first in (1, 50):
        assert cached(core, prompt_of(40, first)) == 0
    group(core).cached.evict(7)
    assert cached(core, prompt_of(40, 1)) == 0
    assert group(core).cached.num_pages == 20
    group(core).cached.evict(10)
    assert cached(core, prompt_of(40, 1)) == 36


def test_eviction_takes_windowed_pages_and_leaves_the_nodes() -> None:
    core = make_core(windowed(num_window_pages=24))
    for i in range(12):
        assert cached(core, prompt_of(40, i)) == 0
    kv = core.scheduler.kv
    assert kv.cache.num_pages == 120 and group(core).cached.num_pages <= 24
    assert cached(core, prompt_of(40, 11)) == 36 and cached(core, prompt_of(40, 0)) == 0


def test_what_leaves_the_tree_leaves_no_windowed_page_behind() -> None:
    core = make_core(windowed())
    for i in range(4):
        cached(core, prompt_of(40, i))
    core.scheduler.kv.cache.evict(15)
    core.scheduler.check_integrity()
    core.flush_prefix_cache()
    core.scheduler.check_integrity()
    assert group(core).pool.num_free == 64


# --- too few of them


def crowd(count: int, tokens: int) -> dict[str, list[int]]:
    return {f"r{i}": prompt_of(6, 11 * i) for i in range(count)}


def test_windowed_pages_alone_can_make_requests_give_way() -> None:
    """Eight requests fit into 400 pages; of 12 windowed ones two can have their five."""
    core = make_core(windowed(num_window_pages=12, new_token_ratio=0.01), eos_token_ids=(1000,))
    prompts = crowd(8, 60)
    transcripts = run_all(core, [make_request(name, prompt, max_tokens=60) for name, prompt in prompts.items()])
    for name, prompt in prompts.items():
        assert transcripts[name].token_ids == alone(prompt, make_request("", prompt, max_tokens=60).params)[0]
    assert core.scheduler.counters.retractions > 0


def test_admission_leaves_room_for_windows_to_fill() -> None:
    core = make_core(windowed(num_window_pages=12, new_token_ratio=1.0), eos_token_ids=(1000,))
    run_all(core, [make_request(name, prompt, max_tokens=60) for name, prompt in crowd(8, 60).items()])
    assert core.scheduler.counters.retractions == 0


def test_where_pages_are_scarce_a_long_prompt_begins_with_fewer() -> None:
    """Twelve windows of pages, ten prompts that could each use seven: they do not wait for so many to come free."""
    core = make_core(windowed(num_window_pages=60, max_num_seqs=16, max_num_batched_tokens=64), eos_token_ids=(1000,))
    assert group(core).span.prefilling == 36
    requests = [make_request(f"r{i}", prompt_of(150, 9 * i), max_tokens=100) for i in range(10)]
    for request in requests:
        core.add(request)
    transcripts, taken, most = Transcripts(), list[int](), 0
    while core.has_work:
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        now = [len(pages.pages) + len(pages.spare) for request, pages in held(core) if not request.prompt_done]
        taken, most = taken + now[:1], max(most, len(list(held(core))))
    assert taken[0] == 36 and min(taken) < 20, "as many as there are, and as few as will do"
    assert most >= 7, "five, if each waited for 36"
    for request in requests:
        expected = alone(request.prompt_token_ids, request.params)[0]
        assert transcripts[request.request_id].token_ids == expected


@pytest.mark.parametrize("pages", [9, 10])
def test_the_least_number_of_pages(pages: int) -> None:
    sizes = {"num_window_pages": pages, "max_model_len": 512}
    if pages < 10:
        with pytest.raises(ConfigError, match="9 pages for layers with a window of 10 tokens are too few: 10"):
            windowed(**sizes)
        return
    core = make_core(windowed(**sizes))
    for _ in range(2):
        transcripts = run_all(core, [make_request(f"r{i}", prompt_of(99, 5 * i), max_tokens=50) for i in range(3)])
        assert all(len(transcript.token_ids) == 50 for transcript in transcripts.values())


def test_integrity_sees_a_windowed_page_astray() -> None:
    core = make_core(windowed())
    core.add(make_request("a", prompt_of(30), max_tokens=9))
    core.step()
    core.scheduler.check_integrity()
    ((_, pages),) = held(core)
    pages.spare.append(pages.pages[0])
    with pytest.raises(AssertionError, match="two owners"):
        core.scheduler.check_integrity()
