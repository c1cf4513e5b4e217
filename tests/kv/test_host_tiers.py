"""Copies of evicted pages of two layer groups: which prefixes can be loaded, and what is overwritten meanwhile."""

from __future__ import annotations

from collections import deque

from jaxserve.engine.core import EngineCore
from tests.fakes import EMPTY, FakeRunner, make_core, make_request, run_all, small_config

PAGE = 4
WINDOW = 7  # tokens: two pages and a part of a third
FIRST = list(range(40))
OTHERS = [[50 + i, *range(39)] for i in range(8)]


def core_of(num_host_pages: int = 200, num_host_window_pages: int = 200, **keys: int) -> EngineCore:
    sizes = {"num_pages": 24, "num_window_pages": 32, "max_num_seqs": 2} | keys
    host = {"num_host_pages": num_host_pages, "num_host_window_pages": num_host_window_pages}
    return make_core(small_config(window=WINDOW, **host, **sizes))


def ask(core: EngineCore, prompt: list[int], name: str = "asked") -> int:
    """Ask for a token. Returns the prompt tokens that were computed."""
    before = core.scheduler.counters.prefill_tokens
    run_all(core, [make_request(name, prompt, max_tokens=1)])
    return core.scheduler.counters.prefill_tokens - before


def evict(core: EngineCore) -> None:
    """Ask for so much else that no page of the first prompt is left on the device."""
    for index, prompt in enumerate(OTHERS):
        ask(core, prompt, f"other {index}")


def kept(core: EngineCore, prompt: list[int]) -> int:
    """Pages of a prompt that the device has."""
    return core.scheduler.kv.cache.match_prefix("", prompt, len(prompt) // PAGE).depth


def test_a_prefix_needs_all_pages_of_one_group_and_the_last_window_of_the_other() -> None:
    core = core_of()
    assert ask(core, FIRST) == 40
    evict(core)
    host = core.scheduler.kv.host
    assert host is not None and kept(core, FIRST) == 0
    full, window = host.full.num_loaded, host.tiers[1].num_loaded
    assert ask(core, FIRST) == PAGE, "the last page of a prompt is computed"
    assert (host.full.num_loaded - full, host.tiers[1].num_loaded - window) == (9, 2)


def test_where_the_window_is_lost_a_shorter_prefix_is_loaded() -> None:
    core = core_of()
    ask(core, FIRST)
    evict(core)
    host = core.scheduler.kv.host
    assert host is not None
    pages = host.full.find(core.scheduler.kv.cache.match_prefix("", FIRST, 0), FIRST, 10)
    host.tiers[1]._give_up(host.tiers[1]._slots.pop(pages[8]))  # in the window of the tenth page
    assert ask(core, FIRST) == 40 - 8 * PAGE


def test_window_pages_alone_are_loaded_for_a_prefix_that_the_device_has() -> None:
    core = core_of(num_pages=200)
    ask(core, FIRST)
    evict(core)
    kv = core.scheduler.kv
    assert kept(core, FIRST) == 10 and kv.host is not None
    node = kv.cache.match_prefix("", FIRST, 9)
    assert kv.groups[0].cached.served(node).depth == 0, "and cannot use alone"
    before = kv.host.full.num_loaded
    assert ask(core, FIRST) == PAGE
    assert kv.host.full.num_loaded == before and kv.host.tiers[1].num_loaded == 2


def test_what_a_prefix_needs_is_not_overwritten_while_room_is_made_for_it() -> None:
    """Tiers with room for one prompt: the pages that are evicted for it are not kept."""
    core = core_of(num_host_pages=9, num_host_window_pages=2, num_pages=11, num_window_pages=12)
    ask(core, FIRST)
    ask(core, OTHERS[0], "other")
    assert ask(core, FIRST) < len(FIRST)
    assert ask(core, FIRST) == PAGE, "it is on the device"
    core.scheduler.check_integrity()


def test_a_flush_forgets_the_copies_of_both_groups() -> None:
    core = core_of()
    ask(core, FIRST)
    evict(core)
    core.flush_prefix_cache()
    assert ask(core, FIRST) == 40


def test_a_new_process_finds_the_copies_of_both_groups_at_once_and_not_those_that_were_lost() -> None:
    before, core = core_of(), core_of()
    ask(before, FIRST)
    evict(before)
    old, new = before.scheduler.kv.host, core.scheduler.kv.host
    assert old is not None and new is not None
    assert isinstance(before.runner, FakeRunner) and isinstance(core.runner, FakeRunner)
    core.runner.host = before.runner.host
    checked: list[deque[tuple[int, bytes | None]]] = []
    for tier, other in zip(old.tiers, new.tiers, strict=True):
        checked.append(deque((slot, digest) for digest, slot in tier._slots.items()))
        other.restore([slot for slot, _ in checked[-1]], checked[-1])
    assert ask(core, FIRST) == PAGE
    evict(core)
    core.runner.host[1][:] = EMPTY  # its file was cut
    checked[1] += [(slot, None) for slot in range(200)]
    assert ask(core, FIRST) == 40
    core.scheduler.check_integrity()
