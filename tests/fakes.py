"""A device that can be computed by hand: its next token is a function of the tokens that it finds in its own pages.

Whatever goes wrong between scheduler and pages (a page in two hands, a wrong offset, a slot reused too early) changes
what a row reads and so its tokens, or trips an assertion. Steps run when they are read, so that an array or list that
the host changes after dispatch shows as well.
"""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.types.extras import StepExtras
from jaxserve.types.picture import Picture, PictureInfo
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.scheduling import STATE_COLUMNS, STATE_EMITS, GroupSizes, Reach, SchedulerConfig
from jaxserve.types.step import (
    EncodePart,
    FinishReason,
    Request,
    RowStatus,
    SampledTokens,
    ScheduledRow,
    SchedulerOutput,
    SlotInit,
    TableUpdate,
    TokenOutput,
)

if TYPE_CHECKING:  # the runtime imports jax, which most tests with a fake device do without
    from jaxserve.runtime.memory import MemoryPlan

VOCAB = 97
PLACEHOLDER = 96  # of the pictures
FIRST_ROW = 2**32  # the first number that stands for a picture's row; a tokenizer may have ids beyond VOCAB
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # log-probabilities, ranks, top ids, theirs

EMPTY = -1  # of an offset in a page that was never written
NAN = -2  # of one whose content is not finite


def next_token(context: Sequence[int] | np.ndarray, seed: int = 0) -> int:
    """Every token counts by its position, so that a missing, stale or moved one is seen."""
    tokens = np.asarray(context, np.int64)
    return int((tokens + 1) @ np.arange(1, len(tokens) + 1) + seed) % VOCAB


def embedding_of(context: Sequence[int] | np.ndarray) -> np.ndarray:
    """float32 [2]: every token counts by its position."""
    return np.array([next_token(context), len(context)], np.float32)


def masked_next_token(context: Sequence[int] | np.ndarray, seed: int, mask: np.ndarray | None) -> int:
    """The first allowed token from `next_token` on, cyclically. mask: int32 [ceil(VOCAB/32)]."""
    token = next_token(context, seed)
    if mask is None:
        return token
    allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB]
    return int((token + np.argmax(np.roll(allowed, -token))) % VOCAB)


def seed_of(params: SamplingParams, adapter: str = "") -> int:
    """What makes one request's tokens differ from another's of the same prompt. adapter: its digest, "" for none"""
    return ((params.seed or 0) if params.temperature else 0) + zlib.crc32(adapter.encode())


def seen_prompt(request: EngineRequest) -> list[int]:
    """The prompt as the device has it: each token of a picture is a number that no other picture and place has."""
    found = list(request.prompt_token_ids)
    for picture in request.pictures:
        found[picture.start : picture.end] = rows_of(picture)
    return found


def rows_of(picture: Picture) -> list[int]:
    first = FIRST_ROW + int.from_bytes(picture.digest[:3], "big") * 100
    return list(range(first, first + picture.num_tokens))


def alone(
    prompt: Sequence[int], params: SamplingParams, eos: Container[int] = (), room: int = 10**6, adapter: str = ""
) -> tuple[list[int], FinishReason]:
    """What a request yields that has the device to itself, by the definition of its parameters. room: of max_tokens."""
    seed = seed_of(params, adapter)
    context, output = list(prompt), list[int]()
    limit = room if params.max_tokens is None else min(params.max_tokens, room)
    while len(output) < limit:
        token = next_token(context, seed)
        context.append(token)
        output.append(token)
        stops = token in params.stop_token_ids or (token in eos and not params.ignore_eos)
        if stops and len(output) >= params.min_tokens:
            return output, FinishReason.STOP
    return output, FinishReason.LENGTH


class OracleDrafter:
    """Guesses right with a probability, and wrong otherwise. `outputs`: what each request yields."""

    def __init__(self, rng: Random, right: float) -> None:
        self.outputs: dict[str, list[int]] = {}
        self._rng = rng
        self._right = right

    def propose(self, request: Request, most: int) -> list[int]:
        return self.guess(request.request_id, len(request.output_token_ids), most)

    def guess(self, request_id: str, done: int, most: int) -> list[int]:
        right = self.outputs.get(request_id, [])[done : done + most]
        return [token if self._rng.random() < self._right else self._rng.randrange(VOCAB) for token in right]

    def anything(self, request_id: str, done: int, most: int) -> list[int]:
        """What a broken draft model might give: no tokens between tokens, and more of them than there is room for."""
        rng = self._rng
        wrong = (-1, -2, -(2**31), VOCAB, 2**31 - 1)
        guesses = self.guess(request_id, done, 2 * most + 3) + rng.choices(range(VOCAB), k=rng.randrange(3))
        return [rng.choice(wrong) if rng.random() < 0.3 else token for token in guesses]

    def forget(self, request_id: str) -> None:
        self.outputs.pop(request_id, None)


RING = 2  # tokens before the row that a state page keeps, beside what it has folded


def folded(value: int, token: int) -> int:
    """The state after one more token: a hash of all tokens so far, in their order."""
    return (value * 1_000_003 + token + 1) % (2**61 - 1)


@dataclass(frozen=True)
class FakeState:
    """A page of states: the hash of `count` tokens, and the tokens of the last positions."""

    value: int = 0
    count: int = 0
    ring: dict[int, int] = field(default_factory=dict)

    def fold(self, tokens: Iterable[int]) -> FakeState:
        value, count = self.value, self.count
        for token in tokens:
            value, count = folded(value, token), count + 1
        return replace(self, value=value, count=count)


@dataclass
class FakeSlot:
    """The slot state of the device."""

    init: SlotInit
    page_table: list[int] = field(default_factory=list)
    tables: dict[int, dict[int, int]] = field(default_factory=dict)  # of each layer group from 1 on: page by index
    position: int = 0
    last_token: int = EMPTY
    states: list[int] = field(default_factory=lambda: [EMPTY] * STATE_COLUMNS)  # the columns of the table of states


class FakeStep:
    """A StepHandle. Runs when it is asked, after all steps before it."""

    def __init__(self, runner: FakeRunner, output: SchedulerOutput) -> None:
        self.output = output
        self.seen = {span: {page for row in output.rows for page in runner.seen_by(row, span)} for span in runner.spans}
        self.writes = {page: row.request_id for row in output.rows for page in runner.pages_written(row)}
        self.sampled: SampledTokens | None = None
        self.bitmask: np.ndarray | None = None
        self.late: Sequence[int] = ()
        self._runner = runner

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        assert self.output.masked and self.bitmask is None
        assert all(self.output.rows[row].masked for row in late)
        self.late = list(late)
        rows = len(self.output.rows) + self.output.num_drafts
        assert bitmask.shape == (rows, -(-VOCAB // 32)) and bitmask.dtype == np.int32
        self.bitmask = bitmask

    def result(self) -> SampledTokens:
        assert not self.output.masked or self.bitmask is not None
        self._runner.run_until(self)
        assert self.sampled is not None
        return self.sampled


class FakeRunner:
    """A StepRunner of `config`'s sizes.

    not_finite   request ids whose hidden states are NaN from the position `nan_from` on
    guess        the drafts of a draft model: (request id, number of its output tokens, most drafts) -> tokens
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        not_finite: Container[str] = (),
        nan_from: int = 0,
        guess: Callable[[str, int, int], list[int]] | None = None,
    ) -> None:
        self.config = config
        self.not_finite = not_finite
        self.nan_from = nan_from
        self.guess = guess
        self.followed = np.zeros((config.num_pages, config.page_size), bool)  # whether the draft model computed it
        self.host_followed = np.zeros((config.num_host_pages, config.page_size), bool)
        self.pages = np.full((config.num_pages, config.page_size), EMPTY, np.int64)
        self.spans = dict(enumerate(config.spans, start=1))  # of the layer groups from 1 on
        sizes = [group.num_pages for group in config.groups]
        self.states: list[FakeState | None] = [None] * (config.states.num_pages if config.states else 0)
        self.of_groups = [self.pages, *(np.full((count, config.page_size), EMPTY, np.int64) for count in sizes)]
        counts = config.num_host_pages, *(group.num_host_pages for group in config.groups)
        self.host = [np.full((count, config.page_size), EMPTY, np.int64) for count in counts]
        self.slots: dict[int, FakeSlot] = {}
        self.pool: dict[int, int] = {}  # of the rows of pictures
        self.adapters: dict[int, str] = {}
        self._encoding: tuple[tuple[Picture, ...], int] = (), 0  # pictures, and how many pieces were run
        self.num_steps = 0
        self.num_read_nan = 0  # rows of other requests that read what is not finite
        self._tables: dict[int, list[int]] = {}  # as dispatched: ahead of `slots`
        self._group_tables: dict[tuple[int, int], dict[int, int]] = {}  # by slot and group
        self._unread: deque[FakeStep] = deque()
        self._rests = False  # the draft model, in the step that runs

    def num_compiles(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""

    def rebuild(self) -> None:
        for pages in self.of_groups:
            pages.fill(EMPTY)
        self.states = [None] * len(self.states)
        self.slots.clear()
        self._tables.clear()
        self._group_tables.clear()
        self._unread.clear()
        self.pool.clear()
        self.adapters.clear()

    # --- dispatch

    def execute(self, output: SchedulerOutput) -> FakeStep:
        rows, config = output.rows, self.config
        assert rows or output.page_moves or output.encodes
        assert sum(row.num_tokens for row in rows) == output.num_tokens <= config.max_num_batched_tokens
        assert len({row.slot for row in rows}) == len(rows) <= config.max_num_seqs
        assert all(row.num_tokens == 1 and not row.token_ids for row in rows[: output.num_decode_rows])
        assert all(len(row.token_ids) == row.num_tokens for row in rows[output.num_decode_rows :])
        assert all(row.samples for row in rows if row.masked)
        assert not output.num_drafts or (output.num_decode_rows == len(rows) and not self._unread)
        assert not output.num_drafts or len(rows) + output.num_drafts <= config.verify_sizes[-1]
        assert all(len(row.drafts) <= config.max_drafts for row in rows)
        assert all(0 <= draft < VOCAB for row in rows for draft in row.drafts), "a draft that is no token"
        assert not output.draft_room or (self.guess and len(output.draft_room) == len(rows) <= config.draft_rows)
        assert not output.rests or (self.guess and output.num_decode_rows == len(rows) and not output.draft_room)
        assert all(not step.output.masked or step.bitmask is not None for step in self._unread)
        self._check_moves(output)
        if not (rows or output.encodes):
            assert not self._unread
            self._move_pages(output)
            return FakeStep(self, output)
        admitted = {init.slot for init in output.slot_inits}
        assert not admitted & {row.slot for step in self._unread for row in step.output.rows}, "a slot reused too early"
        for slot in admitted:
            self._tables[slot] = []
            self._group_tables |= {(slot, group): {} for group in self.spans}
        for row in rows:
            self._extend_table(row, row.slot in admitted, config.max_drafts if output.draft_room else 0)
        for row, room in zip(rows, output.draft_room, strict=bool(output.draft_room)):
            assert room == len(self._tables[row.slot]) * config.page_size, "the pages of another request"
        places = [(u.slot, u.group, u.first + i) for u in output.table_updates for i in range(len(u.page_ids))]
        assert len(set(places)) == len(places), "an entry twice, of which a device may write either"
        starts = {row.slot: row.start // config.page_size for row in rows}
        for update in output.table_updates:
            if update.group in self.spans:
                self._extend_group_table(update, starts[update.slot])
        step = FakeStep(self, output)
        self._unread.append(step)
        self.num_steps += 1
        return step

    def _check_moves(self, output: SchedulerOutput) -> None:
        """What a step in flight writes is not copied, and what it reads is not overwritten."""
        written = {page for step in self._unread for page in step.writes}
        seen = {group: {page for step in self._unread for page in step.seen[group]} for group in self.spans}
        used = {0: written} | seen
        moved = [move for move in output.page_moves if move.kind in ("store", "load")]
        assert not any(move.page_id in used[move.group] for move in moved), "a page moved too early"

    def _extend_table(self, row: ScheduledRow, first: bool, ahead: int) -> None:
        table, new = self._tables[row.slot], row.new_page_ids
        assert not new or row.first_new_page == len(table)
        assert first or len(new) <= -(-(1 + len(row.drafts) + ahead) // self.config.page_size)
        for step in self._unread:
            others = [page for page in new if step.writes.get(page, row.request_id) != row.request_id]
            assert not others, "a page reused too early"
        table += new
        assert len(table) <= -(-self.config.max_sequence_tokens // self.config.page_size)

    def _extend_group_table(self, update: TableUpdate, start: int) -> None:
        """What a step in flight sees or writes is nobody's to write, not even the request's whose it was."""
        table, shared = self._group_tables[update.slot, update.group], max(0, start - update.first)
        own = set(update.page_ids[shared:])
        assert not any(step.seen[update.group] & own for step in self._unread), "a page reused too early"
        assert not table or update.first == max(table) + 1
        table.update(zip(itertools.count(update.first), update.page_ids, strict=False))

    def seen_by(self, row: ScheduledRow, group: int) -> set[int]:
        """Pages of a layer group that a row reads or writes."""
        size, table = self.config.page_size, self._group_tables[row.slot, group]
        last = row.start + row.num_tokens - 1 + len(row.drafts)
        return {table[i] for i in range(self._oldest(group, row.start) // size, last // size + 1) if i in table}

    def _oldest(self, group: int, position: int) -> int:
        """First position that a token sees in the layers of a group."""
        kind, tokens = self.spans[group].reach
        return position // tokens * tokens if kind == "chunk" else max(0, position - tokens + 1)

    def pages_written(self, row: ScheduledRow) -> set[int]:
        size, table = self.config.page_size, self._tables[row.slot]
        last = row.start + row.num_tokens - 1 + len(row.drafts)
        return set(table[row.start // size : last // size + 1])

    # --- the device

    def run_until(self, last: FakeStep) -> None:
        assert last in self._unread, "read twice"
        while self._unread:
            step = self._unread.popleft()
            self._run(step)
            if step is last:
                return

    def _move_pages(self, output: SchedulerOutput) -> None:
        for move in output.page_moves:
            pages, host = self.of_groups[move.group], self.host[move.group]
            if move.kind == "store":
                host[move.slot] = pages[move.page_id]
            elif move.kind == "load":
                pages[move.page_id] = host[move.slot]
            if move.group == 0 and move.kind == "store":
                self.host_followed[move.slot] = self.followed[move.page_id]
            elif move.group == 0 and move.kind == "load":
                self.followed[move.page_id] = self.host_followed[move.slot]

    def _run(self, step: FakeStep) -> None:
        self._move_pages(step.output)
        for init in step.output.slot_inits:
            assert self.config.pictures or not init.position_delta
            self.slots[init.slot] = FakeSlot(init, tables={group: {} for group in self.spans})
        for update in step.output.table_updates:
            if update.group not in self.spans:
                self.slots[update.slot].states[update.first : update.first + len(update.page_ids)] = update.page_ids
                continue
            new = zip(itertools.count(update.first), update.page_ids, strict=False)
            self.slots[update.slot].tables[update.group].update(new)
        self.adapters |= step.output.adapter_writes
        rows, self._rests = [self._with_pictures(row) for row in step.output.rows], step.output.rests
        if self.states:
            self._advance_states(rows)
        tokens = np.full((len(rows), 1 + max((len(row.drafts) for row in rows), default=0)), EMPTY, np.int32)
        valid = np.zeros(len(rows), np.int32)
        status = np.zeros(len(rows), np.uint8)
        ends = list(itertools.accumulate(1 + len(row.drafts) for row in rows))
        for i, row in enumerate(rows):
            first = ends[i] - 1 - len(row.drafts)
            masks = step.bitmask[first : ends[i]] if row.masked and step.bitmask is not None else None
            mask = None if masks is None else masks[0]
            if i in step.late:
                status[i] = self._run_late(row)
                continue
            new = self._run_row(row, masks)
            tokens[i, : len(new)], valid[i] = new, len(new)
            status[i] = self._status(row, mask)
        logprobs = self._logprobs(tokens) if any(row.logprobs is not None for row in rows) else ()
        step.sampled = SampledTokens(
            tokens,
            valid,
            status,
            *logprobs,
            prompt_logprobs=self._prompt_logprobs(rows),
            embeddings={
                i: embedding_of(self._context(self.slots[row.slot])) for i, row in enumerate(rows) if row.embed
            },
            extras=StepExtras() if any(row.extras is not None for row in rows) else None,
            drafts=self._drafts(step.output) if step.output.draft_room else None,
        )
        for part in step.output.encodes:
            self._encode(part)

    def _with_pictures(self, row: ScheduledRow) -> ScheduledRow:
        """The row with the pool's rows in place of the tokens that stand for pictures."""
        if row.pictures is None:
            return row
        pairs = zip(row.token_ids, row.pictures.rows.tolist(), strict=True)
        return msgspec.structs.replace(row, token_ids=[token if at < 0 else self.pool[at] for token, at in pairs])

    def _encode(self, part: EncodePart) -> None:
        """Run pieces on pictures. Parts of other pictures never come between."""
        limits = self.config.pictures
        assert limits is not None
        pieces = limits.pieces[limits.size_of(sum(picture.num_patches for picture in part.pictures))]
        assert part.first < part.last and (part.first == 0 or self._encoding == (part.pictures, part.first))
        self._encoding = part.pictures, part.last
        if part.last == len(pieces):
            rows = itertools.chain.from_iterable(map(rows_of, part.pictures))
            self.pool |= {at: row for at, row in zip(part.rows, rows, strict=True) if at < limits.num_rows}

    def _drafts(self, output: SchedulerOutput) -> np.ndarray:
        """What the draft model guesses after each row. It ends where the row's pages do.

        Where it has not computed a token of the row, all its guesses are others than they would be.
        """
        assert self.guess is not None
        drafts = np.full((len(output.rows), 3 * self.config.max_drafts + 9), -1, np.int32)
        for i, (row, room) in enumerate(zip(output.rows, output.draft_room, strict=True)):
            slot = self.slots[row.slot]
            most = max(0, min(self.config.max_drafts, room - slot.position))
            found = self.guess(row.request_id, slot.position + 1 - slot.init.num_prompt_tokens, most)
            if not self.followed[slot.page_table].reshape(-1)[: slot.position].all():
                found = [(token + 1) % VOCAB for token in found]
            drafts[i, : len(found)] = found
        return drafts

    def _advance_states(self, rows: list[ScheduledRow]) -> None:
        """Fold the tokens of all rows at once: each reads what was there before the step."""
        sizes, before, reads, writes = self.config.states, list(self.states), list[int](), list[list[int]]()
        assert sizes is not None
        for row in rows:
            slot = self.slots[row.slot]
            table, tokens = slot.states, row.token_ids or [slot.last_token, *row.drafts]
            start = row.start if row.token_ids else slot.position
            state, written = FakeState(), list[int]()
            if table[0] < len(before):
                found = before[table[0]]
                assert found is not None, "a state that was never written"
                state = found
            assert state.count == table[2], "a state of another number of tokens"
            known = state.ring | dict(zip(itertools.count(start), tokens, strict=False))
            end = start + len(tokens)
            sure = end - 1 if row.token_ids else start  # drafts may be wrong
            kept = {sure: [table[1]]}
            # The program of decode rows without drafts looks at one entry.
            num_entries = STATE_EMITS if row.token_ids or row.drafts else 1
            for position, page in list(zip(table[3::2], table[4::2], strict=True))[:num_entries]:
                if table[2] < position <= sure and page < len(before):
                    assert position % sizes.border == 0, "a state that no kernel keeps"
                    kept.setdefault(position, []).append(page)
            for position in range(state.count, sure + 1):
                for page in kept.get(position, ()):
                    written.append(page)
                    last = end if page == table[1] else position
                    ring = {place: token for place, token in known.items() if position - RING <= place < last}
                    self.states[page] = replace(state, ring=ring)
                state = state.fold([known[position]]) if position < sure else state
            reads.append(table[0])
            writes.append(written)
            table[0], table[2] = table[1], sure
        assert len(set(itertools.chain(*writes))) == sum(map(len, writes)), "two rows write the same state"
        for i, written in enumerate(writes):
            assert not {*reads[:i], *reads[i + 1 :]} & set(written), "a row writes a state that another one reads"

    def _check_state(self, slot: FakeSlot) -> None:
        """What the own page of a slot has folded is what its pages hold."""
        state = self.states[slot.states[1]]
        assert state is not None
        tokens = self._context(slot)[: state.count].tolist()
        assert NAN in tokens or state.value == FakeState().fold(tokens).value, "another's token in a state"

    def _status(self, row: ScheduledRow, mask: np.ndarray | None) -> RowStatus:
        if row.request_id in self.not_finite and self.slots[row.slot].position > self.nan_from:
            return RowStatus.NOT_FINITE
        nothing = mask is not None and not np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].any()
        return RowStatus.NOTHING_ALLOWED if nothing else RowStatus.FINE

    def _run_row(self, row: ScheduledRow, masks: np.ndarray | None) -> list[int]:
        slot = self.slots[row.slot]
        slot.page_table += row.new_page_ids
        if row.token_ids:
            slot.position = row.start
        assert slot.position == row.start
        nan_from = self.nan_from if row.request_id in self.not_finite else None
        self._write(slot, row.token_ids or [slot.last_token], nan_from)
        self.num_read_nan += nan_from is None and NAN in self._context(slot)
        if self.states:
            self._check_state(slot)
        if not row.samples:
            return []
        if row.token_ids and nan_from is None:
            context = self._context(slot).tolist()
            assert [PLACEHOLDER if token >= FIRST_ROW else token for token in context] == slot.init.token_ids
        new = [self._sample(slot, None if masks is None else masks[0])]
        right = True
        for i, draft in enumerate(row.drafts, start=1):
            self._write(slot, [draft], nan_from)
            if right := right and draft == new[-1] and nan_from is None:
                new.append(self._sample(slot, None if masks is None else masks[i]))
        slot.position = row.start + row.num_tokens - 1 + len(new)
        slot.last_token = new[-1]
        return new

    def _run_late(self, row: ScheduledRow) -> RowStatus:
        """Pages are written, and the slot stays before its last token. Only of a prompt's chunk is the status known."""
        slot = self.slots[row.slot]
        position = row.start + row.num_tokens - 1 if row.token_ids else slot.position
        before = slot.init.token_ids[position] if row.token_ids else slot.last_token
        self._run_row(msgspec.structs.replace(row, samples=False), None)
        status = self._status(row, None) if row.token_ids else RowStatus.FINE
        slot.position, slot.last_token = position, before
        return status

    def _write(self, slot: FakeSlot, tokens: Iterable[int], nan_from: int | None) -> None:
        first = slot.position
        for token in tokens:
            page, offset = divmod(slot.position, self.config.page_size)
            content = token if nan_from is None or slot.position < nan_from else NAN
            self.pages[slot.page_table[page], offset] = content
            self.followed[slot.page_table[page], offset] = not self._rests
            for group, table in slot.tables.items():
                self.of_groups[group][table[page], offset] = content
            slot.position += 1
        for group in self.spans:
            self._check_seen(slot, group, self._oldest(group, first))

    def _check_seen(self, slot: FakeSlot, group: int, oldest: int) -> None:
        """What tokens see in the layers of a group from position `oldest` on is what the others hold."""
        places = [divmod(position, self.config.page_size) for position in range(oldest, slot.position)]
        seen = [self.of_groups[group][slot.tables[group][page], offset] for page, offset in places]
        assert seen == self._context(slot)[oldest:].tolist(), "another's token in a window"

    def _context(self, slot: FakeSlot) -> np.ndarray:
        context = self.pages[slot.page_table].reshape(-1)[: slot.position]
        assert (context != EMPTY).all(), "a position was read that was never written"
        return context

    def _sample(self, slot: FakeSlot, mask: np.ndarray | None) -> int:
        adapter = self.adapters[slot.init.adapter] if slot.init.adapter >= 0 else ""
        seed = (slot.init.seed if slot.init.params.temperature else 0) + zlib.crc32(adapter.encode())
        return masked_next_token(self._context(slot), seed, mask)

    def _logprobs(self, tokens: np.ndarray) -> Arrays:
        """A token's log-probability is minus itself, its rank itself, and the k-th most likely one is k tokens on."""
        top = (tokens[..., None] + np.arange(20)) % VOCAB
        return -tokens.astype(np.float32), tokens, top, -top.astype(np.float32)

    def _prompt_logprobs(self, rows: list[ScheduledRow]) -> dict[int, Arrays] | None:
        """As `_logprobs`, of the prompt tokens that follow those of each chunk."""
        result: dict[int, Arrays] = {}
        for i, row in enumerate(rows):
            if row.prompt_logprobs is not None and row.token_ids:
                init = self.slots[row.slot].init
                following = init.token_ids[: init.num_prompt_tokens][row.start + 1 : row.start + row.num_tokens + 1]
                if following:
                    result[i] = self._logprobs(np.array(following, np.int32))
        return result or None


# --- driving an engine


def small_config(**changes: object) -> SchedulerConfig:
    sizes: dict[str, object] = {
        "num_pages": 64,
        "page_size": 4,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": 128,
    }
    return SchedulerConfig(**(sizes | with_window(changes)))  # type: ignore[arg-type]


def groups_of(plan: MemoryPlan, changes: dict[str, Any]) -> tuple[GroupSizes, ...]:
    """The plan's layer groups, with pages as `num_window_pages` and `num_host_window_pages` in `changes` say."""
    pages, host = changes.pop("num_window_pages", None), changes.pop("num_host_window_pages", 0)
    return tuple(replace(group, num_pages=pages or group.num_pages, num_host_pages=host) for group in plan.group_sizes)


def with_window(changes: dict[str, object]) -> dict[str, object]:
    """The changes with one layer group in place of `window`, `num_window_pages` and `num_host_window_pages`."""
    window = changes.pop("window", None)
    sizes = [int(str(changes.pop(name, 0))) for name in ("num_window_pages", "num_host_window_pages")]
    if window is None:
        return changes
    return changes | {"groups": (GroupSizes(Reach("window", int(str(window))), *sizes),)}


PICTURES = PictureInfo(
    kind="fake", patch_size=1, merge_size=2, width=1, token_id=PLACEHOLDER, max_tokens=6, mean=(), std=()
)


def make_core(config: SchedulerConfig, **options: object) -> EngineCore:
    core_options = {
        key: options.pop(key)
        for key in ("eos_token_ids", "make_matcher", "mask_threads", "clock", "generates", "drafter", "on_close")
        if key in options
    }
    core_options["pictures"] = None if config.pictures is None else PICTURES
    core = CoreOptions(vocab_size=VOCAB, **core_options)  # type: ignore[arg-type]
    return EngineCore(FakeRunner(config, **options), config, core)  # type: ignore[arg-type]


@dataclass
class Transcript:
    """What the outputs of one request add up to."""

    token_ids: list[int] = field(default_factory=list)
    last: TokenOutput | None = None
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def reason(self) -> FinishReason | None:
        return self.last.finish_reason if self.last else None


class Transcripts(dict[str, Transcript]):
    """Collects outputs; a second last output, or anything after it, is an error."""

    def take(self, outputs: Iterable[TokenOutput]) -> None:
        for output in outputs:
            transcript = self.setdefault(output.request_id, Transcript())
            assert transcript.last is None, f"{output.request_id}: an output after the last one"
            transcript.token_ids += output.token_ids
            transcript.outputs.append(output)
            if output.finish_reason is not None:
                transcript.last = output


def drain(core: EngineCore) -> list[TokenOutput]:
    """Step until no work is left."""
    outputs: list[TokenOutput] = []
    while core.has_work:
        outputs += core.step()
    return outputs


def run_all(
    core: EngineCore,
    requests: Iterable[EngineRequest] = (),
    transcripts: Transcripts | None = None,
    max_steps: int = 10_000,
) -> Transcripts:
    """Add the requests and step to the end, with a check of the scheduler's integrity after every step."""
    transcripts = Transcripts() if transcripts is None else transcripts
    for request in requests:
        core.add(request)
    for _ in range(max_steps):
        if not core.has_work:
            return transcripts
        transcripts.take(core.step())
        core.scheduler.check_integrity()
    raise AssertionError(f"still busy after {max_steps} steps: {core.scheduler.stats()}")


def make_request(request_id: str, prompt: Sequence[int], **changes: object) -> EngineRequest:
    """`changes` are fields of EngineRequest or SamplingParams. Greedy unless a temperature is given."""
    fields = {key: changes.pop(key) for key in list(changes) if key in EngineRequest.__struct_fields__}
    params = SamplingParams(**({"temperature": 0.0} | changes))  # type: ignore[arg-type]
    return EngineRequest(request_id=request_id, prompt_token_ids=list(prompt), params=params, **fields)  # type: ignore[arg-type]
