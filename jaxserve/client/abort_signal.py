"""A way to abort engine requests from outside of their iterators."""

from __future__ import annotations

from collections.abc import Callable


class AbortSignal:
    """Aborts the requests that were given it: those that run, and those that are submitted after it was set.

    A generation of several requests, one after the other, is so aborted between two of them too.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: dict[int, Callable[[], object]] = {}

    def set(self) -> None:
        self.is_set = True
        for callback in list(self._callbacks.values()):
            callback()

    def attach(self, callback: Callable[[], object]) -> None:
        """Call `callback` when it is set, and at once if it is."""
        self._callbacks[id(callback)] = callback
        if self.is_set:
            callback()

    def detach(self, callback: Callable[[], object]) -> None:
        self._callbacks.pop(id(callback), None)
