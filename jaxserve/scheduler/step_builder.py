"""Builds one step: makes the device's rows from Requests and updates what each Request counts as computed. No jax.

All rows are built here. The scheduler decides which request gets a row and how many tokens.

Once a step was read, `StepLogprobs` and the functions below it copy log-probabilities and extra outputs into the
outputs of its requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from jaxserve.kv.kv_manager import KVManager
from jaxserve.scheduler.pictures import PicturePool
from jaxserve.scheduler.scheduler_stats import Counters
from jaxserve.types.extras import PromptExtras, StepExtras, TokenExtras
from jaxserve.types.sampling import Prefilled
from jaxserve.types.step import (
    Request,
    SampledTokens,
    ScheduledRow,
    SchedulerOutput,
    SlotInit,
    TableUpdate,
    TokenLogprobs,
    TokenOutput,
)

WORTH_CUTTING = 4  # drop the tail of a chunk if that saves at least so many times the tokens that are delayed
_EMPTY: list[int] = []  # shared by all decode rows; never modified


class StepBuilder:
    """Collects the rows of a step. Add decode rows first, then prompt chunks.

    requests           the requests of the rows, in their order
    short_of_pages     a decoding request had no page for its next token
    rests              the draft model does not compute the step's tokens
    """

    def __init__(self, number: int, kv: KVManager, pictures: PicturePool | None = None) -> None:
        self.number = number
        self._pictures = pictures
        self.rows: list[ScheduledRow] = []
        self.requests: list[Request] = []
        self.short_of_pages = False
        self.rests = False
        self._kv = kv
        self._table_updates: list[TableUpdate] = []
        self._slot_inits: list[SlotInit] = []
        self._new_pages: dict[int, list[int]] = {}  # by slot, for the requests that started in this step
        self._num_decode_rows = self._num_drafts = 0
        self._draft_room: list[int] = []

    def add_decodes(self, decoding: list[Request]) -> None:
        """Add a row for each request that has tokens left to generate and a page for the next one."""
        number, rows, requests, kv = self.number, self.rows, self.requests, self._kv
        for request in decoding:
            start = request.num_computed_tokens
            if start >= request.max_computed_tokens or request.is_paused:
                continue  # its last token is in flight, or its token mask is not ready
            first_new_page, new_page_ids = 0, _EMPTY
            if start >= request.page_capacity:
                if (wanted := pages_wanted(request, kv)) > kv.num_available:
                    self.short_of_pages = True
                    continue
                first_new_page, new_page_ids = len(request.page_ids), self._grow(request, wanted)
            rows.append(
                ScheduledRow(
                    request.request_id,
                    request.slot,  # type: ignore[arg-type]  # a running request has a slot
                    start,
                    1,  # num_tokens
                    True,  # samples
                    _EMPTY,  # token_ids
                    first_new_page,
                    new_page_ids,
                    request.masked,
                    request.params.logprobs,
                    None,  # prompt_logprobs
                    False,  # embed
                    request.extras,
                )
            )
            requests.append(request)
            request.num_computed_tokens = start + 1
            request.num_inflight_tokens += 1
            request.last_step = number
        self._num_decode_rows = len(rows)

    def _grow(self, request: Request, count: int) -> list[int]:
        page_ids = self._kv.grow(request, count)
        for group in self._kv.groups:
            self._send(group.grow(request, count))
        return page_ids

    def room_for_drafts(self, index: int, most: int) -> int:
        """Return for how many drafts, at most `most`, row `index` has pages. Each other row keeps one free page."""
        request = self.requests[index]
        free = max(0, self._kv.num_available - len(self.rows))
        return max(0, min(most, request.page_capacity + free * self._kv.page_size - request.num_computed_tokens))

    def add_drafts(self, index: int, drafts: Sequence[int]) -> None:
        """Give decode row `index` drafts, at most as many as `room_for_drafts` says.

        They count as right until the step is read.
        """
        request = self.requests[index]
        request.num_computed_tokens += len(drafts)
        request.num_inflight_tokens += len(drafts)
        self._num_drafts += len(drafts)
        if (wanted := self._kv.num_pages_for(request.num_computed_tokens) - len(request.page_ids)) > 0:
            self._add_pages(index, wanted)
        self.rows[index] = msgspec.structs.replace(self.rows[index], drafts=tuple(drafts))

    def ask_drafts(self, ahead: int) -> None:
        """Let the device propose drafts after this step, which is complete.

        Decode rows get pages for `ahead` more tokens, if each other row keeps one free page. Elsewhere the drafts end
        where a row's pages do.
        """
        for i in range(self._num_decode_rows):
            request = self.requests[i]
            end = min(request.num_computed_tokens + ahead, request.max_computed_tokens)
            wanted = self._kv.num_pages_for(end) - len(request.page_ids)
            if 0 < wanted <= self._kv.num_available - len(self.rows):
                self._add_pages(i, wanted)
        self._draft_room = [request.page_capacity for request in self.requests]

    def _add_pages(self, index: int, count: int) -> None:
        """Give decode row `index` more pages."""
        row, request = self.rows[index], self.requests[index]
        first = row.first_new_page if row.new_page_ids else len(request.page_ids)
        pages = row.new_page_ids + self._grow(request, count)
        self.rows[index] = msgspec.structs.replace(row, first_new_page=first, new_page_ids=pages)

    def init_slot(self, request: Request, eos_token_ids: tuple[int, ...]) -> None:
        """Initialize the slot of a request that just started. A prompt chunk of it must follow."""
        assert request.slot is not None
        init = SlotInit(
            slot=request.slot,
            params=request.params,
            seed=request.seed,
            num_prompt_tokens=request.num_prompt_tokens,
            token_ids=request.token_ids(0, request.num_tokens),
            eos_token_ids=() if request.params.ignore_eos else eos_token_ids,
            position_delta=0 if self._pictures is None else self._pictures.position_delta(request),
            adapter=request.adapter_slot,
        )
        self._slot_inits.append(init)
        self._new_pages[request.slot] = request.page_ids.copy()

    def add_chunk(self, request: Request, num_tokens: int) -> None:
        """Add a row that computes the next `num_tokens` tokens of a prompt. The request must have pages for them."""
        assert request.slot is not None
        start = request.num_computed_tokens
        end = start + num_tokens
        for group in self._kv.groups:
            self._send(group.cover(request, start, end))
        done = end == request.num_prefill_tokens
        row = ScheduledRow(
            request_id=request.request_id,
            slot=request.slot,
            start=start,
            num_tokens=end - start,
            samples=done,
            token_ids=request.token_ids(start, end),
            first_new_page=0,
            new_page_ids=self._new_pages.get(request.slot, _EMPTY),
            masked=request.masked and done,
            logprobs=request.params.logprobs,
            prompt_logprobs=None if request.prompt_logprobs is None else request.params.prompt_logprobs,
            embed=request.params.embed and done,
            second_text=request.params.second_text,
            extras=request.extras,
            pictures=None if self._pictures is None else self._pictures.chunk_rows(request, start, end),
        )
        self.rows.append(row)
        self.requests.append(request)
        request.num_computed_tokens = end
        request.last_step = self.number
        if done:
            request.num_inflight_tokens += 1

    def _send(self, update: TableUpdate | None) -> None:
        if update is not None:
            self._table_updates.append(update)

    def fit(self, sizes: tuple[int, ...]) -> None:
        """Shorten the last chunk if the step is slightly above one of `sizes` (ascending).

        The rest of the chunk waits for the next step.
        """
        if not sizes or not self.has_prompt:
            return
        num_tokens = sum(row.num_tokens for row in self.rows)
        index = bisect_left(sizes, num_tokens)
        if not 0 < index < len(sizes):
            return
        below = sizes[index - 1]
        excess = num_tokens - below
        if excess < self.rows[-1].num_tokens and excess * WORTH_CUTTING <= sizes[index] - below:
            self._cut(excess)

    def _cut(self, num_tokens: int) -> None:
        row, request = self.rows.pop(), self.requests.pop()
        request.num_computed_tokens = row.start
        if row.samples:
            request.num_inflight_tokens -= 1
        self.add_chunk(request, row.num_tokens - num_tokens)

    @property
    def num_decode_rows(self) -> int:
        return self._num_decode_rows

    @property
    def has_prompt(self) -> bool:
        return len(self.rows) > self._num_decode_rows

    def build(self, adapter_writes: dict[int, str]) -> SchedulerOutput:
        """Return the step, with the page copies that it needs and the pictures that it encodes.

        adapter_writes: as in SchedulerOutput
        """
        encodes = []
        if self._pictures is not None:
            for request in self.requests[self._num_decode_rows :]:
                self._pictures.release_passed(request)
            encodes = self._pictures.plan()
        return SchedulerOutput(
            self.number,
            self.rows,
            self._num_decode_rows,
            self._slot_inits,
            self._table_updates,
            self._num_drafts,
            self._draft_room,
            self._kv.take_page_moves(),
            encodes,
            adapter_writes,
            self.rests,
        )


def pages_wanted(request: Request, kv: KVManager) -> int:
    """Return how many pages a decoding request lacks for its next token."""
    end = min(request.num_computed_tokens + 1, request.max_computed_tokens)
    return max(0, kv.num_pages_for(end) - len(request.page_ids))


class StepLogprobs:
    """The log-probabilities of a step as lists. Each array is converted once for all rows."""

    def __init__(self, sampled: SampledTokens, rows: Sequence[ScheduledRow]) -> None:
        assert sampled.logprobs is not None and sampled.ranks is not None
        assert sampled.top_ids is not None and sampled.top_logprobs is not None
        width = max((row.logprobs or 0 for row in rows), default=0)
        self._logprobs: list[list[float]] = sampled.logprobs.tolist()
        self._ranks: list[list[int]] = sampled.ranks.tolist()
        self._top_ids: list[list[list[int]]] = sampled.top_ids[:, :, :width].tolist()
        self._top_logprobs: list[list[list[float]]] = sampled.top_logprobs[:, :, :width].tolist()

    def of_row(self, row: int, token_ids: list[int], top: int) -> list[TokenLogprobs]:
        """Return the log-probabilities of the tokens that row `row` yielded, each with the `top` most likely tokens."""
        own, ranks, ids, most = self._logprobs[row], self._ranks[row], self._top_ids[row], self._top_logprobs[row]
        found = []
        for i, token in enumerate(token_ids):  # half the time of a comprehension over zip
            found.append(TokenLogprobs(token, own[i], ranks[i], ids[i][:top], most[i][:top]))
        return found


def gather_prompt_outputs(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Store the values of a chunk's prompt tokens that the request asks for."""
    if row.prompt_logprobs is not None:
        _gather_logprobs(request, row, index, sampled)
    if request.prompt_extras is not None and sampled.extras is not None:
        request.prompt_extras.add(sampled.extras, index, row.start)


def _gather_logprobs(request: Request, row: ScheduledRow, index: int, sampled: SampledTokens) -> None:
    """Store a prompt chunk's log-probabilities at their positions. Positions beyond the prompt are skipped."""
    arrays = (sampled.prompt_logprobs or {}).get(index)
    entries, prompt, top = request.prompt_logprobs, request.prompt_token_ids, row.prompt_logprobs
    if arrays is None or entries is None:
        return
    first = row.start + 1
    known = max(0, min(len(arrays[0]), len(prompt) - first))
    logprobs, ranks = (array[:known].tolist() for array in arrays[:2])
    top_ids, top_logprobs = (array[:known, :top].tolist() for array in arrays[2:])
    found = None if sampled.extras is None else (sampled.extras.prompt_id_logprobs or {}).get(index)
    count = len(request.params.extras.logprob_token_ids)
    of_ids = [[]] * known if found is None else found[:known, :count].tolist()
    columns = zip(prompt[first : first + known], logprobs, ranks, top_ids, top_logprobs, of_ids, strict=True)
    entries[first : first + known] = [TokenLogprobs(*column) for column in columns]


def too_many_candidates(row: ScheduledRow, index: int, extras: StepExtras | None) -> str | None:
    """Return the error of a row whose token has more candidates than the server reports; None if they fit."""
    if row.extras is None or not row.extras.sampling_mask:
        return None
    assert extras is not None and extras.sampling_masks is not None
    count, limit = int(extras.sampling_masks.counts[index]), extras.sampling_masks.ids.shape[1]
    if count <= limit:
        return None
    message = f"a token was drawn from {count} candidates, of which return_sampling_mask gives at most {limit}"
    return f"{message}: set top_k, or a lower top_p"


def add_extras(result: TokenOutput, row: ScheduledRow, index: int, extras: StepExtras | None) -> None:
    """Add the extra outputs that `row` asks for to `result`, whose log-probabilities are set.

    The row yielded one token.
    """
    asked = row.extras
    if asked is None or not result.token_ids:
        return
    assert extras is not None
    if asked.logprob_token_ids and result.logprobs:
        assert extras.id_logprobs is not None
        values = extras.id_logprobs[index, : len(asked.logprob_token_ids)].tolist()
        result.logprobs = [_with_ids(entry, values) for entry in result.logprobs]
    result.extras = result.extras or TokenExtras()
    extras.add_token(asked, index, result.extras)


def _with_ids(entry: TokenLogprobs, values: list[float]) -> TokenLogprobs:
    return TokenLogprobs(entry.token_id, entry.logprob, entry.rank, entry.top_ids, entry.top_logprobs, values)


def ask_prompt_outputs(request: Request) -> None:
    """Prepare to collect the values of prompt tokens that a request asks for, unless they were sent already."""
    if request.is_answered:
        return
    if request.params.prompt_logprobs is not None:
        unknown: list[TokenLogprobs | None] = [None]
        request.prompt_logprobs = unknown * request.num_prompt_tokens
    request.prompt_extras = PromptExtras.of(request.params.extras)


def take_prompt_outputs(request: Request, result: TokenOutput) -> None:
    """Move the collected values of all prompt tokens into `result`, once."""
    result.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
    if request.prompt_extras is not None:
        result.extras = request.prompt_extras.joined(request.num_prompt_tokens)
        request.prompt_extras = None


def report_first(request: Request, result: TokenOutput, now: float, counters: Counters) -> None:
    """Add the values that are sent once to the first output of a request. now: seconds"""
    if request.is_answered:
        return
    result.num_cached_tokens = request.num_cached_tokens
    take_prompt_outputs(request, result)
    if request.first_token is None:
        assert request.admitted is not None
        request.first_token = now
        before = request.prefilled or Prefilled()
        result.queue_seconds = before.queue_seconds + request.admitted - request.arrival
        result.first_token_seconds = before.seconds + now - request.arrival
        counters.first_tokens += 1
        counters.first_token_seconds += result.first_token_seconds
