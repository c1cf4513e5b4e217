"""What the log of a prefix cache reports is, added up, what the cache holds."""

import random
from array import array

from jaxserve.kv.kv_manager import KVManager
from jaxserve.kv.radix_cache import Node
from jaxserve.routing.router import PrefixIndex
from jaxserve.types.page_keys import page_keys
from jaxserve.types.scheduling import SchedulerConfig

PAGE = 2


def manager(num_pages: int) -> KVManager:
    config = SchedulerConfig(
        num_pages=num_pages,
        page_size=PAGE,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        page_events=True,
    )
    return KVManager(config)


def insert(kv: KVManager, tokens: list[int], namespace: str = "") -> Node:
    """Compute a prompt and leave its full pages in the cache, locked."""
    node = kv.cache.match_prefix(namespace, tokens, len(tokens) // PAGE)
    kv.cache.lock(node)
    count = len(tokens) // PAGE - node.depth
    pages = kv.allocate(count)
    return kv.cache.insert(node, tokens[node.depth * PAGE :], pages, node.depth + count)[0]


def cached(kv: KVManager) -> set[bytes]:
    """The keys of the pages that new requests can match."""
    found = set()
    for node in kv.cache.nodes():
        if node.alive:
            root = node
            while root.parent is not None:
                root = root.parent
            tokens = [int(token) for above in node.path for token in above.key]
            found.add([*page_keys(str(root.key), array("i", tokens).tobytes(), PAGE)][-1])
    return found


def test_without_several_engines_nothing_is_recorded() -> None:
    config = SchedulerConfig(num_pages=4, page_size=2, max_num_seqs=4, max_num_batched_tokens=16, max_model_len=8)
    assert KVManager(config).page_log is None


def test_pages_are_reported_once_when_they_come_and_when_they_go() -> None:
    kv = manager(4)
    log = kv.page_log
    assert log is not None and log.take() is None
    first = insert(kv, [1, 2, 3, 4])
    keys = [*page_keys("", array("i", [1, 2, 3, 4]).tobytes(), PAGE)]
    events = log.take()
    assert events is not None and events.added == b"".join(keys) and not events.removed
    second = insert(kv, [1, 2, 5, 6])
    events = log.take()
    assert events is not None and events.added == [*page_keys("", array("i", [1, 2, 5, 6]).tobytes(), PAGE)][1]
    kv.cache.unlock(first)
    kv.cache.evict(4)
    events = log.take()
    assert events is not None and (events.added, events.removed) == (b"", keys[1])
    kv.cache.unlock(second)
    kv.flush()
    events = log.take()
    assert events is not None and len(events.removed) == 16
    kv.cache.unlock(insert(kv, [7, 8]))
    kv.flush()
    assert log.take() is None


def test_the_reports_of_a_random_life_add_up_to_the_cache() -> None:
    rng = random.Random(7)
    kv, index, locked = manager(40), PrefixIndex(PAGE), []
    log = kv.page_log
    assert log is not None
    for turn in range(600):
        if len(locked) > 3:
            kv.cache.unlock(locked.pop(rng.randrange(len(locked))))
        locked.append(insert(kv, rng.choices(range(3), k=2 * rng.randint(1, 6)), rng.choice(["", "a"])))
        if rng.random() < 0.05:
            kv.cache.discard(locked[-1])
        if rng.random() < 0.01:
            kv.flush()
        if rng.random() < 0.3 and (events := log.take()) is not None:
            index.update(0, events)
            assert len(index) == len(cached(kv)), turn
    assert len(index) > 10
