"""The pages of all layer groups in the memory of the host: a tier for each group, and which prefixes they complete.

A prefix can be loaded up to the deepest page at which every group has what a later token sees: full attention all
pages, the layers with a sliding window those of the last window. A page may be on the device, or a copy in a tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.kv.host_tier import HostTier
from jaxserve.kv.radix_cache import Node
from jaxserve.kv.window_group import WindowGroup
from jaxserve.types.scheduling import SchedulerConfig
from jaxserve.types.step import PageMove


@dataclass(frozen=True)
class StoredPrefix:
    """A prefix that can be used after its pages were loaded.

    node: its deepest node whose full-attention page is cached. after: digests of the pages behind it, to load.
    """

    node: Node
    after: list[bytes]

    @property
    def depth(self) -> int:
        """Pages of the prefix."""
        return self.node.depth + len(self.after)


class HostTiers:
    """The tiers of all layer groups.

    full: the pages of full attention. window: those of the layers with a sliding window; None if there are none.
    """

    def __init__(self, config: SchedulerConfig, group: WindowGroup | None) -> None:
        self.full = HostTier(config.num_host_pages, config.page_size)
        self.window: HostTier | None = None
        self._group = group
        self._page_size = config.page_size
        self._num_slots = config.num_host_pages, config.num_host_window_pages
        if group is not None:
            self.window = HostTier(config.num_host_window_pages, config.page_size, group=1, digest=self.full.digest)
            group.index.on_evicted = self.window.store_page

    @property
    def tiers(self) -> list[HostTier]:
        """The tiers in the order of their layer groups."""
        return [self.full] if self.window is None else [self.full, self.window]

    def store(self, node: Node) -> None:
        """Keep copies of the pages of a node that is evicted now."""
        self.full.store(node)
        if self.window is not None and self._group is not None and node in self._group.index:
            self.window.store_page(node, self._group.index.page_of(node))

    # --- finding

    def find(self, node: Node, tokens: Sequence[int]) -> StoredPrefix:
        """Return the longest prefix that can be loaded and begins with that of `node`.

        node: the deepest one on the way whose full-attention page is cached. Where the window is incomplete, the prefix
        may end before it. tokens: whole pages of them, those after it
        """
        after = self.full.find(node, tokens, len(tokens) // self._page_size)
        if self.window is None:
            return StoredPrefix(node, after)
        self.window.take_checked()
        depth = self._with_window(node, after)
        after = after[: max(0, depth - node.depth)]
        while node.depth > depth:
            assert node.parent is not None
            node = node.parent
        prefix = StoredPrefix(node, after)
        self.window.use(self.window_digests(prefix))
        return prefix

    def _with_window(self, node: Node, after: list[bytes]) -> int:
        """Return the depth of the longest prefix whose last window is complete, on the device or in the tier."""
        assert self._group is not None
        first_of_prefix = self._group.size.first_of_prefix
        deepest = node.depth + len(after)
        first, above = first_of_prefix(deepest), node
        for depth in range(deepest, 0, -1):
            if depth <= first:
                break
            while above.depth > depth:
                assert above.parent is not None
                above = above.parent
            if not self._has_window(above, depth, node, after):
                deepest, first = depth - 1, first_of_prefix(depth - 1)
        return deepest

    def _has_window(self, above: Node, depth: int, node: Node, after: list[bytes]) -> bool:
        assert self.window is not None and self._group is not None
        if depth > node.depth:
            return after[depth - node.depth - 1] in self.window
        return above in self._group.index or self.full.digest(above) in self.window

    def window_digests(self, prefix: StoredPrefix) -> list[bytes]:
        """Return the digests of the pages of the prefix's last window that are not on the device."""
        if self._group is None:
            return []
        index, first = self._group.index, self._group.size.first_of_prefix(prefix.depth)
        before: list[bytes] = []
        node = prefix.node
        while node.depth > first:
            if node not in index:
                before.append(self.full.digest(node))
            assert node.parent is not None
            node = node.parent
        return [*reversed(before), *prefix.after[max(0, first - prefix.node.depth) :]]

    # --- all tiers

    def keep(self, prefix: StoredPrefix | None) -> None:
        """Overwrite no copy that `prefix` needs, until the next call."""
        if self.window is not None:
            self.window.kept = set() if prefix is None else set(self.window_digests(prefix))
            self.full.kept = set() if prefix is None else set(prefix.after)

    def take_moves(self) -> list[PageMove]:
        """Return the copies to make before the next step, in order."""
        return [move for tier in self.tiers for move in tier.take_moves()]

    def drop(self, node: Node) -> None:
        """Drop the copies of all prefixes with the first page of `node`, also for later processes."""
        for tier in self.tiers:
            tier.drop(node)

    def clear(self, *, new_weights: bool = False) -> None:
        """See `HostTier.clear`."""
        for tier in self.tiers:
            tier.clear(new_weights=new_weights)

    def recover(self) -> None:
        """See `HostTier.recover`."""
        for tier in self.tiers:
            tier.recover()

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is exactly once free or in use."""
        for tier, num_slots in zip(self.tiers, self._num_slots, strict=False):
            tier.check_integrity(num_slots)
