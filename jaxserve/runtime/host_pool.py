"""The memory of the host that holds copies of KV pages: one numpy array for each array of a page's layers.

Pages arrive as device arrays that may not be computed yet. They are copied to their slots at the next use of the pool,
so that dispatching a step does not wait for the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np

from jaxserve.runtime.page_transfer import PageTransfer
from jaxserve.runtime.program_set import TRANSFER_PAGES, ProgramSet
from jaxserve.runtime.programs import Caches
from jaxserve.types.step import PageMove

MAX_PENDING = 2  # groups of pages on the device that wait to be copied; more would take too much of its memory


class HostPool:
    """Slots for pages.

    transfer: copies pages from and to the device. programs: know the form of exported pages. num_slots: pages that
    fit; 0: no pages are moved
    """

    def __init__(self, transfer: PageTransfer, programs: ProgramSet, num_slots: int) -> None:
        self._transfer = transfer
        self._num_slots = num_slots
        pages = programs.exported_pages(1) if num_slots else ()
        self._arrays = jax.tree.map(lambda page: np.empty((num_slots, *page.shape[1:]), page.dtype), pages)
        self._pending: deque[tuple[list[int], Any]] = deque()

    def move(self, caches: Caches, moves: Sequence[PageMove]) -> Caches:
        """Make the copies in order, after all dispatched steps. Returns the new caches."""
        self.settle()
        for to_host, group in groupby(moves, key=lambda move: move.to_host):
            run = list(group)
            page_ids, slots = [move.page_id for move in run], [move.slot for move in run]
            if to_host:
                first = 0
                for pages, count in self._transfer.gather(caches, page_ids):
                    self._store(slots[first : first + count], pages)
                    first += count
            else:
                caches = self._transfer.fill(caches, page_ids, self._load(slots))
        return caches

    def warm_up(self, caches: Caches) -> Caches:
        """Run every program once. Overwrites the first pages of the caches and of the pool. Returns the new caches."""
        for size in TRANSFER_PAGES if self._num_slots else ():
            for to_host in (True, False):
                caches = self.move(caches, [PageMove(to_host, 0, 0)] * size)
        return caches

    def _store(self, slots: Sequence[int], pages: Any) -> None:
        """Keep pages, device arrays [n, ...], in `slots`. Entries of `pages` beyond the slots are ignored."""
        if len(self._pending) == MAX_PENDING:
            self._copy_oldest()
        self._pending.append((list(slots), pages))

    def settle(self) -> None:
        """Copy what has arrived to its slots. Waits for the device."""
        while self._pending:
            self._copy_oldest()

    def _copy_oldest(self) -> None:
        slots, pages = self._pending.popleft()

        def copy(target: np.ndarray, source: jax.Array) -> None:
            target[slots] = np.asarray(source)[: len(slots)]

        jax.tree.map(copy, self._arrays, pages)

    def _load(self, slots: Sequence[int]) -> Any:
        """Return the pages in `slots`: a pytree of numpy [n, ...]."""
        self.settle()
        return jax.tree.map(lambda array: array[list(slots)], self._arrays)

    def clear(self) -> None:
        """Forget what has not been copied: the device's state is lost."""
        self._pending.clear()
