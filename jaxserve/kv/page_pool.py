"""The free list of KV pages. It stores page numbers and knows no requests, prefixes or devices.

A page has exactly one owner at a time: this free list, one request, or the RadixCache (whose nodes count their
users).
"""

from __future__ import annotations

from collections.abc import Iterable


class PagePool:
    """Free list of pages [0, num_pages). Freeing a free page raises ValueError: it would be allocated twice."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # taken from the end: low numbers first
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Remove `count` pages from the free list, in no particular order. Raises ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} pages wanted, {len(self._free)} are free")
        split = len(self._free) - count
        pages = self._free[split:]
        del self._free[split:]
        for page in pages:
            self._is_free[page] = 0
        return pages

    def free(self, page_ids: Iterable[int]) -> None:
        """Return pages to the free list. Raises ValueError if one of them is free already."""
        for page in page_ids:
            if self._is_free[page]:
                raise ValueError(f"page {page} is free already")
            self._is_free[page] = 1
            self._free.append(page)

    def check_integrity(self, owned: Iterable[int]) -> None:
        """Raise AssertionError unless every page is either free or exactly once in `owned`."""
        owned = list(owned)
        assert len(set(owned)) == len(owned), "a page has two owners"
        assert len(set(self._free)) == len(self._free), "a page is twice in the free list"
        assert not set(owned) & set(self._free), "a page is free and owned"
        assert len(owned) + len(self._free) == self.num_pages, "a page is lost"
        assert sum(self._is_free) == len(self._free), "the free marks disagree with the free list"
