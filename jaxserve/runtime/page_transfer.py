"""Copy, export and import of whole KV pages, for models whose layers form a single group.

A page id then names the same page in every layer. The engine does not use these programs while it serves, so each is
compiled at its first call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.ops.paged_attention.scaled_pages import ScaledPages
from jaxserve.runtime.compilation.compiler import CompileCounter, compile_all
from jaxserve.runtime.program_set import TRANSFER_PAGES, ProgramSet
from jaxserve.runtime.programs import Caches

HostPages = np.ndarray | ScaledPages  # whose arrays are numpy's


class PageTransfer:
    """The page programs of a runner.

    num_compiles   XLA compilations of these programs so far
    """

    def __init__(self, programs: ProgramSet, num_pages: int) -> None:
        self.num_compiles = 0
        self._programs = programs
        self._num_pages = num_pages
        self._compiled: dict[str, jax.stages.Compiled] = {}

    def copy(self, caches: Caches, sources: Sequence[int], destinations: Sequence[int]) -> Caches:
        """Copy pages sources[i] to destinations[i] in every layer; caches: one array [num_pages, ...] per layer."""
        for first in range(0, len(sources), TRANSFER_PAGES):
            packed = np.full((2, TRANSFER_PAGES), self._num_pages, np.int32)
            chunk = slice(first, first + TRANSFER_PAGES)
            packed[0, : len(sources[chunk])] = sources[chunk]
            packed[1, : len(sources[chunk])] = destinations[chunk]
            caches = self._run("copy_pages", caches, packed)
        return caches

    def export(self, caches: Caches, page_ids: Sequence[int]) -> list[HostPages]:
        """Return the content of pages: [n, page_size, 2 * KH, H] per layer, see `Backend.export_pages`."""
        groups = [(self._run("export_pages", caches, ids), count) for ids, count in self._groups(page_ids)]

        def whole(*parts: jax.Array) -> np.ndarray:
            return np.concatenate([np.asarray(part)[:count] for part, (_, count) in zip(parts, groups, strict=True)])

        return list(jax.tree.map(whole, *(pages for pages, _ in groups)))

    def fill(self, caches: Caches, page_ids: Sequence[int], pages: Sequence[HostPages]) -> Caches:
        """Write `pages`, from `export`: [n, page_size, 2 * KH, H] per layer. Returns the new caches."""
        first = 0
        for ids, count in self._groups(page_ids):
            padded = jax.tree.map(functools.partial(_chunk, first, count), tuple(pages))
            caches = self._run("import_pages", caches, ids, padded)
            first += count
        return caches

    def _run(self, name: str, *args: Any) -> Any:
        if name not in self._compiled:
            wanted = [program for program in self._programs.page_programs() if program.name == name]
            with CompileCounter() as counter:
                self._compiled |= compile_all(wanted)
            self.num_compiles += counter.count
        return self._compiled[name](*args)

    def _groups(self, page_ids: Sequence[int]) -> Iterator[tuple[np.ndarray, int]]:
        """Yield page ids as padded int32 [TRANSFER_PAGES] groups, with the number of ids in each."""
        for first in range(0, len(page_ids), TRANSFER_PAGES):
            chunk = page_ids[first : first + TRANSFER_PAGES]
            ids = np.full(TRANSFER_PAGES, self._num_pages, np.int32)
            ids[: len(chunk)] = chunk
            yield ids, len(chunk)


def _chunk(first: int, count: int, pages: np.ndarray) -> np.ndarray:
    """Return pages [first, first + count) with zeros behind them: [TRANSFER_PAGES, ...]."""
    padded = np.zeros((TRANSFER_PAGES, *pages.shape[1:]), pages.dtype)
    padded[:count] = pages[first : first + count]
    return padded
