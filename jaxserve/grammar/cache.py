"""Cache of compiled grammars, for later requests with the same text."""

from __future__ import annotations

import threading
from collections import OrderedDict

import llguidance

Key = tuple[str, str]  # kind and source of a GrammarSpec


class CachedGrammar:
    """A compiled grammar. Its copies share one lexer, to which states are only added.

    The library does not report the number of states, so it is estimated from the CPU time spent: 50,000 states take
    35 MB and 0.3 s. A mask that adds no states is quicker than QUICK.

    is_full    a copy has reached the limit on states, so every further copy would fail too
    is_slow    one of the last NUM_QUICK masks of all copies took longer than SLOW
    """

    QUICK = 0.0002
    SLOW = 0.001
    NUM_QUICK = 64
    BYTES_PER_SECOND = 128 << 20
    MAX_LEXER_BYTES = 40 << 20

    def __init__(self, base: llguidance.LLMatcher, source: str, compile_seconds: float) -> None:
        self.is_full = False
        self.is_slow = False
        self._num_quick = 0
        self._base = base
        self._source_bytes = len(source)
        self._seconds = compile_seconds

    def copy(self) -> llguidance.LLMatcher:
        return self._base.deep_copy()

    def charge(self, seconds: float) -> None:
        """Add the CPU time of one mask."""
        if seconds > self.QUICK:
            self._seconds += seconds
        self._num_quick = 0 if seconds > self.SLOW else self._num_quick + 1
        self.is_slow = seconds > self.SLOW or (self.is_slow and self._num_quick < self.NUM_QUICK)

    @property
    def num_bytes(self) -> int:
        return self._source_bytes + min(int(self._seconds * self.BYTES_PER_SECOND), self.MAX_LEXER_BYTES)


class GrammarCache:
    """Cache of at most max_entries grammars and max_bytes. Evicts the least recently used ones. Thread-safe."""

    def __init__(self, max_entries: int = 64, max_bytes: int = 256 << 20) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, CachedGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values())

    def get(self, key: Key) -> CachedGrammar | None:
        """Return the grammar; None if it is absent or full. A full one is compiled again."""
        with self._lock:
            found = self._entries.get(key)
            if found is not None and found.is_full:
                del self._entries[key]
                return None
            if found is not None:
                self._entries.move_to_end(key)
            self._shrink()  # entries grow while they are used
            return found

    def put(self, key: Key, grammar: CachedGrammar) -> None:
        with self._lock:
            self._entries[key] = grammar
            self._shrink()

    def _shrink(self) -> None:
        while self._entries and (len(self._entries) > self._max_entries or self.num_bytes > self._max_bytes):
            self._entries.popitem(last=False)
