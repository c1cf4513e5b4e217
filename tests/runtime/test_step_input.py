"""Both ends of the packed array: what the host writes is what the device reads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import host_cost
from jaxserve.runtime import step_input
from jaxserve.runtime.programs import attention_metadata, each_token
from jaxserve.runtime.sampling import slots
from jaxserve.runtime.step_input import PageUpdates
from jaxserve.types.step import ScheduledRow, TableUpdate
from tests.runtime.slot_states import empty_state

S, PAGES = 6, 4


def row(slot: int, start: int, tokens: list[int] | None, pages: dict[int, int] | None = None) -> ScheduledRow:
    pages = pages or {}
    first = min(pages, default=0)
    return ScheduledRow("r", slot, start, len(tokens or [0]), True, tokens or [], first, list(pages.values()))


@pytest.fixture
def state() -> slots.SlotState:
    empty = empty_state(S, 10, PAGES)
    return empty.replace(
        recent=jnp.zeros((S, slots.RECENT), jnp.int32).at[:, -1].set(jnp.arange(S, dtype=jnp.int32) + 50),
        position=jnp.arange(S, dtype=jnp.int32) * 3,
        page_table=jnp.arange(S * PAGES, dtype=jnp.int32).reshape(S, PAGES),
    )


def test_decode_rows_take_token_and_position_from_their_slots(state: slots.SlotState) -> None:
    rows = [row(4, 0, None, {2: 99}), row(1, 0, None)]
    packed = step_input.pack_decode(rows, PageUpdates.of(rows), 4, S, True)
    after, tokens, head = step_input.unpack_decode(jnp.asarray(packed), state)
    assert tokens.slots.tolist() == [4, 1, S, S]
    assert tokens.token_ids.tolist()[:2] == [54, 51] and tokens.positions.tolist() == [12, 3, 0, 0]
    assert tokens.num_tokens.tolist() == [1, 1, 0, 0] and tokens.row_of_token.tolist() == [0, 1, 4, 4]
    assert bool(head.want_logprobs) and not bool(head.masked)
    assert after.page_table[4].tolist() == [16, 17, 99, 19]
    assert (after.page_table == state.page_table).sum() == S * PAGES - 1


def test_ragged_rows(state: slots.SlotState) -> None:
    rows = [row(2, 0, None), row(0, 5, [7, 8, 9], {1: 90, 2: 91}), row(3, 0, [6])]
    packed = step_input.pack_extend(rows, PageUpdates.of(rows), 8, 5, 6, S)
    after, tokens = step_input.unpack_extend(jnp.asarray(packed), state, 8, 5)
    assert tokens.token_ids.tolist()[:5] == [52, 7, 8, 9, 6]
    assert tokens.positions.tolist() == [6, 5, 6, 7, 0, 0, 0, 0]
    assert tokens.row_of_token.tolist() == [0, 1, 1, 1, 2, 5, 5, 5]
    assert tokens.slots.tolist() == [2, 0, 3, S, S] and tokens.num_tokens.tolist() == [1, 3, 1, 0, 0]
    assert after.page_table[0].tolist() == [0, 90, 91, 3]


def table_of(tokens: step_input.TokenInput, state: slots.SlotState) -> jax.Array:
    return state.page_table.at[tokens.slots].get(mode="clip")


def test_metadata_of_ragged_rows_and_of_the_same_tokens_alone(state: slots.SlotState) -> None:
    rows = [row(2, 0, None), row(1, 5, [7, 8, 9])]
    packed = step_input.pack_extend(rows, PageUpdates.of(rows), 6, 4, 4, S)
    state, tokens = step_input.unpack_extend(jnp.asarray(packed), state, 6, 4)
    ragged = attention_metadata(tokens, table_of(tokens, state), 100, 4, False)
    assert ragged.cu_q_lens.tolist() == [0, 1, 4, 4, 4] and ragged.kv_lens.tolist() == [7, 8, 0, 0]
    assert ragged.slot_mapping.tolist() == [9 * 4 + 2, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 400, 400]
    each = each_token(tokens)
    alone = attention_metadata(each, table_of(each, state), 100, 4, True)
    assert alone.kv_lens.tolist() == [7, 6, 7, 8, 0, 0]
    assert alone.slot_mapping.tolist() == ragged.slot_mapping.tolist()
    assert alone.page_table[1:4].tolist() == [[4, 5, 6, 7]] * 3


def test_head_rows() -> None:
    packed = step_input.pack_head([3, 1], [7, 2], 4, S, step_input.HeadWishes(masked=True))
    head = step_input.unpack_head(jnp.asarray(packed))
    assert head.slots.tolist() == [3, 1, S, S] and head.token_indices.tolist()[:2] == [7, 2]
    assert not bool(head.want_logprobs) and bool(head.masked)


def test_pages_beyond_the_steps_room_go_ahead_in_groups(state: slots.SlotState) -> None:
    count = step_input.PAGE_UPDATES + 3
    first, rest = PageUpdates([0] * count, list(range(count)), list(range(count))).split(2)
    groups = list(step_input.pack_pages(rest, S))
    assert len(first) == 2 and [group.shape for group in groups] == [(3, step_input.PAGE_UPDATES)] * 2
    assert groups[1][:, :2].tolist() == [[0, S], [count - 1, S], [count - 1, S]]


def test_every_step_is_packed_into_fresh_memory() -> None:
    """The CPU client reads host memory in place: an array used again would change the step in flight."""
    rows = [row(0, 0, None)]
    arrays = [step_input.pack_decode(rows, PageUpdates.of(rows), 1, S, False) for _ in range(3)]
    assert not any(np.shares_memory(a, b) for a in arrays for b in arrays if a is not b)


def test_host_cost_grows_no_worse_than_linearly() -> None:
    small, large = (host_cost.measure_host_cost(rows, repeats=10) for rows in (64, 1024))
    assert large.pack < 32 * small.pack and large.unpack < 32 * small.unpack  # 16 times the rows
    assert small.pack + small.unpack < 2e-3


def test_two_groups_of_layers_have_a_table_each() -> None:
    """Beside each other in a slot's row: the second one's entries lie behind all of the first."""
    groups = 2
    state = empty_state(S, 10, groups * PAGES)
    windows = [TableUpdate(4, 1, 1, [70, 71]), TableUpdate(2, 1, 3, [72])]
    rows = [row(4, 0, None, {2: 99}), row(2, 0, None, {3: 98})]
    updates = PageUpdates.of(rows, windows, PAGES)
    packed = step_input.pack_decode(rows, updates, 3, S, False, groups)
    assert packed.shape == (step_input.decode_size(3, groups),)
    after, tokens, _ = step_input.unpack_decode(jnp.asarray(packed), state, groups)
    assert tokens.slots.tolist() == [4, 2, S]
    assert after.page_table[4].tolist() == [0, 0, 99, 0, 0, 70, 71, 0]
    assert after.page_table[2].tolist() == [0, 0, 0, 98, 0, 0, 0, 72]
    assert int((after.page_table != 0).sum()) == 5
    after = after.replace(position=after.position.at[2].set(13))
    _, tokens, _ = step_input.unpack_decode(jnp.asarray(packed), after, groups)
    tables = jnp.split(table_of(tokens, after), groups, axis=1)
    full, window = (
        attention_metadata(tokens, table, num_pages, 4, True)
        for table, num_pages in zip(tables, (100, 80), strict=True)
    )
    assert full.page_table[1].tolist() == [0, 0, 0, 98] and window.page_table[1].tolist() == [0, 0, 0, 72]
    assert full.slot_mapping.tolist()[1:] == [98 * 4 + 1, 400] and window.slot_mapping.tolist()[1:] == [72 * 4 + 1, 320]
