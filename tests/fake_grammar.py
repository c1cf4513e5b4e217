"""A grammar that can be computed by hand, and threads for its masks that run when they are told to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class CountingMatcher:
    """A grammar of `length` tokens, all multiples of `modulus`."""

    modulus: int
    length: int
    was_slow: bool = False
    in_thread: bool = False  # a task of HandExecutor has it, and nobody else may use it

    @property
    def is_terminated(self) -> bool:
        assert not self.in_thread
        return self.length == 0

    @property
    def limit_error(self) -> str | None:
        assert not self.in_thread
        return None

    def fill(self, bitmask_row: np.ndarray) -> None:
        assert not self.in_thread
        allowed = np.zeros(32 * len(bitmask_row), np.uint8)
        allowed[:: self.modulus] = 1
        bitmask_row[:] = np.packbits(allowed, bitorder="little").view(np.int32)

    def accept(self, token_id: int) -> bool:
        assert not self.in_thread
        if token_id % self.modulus or self.is_terminated:
            return False
        self.length -= 1
        return True

    drafts_allowed = True

    def prefix(self, token_ids: Sequence[int]) -> int:
        assert not self.in_thread
        return len(list(itertools.takewhile(lambda token: not token % self.modulus, token_ids[: self.length])))

    def forced(self) -> list[int]:
        assert not self.in_thread
        return []

    def rollback(self, num_tokens: int) -> bool:
        self.length += num_tokens
        return True


class HandExecutor(Executor):
    """Threads that run a task when they are told to. A matcher whose mask is a task's may not be used before."""

    def __init__(self) -> None:
        self.tasks: list[tuple[Future[Any], functools.partial[Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        matcher = args[0].matcher
        assert not matcher.in_thread
        matcher.in_thread = True
        future: Future[Any] = Future()
        self.tasks.append((future, functools.partial(fn, *args, **kwargs)))
        return future

    def run(self, count: int) -> None:
        """The first tasks that were not cancelled, in their order."""
        tasks, self.tasks = self.tasks[:count], self.tasks[count:]
        for future, task in tasks:
            if future.set_running_or_notify_cancel():
                task.args[0].matcher.in_thread = False
                future.set_result(task())
