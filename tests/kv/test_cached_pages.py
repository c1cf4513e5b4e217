"""Which prefix is served: against its definition, and what happens to a page whose node leaves the tree."""

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.kv.groups.cached_pages import CachedPages
from jaxserve.kv.page_pool import PagePool
from jaxserve.kv.radix_cache import Node, RadixCache
from jaxserve.types.scheduling import Reach, Span


def chain(length: int) -> list[Node]:
    """A root and the nodes of one sequence."""
    nodes = [Node("", -1, None)]
    for depth in range(1, length + 1):
        nodes.append(Node((depth,), depth, nodes[-1]))
    return nodes


@settings(max_examples=300, deadline=None)
@given(st.lists(st.booleans(), min_size=0, max_size=12), st.integers(1, 20), st.integers(1, 5))
def test_served_is_the_longest_prefix_whose_last_window_is_here(here: list[bool], window: int, page_size: int) -> None:
    index = CachedPages(PagePool(20), Span(Reach("window", window), page_size, prompt_tokens=8).first_of_prefix)
    nodes = chain(len(here))
    for page, (node, is_here) in enumerate(zip(nodes[1:], here, strict=True)):
        if is_here:
            index.put(node, page)

    def usable(depth: int) -> bool:
        position = depth * page_size  # of the first token behind the prefix
        seen = {token // page_size for token in range(max(0, position - window + 1), position)}
        return all(here[page] for page in seen)

    longest = max(depth for depth in range(len(here) + 1) if usable(depth))
    served = index.served(nodes[-1])
    assert served is nodes[longest]
    assert all(node in index for node in index.path(served))


def test_a_page_whose_node_is_gone_stays_for_its_user() -> None:
    pool = PagePool(4)
    index = CachedPages(pool, Span(Reach("window", 4), 2, prompt_tokens=8).first_of_prefix)
    tree = RadixCache(PagePool(4), 2, index.forget)
    root = tree.match_prefix("", [], 0)
    tree.lock(root)
    node, _ = tree.insert(root, [1, 2, 3, 4], [0, 1], 2)
    first, second = node.path
    index.put(first, pool.allocate(1)[0])
    index.put(second, pool.allocate(1)[0])
    index.unlock(first)
    assert (index.num_evictable, pool.num_free) == (1, 2)
    tree.flush()
    assert (index.num_evictable, pool.num_free) == (0, 3), "nobody uses the first one"
    index.unlock(second)
    assert (index.num_pages, pool.num_free) == (0, 4)


def test_the_least_recently_unlocked_goes_first() -> None:
    pool = PagePool(3)
    index = CachedPages(pool, Span(Reach("window", 4), 2, prompt_tokens=8).first_of_prefix)
    nodes = chain(3)[1:]
    for node in nodes:
        index.put(node, pool.allocate(1)[0])
    for node in (nodes[1], nodes[0], nodes[2]):
        index.unlock(node)
    index.lock(nodes[1])
    index.evict(1)
    assert [node in index for node in nodes] == [False, True, True]
    index.check_integrity([nodes[1]])
    index.evict(5)
    assert [node in index for node in nodes] == [False, True, False], "and the one in use stays"
