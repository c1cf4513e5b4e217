"""The protocol of a layer group: layers that keep something else of a request than the pages of all its tokens. No jax.

Group 0 is not one of these. It is the layers that see all tokens, and its pages make the radix tree: `KVManager` and
`RadixCache` have them. Every other group has a pool and page tables of its own. A node of the tree may have a page of
each. A prefix is usable if every group has the pages that the token after it needs: `first_of_prefix` to its end.

    SpanGroup   layers with a sliding window, or with chunks (span_group.py)
    StateGroup  layers with a recurrent state (state_group.py)

A group's record of a running request is in `request.holdings`, by the group's index. Its `due` is the number of read
tokens at which `advance` next has work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from jaxserve.kv.groups.cached_pages import CachedPages
from jaxserve.kv.radix_cache import Node
from jaxserve.types.step import Request, TableUpdate


class LayerGroup(Protocol):
    """The interface that the scheduler, KVManager and HostTiers use. Counts are of the group's own pages."""

    index: int  # of the group in page tables, table updates, page moves and `holdings`; 1 or above
    num_pages: int
    cached: CachedPages  # of the prefix cache

    # --- counting

    @property
    def num_available(self) -> int:
        """Return the number of pages that could be allocated now."""
        ...

    @property
    def num_growable(self) -> int:
        """Return the number of pages by which running requests could grow now."""
        ...

    def num_reclaimable(self, request: Request) -> int:
        """Return the number of pages that releasing a running request makes available."""
        ...

    def num_new(self, request: Request, node: Node) -> int:
        """Return the number of available pages that `take` consumes, at least."""
        ...

    def num_new_with(self, request: Request, node: Node, depth: int) -> int:
        """Return the number of available pages that `take` consumes at depth `depth`, if the missing pages are loaded.

        node: the deepest cached node on the way there
        """
        ...

    def num_to_grow(self, request: Request, node: Node) -> int:
        """Return how many more pages a request needs at most while it decodes.

        Pages that it holds, or would take over from the prefix at `node`, are subtracted.
        """
        ...

    # --- the prefix cache

    def num_usable(self, leader: Request, num_pages: int) -> int:
        """Return how many of the first `num_pages` pages of a running prompt others can use once it is computed."""
        ...

    # --- a running request

    def take(self, request: Request, node: Node, surplus: int) -> None:
        """Lock the pages of the prefix `node` that the request needs, and allocate pages for the tokens after it.

        surplus: available pages beyond `num_new`; the prompt gets as many of them as it can use
        """
        ...

    def reach(self, request: Request, end: int) -> int:
        """Make pages available for the prompt's tokens up to `end`. Return the position that the pages cover."""
        ...

    def cover(self, request: Request, start: int, end: int) -> TableUpdate | None:
        """Return the table entries that the device needs for the prompt's tokens [start, end) and does not have."""
        ...

    def grow(self, request: Request, count: int) -> TableUpdate | None:
        """Allocate pages for the next `count` pages of tokens of a decoding request. Return the new table entries."""
        ...

    def commit(self, request: Request, node: Node, depth: int, num_tokens: int) -> None:
        """Give the cache the request's pages for the nodes between depth `depth` and `node`.

        num_tokens: the leading ones that were computed and read
        """
        ...

    def advance(self, request: Request, num_tokens: int) -> None:
        """Record that the steps of the first `num_tokens` tokens have been read. Free pages that no later one needs."""
        ...

    def release(self, request: Request) -> None:
        """Free all that a request holds."""
        ...

    def check_integrity(self, holders: Iterable[Request]) -> None:
        """Raise AssertionError unless every page of the pool is exactly once free, cached or held."""
        ...
