"""Prefixes that stay in the cache until another engine has fetched them, or until a limit of time has passed."""

from __future__ import annotations

from jaxserve.kv.radix_cache import Node, RadixCache


class HeldPages:
    """Holds the pages of at most `max_prefixes` prefixes at a time, the latest ones."""

    def __init__(self, cache: RadixCache, max_prefixes: int = 64) -> None:
        self._cache = cache
        self._max_prefixes = max_prefixes
        self._held: list[tuple[Node, float]] = []  # seconds to hold, from the next `expire` on
        self._until: list[tuple[Node, float]] = []  # the end of the time

    @property
    def nodes(self) -> list[Node]:
        """The last nodes of the prefixes held, each locked once."""
        return [node for node, _ in (*self._until, *self._held)]

    def hold(self, node: Node, seconds: float) -> None:
        """Keep the pages of the prefix of `node`, which must not be evicted before this call."""
        self._cache.lock(node)
        self._held.append((node, seconds))
        if len(self.nodes) > self._max_prefixes:
            self._cache.unlock((self._until or self._held).pop(0)[0])

    def give_up(self, node: Node) -> None:
        """End all holds of exactly this prefix: those of the choices of one request too."""
        for held in (self._until, self._held):
            for entry in [entry for entry in held if entry[0] is node]:
                held.remove(entry)
                self._cache.unlock(node)

    def clear(self) -> None:
        """End all holds."""
        for node in self.nodes:
            self._cache.unlock(node)
        self._until.clear()
        self._held.clear()

    def expire(self, now: float) -> None:
        """End what was held long enough. now: seconds"""
        if self._held or self._until:
            self._until += [(node, now + seconds) for node, seconds in self._held]
            self._held.clear()
            for entry in [entry for entry in self._until if entry[1] <= now]:
                self._until.remove(entry)
                self._cache.unlock(entry[0])
