"""Aborts engine requests from outside of their iterators."""

from __future__ import annotations

from collections.abc import Callable

AbortCallback = Callable[[int | None], object]


class AbortSignal:
    """Aborts the attached requests: those that run, and those submitted after the signal was set.

    So it also stops a generation of several consecutive requests that is between two of them. A callback gets the index
    of the choice to abort, None: all.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._callbacks: dict[int, AbortCallback] = {}

    def set(self) -> None:
        self.is_set = True
        for callback in list(self._callbacks.values()):
            callback(None)

    def abort_choice(self, index: int) -> None:
        """Abort one choice of the requests that run."""
        for callback in list(self._callbacks.values()):
            callback(index)

    def attach(self, callback: AbortCallback) -> None:
        """Call `callback` when the signal is set; at once if it is set already."""
        self._callbacks[id(callback)] = callback
        if self.is_set:
            callback(None)

    def detach(self, callback: AbortCallback) -> None:
        self._callbacks.pop(id(callback), None)
