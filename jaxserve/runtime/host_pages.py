"""Copies of KV pages in the host's memory: a row of bytes for each page, which may be in a file.

Pages arrive as device arrays that may not be computed yet. They are copied to their slots at the next use of the pool,
so that dispatching a step does not wait for the device.

PageTransfer exports and imports whole pages. A page id names the same page in every layer of a group, so pages are
moved by group. A program that was not compiled at the start is compiled
at its first call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal

import jax
import numpy as np

from jaxserve.ops.paged_attention.scaled_pages import ScaledPages
from jaxserve.runtime.compilation.compiler import Program, compile_all
from jaxserve.runtime.page_file import PageFile, PageFileConfig, remove_files
from jaxserve.types.step import PageMove

Caches = tuple[Any, ...]  # the KV cache: Pages of each layer
TRANSFER_PAGES = (8, 64)  # pages per dispatch of export and import
HostPages = np.ndarray | ScaledPages  # whose arrays are numpy's


class PageTransfer:
    """The page programs of a runner. programs: all of them. compiled: the ones compiled at the start, by name

    num_pages: of each layer group
    """

    def __init__(
        self,
        programs: Callable[[], Iterable[Program]],
        num_pages: Sequence[int],
        compiled: Mapping[str, jax.stages.Compiled],
    ) -> None:
        self._programs = programs
        self._num_pages = tuple(num_pages)
        self._compiled = dict(compiled)

    def gather(self, caches: Caches, page_ids: Sequence[int], group: int = 0) -> Iterator[tuple[Any, int]]:
        """Yield (pages, count): device arrays whose first `count` pages are valid. Does not wait for them."""
        for ids, count in self._chunks(page_ids, group):
            yield self._run(transfer_name("export", len(ids), group), caches, ids), count

    def export(self, caches: Caches, page_ids: Sequence[int], group: int = 0) -> list[HostPages]:
        """Return the content of pages: [n, page_size, 2 * KH, H] per layer, see `Backend.export_pages`."""
        groups = list(self.gather(caches, page_ids, group))

        def whole(*parts: jax.Array) -> np.ndarray:
            return np.concatenate([np.asarray(part)[:count] for part, (_, count) in zip(parts, groups, strict=True)])

        return list(jax.tree.map(whole, *(pages for pages, _ in groups)))

    def fill(self, caches: Caches, page_ids: Sequence[int], pages: Sequence[HostPages], group: int = 0) -> Caches:
        """Write `pages`, from `export`: [n, page_size, 2 * KH, H] per layer. Returns the new caches."""
        first = 0
        for ids, count in self._chunks(page_ids, group):
            padded = jax.tree.map(functools.partial(_chunk, first, count, len(ids)), tuple(pages))
            caches = self._run(transfer_name("import", len(ids), group), caches, ids, padded)
            first += count
        return caches

    def warm_up(self, caches: Caches) -> Caches:
        """Run every program once. Returns the new caches."""
        names = {program.name for program in self._programs()}
        for group, size in itertools.product(range(len(self._num_pages)), TRANSFER_PAGES):
            if transfer_name("export", size, group) in names:
                caches = self.fill(caches, [0] * size, self.export(caches, [0] * size, group), group)
        return caches

    def _run(self, name: str, *args: Any) -> Any:
        if name not in self._compiled:
            wanted = [program for program in self._programs() if program.name == name]
            self._compiled |= compile_all(wanted)
        return self._compiled[name](*args)

    def _chunks(self, page_ids: Sequence[int], group: int) -> Iterator[tuple[np.ndarray, int]]:
        """Yield page ids as padded int32 arrays of one of the sizes TRANSFER_PAGES, with the number of ids in each."""
        small, large = TRANSFER_PAGES
        first = 0
        while left := len(page_ids) - first:
            size = small if left <= small else large
            chunk = page_ids[first : first + size]
            ids = np.full(size, self._num_pages[group], np.int32)
            ids[: len(chunk)] = chunk
            yield ids, len(chunk)
            first += len(chunk)


def transfer_name(kind: Literal["export", "import"], size: int, group: int) -> str:
    """Return the name of the program that moves `size` pages of a layer group."""
    name = ("", "_window")[group] if group < 2 else f"_group_{group}"
    return f"{kind}{name}_pages[{size}]"


def _chunk(first: int, count: int, size: int, pages: np.ndarray) -> np.ndarray:
    """Return pages [first, first + count) with zeros behind them: [size, ...]."""
    if count == size:
        return pages[first : first + count]
    padded = np.zeros((size, *pages.shape[1:]), pages.dtype)
    padded[:count] = pages[first : first + count]
    return padded


MAX_PENDING = 2  # groups of pages on the device that wait to be copied; more would take too much of its memory


class HostPools:
    """A pool for each layer group.

    pages: structs of one exported page of each group, see `HostPool`. num_slots: number of pages that fit, by group
    """

    def __init__(
        self, transfer: PageTransfer, pages: Sequence[Any], num_slots: Sequence[int], file: PageFileConfig | None
    ) -> None:
        self._pools: list[HostPool] = []
        try:
            for group, (page, count) in enumerate(zip(pages, num_slots, strict=True)):
                self._pools.append(HostPool(transfer, page, count, file and file.of_group(group), group))
        except BaseException:
            self.close()  # another try in this process needs the files of the earlier groups
            raise

    @property
    def files(self) -> list[PageFile | None]:
        """Return the file of each group; None if its pages end with the process."""
        return [pool.file for pool in self._pools]

    def move(self, caches: Caches, moves: Sequence[PageMove]) -> Caches:
        """Make the copies of each group in order, after all dispatched steps. Returns the new caches."""
        for group, pool in enumerate(self._pools):
            caches = pool.move(caches, [move for move in moves if move.group == group])
        return caches

    def clear(self) -> None:
        """Forget the pages that were not copied yet: the device's state is lost."""
        for pool in self._pools:
            pool.clear()

    def close(self) -> None:
        """Give the files back. No page may be moved afterwards."""
        for pool in self._pools:
            pool.close()


class HostPool:
    """Slots for pages of a layer group.

    transfer: copies pages from and to the device
    page: structs of one exported page, a pytree of [1, ...]; it has no leaves if the group has no layers
    num_slots: number of pages that fit; 0: no pages are moved. file: None: the memory of this process
    """

    def __init__(
        self, transfer: PageTransfer, page: Any, num_slots: int, file: PageFileConfig | None, group: int = 0
    ) -> None:
        self._transfer = transfer
        self._group = group
        self._has_content = bool(jax.tree.leaves(page))
        self.file: PageFile | None = None
        self._arrays: Any = ()
        if num_slots:
            num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(page))
            self.file = None if file is None else PageFile(file, num_slots, num_bytes)
            rows = np.empty((num_slots, num_bytes), np.uint8) if self.file is None else self.file.rows
            self._arrays = page_views(rows, page)
        elif file is not None:
            remove_files(file.directory)  # of a model that has such layers
        self._pending: deque[tuple[list[PageMove], Any]] = deque()

    def move(self, caches: Caches, moves: Sequence[PageMove]) -> Caches:
        """Make the copies in order, after all dispatched steps. Returns the new caches.

        Raises OSError if the file was truncated.
        """
        if self.file is not None and (moves or self._pending):
            self.file.check()
        self.settle()
        for kind, group in groupby(moves, key=lambda move: move.kind):
            run = list(group)
            page_ids = [move.page_id for move in run]
            if not self._has_content and kind in ("store", "load"):
                self._store(run if kind == "store" else [], ())
            elif kind == "store":
                first = 0
                for pages, count in self._transfer.gather(caches, page_ids, self._group):
                    self._store(run[first : first + count], pages)
                    first += count
            elif kind == "load":
                caches = self._transfer.fill(caches, page_ids, self._load([move.slot for move in run]), self._group)
            else:
                self._forget(None if kind == "clear" else [move.slot for move in run])
        return caches

    def _store(self, moves: list[PageMove], pages: Any) -> None:
        """Store pages, device arrays [n, ...], in the slots of `moves`. Further entries of `pages` are ignored."""
        if len(self._pending) == MAX_PENDING:
            self._copy_oldest()
        self._pending.append((moves, pages))

    def settle(self) -> None:
        """Copy the pages that have arrived to their slots. Waits for the device."""
        while self._pending:
            self._copy_oldest()

    def _copy_oldest(self) -> None:
        moves, pages = self._pending.popleft()
        places = {move.slot: i for i, move in enumerate(moves)}  # if a slot is stored twice, only the last counts
        slots, kept, file = list(places), list(places.values()), self.file

        def copy(target: np.ndarray, source: jax.Array) -> None:
            """Copy the pages `kept` of source [n, ...] into the slots of target [num_slots, ...]."""
            target[slots] = np.asarray(source)[kept]

        if file is not None:
            file.begin(slots)
        jax.tree.map(copy, self._arrays, pages)
        if file is not None:
            file.end(slots, [moves[i].digest for i in kept])

    def _load(self, slots: list[int]) -> Any:
        """Return the pages in `slots`: a pytree of numpy [n, ...]."""
        self.settle()
        return jax.tree.map(lambda array: array[slots], self._arrays)

    def _forget(self, slots: list[int] | None) -> None:
        """Make sure that no later process finds the pages in `slots`; None: any page that exists now."""
        self.settle()
        if self.file is None:
            return
        if slots is None:
            self.file.clear()
        else:
            self.file.begin(slots)

    def clear(self) -> None:
        """Forget the pages that were not copied yet: the device's state is lost."""
        self._pending.clear()

    def close(self) -> None:
        """Give the file back. No page may be moved afterwards."""
        if self.file is not None:
            self.file.close()


def page_views(rows: np.ndarray, page: Any) -> Any:
    """Return arrays [n, ...] over the bytes of rows [n, bytes of a page], formed as `page`, a pytree of [1, ...]."""
    leaves, form = jax.tree.flatten(page)
    offset, views = 0, []
    for leaf in leaves:
        inner = np.empty(leaf.shape[1:], leaf.dtype)
        shape, strides = (len(rows), *inner.shape), (rows.shape[1], *inner.strides)
        views.append(np.ndarray(shape, inner.dtype, rows, offset, strides))
        offset += inner.nbytes
    return jax.tree.unflatten(form, views)
