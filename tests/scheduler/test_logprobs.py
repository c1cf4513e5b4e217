"""What a step's arrays become: extra outputs of a token, and those of a prompt over chunks and preemptions."""

import msgspec
import numpy as np
import pytest

from jaxserve.scheduler.step_builder import (
    StepLogprobs,
    add_extras,
    ask_prompt_outputs,
    gather_prompt_outputs,
    take_prompt_outputs,
    too_many_candidates,
)
from jaxserve.types.extras import ExtraParams, SamplingMask, SamplingMasks, StepExtras
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import Request, SampledTokens, ScheduledRow, TokenLogprobs, TokenOutput

ALL = ExtraParams(logprob_token_ids=(4, 9), sampling_mask=True, hidden_states="all", routed_experts=True)


def row(start: int, count: int, extras: ExtraParams = ALL) -> ScheduledRow:
    return ScheduledRow("r", 0, start, count, True, [1] * count, 0, [], logprobs=0, extras=extras)


def states(start: int, count: int) -> np.ndarray:
    """float32 [count, 2]: a position and its negative."""
    positions = np.arange(start, start + count, dtype=np.float32)
    return np.stack([positions, -positions], axis=1)


def experts(start: int, count: int) -> np.ndarray:
    """int32 [count, 2, 1]"""
    return np.arange(start, start + count, dtype=np.int32)[:, None, None] + np.array([[0], [100]], np.int32)


def step_extras(start: int, count: int, num_candidates: int = 2) -> StepExtras:
    return StepExtras(
        id_logprobs=np.array([[-4.0, -9.0, 0.0]], np.float32),
        sampling_masks=SamplingMasks(
            logprobs=np.array([-0.5], np.float32),
            counts=np.array([num_candidates], np.int32),
            ids=np.array([[7, 8, 0]], np.int32),
            top_logprobs=np.array([[-0.5, -1.0, -np.inf]], np.float32),
        ),
        hidden_states={0: states(start, count)},
        routed_experts={0: experts(start, count)},
    )


def request(num_prompt: int) -> Request:
    made = Request("r", list(range(num_prompt)), SamplingParams(logprobs=0, extras=ALL), 0.0, 0, 4)
    ask_prompt_outputs(made)
    return made


def test_the_extras_of_one_token() -> None:
    result = TokenOutput(request_id="r", token_ids=[7], logprobs=[TokenLogprobs(7, -0.7, 1)])
    add_extras(result, row(3, 2), 0, step_extras(3, 2))
    assert result.logprobs == [TokenLogprobs(7, -0.7, 1, [], [], [-4.0, -9.0])]
    extras = result.extras
    assert extras is not None and extras.sampling_masks == [SamplingMask(-0.5, [7, 8], [-0.5, -1.0])]
    assert extras.hidden_states == states(4, 1).tobytes() and extras.routed_experts == experts(4, 1).tobytes()


def test_a_token_that_was_cut_off_has_none() -> None:
    result = TokenOutput(request_id="r")
    add_extras(result, row(3, 1), 0, step_extras(3, 1))
    assert result == TokenOutput(request_id="r")


@pytest.mark.parametrize("chunks", [[(0, 6)], [(0, 4), (4, 2)], [(0, 4), (0, 3), (3, 5)]])
def test_a_prompt_is_gathered_over_chunks_and_preemptions(chunks: list[tuple[int, int]]) -> None:
    """The last case begins again after a preemption, and computes two tokens of the output with the prompt."""
    made, result = request(6), TokenOutput(request_id="r")
    for start, count in chunks:
        sampled = msgspec.structs.replace(with_logprobs(1, 1), extras=step_extras(start, count))
        gather_prompt_outputs(made, row(start, count), 0, sampled)
    take_prompt_outputs(made, result)
    extras = result.extras
    assert extras is not None and extras.prompt_hidden_states == states(0, 6).tobytes()
    assert extras.prompt_routed_experts == experts(0, 6).tobytes()
    again = TokenOutput(request_id="r")
    take_prompt_outputs(made, again)
    assert again == TokenOutput(request_id="r") and not made.reads_whole_prompt


def test_more_candidates_than_there_is_room_for() -> None:
    assert too_many_candidates(row(0, 1), 0, step_extras(0, 1, num_candidates=3)) is None
    message = too_many_candidates(row(0, 1), 0, step_extras(0, 1, num_candidates=4))
    assert message is not None and "4 candidates" in message and "at most 3" in message
    plain = ExtraParams(routed_experts=True)
    assert too_many_candidates(row(0, 1, plain), 0, step_extras(0, 1, num_candidates=4)) is None


def with_logprobs(num_rows: int, per_row: int) -> SampledTokens:
    """Row r, token q: -(r + q / 2), rank r, and the top 20 from r on."""
    rows, columns = np.arange(num_rows)[:, None], np.arange(per_row)[None, :]
    top = np.broadcast_to((rows + 0 * columns)[:, :, None] + np.arange(20), (num_rows, per_row, 20))
    return SampledTokens(
        np.zeros((num_rows, per_row), np.int32),
        np.full(num_rows, per_row, np.int32),
        np.zeros(num_rows, np.uint8),
        logprobs=-(rows + columns / 2).astype(np.float32),
        ranks=(rows + 0 * columns).astype(np.int32),
        top_ids=top.astype(np.int32),
        top_logprobs=-top.astype(np.float32),
    )


def asking(top: int | None) -> ScheduledRow:
    return ScheduledRow("r", 0, 0, 1, True, [], 0, [], logprobs=top)


def test_each_row_gets_as_many_of_the_likeliest_as_it_asks_for() -> None:
    step = StepLogprobs(with_logprobs(4, 2), [asking(2), asking(None), asking(0), asking(3)])
    assert step.of_row(0, [7, 8], 2) == [
        TokenLogprobs(7, 0.0, 0, [0, 1], [0.0, -1.0]),
        TokenLogprobs(8, -0.5, 0, [0, 1], [0.0, -1.0]),
    ]
    assert step.of_row(2, [9], 0) == [TokenLogprobs(9, -2.0, 2)], "a row that yielded one token of two"
    assert step.of_row(3, [1, 1], 3)[1] == TokenLogprobs(1, -3.5, 3, [3, 4, 5], [-3.0, -4.0, -5.0])
    assert all(type(value) is float for value in step.of_row(3, [1], 3)[0].top_logprobs)


def test_a_prompts_entries_end_with_the_prompt() -> None:
    made = request(6)
    unknown: list[TokenLogprobs | None] = [None] * 6
    made.prompt_logprobs = unknown
    part = with_logprobs(4, 1)
    assert part.logprobs is not None and part.ranks is not None
    assert part.top_ids is not None and part.top_logprobs is not None
    arrays = (part.logprobs[:, 0], part.ranks[:, 0], part.top_ids[:, 0], part.top_logprobs[:, 0])
    chunk = msgspec.structs.replace(part, prompt_logprobs={0: arrays})
    asks = msgspec.structs.replace(row(3, 4), prompt_logprobs=1)
    gather_prompt_outputs(made, asks, 0, chunk)
    assert made.prompt_logprobs == [
        *[None] * 4,
        TokenLogprobs(4, 0.0, 0, [0], [0.0]),
        TokenLogprobs(5, -1.0, 1, [1], [-1.0]),
    ]
