"""The token masks of all live requests. The engine loop computes quick masks, threads compute slow ones.

A step waits at most PATIENCE for its masks. A row whose mask is late yields no token in it. A request with slow
masks is paused until a thread has computed its next mask, which depends on its last token. So it takes part in at
most every other step.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np

from jaxserve.grammar.token_mask import Matcher, TokenMask
from jaxserve.types.step import QUICK, FinishReason, SchedulerOutput, TokenOutput

PATIENCE = 0.005  # seconds that a step waits for its masks
PATIENCE_PER_ROW = 0.0002  # and this many more per masked row; a mask of a JSON schema takes 0.01 to 0.1 ms
MIN_PARALLEL = 4  # grammars; filling fewer takes less time than waking threads
MAX_PARALLEL = 8  # grammars filled at once; the deadline is checked between two groups

# Fills row r of a bitmask for each (matcher, r), all rows at once. May raise for any of them.
FillRows = Callable[[Sequence[tuple[Matcher, int]], np.ndarray], None]
Entry = tuple[int, str, TokenMask]  # row of the step, request, mask


class Made(NamedTuple):
    """Result of a thread.

    row: int32 [ceil(V/32)]; undefined if `end` is set. end: the reason for which the request must end
    """

    row: np.ndarray
    end: FinishReason | None


class StepMasks(NamedTuple):
    """The masks of a step of R rows.

    bits      int32 [R, ceil(V/32)]; all ones for a row that has no mask, is late, or whose request must end. A row
              with k drafts has 1 + k of these rows
    ended     requests that must end, each with the reason
    late      rows that yield no token in this step
    paused    requests that are paused until `MaskTable.take_ready` returns them
    """

    bits: np.ndarray
    ended: list[tuple[str, FinishReason]]
    late: list[int]
    paused: set[str]


class MaskTable:
    """The masks of all live requests.

    fill_rows   fills many grammars on all cores; None: one after the other
    threads     compute slow masks; None: a step waits for all of its masks
    """

    def __init__(self, vocab_size: int, fill_rows: FillRows | None = None, threads: Executor | None = None) -> None:
        self._fill_rows = fill_rows
        self._threads = threads
        self._num_words = -(-vocab_size // 32)
        self._masks: dict[str, TokenMask] = {}
        self._made: dict[str, Future[Made]] = {}  # request id -> its next mask, if it is left to threads
        self._paused: set[str] = set()
        self._passed_over: set[str] = set()  # requests whose masks the last step had no time for
        self._ahead: dict[str, np.ndarray] = {}  # request id -> masks after its drafts in the next step

    def __len__(self) -> int:
        return len(self._masks)

    def add(self, request_id: str, mask: TokenMask) -> None:
        self._masks[request_id] = mask

    def drop(self, request_id: str) -> None:
        self._masks.pop(request_id, None)
        self._ahead.pop(request_id, None)
        self._paused.discard(request_id)
        if (made := self._made.pop(request_id, None)) is not None:
            made.cancel()

    # --- the tokens of an output

    def advance(self, output: TokenOutput, *, here: bool = True) -> FinishReason | None:
        """Pass a request's new tokens to its mask. STOP: its grammar is complete. ERROR: the tokens violate it.

        here: process them now, unless the request's masks are slow. `take_ready` or the masks of a step return the
        result of a thread.
        """
        name = output.request_id
        mask = self._masks.get(name)
        if mask is None or output.finish_reason is not None:
            return None
        if name in self._paused or self._is_slow(mask) or (self._threads is not None and not here):
            self._begin(name, mask, output.token_ids)
            return None
        return mask.advance(output.token_ids, name)

    def _begin(self, name: str, mask: TokenMask, token_ids: Sequence[int] = ()) -> None:
        """Let a thread compute the mask after these tokens. Only that thread may use the mask until it is done."""
        assert self._threads is not None and name not in self._made
        self._made[name] = self._threads.submit(_make, mask, list(token_ids), name, self._num_words)

    def take_ready(self) -> list[tuple[str, FinishReason | None]]:
        """Return the paused requests whose masks are ready, each with the reason if it must end."""
        ready = [name for name in self._paused if name in self._made and self._made[name].done()]
        self._paused.difference_update(ready)
        return [(name, self._made[name].result().end) for name in ready]

    def close(self) -> None:
        """Stop computing masks in threads."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def wait(self, seconds: float) -> None:
        """Wait until a thread has computed a mask, at most `seconds`."""
        if making := [made for made in self._made.values() if not made.done()]:
            wait(making, seconds, FIRST_COMPLETED)

    def failure(self, request_id: str) -> tuple[str, int]:
        """Return the message and HTTP status for a request that its mask ended with an error."""
        mask = self._masks.get(request_id)
        limit = mask.error if mask is not None else None
        if limit is not None:
            return f"this grammar cannot be enforced, it grew over a limit while the output was made: {limit}", 400
        return "the output left the grammar", 500

    # --- drafts, see speculation.ngram.DraftMasks

    def _ready(self, request_id: str) -> TokenMask | None:
        """Return the mask of a request if it is quick and no thread uses it."""
        mask = self._masks.get(request_id)
        if mask is None or request_id in self._made or request_id in self._paused or self._is_slow(mask):
            return None
        return mask

    def forced(self, request_id: str, most: int) -> list[int]:
        """Return the next tokens if the grammar leaves no choice, `most` of them at most."""
        mask = self._ready(request_id)
        return mask.forced(request_id)[:most] if mask is not None else []

    def allow(self, request_id: str, drafts: list[int]) -> list[int]:
        """Return the drafts up to the first that the grammar refuses, and keep the masks after each for the step."""
        mask = self._ready(request_id)
        if mask is None:
            return []
        rows = np.full((len(drafts), self._num_words), -1, np.int32)
        count = mask.fill_ahead(drafts, rows, request_id)
        self._ahead[request_id] = rows[:count]
        return drafts[:count]

    # --- the masks of a step

    def of_step(self, output: SchedulerOutput) -> StepMasks:
        """Compute the masks of a step.

        A request whose matcher failed or exceeded a limit must end, because its mask would only allow the end of the
        output, and the client would believe that the text is complete. The array is new for every step, because the
        device may still read the previous one.
        """
        bits = np.full((len(output.rows), self._num_words), -1, np.int32)
        entries = [
            (i, row.request_id, self._masks[row.request_id])
            for i, row in enumerate(output.rows)
            if row.masked and row.request_id in self._masks  # others have ended since
        ]
        late, failed = self._fill([entry for entry in entries if entry[1] not in self._made], bits)
        ended = dict.fromkeys(failed, FinishReason.ERROR)
        for i, name, mask in entries:
            made = self._made.get(name)
            if mask.budget.error is not None or (made is None and mask.error is not None):
                ended[name] = FinishReason.ERROR
            if made is not None and made.done():
                late.discard(i)  # the thread may have begun in this very step
                del self._made[name]
                bits[i], end = made.result()
                ended |= {name: end} if end is not None else {}
            elif made is not None:
                late.add(i)
        for i, name, mask in entries:
            if name in ended:
                bits[i] = -1
            elif name in self._made or self._is_slow(mask):
                self._paused.add(name)
        return StepMasks(self._with_drafts(output, bits, late), list(ended.items()), sorted(late), self._paused)

    def _with_drafts(self, output: SchedulerOutput, bits: np.ndarray, late: set[int]) -> np.ndarray:
        """Return `bits` with one more row for each draft."""
        if not output.num_drafts:
            return bits
        rows = []
        for i, row in enumerate(output.rows):
            rows.append(bits[i : i + 1])
            after = self._ahead.pop(row.request_id, None) if row.masked else None
            if row.drafts:
                free = np.full((len(row.drafts), self._num_words), -1, np.int32)
                rows.append(free if after is None or i in late else after[: len(row.drafts)])
        return np.concatenate(rows)

    def _is_slow(self, mask: TokenMask) -> bool:
        return self._threads is not None and mask.is_slow

    def _fill(self, entries: list[Entry], bits: np.ndarray) -> tuple[set[int], set[str]]:
        """Fill rows of `bits`. Return the rows that are left to threads, and the requests whose matchers failed."""
        deadline = time.perf_counter() + PATIENCE + PATIENCE_PER_ROW * len(entries)
        entries.sort(key=lambda entry: entry[1] not in self._passed_over)
        together = {
            i for group in self._groups(entries) if self._fill_together(group, bits, deadline) for i, *_ in group
        }
        late: set[int] = set()
        failed: set[str] = set()
        for i, name, mask in entries:
            if i in together:
                continue
            if self._is_slow(mask):
                self._begin(name, mask)
                late.add(i)
            elif self._is_over(deadline):
                late.add(i)  # it comes first in the next step
            elif not mask.try_fill(bits[i], name):
                failed.add(name)
        self._passed_over = {name for i, name, _ in entries if i in late}
        return late, failed

    def _is_over(self, deadline: float) -> bool:
        return self._threads is not None and time.perf_counter() > deadline

    def _groups(self, entries: list[Entry]) -> list[list[Entry]]:
        """Return groups of masks that are probably quick, to be filled together; none if they are few."""
        quick = [entry for entry in entries if entry[2].is_quick and not self._is_slow(entry[2])]
        if self._fill_rows is None or sum(entry[2].matcher is not None for entry in quick) < MIN_PARALLEL:
            return []
        return [quick[i : i + MAX_PARALLEL] for i in range(0, len(quick), MAX_PARALLEL)]

    def _fill_together(self, entries: list[Entry], bits: np.ndarray, deadline: float) -> bool:
        """Fill all rows together. Return whether that worked. If it took long, the next step measures each."""
        matchers = [(mask.matcher, i) for i, _, mask in entries if mask.matcher is not None]
        if self._fill_rows is None or self._is_over(deadline):
            return False
        began = time.perf_counter()
        try:
            self._fill_rows(matchers, bits)
        except Exception:  # filling one by one shows which of them failed
            for i, _, _ in entries:
                bits[i] = -1
            return False
        quick = time.perf_counter() - began < QUICK * len(matchers)
        for i, _, mask in entries:
            mask.ban(bits[i])
            mask.is_quick = quick
        return True


def _make(mask: TokenMask, token_ids: Sequence[int], request_id: str, num_words: int) -> Made:
    """Pass new output tokens to a mask and compute the next one. Runs in a thread, which alone uses the mask."""
    row = np.full(num_words, -1, np.int32)
    end = mask.advance(token_ids, request_id)
    if end is None and not mask.try_fill(row, request_id):
        end = FinishReason.ERROR
    return Made(row, end)


def mask_threads() -> ThreadPoolExecutor:
    """Return a pool with a quarter as many threads as there are cores."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4), thread_name_prefix="masks")
