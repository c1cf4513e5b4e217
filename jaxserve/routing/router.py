"""Chooses the replica for a request: by its load, and by how much of the prompt is in its prefix cache. No jax.

    the loads differ by more than MAX_SPREAD and by more than MAX_RATIO   the least loaded
    a replica has more than half of the prompt                            the one that has most of it
    otherwise                                                             the least of load minus matched pages

A load is a number of sequences. Batch requests go to the least loaded replica, because no client waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from jaxserve.routing.prefix_index import PrefixIndex
from jaxserve.types.page_keys import TOKEN_BYTES, PageEvents

MAX_SPREAD = 8  # sequences by which the loads may differ
MAX_RATIO = 1.5  # of the largest load to the least

Reason = Literal["only", "load", "prefix", "mixed"]


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a replica that may get a request. pages_used: share of its KV pages that requests hold now"""

    replica: int
    num_live: int  # sequences that it was sent, and that have not ended
    pages_used: float = 0.0

    @property
    def order(self) -> tuple[int, float, int]:
        return self.num_live, self.pages_used, self.replica


class Router:
    """Chooses replicas by the rules above.

    page_size: in tokens, of all replicas. reasons: how often each rule has chosen
    """

    def __init__(self, page_size: int) -> None:
        self.index = PrefixIndex(page_size)
        self.reasons: Counter[Reason] = Counter()
        self._page_bytes = page_size * TOKEN_BYTES

    def take(self, replica: int, events: PageEvents) -> None:
        """Note what changed in the prefix cache of a replica."""
        self.index.take(replica, events)

    def forget(self, replica: int) -> None:
        """Note that a replica died, and its cache with it."""
        self.index.forget(replica)

    def num_cached(self, replica: int, prompt: bytes, namespace: str = "") -> int:
        """Return how many tokens of a prompt a replica has in its prefix cache."""
        return self.index.match(namespace, prompt, [replica])[replica] * self._page_bytes // TOKEN_BYTES

    def choose(self, loads: Sequence[ReplicaLoad], prompt: bytes, namespace: str = "", *, batch: bool = False) -> int:
        """Return the replica for a request.

        loads: of the replicas that may get it, at least one. prompt: token ids, int32, little-endian. namespace: of
        the prefix cache. batch: the request is of a batch
        """
        replica, reason = self._choose(loads, prompt, namespace, batch=batch)
        self.reasons[reason] += 1
        return replica

    def _choose(
        self, loads: Sequence[ReplicaLoad], prompt: bytes, namespace: str, *, batch: bool
    ) -> tuple[int, Reason]:
        if len(loads) == 1:
            return loads[0].replica, "only"
        ordered = sorted(loads, key=lambda load: load.order)
        least, most = ordered[0].num_live, ordered[-1].num_live
        if batch or (most - least > MAX_SPREAD and most > MAX_RATIO * least):
            return ordered[0].replica, "load"
        pages = self.index.match(namespace, prompt, [load.replica for load in ordered])
        best = max(pages, key=pages.__getitem__)  # the least loaded of equal ones
        if 2 * pages[best] * self._page_bytes > len(prompt):
            return best, "prefix"
        return min(ordered, key=lambda load: load.num_live - pages[load.replica]).replica, "mixed"
