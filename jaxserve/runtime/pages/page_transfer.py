"""Export and import of whole KV pages.

A page id names the same page in every layer of a group, so pages are moved by group: 0, or 1 for the layers with a
sliding window. Programs that were not compiled at the start are compiled at their first call.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jaxserve.ops.paged_attention.scaled_pages import ScaledPages
from jaxserve.runtime.compilation.compiler import Program, compile_all

Caches = tuple[Any, ...]  # the KV cache: Pages of each layer
TRANSFER_PAGES = (8, 64)  # pages per dispatch of export and import
HostPages = np.ndarray | ScaledPages  # whose arrays are numpy's


class PageTransfer:
    """The page programs of a runner. programs: all of them. compiled: those compiled at the start, by name.

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
        """Yield (pages, count): device arrays, of which the first `count` pages count, and which are not waited for."""
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
    return f"{kind}{'_window' if group else ''}_pages[{size}]"


def _chunk(first: int, count: int, size: int, pages: np.ndarray) -> np.ndarray:
    """Return pages [first, first + count) with zeros behind them: [size, ...]."""
    if count == size:
        return pages[first : first + count]
    padded = np.zeros((size, *pages.shape[1:]), pages.dtype)
    padded[:count] = pages[first : first + count]
    return padded
