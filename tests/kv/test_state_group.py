"""Which recurrent states are kept and served, and that no rule about their pages can be left out.

The engine's random worlds (tests/engine/test_core.py) hold every fold to a hash of all tokens; the mutants here are the
rules that must matter to them.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from jaxserve.engine.core import EngineCore, StepError
from jaxserve.errors import ConfigError
from jaxserve.kv.groups.cached_pages import CachedPages
from jaxserve.kv.groups.state_group import StateGroup, StatePages
from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.radix_cache import Node
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from jaxserve.types.scheduling import STATE_COLUMNS, StateSizes
from jaxserve.types.step import Request, TableUpdate
from tests.engine.test_core import World, constrained
from tests.fake_grammar import CountingMatcher, HandExecutor
from tests.fakes import VOCAB, Transcripts, alone, make_core, make_request, run_all, small_config

PAGE, BORDER, INTERVAL = 4, 8, 32


def core_of(num_pages: int = 40, **changes: object) -> EngineCore:
    sizes: dict[str, object] = {"num_pages": 400, "max_model_len": 512, "max_num_batched_tokens": 64}
    states = StateSizes(num_pages, INTERVAL, BORDER)
    return make_core(small_config(**(sizes | {"states": states} | changes)), eos_token_ids=(1000,))


def states_of(core: EngineCore) -> StateGroup:
    states = core.scheduler.kv.states
    assert states is not None
    return states


def words(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=count)


def computed(core: EngineCore, prompt: list[int], name: str, max_tokens: int = 1) -> int:
    """Prompt tokens that a request computes."""
    before = core.scheduler.counters.prefill_tokens
    run_all(core, [make_request(name, prompt, max_tokens=max_tokens)])
    core.scheduler.check_integrity()
    return core.scheduler.counters.prefill_tokens - before


def test_a_shared_beginning_costs_an_interval_once_and_then_a_border() -> None:
    core, shared = core_of(), words(100)
    assert computed(core, shared + words(7, 1), "first") == 107
    assert computed(core, shared + words(7, 2), "second") == 107 - 96, "96 is a multiple of the interval"
    other = words(93, 3)
    assert computed(core, other + words(40, 4), "a") == 133
    assert computed(core, other + words(40, 5), "b") == 133 - 64
    assert computed(core, other + words(40, 6), "c") == 133 - 88, "the junction: the last border in what is shared"
    assert core.scheduler.counters.stateless_tokens == 4 + (92 - 64) + (92 - 88)


def test_which_states_a_long_prompt_keeps() -> None:
    """The last border and the deepest multiples, as many as fill a quarter of the pool.

    If a step has places for every other multiple only, these, and not the last few of it.
    """
    prompt = words(255)
    cases: tuple[tuple[dict[str, Any], int, int], ...] = (
        ({}, 8, 224),
        ({"max_num_batched_tokens": 256}, 4, 192),
        ({"num_pages": 8}, 3, 224),
    )
    for changes, expected, begin in cases:
        core = core_of(**changes)
        assert computed(core, prompt, "long") == 255
        assert states_of(core).cached.num_pages == expected
        assert computed(core, prompt[:230] + words(50, 1), "another") == 280 - begin
    core = core_of(max_num_batched_tokens=256)
    assert computed(core, prompt, "long") == 255
    assert computed(core, prompt[:70] + words(50, 1), "early") == 120 - 64


def test_a_chunk_that_is_shortened_keeps_the_state_that_it_does_not_reach() -> None:
    core, prompt = core_of(max_num_batched_tokens=65, step_sizes=(64, 128)), words(100)
    assert computed(core, prompt, "a") == 100
    assert states_of(core).cached.num_pages == 3
    assert computed(core, prompt[:70] + words(9, 1), "b") == 79 - 64


def test_a_prompt_that_ends_at_a_border_keeps_the_state_before_it() -> None:
    for core in (core_of(), core_of(2, max_num_seqs=1)):
        assert [computed(core, words(64), name, max_tokens=2) for name in "abc"] == [64, 8, 8]


def test_states_and_pages_of_windows_are_counted_apart() -> None:
    core = core_of(window=10, num_window_pages=64)
    core.add(make_request("running", words(20), max_tokens=4))
    core.step()
    stats = core.scheduler.stats()
    assert (stats.group_pages_used, stats.num_state_pages_used) == ([5], 2), "its own state, and the one at 16 tokens"


DRAFTS = 5
CONVERSATION = 20 + BORDER + INTERVAL  # what a turn may compute: its new tokens, and what was written since a state


def turns(core: EngineCore, name: str, count: int, max_tokens: int = 40) -> list[int]:
    """Prompt tokens that each turn of a conversation computes, each with 20 new ones."""
    history, found = words(50, sum(name.encode())), []
    for turn in range(count):
        before = core.scheduler.counters.prefill_tokens
        transcript = run_all(core, [make_request(f"{name} {turn}", history, max_tokens=max_tokens)])[f"{name} {turn}"]
        found.append(core.scheduler.counters.prefill_tokens - before)
        history = history + transcript.token_ids + words(20, turn)
    core.scheduler.check_integrity()
    return found


def test_a_conversation_computes_what_is_new_and_what_was_written_since_the_last_state() -> None:
    assert max(turns(core_of(), "turn", 6)[1:]) <= CONVERSATION


def test_the_newest_conversation_goes_on_where_it_ended_although_the_pool_is_full_of_older_ones() -> None:
    core = core_of(num_pages=16, max_num_seqs=4)
    for i in range(12):
        computed(core, words(60, 100 + i), f"old {i}")
    assert states_of(core).cached.num_pages == 15
    assert turns(core, "new", 2, max_tokens=100)[1] <= CONVERSATION
    assert [computed(core, words(60, 100 + i), f"again {i}") for i in (11, 5)] == [4, 60], "older ones were evicted"


@pytest.mark.parametrize(("num_pages", "max_num_seqs"), [(2, 1), (6, 32)])
@pytest.mark.parametrize(("count", "max_tokens"), [(4, 100), (8, 10)])
def test_few_states_serve_a_conversation(num_pages: int, max_num_seqs: int, count: int, max_tokens: int) -> None:
    """Of two states one is that which the prompt begins with, so short answers keep one at the next border."""
    core = core_of(num_pages, max_num_seqs=max_num_seqs)
    assert max(turns(core, "turn", count, max_tokens=max_tokens)[1:]) <= CONVERSATION


def test_answers_keep_no_state_that_an_idle_slot_needs() -> None:
    """A request starts beside others that write, on a state that was cached: it takes a page, and locks that one."""
    core, prompt = core_of(num_pages=5, max_num_seqs=3), words(60)
    assert computed(core, prompt, "a") == 60
    for name in ("b", "c"):
        core.add(make_request(name, words(7, ord(name)), max_tokens=200))  # too short for a state
    for _ in range(100):
        core.step()
    assert states_of(core).num_available == 2
    before, end = core.scheduler.counters.prefill_tokens, False
    core.add(make_request("again", prompt, max_tokens=1))
    for _ in range(4):
        end = end or any(output.request_id == "again" for output in core.step())
    assert end and core.scheduler.counters.prefill_tokens - before == 4


class Scripted:
    """Proposes the drafts of a script, by the number of tokens that a request has."""

    def __init__(self, drafts: dict[int, list[int]]) -> None:
        self._drafts = drafts

    def propose(self, request: Request, most: int) -> list[int]:
        return self._drafts.get(request.num_tokens, [])[:most]

    def forget(self, request_id: str) -> None:
        """Nothing is kept of a request."""


def all_drafts() -> Any:
    """Rows get all drafts that there are."""
    return patch("jaxserve.scheduler.speculation.allot", lambda rows, offers, *_: [count for _, count in offers])


class Right:
    """Proposes what follows, in rows of 1 to DRAFTS drafts."""

    def propose(self, request: Request, most: int) -> list[int]:
        context = request.token_ids(0, request.num_tokens)
        following = alone(context, SamplingParams(temperature=0.0, max_tokens=1 + request.num_tokens % DRAFTS))[0]
        return following[:most]

    def forget(self, request_id: str) -> None:
        """Nothing is kept of a request."""


def test_an_answer_made_of_drafts_keeps_its_states_too() -> None:
    sizes: dict[str, object] = {"max_drafts": DRAFTS, "verify_sizes": (6,), "num_pages": 400, "max_model_len": 1024}
    config = small_config(**sizes, states=StateSizes(40, INTERVAL, BORDER))
    core = make_core(config, eos_token_ids=(1000,), drafter=Right())
    with all_drafts():
        found = turns(core, "turn", 6, max_tokens=100)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and sum(drafts.accepted_per_pos) > 300
    assert max(found[1:]) <= CONVERSATION + DRAFTS


def test_a_state_that_only_the_last_drafts_passed_is_not_kept() -> None:
    """The row after them would write it. Drafts that were wrong had reserved its page."""
    prompt = words(6)
    answer, _ = alone(prompt, SamplingParams(temperature=0.0, max_tokens=8))
    wrong = [(token + 1) % VOCAB for token in answer[1:6]]
    drafter = Scripted({6: wrong, 7: wrong, 8: answer[2:7]})
    sizes: dict[str, object] = {"max_drafts": DRAFTS, "verify_sizes": (6,), "states": StateSizes(40, PAGE, PAGE)}
    core = make_core(small_config(**sizes), eos_token_ids=(1000,), drafter=drafter)
    with all_drafts():
        assert run_all(core, [make_request("a", prompt, max_tokens=8)])["a"].token_ids == answer
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and (drafts.num_drafts, drafts.accepted_per_pos) == (2, [1] * 5)
    assert computed(core, prompt + answer, "b") == 14 - 4, "the state of the prompt's last border"


def test_drafts_that_reach_a_second_border_replace_no_state_of_the_same_step() -> None:
    prompt = words(8)
    answer, _ = alone(prompt, SamplingParams(temperature=0.0, max_tokens=12))
    sizes: dict[str, object] = {"max_drafts": DRAFTS, "verify_sizes": (6,), "states": StateSizes(40, PAGE, PAGE)}
    drafter = Scripted({8: answer[:5], 9: answer[1:6]})
    core = make_core(small_config(**sizes), eos_token_ids=(1000,), drafter=drafter)
    with all_drafts():
        assert run_all(core, [make_request("a", prompt, max_tokens=12)])["a"].token_ids == answer
    assert core.scheduler.counters.prefill_tokens == 8


@pytest.mark.parametrize(("length", "budget"), [(57, 16), (63, 16), (63, 56)])
@pytest.mark.parametrize("drafts", [{}, {"max_drafts": DRAFTS, "verify_sizes": (6,)}])
def test_siblings_wait_for_the_state_at_the_prompts_last_border(
    length: int, budget: int, drafts: dict[str, Any]
) -> None:
    """A chunk that ends at the border does not write it: the one after it does."""
    core, prompt = core_of(max_num_batched_tokens=budget, **drafts), words(length)
    requests = [make_request(f"r{i}", prompt, max_tokens=9, group="one") for i in range(4)]
    run_all(core, requests)
    assert core.scheduler.counters.prefill_tokens == length + 3 * (length - 56)


@pytest.mark.parametrize("budget", [16, 64])
def test_of_requests_that_arrive_together_one_computes_the_junctions_state(budget: int) -> None:
    """Their pages are found up to 92 tokens, and a state at 64."""
    core, shared = core_of(max_num_batched_tokens=budget), words(93)
    assert computed(core, shared + words(10, 1), "first") == 103
    before = core.scheduler.counters.prefill_tokens
    run_all(core, [make_request(f"r{i}", shared + words(10, 2 + i)) for i in range(4)])
    assert core.scheduler.counters.prefill_tokens - before == (103 - 64) + 3 * (103 - 88)


def test_nobody_waits_for_a_prompt_that_keeps_no_state_in_what_both_share() -> None:
    core, shared = core_of(max_num_batched_tokens=100), words(20)
    core.add(make_request("long", shared + words(200, 1)))
    core.step()
    core.add(make_request("short", shared + words(10, 2)))
    core.step()
    assert core.scheduler.stats().num_running == 2
    run_all(core)


def test_a_request_waits_for_the_page_that_it_needs_beside_the_state_that_it_begins_with() -> None:
    core, prompt = core_of(num_pages=2, max_num_seqs=2), words(20)
    assert computed(core, prompt, "a") == 20
    transcripts = run_all(core, [make_request("first", words(5, 1), max_tokens=9), make_request("again", prompt)])
    assert len(transcripts["first"].token_ids) == 9 and transcripts["again"].last is not None


def test_an_evicted_state_leaves_its_pages_and_the_junction_comes_back() -> None:
    core, prompt = core_of(num_pages=2, max_num_seqs=2), words(60)
    assert computed(core, prompt, "a") == 60
    assert computed(core, words(60, 1), "another") == 60, "its state needs the page"
    assert computed(core, prompt, "b") == 60
    assert core.scheduler.counters.stateless_tokens == 56
    assert computed(core, prompt, "c") == 4
    core.add(make_request("d", prompt, max_tokens=9))
    for _ in range(3):
        core.step()
    assert states_of(core).num_available == 1, "the state that it began with is needed no more"
    run_all(core)


def test_a_hit_makes_a_state_the_last_to_be_evicted() -> None:
    core = core_of(num_pages=4, max_num_seqs=1)
    asked = [0, 1, 2, 0, 3, 0, 1]  # prompts with one state each
    found = [computed(core, words(20, seed), f"r{i}") for i, seed in enumerate(asked)]
    assert found == [20, 20, 20, 4, 20, 4, 20]


def test_of_the_states_of_a_prompt_the_deepest_is_evicted_last() -> None:
    core = core_of(num_pages=4, max_num_seqs=1)
    asked = [words(60), words(20, 1), words(20, 2), words(60)]
    assert [computed(core, prompt, f"r{i}") for i, prompt in enumerate(asked)] == [60, 20, 20, 4]


def test_a_prefix_is_served_only_where_all_groups_have_their_pages() -> None:
    """The window ends a prefix of 4 pages at 3, the states at 2, and there the window lacks a page."""
    sizes: dict[str, object] = {"states": StateSizes(40, PAGE, PAGE), "window": 2 * PAGE, "num_window_pages": 40}
    kv = KVManager(small_config(**sizes))
    kv.adopt("", words(4 * PAGE))
    nodes = kv.cache.match_prefix("", words(4 * PAGE), 4).path
    for group, depths in zip(kv.groups, ((2, 3), (2, 4)), strict=True):
        for depth in depths:
            group.cached.put(nodes[depth - 1], group.cached.allocate(1)[0])
    assert [kv.served(node).depth for node in nodes] == [0, 0, 0, 0]
    kv.groups[0].cached.put(nodes[0], kv.groups[0].cached.allocate(1)[0])
    assert [kv.served(node).depth for node in nodes] == [0, 2, 2, 2]


def test_few_states_leave_drafts_their_pages() -> None:
    """A request has one state however many tokens it has."""
    assert core_of(num_pages=2).scheduler.kv.num_available == 400


def test_a_state_that_a_step_in_flight_writes_is_given_to_nobody() -> None:
    core = core_of(num_pages=2, max_num_seqs=2)
    core.add(make_request("a", words(9), max_tokens=50))
    for _ in range(3):
        core.step()
    assert states_of(core).num_available == 1
    core.abort(["a"])
    assert states_of(core).num_available == 1
    core.step()
    assert states_of(core).num_available == 2


def test_a_row_without_its_mask_begins_with_the_same_state_again() -> None:
    """Also after it was preempted, in several chunks."""
    threads = HandExecutor()
    core = make_core(
        small_config(states=StateSizes(4, PAGE, PAGE), prefix_cache=False, prefill_chunk_size=2),
        eos_token_ids=(1000,),
        mask_threads=threads,
        make_matcher=lambda spec: CountingMatcher(3, int(spec.source), was_slow=True),
    )
    request = make_request("a", words(5), max_tokens=20, grammar=GrammarSpec(kind="regex", source="9"))
    core.add(request)
    transcripts, steps = Transcripts(), itertools.count()
    while core.has_work:
        if next(steps) % 20 == 19:
            core.scheduler.preempt_all()
        transcripts.take(core.step())
        core.scheduler.check_integrity()
        threads.run(1)
    assert transcripts["a"].token_ids == constrained(request, 100)[0]


@pytest.mark.parametrize("lose", [EngineCore.flush_prefix_cache, EngineCore.recover])
def test_no_state_outlasts_its_prefix(lose: Callable[[EngineCore], object]) -> None:
    """A prompt that is half computed gives the cache no state, or is computed again if the device has lost all."""
    core, prompt = core_of(), words(100)
    assert computed(core, prompt, "a") == 100
    core.add(make_request("b", prompt[:50] + words(50, 1)))
    core.step()
    lose(core)
    run_all(core)
    assert states_of(core).cached.num_pages == (0 if lose is EngineCore.flush_prefix_cache else 3)
    assert computed(core, prompt, "c") == (100 if lose is EngineCore.flush_prefix_cache else 100 - 32)


@pytest.mark.parametrize("nan_from", [0, 70])
def test_a_request_that_is_not_finite_leaves_no_state(nan_from: int) -> None:
    sizes: dict[str, object] = {"max_num_batched_tokens": 64, "states": StateSizes(40, INTERVAL, BORDER)}
    core = make_core(small_config(**sizes), eos_token_ids=(1000,), not_finite={"bad"}, nan_from=nan_from)
    computed(core, words(60), "bad", max_tokens=40)
    assert states_of(core).cached.num_pages == 0
    assert computed(core, words(60), "good") == 60


def test_without_a_prefix_cache_no_state_is_kept() -> None:
    core = core_of(num_pages=2, max_num_seqs=1, prefix_cache=False)
    assert [computed(core, words(60), name) for name in "ab"] == [60, 60]
    core.add(make_request("c", words(60), max_tokens=90))
    for _ in range(80):
        core.step()
        assert states_of(core).num_available == 1
    run_all(core)
    assert states_of(core).cached.num_pages == 0


def test_what_a_state_excludes_is_named() -> None:
    sizes: dict[str, object] = {"states": StateSizes(40, INTERVAL, BORDER)}
    changes: tuple[dict[str, object], ...] = ({"num_host_pages": 4}, {"page_size": 3})
    for change in (*changes, {"states": StateSizes(1, 8, 8)}, {"states": StateSizes(40, 12, 8)}):
        with pytest.raises(ConfigError):
            small_config(**(sizes | change))


# --- mutants

Mutant = Callable[[], Any]


@contextmanager
def patched(owner: type, name: str, new: Any) -> Iterator[None]:
    with patch.object(owner, name, new):
        yield


def no_lock() -> Any:
    """The state that a first step reads can be evicted in that step. Nothing but that shows it."""
    take = StateGroup.take

    def unlocked(self: StateGroup, request: Request, node: Node, surplus: int) -> None:
        take(self, request, node, surplus)
        if (read := request.holdings[self.index].read) is not None:
            self.cached.unlock(read)

    def forget(self: StateGroup, held: StatePages) -> None:
        held.read = None

    def without_lock(self: StateGroup, request: Request) -> int:
        return 1 + len(request.holdings[self.index].pending)

    def nothing(self: StateGroup, holders: object) -> None:
        pass

    methods: dict[str, Any] = {
        "take": unlocked,
        "_unlock": forget,
        "num_reclaimable": without_lock,
        "check_integrity": nothing,
    }
    return patch.multiple(StateGroup, **methods)


def wrong_depth() -> Any:
    """Any cached page is served, whether its state was kept or not."""
    return patched(CachedPages, "served", lambda self, node: node)


def forgotten_entry() -> Any:
    """An entry that a shortened chunk did not reach is overwritten."""
    cover = StateGroup.cover

    def forgetful(self: StateGroup, request: Request, start: int, end: int) -> TableUpdate | None:
        held: StatePages = request.holdings[self.index]
        if not held.is_new:
            held.entries = [None] * len(held.entries)
        return cover(self, request, start, end)

    return patched(StateGroup, "cover", forgetful)


def kept_after_the_node() -> Any:
    """The state of a page that left the tree stays."""
    return patched(CachedPages, "forget", lambda self, node: None)


def no_release() -> Any:
    """A request that ends keeps the pages of states that the cache did not take."""
    release = StateGroup.release

    def leaking(self: StateGroup, request: Request) -> None:
        request.holdings[self.index].pending = []
        release(self, request)

    return patched(StateGroup, "release", leaking)


def old_state_read() -> Any:
    """A request begins with an empty state whatever its prefix."""
    cover = StateGroup.cover

    def empty(self: StateGroup, request: Request, start: int, end: int) -> TableUpdate | None:
        update = cover(self, request, start, end)
        if update is not None and update.first == 0:
            update.page_ids[0] = self.num_pages
        return update

    return patched(StateGroup, "cover", empty)


MUTANTS: tuple[Mutant, ...] = (
    no_lock,
    wrong_depth,
    forgotten_entry,
    kept_after_the_node,
    no_release,
    old_state_read,
)


def survives(seed: int) -> bool:
    world = World(random.Random(seed), states=True)
    try:
        world.run(arrivals=12, abort_rate=0.05)
        for request in world.requests.values():
            world.check(request)
    except (AssertionError, ValueError, KeyError, IndexError, StepError):
        return False
    return True


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_random_worlds_notice_a_rule_that_is_left_out(mutant: Mutant) -> None:
    with mutant():
        assert not all(survives(seed) for seed in range(60))


@pytest.mark.parametrize("length", [3, 60])
def test_a_first_chunk_replaces_all_columns_of_the_slots_last_owner(length: int) -> None:
    """An entry that stayed would be written when the new request reaches its position."""
    core = core_of()
    core.add(make_request("a", words(length), max_tokens=4))
    output = core.scheduler.schedule(0.0)
    assert output is not None
    (update,) = output.table_updates
    assert (update.first, len(update.page_ids), update.group) == (0, STATE_COLUMNS, 1)
