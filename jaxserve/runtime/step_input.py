"""The input of a step as one int32 array: packed on the host, unpacked inside the jitted program.

Both ends of the layout are here. Every `pack_*` returns a newly allocated array that must not be changed: the CPU
client reads host memory in place while the step runs.

    decode  [B]     header | B x slot | U x (slot, page index, page id), U = B x groups of layers
    hidden  [B]     decode [B] | B x offset | B x token id
    extend  [T, R]  R x (slot, start, tokens) | T x token id | U x (slot, page index, page id)
    head    [R]     header | R x (slot, token index)
    verify  [T, R]  header | R x (slot, token index, drafts) | T x draft
    draft   [R]     R x (slot, tokens that fit its pages)

With a draft model, `decode`, `hidden` and `extend` have one more number at their end: whether it rests (`pack_rests`).

Padding rows and padding page updates have slot S = max_num_seqs, which scatters drop. A token id of -1 means the
slot's last token, and a start of -1 the slot's position: the host does not know them while a step is in flight. An
offset is added to the slot's position: the drafts of a row follow its last token.

DeviceStep is a dispatched step, whose results are device arrays that are being copied to the host.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from jaxserve.runtime.sampling.extras import DeviceExtras, spread
from jaxserve.runtime.sampling.logprobs import unpack_logprobs
from jaxserve.runtime.sampling.sampler import Sampled
from jaxserve.runtime.sampling.slots import SlotState
from jaxserve.runtime.sampling.verify import VerifyInput
from jaxserve.types.extras import StepExtras
from jaxserve.types.step import RowStatus, SampledTokens, ScheduledRow, TableUpdate

PAGE_UPDATES = 256  # page-table entries per dispatch of `set_pages`
FROM_DEVICE = -1
_HEADER = 2  # flags of the head: log-probabilities wanted (2: candidates too), bitmask valid


class PageUpdates(msgspec.Struct, frozen=True, gc=False):
    """Page-table entries to write, as three lists of equal length."""

    slots: list[int]
    indices: list[int]
    page_ids: list[int]

    @classmethod
    def of(
        cls, rows: Sequence[ScheduledRow], table_updates: Sequence[TableUpdate] = (), columns: int = 0
    ) -> PageUpdates:
        """Collect the new pages of a step's rows and the entries of other layer groups.

        columns: of one group in page_table.
        """
        slots: list[int] = []
        indices: list[int] = []
        page_ids: list[int] = []
        for row in rows:
            if count := len(row.new_page_ids):
                slots += [row.slot] * count
                indices += range(row.first_new_page, row.first_new_page + count)
                page_ids += row.new_page_ids
        for update in table_updates:
            count, first = len(update.page_ids), update.group * columns + update.first
            slots += [update.slot] * count
            indices += range(first, first + count)
            page_ids += update.page_ids
        return cls(slots, indices, page_ids)

    def __len__(self) -> int:
        return len(self.slots)

    def split(self, count: int) -> tuple[PageUpdates, PageUpdates]:
        """Split into the first `count` entries and the rest."""
        fields = (self.slots, self.indices, self.page_ids)
        return PageUpdates(*(f[:count] for f in fields)), PageUpdates(*(f[count:] for f in fields))

    def write(self, out: np.ndarray) -> None:
        """Write the entries to out, int32 [3, n], whose unused columns already hold the padding slot."""
        count = len(self)
        out[0, :count], out[1, :count], out[2, :count] = self.slots, self.indices, self.page_ids


# --- host


def decode_size(num_rows: int, num_groups: int = 1) -> int:
    """Return the length of a packed decode step."""
    return _HEADER + (1 + 3 * num_groups) * num_rows


def hidden_size(num_rows: int, num_groups: int = 1) -> int:
    """Return the length of a packed decode step without sampler."""
    return decode_size(num_rows, num_groups) + 2 * num_rows


def verify_size(num_tokens: int, num_rows: int) -> int:
    """Return the length of a packed verify input."""
    return _HEADER + 3 * num_rows + num_tokens


def draft_size(num_rows: int) -> int:
    """Return the length of a packed draft input."""
    return 2 * num_rows


def extend_size(num_tokens: int, num_rows: int, num_updates: int) -> int:
    """Return the length of a packed extend step."""
    return 3 * num_rows + num_tokens + 3 * num_updates


def head_size(num_rows: int) -> int:
    """Return the length of a packed head_sample input."""
    return _HEADER + 2 * num_rows


def pack_decode(
    rows: Sequence[ScheduledRow],
    updates: PageUpdates,
    bucket: int,
    num_slots: int,
    want_logprobs: bool,
    num_groups: int = 1,
) -> np.ndarray:
    """Pack at most `bucket` rows, and as many page updates per group -> int32 [decode_size(bucket, num_groups)]."""
    packed = np.zeros(decode_size(bucket, num_groups), np.int32)
    packed[0] = want_logprobs
    packed[_HEADER : _HEADER + (1 + num_groups) * bucket] = num_slots
    packed[_HEADER : _HEADER + len(rows)] = [row.slot for row in rows]
    updates.write(packed[_HEADER + bucket :].reshape(3, -1))
    return packed


def pack_hidden(
    rows: Sequence[ScheduledRow], updates: PageUpdates, bucket: int, num_slots: int, num_groups: int = 1
) -> np.ndarray:
    """Pack rows of at most `bucket` tokens, drafts included, as `pack_decode` -> int32 [hidden_size(...)]."""
    packed = np.zeros(hidden_size(bucket, num_groups), np.int32)
    packed[_HEADER : _HEADER + (1 + num_groups) * bucket] = num_slots
    tokens = [(row.slot, i, token) for row in rows for i, token in enumerate((FROM_DEVICE, *row.drafts))]
    offsets, literals = packed[-2 * bucket :].reshape(2, bucket)
    packed[_HEADER : _HEADER + len(tokens)], offsets[: len(tokens)], literals[: len(tokens)] = zip(*tokens, strict=True)
    updates.write(packed[_HEADER + bucket : -2 * bucket].reshape(3, -1))
    return packed


def pack_verify(
    rows: Sequence[ScheduledRow], size: tuple[int, int], num_slots: int, late: Collection[int] = (), *, masked: bool
) -> np.ndarray:
    """Pack rows of a step of (tokens, rows) at most -> int32 [verify_size(...)]. late: rows that get no token."""
    num_tokens, num_rows = size
    packed = np.zeros(verify_size(num_tokens, num_rows), np.int32)
    packed[:_HEADER] = any(row.logprobs is not None for row in rows), masked
    table = packed[_HEADER : _HEADER + 3 * num_rows].reshape(3, num_rows)
    drafts = packed[_HEADER + 3 * num_rows :]
    table[0] = num_slots
    first = 0
    for i, row in enumerate(rows):
        count = len(row.drafts)
        table[:, i] = num_slots if i in late else row.slot, first, count
        drafts[first : first + count] = row.drafts
        first += 1 + count
    return packed


def pack_draft(rows: Sequence[ScheduledRow], room: Sequence[int], bucket: int, num_slots: int) -> np.ndarray:
    """Pack the rows of a step that yield a token -> int32 [draft_size(bucket)]; the others get no drafts.

    room: tokens that fit the pages of each row
    """
    packed = np.zeros((2, bucket), np.int32)
    packed[0] = num_slots
    packed[0, : len(rows)] = [row.slot if row.samples and not row.embed else num_slots for row in rows]
    packed[1, : len(rows)] = room
    return packed.reshape(-1)


def pack_extend(
    rows: Sequence[ScheduledRow],
    updates: PageUpdates,
    bucket: int,
    row_bucket: int,
    num_updates: int,
    num_slots: int,
) -> np.ndarray:
    """Pack at most `bucket` tokens, `row_bucket` rows, `num_updates` page updates -> int32 [extend_size(...)]."""
    packed = np.zeros(extend_size(bucket, row_bucket, num_updates), np.int32)
    table = packed[: 3 * row_bucket].reshape(3, row_bucket)
    tokens = packed[3 * row_bucket : 3 * row_bucket + bucket]
    updates_out = packed[3 * row_bucket + bucket :].reshape(3, num_updates)
    count = len(rows)
    table[0], updates_out[0] = num_slots, num_slots
    table[0, :count] = [row.slot for row in rows]
    table[1, :count] = [row.start if row.token_ids else FROM_DEVICE for row in rows]
    table[2, :count] = [row.num_tokens for row in rows]
    literals: list[int] = []
    for row in rows:
        literals += row.token_ids or [FROM_DEVICE] * row.num_tokens
    tokens[: len(literals)] = literals
    updates.write(updates_out)
    return packed


def pack_rests(packed: np.ndarray, rests: bool) -> np.ndarray:
    """Return a packed forward pass int32 [n] with the flag at its end, [n + 1]. rests: as in SchedulerOutput"""
    return np.append(packed, np.int32(rests))


def pack_pictures(rows: Sequence[ScheduledRow], bucket: int) -> np.ndarray:
    """Pack the pictures of a step of at most `bucket` tokens -> int32 [4, bucket], see `StepPrograms.extend`."""
    packed = np.zeros((4, bucket), np.int32)
    packed[0] = -1
    first = 0
    for row in rows:
        if row.pictures is not None:
            packed[0, first : first + row.num_tokens] = row.pictures.rows
            packed[1:, first : first + row.num_tokens] = row.pictures.shifts
        first += row.num_tokens
    return packed


class HeadWishes(NamedTuple):
    """The outputs that a step's rows ask of head and sampler. masked: there is a token mask"""

    logprobs: bool = False
    masked: bool = False
    candidates: bool = False  # with them come log-probabilities


def pack_head(
    slots: Sequence[int],
    token_indices: Sequence[int],
    bucket: int,
    num_slots: int,
    wanted: HeadWishes = HeadWishes(),
) -> np.ndarray:
    """Pack the indices of the tokens to sample after, and their slots -> int32 [head_size(bucket)]."""
    packed = np.zeros(head_size(bucket), np.int32)
    packed[:_HEADER] = 2 if wanted.candidates else wanted.logprobs, wanted.masked
    table = packed[_HEADER:].reshape(2, bucket)
    table[0] = num_slots
    table[0, : len(slots)] = slots
    table[1, : len(slots)] = token_indices
    return packed


def pack_pages(updates: PageUpdates, num_slots: int) -> Iterator[np.ndarray]:
    """Yield the updates as int32 [3, PAGE_UPDATES] groups for `set_pages`."""
    while len(updates):
        group, updates = updates.split(PAGE_UPDATES)
        packed = np.full((3, PAGE_UPDATES), num_slots, np.int32)
        group.write(packed)
        yield packed


# --- device


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenInput:
    """The input of the model: T tokens of R rows.

    token_ids, positions: int32 [T]. row_of_token: int32 [T], R for padding. slots: int32 [R].
    starts, num_tokens: int32 [R], position of a row's first token and number of its tokens.
    """

    token_ids: jax.Array
    positions: jax.Array
    row_of_token: jax.Array
    slots: jax.Array
    starts: jax.Array
    num_tokens: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadInput:
    """The input of head and sampler: slots and token_indices int32 [R]; the others are bool scalars."""

    slots: jax.Array
    token_indices: jax.Array
    want_logprobs: jax.Array
    masked: jax.Array
    want_candidates: jax.Array


def set_pages(state: SlotState, packed: jax.Array) -> SlotState:
    """Write page-table entries. packed: int32 [3, n] of slot, index, page id."""
    slots, indices, page_ids = packed
    return state.replace(page_table=state.page_table.at[slots, indices].set(page_ids, mode="drop"))


def unpack_decode(packed: jax.Array, state: SlotState, num_groups: int = 1) -> tuple[SlotState, TokenInput, HeadInput]:
    """Unpack a decode step: packed int32 [decode_size(B)] -> the state with new pages, the tokens, the head's input.

    Token r is the only token of row r.
    """
    table = packed[_HEADER:].reshape(1 + 3 * num_groups, -1)
    state = set_pages(state, table[1:].reshape(3, -1))
    slots = table[0]
    tokens, index = _last_tokens(slots, state)
    return state, tokens, HeadInput(slots, index, packed[0] > 0, jnp.bool_(False), jnp.bool_(False))


def _last_tokens(slots: jax.Array, state: SlotState) -> tuple[TokenInput, jax.Array]:
    """Return the last token of each of R slots as a row of its own, and the rows' indices, int32 [R]."""
    live = slots < state.num_slots
    starts = jnp.where(live, state.position.at[slots].get(mode="clip"), 0)
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    tokens = TokenInput(
        token_ids=state.recent.at[slots, -1].get(mode="clip"),
        positions=starts,
        row_of_token=jnp.where(live, index, slots.shape[0]),
        slots=slots,
        starts=starts,
        num_tokens=live.astype(jnp.int32),
    )
    return tokens, index


def unpack_hidden(packed: jax.Array, state: SlotState, num_groups: int = 1) -> tuple[SlotState, TokenInput]:
    """Unpack a decode step without sampler: packed int32 [hidden_size(B)] -> the state with new pages, the tokens.

    Each token is a row of its own. Drafts come after the last token of their slot.
    """
    num_rows = (packed.shape[0] - _HEADER) // (3 + 3 * num_groups)
    state, tokens, _ = unpack_decode(packed[: -2 * num_rows], state, num_groups)
    offsets, literals = packed[-2 * num_rows :].reshape(2, num_rows)
    positions = tokens.positions + offsets
    token_ids = jnp.where(literals == FROM_DEVICE, tokens.token_ids, literals)
    return state, dataclasses.replace(tokens, token_ids=token_ids, positions=positions, starts=positions)


def unpack_rests(packed: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Unpack int32 [n + 1] of `pack_rests` -> (int32 [n], whether the draft model rests, a bool scalar)."""
    return packed[:-1], packed[-1] > 0


def unpack_verify(packed: jax.Array, num_rows: int) -> VerifyInput:
    """Unpack int32 [verify_size(T, R)]."""
    slots, first, num_drafts = packed[_HEADER : _HEADER + 3 * num_rows].reshape(3, num_rows)
    drafts = packed[_HEADER + 3 * num_rows :]
    return VerifyInput(slots, first, num_drafts, drafts, packed[0] > 0, packed[1] > 0)


def unpack_extend(packed: jax.Array, state: SlotState, num_tokens: int, num_rows: int) -> tuple[SlotState, TokenInput]:
    """Unpack an extend step: packed int32 [extend_size(T, R, U)] -> the state with new pages, and the ragged rows."""
    rows_end, tokens_end = 3 * num_rows, 3 * num_rows + num_tokens
    state = set_pages(state, packed[tokens_end:].reshape(3, -1))
    slots, starts, lengths = packed[:rows_end].reshape(3, num_rows)
    literals = packed[rows_end:tokens_end]
    starts = jnp.where(starts == FROM_DEVICE, state.position.at[slots].get(mode="clip"), starts)
    ends = jnp.cumsum(lengths)
    index = jnp.arange(num_tokens, dtype=jnp.int32)
    row = jnp.searchsorted(ends, index, side="right", method="compare_all").astype(jnp.int32)
    safe = jnp.minimum(row, num_rows - 1)
    positions = jnp.where(row < num_rows, starts[safe] + index - (ends - lengths)[safe], 0)
    last_tokens = state.recent.at[slots[safe], -1].get(mode="clip")
    token_ids = jnp.where(literals == FROM_DEVICE, last_tokens, literals)
    return state, TokenInput(token_ids, positions, row, slots, starts, lengths)


def unpack_draft(packed: jax.Array, state: SlotState) -> tuple[TokenInput, jax.Array]:
    """Unpack int32 [draft_size(R)] -> the last token of each row, and how many tokens fit its pages, int32 [R]."""
    slots, room = packed.reshape(2, -1)
    tokens, _ = _last_tokens(slots, state)
    return tokens, room


def unpack_head(packed: jax.Array) -> HeadInput:
    """Unpack int32 [head_size(R)]."""
    slots, token_indices = packed[_HEADER:].reshape(2, -1)
    return HeadInput(slots, token_indices, packed[0] > 0, packed[1] > 0, packed[0] > 1)


Pooled = tuple[Sequence[int], jax.Array]
PromptLogprobs = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class PromptChunk(NamedTuple):
    """Log-probabilities of `num_valid` prompt tokens on the device.

    packed: int32 [C, 2 + 2K] of `pack_logprobs`. id_logprobs: int32 [C, N], None if no ids are requested.
    """

    packed: jax.Array
    num_valid: int
    id_logprobs: jax.Array | None = None


class StepOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a step of R rows except its tokens. Arrays are on the device.

    logprobs        whether `Sampled.logprobs` are requested
    prompt          row -> the chunks of its log-probabilities, in order
    pooled          [(rows, embeddings [n and more, D], of these rows in order)]
    finite          bool [R and more]: whether a row's hidden states are finite; None: the sampler says it
    extras          None: no row requests extra outputs
    """

    logprobs: bool = False
    prompt: Mapping[int, list[PromptChunk]] = {}
    pooled: Sequence[Pooled] = ()
    finite: jax.Array | None = None
    extras: DeviceExtras | None = None

    def arrays(self) -> Iterator[jax.Array]:
        """Yield the arrays to copy to the host, without `Sampled`'s."""
        chunks = itertools.chain.from_iterable(self.prompt.values())
        wanted = itertools.chain(
            [self.finite],
            *((chunk.packed, chunk.id_logprobs) for chunk in chunks),
            (vectors for _, vectors in self.pooled),
            () if self.extras is None else self.extras.arrays(),
        )
        yield from (array for array in wanted if array is not None)


Finish = Callable[[np.ndarray, Collection[int]], Sampled]
Propose = Callable[[], jax.Array]


class DeviceStep:
    """The `StepHandle` of a step of R rows.

    sampling        the rows that got a token, ascending; they are first in `sampled`, in this order
    finish          of a masked step: bitmask of the sampling rows, and which of them get no token -> Sampled
    propose         dispatches the drafts that follow the sampled tokens, int32 [R and more, Q]; None: there are none
    """

    def __init__(
        self,
        num_rows: int,
        sampling: Sequence[int],
        sampled: Sampled | None,
        outputs: StepOutputs,
        finish: Finish | None = None,
        propose: Propose | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._sampling = sampling
        self._sampled = sampled
        self._outputs = outputs
        self._finish = finish
        self._propose = propose
        self._drafts: jax.Array | None = None
        self._late: list[int] = []
        for array in outputs.arrays():
            array.copy_to_host_async()
        self._copy_async()

    @property
    def waits_for_mask(self) -> bool:
        return self._finish is not None

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        """Dispatch head and sampler of a masked step. bitmask: int32 [R, W]. late: rows that get no token.

        Raises RuntimeError if the step is not masked or was sampled already.
        """
        if self._finish is None:
            raise RuntimeError("this step is not masked, or was sampled already")
        self._late = list(late)
        self._sampled = self._finish(bitmask[self._sampling], {self._sampling.index(row) for row in late})
        self._finish = None
        self._copy_async()

    def _copy_async(self) -> None:
        if self._sampled is not None:
            self._sampled.tokens.copy_to_host_async()
            if self._outputs.logprobs:
                self._sampled.logprobs.copy_to_host_async()
            if self._outputs.extras is not None:
                for array in self._outputs.extras.sampled_arrays(self._sampled):
                    array.copy_to_host_async()
            if self._propose is not None:
                self._drafts = self._propose()
                self._drafts.copy_to_host_async()

    def result(self) -> SampledTokens:
        """Wait for the step and return its tokens. Rows that did not sample have num_valid 0.

        Raises RuntimeError if the step still waits for `sample`.
        """
        if self._finish is not None:
            raise RuntimeError("a masked step has no result before sample(bitmask)")
        tokens = np.zeros((self._num_rows, 2), np.int32)
        valid = np.zeros(self._num_rows, np.int32)
        logprobs: tuple[np.ndarray | None, ...] = (None,) * 4
        if self._sampled is not None:
            tokens[self._sampling] = np.asarray(self._sampled.tokens)[: len(self._sampling)]
            valid[self._sampling] = 1
            tokens[self._late], valid[self._late] = 0, 0
            if self._outputs.logprobs:
                logprobs = self._spread_logprobs(np.asarray(self._sampled.logprobs))
        embeddings = fetch_embeddings(self._outputs.pooled)
        return SampledTokens(
            token_ids=tokens[:, :1],
            num_valid=valid,
            status=self._status(tokens[:, 1], embeddings),
            logprobs=logprobs[0],
            ranks=logprobs[1],
            top_ids=logprobs[2],
            top_logprobs=logprobs[3],
            prompt_logprobs={row: _join(chunks) for row, chunks in self._outputs.prompt.items()} or None,
            embeddings=embeddings,
            extras=None if self._outputs.extras is None else self._fetch_extras(self._outputs.extras),
            drafts=None if self._drafts is None else np.asarray(self._drafts)[: self._num_rows],
        )

    def _fetch_extras(self, extras: DeviceExtras) -> StepExtras:
        joined = {row: _join_ids(chunks) for row, chunks in self._outputs.prompt.items()}
        of_prompt = {row: values for row, values in joined.items() if values is not None}
        return extras.fetch(self._sampled, self._sampling, self._num_rows, of_prompt)

    def _status(self, sampled: np.ndarray, embeddings: Mapping[int, np.ndarray]) -> np.ndarray:
        """Return the RowStatus of each row, uint8 [R]. sampled: int32 [R], 0 for rows without a token."""
        status = sampled.astype(np.uint8)
        if self._outputs.finite is not None:
            status[~np.asarray(self._outputs.finite)[: self._num_rows]] = RowStatus.NOT_FINITE
        for row, embedding in embeddings.items():
            if not np.isfinite(embedding).all():
                status[row] = RowStatus.NOT_FINITE
        return status

    def _spread_logprobs(self, packed: np.ndarray) -> tuple[np.ndarray, ...]:
        rows = spread(packed, self._sampling, self._num_rows)
        return tuple(values[:, None] for values in unpack_logprobs(rows))


def fetch_embeddings(pooled: Sequence[Pooled]) -> dict[int, np.ndarray]:
    """Return the embedding of each row, float32 [D]."""
    arrays = [(rows, np.asarray(embeddings)) for rows, embeddings in pooled]
    return {row: array[i] for rows, array in arrays for i, row in enumerate(rows)}


def _join(chunks: list[PromptChunk]) -> PromptLogprobs:
    return unpack_logprobs(np.concatenate([np.asarray(chunk.packed)[: chunk.num_valid] for chunk in chunks]))


def _join_ids(chunks: list[PromptChunk]) -> np.ndarray | None:
    """Join to float32 [n, MAX_LOGPROB_IDS]."""
    found = [np.asarray(chunk.id_logprobs)[: chunk.num_valid] for chunk in chunks if chunk.id_logprobs is not None]
    return np.concatenate(found).view(np.float32) if found else None
