"""Outputs of lines come in groups and lose nothing."""

import random

import pytest

from jaxserve.engine.server import GROUP_TOKENS, OutputGroups
from jaxserve.types.extras import SamplingMask, TokenExtras
from jaxserve.types.sampling import BACKGROUND_PRIORITY
from jaxserve.types.step import FinishReason, TokenLogprobs, TokenOutput
from tests.fakes import make_request


def line(name: str, **changes: object) -> OutputGroups:
    groups = OutputGroups()
    groups.watch(make_request(name, [1], **({"priority": BACKGROUND_PRIORITY} | changes)))
    return groups


def token(name: str, token_id: int, reason: FinishReason | None = None) -> TokenOutput:
    logprobs = [TokenLogprobs(token_id, -1.0, 1)]
    return TokenOutput(
        request_id=name,
        token_ids=[token_id],
        logprobs=logprobs,
        extras=TokenExtras(
            sampling_masks=[SamplingMask(-1.0, [token_id], [-1.0])],
            hidden_states=bytes([token_id % 256]),
            routed_experts=bytes([token_id % 256]),
        ),
        finish_reason=reason,
    )


def test_the_first_output_passes_and_the_last_brings_what_was_held() -> None:
    groups = line("a")
    assert [output.token_ids for output in groups.take([token("a", 0)])] == [[0]]
    assert groups.take([token("a", 1)]) == groups.take([token("a", 2)]) == []
    (last,) = groups.take([token("a", 3, FinishReason.LENGTH)])
    assert (last.token_ids, last.finish_reason) == ([1, 2, 3], FinishReason.LENGTH)
    assert [entry.token_id for entry in last.logprobs or []] == [1, 2, 3]
    assert last.extras is not None
    assert [mask.ids for mask in last.extras.sampling_masks or []] == [[1], [2], [3]]
    assert last.extras.hidden_states == last.extras.routed_experts == bytes([1, 2, 3])
    assert len(groups) == 0


def test_a_long_line_is_sent_from_time_to_time() -> None:
    groups = line("a")
    sent = [output for i in range(3 * GROUP_TOKENS) for output in groups.take([token("a", i)])]
    assert [len(output.token_ids) for output in sent] == [1, GROUP_TOKENS, GROUP_TOKENS]


@pytest.mark.parametrize("changes", [{"priority": 0}, {"stop": ("x",)}, {"stop_regex": ("x",)}, {"grouped": False}])
def test_online_requests_and_stop_strings_are_not_held_up(changes: dict[str, object]) -> None:
    groups = line("a", **changes)
    assert [len(groups.take([token("a", i)])) for i in range(3)] == [1, 1, 1]


def test_an_end_without_a_token_brings_what_was_held() -> None:
    groups = line("a")
    for i in range(3):
        groups.take([token("a", i)])
    (last,) = groups.take([TokenOutput(request_id="a", finish_reason=FinishReason.ABORT)])
    assert (last.token_ids, len(last.logprobs or [])) == ([1, 2], 2)
    assert last.extras is not None and last.extras.hidden_states == bytes([1, 2])


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [((), (), ()), (("1",), ("1",), ("1",)), ((), ("1",), ("default", "1")), (("1",), ("2",), ("1", "2"))],
)
def test_labels_of_weights_are_joined(
    before: tuple[str, ...], after: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    groups = line("a")
    outputs = [token("a", i) for i in range(4)]
    for i, output in enumerate(outputs):
        output.weight_versions = before if i < 3 else after
        groups.take([output])
    (last,) = groups.take([TokenOutput(request_id="a", finish_reason=FinishReason.ABORT)])
    assert last.weight_versions == expected


def test_any_mixture_of_requests_keeps_its_tokens_in_order() -> None:
    rng, groups = random.Random(1), OutputGroups()
    left = {f"r{i}": rng.randrange(1, 4 * GROUP_TOKENS) for i in range(20)}
    made: dict[str, list[int]] = {name: [] for name in left}
    got: dict[str, list[int]] = {name: [] for name in left}
    for name in left:
        groups.watch(make_request(name, [1], priority=rng.choice([0, BACKGROUND_PRIORITY])))
    while left:
        outputs = []
        for name in rng.sample(sorted(left), rng.randint(1, len(left))):
            left[name] -= 1
            made[name].append(len(made[name]))
            outputs.append(token(name, made[name][-1], None if left[name] else FinishReason.LENGTH))
        left = {name: count for name, count in left.items() if count}
        for output in groups.take(outputs):
            got[output.request_id] += output.token_ids
    assert got == made and len(groups) == 0


def test_every_field_of_an_output_is_joined() -> None:
    """A field that is new must be thought of in `_prepend`, or be one that only a first or a last output has."""
    joined = {"token_ids", "logprobs", "prompt_logprobs", "extras", "num_accepted_drafts", "num_rejected_drafts"}
    joined |= {"weight_versions"}
    first = {"queue_seconds", "first_token_seconds"}
    last = {"finish_reason", "stop_token_id", "embedding", "num_cached_tokens", "num_preemptions"}
    last |= {"error", "error_status", "error_param", "weights"}
    assert set(TokenOutput.__struct_fields__) == {"request_id", *joined, *first, *last}
