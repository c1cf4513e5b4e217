"""Requests whose grammar is being compiled. They wait like those in the scheduler's queue, but cannot be scheduled."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxserve.scheduler.stopping import Timers, overdue
from jaxserve.types.sampling import GrammarSpec
from jaxserve.types.step import Request

Prepare = Callable[[GrammarSpec], Future[Any]]  # compiles a grammar in a thread; the future's result is a Matcher


class CompilingRequests:
    """Holds requests until their grammars are compiled.

    queue_timeout: seconds that a request may wait, here and in the scheduler's queue together
    """

    def __init__(self, queue_timeout: float | None) -> None:
        self.num_tokens = 0  # prompt tokens of the waiting requests
        self._queue_timeout = queue_timeout
        self._requests: dict[str, tuple[Request, Future[Any]]] = {}
        self._timers = Timers()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    @property
    def ids(self) -> list[str]:
        return list(self._requests)

    def requests(self) -> list[Request]:
        return [request for request, _ in self._requests.values()]

    def add(self, request: Request, matcher: Future[Any]) -> None:
        self._requests[request.request_id] = request, matcher
        self.num_tokens += request.num_prompt_tokens
        self._timers.watch(request, self._queue_timeout)

    def remove(self, request_id: str) -> Request | None:
        """Remove and return a request; None if it does not wait here. Cancels its compilation if that has not begun."""
        if request_id not in self._requests:
            return None
        request, matcher = self._requests.pop(request_id)
        self.num_tokens -= request.num_prompt_tokens
        matcher.cancel()
        return request

    def take_compiled(self) -> list[tuple[Request, Future[Any]]]:
        """Remove and return the requests whose compilation has ended, successfully or not."""
        done = [entry for entry in self._requests.values() if entry[1].done()]
        for request, _ in done:
            self.remove(request.request_id)
        return done

    def take_overdue(self, now: float) -> list[tuple[Request, str]]:
        """Remove and return the requests that have timed out, each with the reason. now: time.monotonic() seconds"""
        ended: list[tuple[Request, str]] = []
        for request_id in self._timers.due(now):
            entry = self._requests.get(request_id)
            if entry is not None and (reason := overdue(entry[0], now, self._queue_timeout)):
                self.remove(request_id)
                ended.append((entry[0], reason))
        return ended
