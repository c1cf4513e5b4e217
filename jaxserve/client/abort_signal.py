"""Aborts engine requests from outside of their iterators."""

from __future__ import annotations

from collections.abc import Callable


class AbortSignal:
    """Aborts the attached requests: those that run, and those submitted after the signal was set.

    So it also stops a generation of several consecutive requests that is between two of them.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: dict[int, Callable[[], object]] = {}

    def set(self) -> None:
        self.is_set = True
        for callback in list(self._callbacks.values()):
            callback()

    def attach(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the signal is set; at once if it is set already."""
        self._callbacks[id(callback)] = callback
        if self.is_set:
            callback()

    def detach(self, callback: Callable[[], object]) -> None:
        self._callbacks.pop(id(callback), None)
