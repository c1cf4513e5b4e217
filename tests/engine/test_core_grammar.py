"""Grammars of requests in the engine core: ends, errors and limits. Outputs that go on after a restart."""

import itertools

import numpy as np
import pytest

from jaxserve.errors import InvalidSchemaError, UnsupportedParameterError
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from jaxserve.types.step import FinishReason
from tests.engine.test_core import EOS, GREEDY, grammar_core
from tests.fake_grammar import CountingMatcher
from tests.fakes import VOCAB, alone, make_core, make_request, run_all, small_config

# --- grammars


def test_a_complete_grammar_ends_the_request() -> None:
    core = grammar_core()
    grammar = GrammarSpec(kind="regex", source="4")
    transcripts = run_all(core, [make_request("a", [1, 2], max_tokens=50, grammar=grammar), make_request("b", [9])])
    assert len(transcripts["a"].token_ids) == 4 and transcripts["a"].reason is FinishReason.STOP
    assert all(token % 3 == 0 for token in transcripts["a"].token_ids)
    assert transcripts["b"].token_ids == alone([9], SamplingParams(temperature=0.0))[0]


def test_an_output_that_leaves_the_grammar_ends_with_an_error() -> None:
    class Strict(CountingMatcher):
        def fill(self, bitmask_row: object) -> None:
            """Allow everything, and then take offence."""

    core = make_core(small_config(), make_matcher=lambda spec: Strict(VOCAB + 1, 4))
    transcripts = run_all(core, [make_request("a", [1, 2], grammar=GrammarSpec(kind="regex", source="x"))])
    last = transcripts["a"].last
    assert last and (last.finish_reason, last.error) == (FinishReason.ERROR, "the output left the grammar")


def test_a_grammar_that_grows_over_its_limits_is_the_clients_fault() -> None:
    class Limited(CountingMatcher):
        @property
        def limit_error(self) -> str | None:
            return "Too many items"

        def accept(self, token_id: int) -> bool:
            return False

    core = make_core(small_config(), make_matcher=lambda spec: Limited(3, 4))
    last = run_all(core, [make_request("a", [1, 2], grammar=GrammarSpec(kind="regex", source="x"))])["a"].last
    assert last and last.error and "Too many items" in last.error and last.error_status == 400


def test_a_grammar_that_meets_a_limit_in_a_mask_is_never_a_stop() -> None:
    class Full(CountingMatcher):
        fills = 0

        @property
        def limit_error(self) -> str | None:
            return "Too many items" if self.fills > 2 else None

        def fill(self, bitmask_row: np.ndarray) -> None:
            self.fills += 1
            super().fill(bitmask_row)
            if self.limit_error:
                bitmask_row[:] = 0
                bitmask_row[0] = 1 << EOS[0]

    core = make_core(small_config(), make_matcher=lambda spec: Full(3, 9))
    requests = [make_request("a", [1, 2], grammar=GrammarSpec(kind="regex", source="x")), make_request("b", [9])]
    transcripts = run_all(core, requests)
    last = transcripts["a"].last
    assert last and last.finish_reason is FinishReason.ERROR and last.error and "Too many items" in last.error
    assert len(transcripts["a"].token_ids) == 2 and last.error_status == 400
    assert transcripts["b"].token_ids == alone([9], SamplingParams(temperature=0.0))[0]


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_matcher_that_breaks_ends_its_own_request_only(method: str, caplog: pytest.LogCaptureFixture) -> None:
    def break_down(*_: object) -> bool:
        raise RuntimeError("no such state")

    broken = type("Broken", (CountingMatcher,), {method: break_down})
    core = make_core(small_config(), make_matcher=lambda spec: broken(3, 9))
    grammar = GrammarSpec(kind="regex", source="x")
    transcripts = run_all(core, [make_request("a", [1, 2], grammar=grammar), make_request("b", [9])])
    assert transcripts["a"].reason is FinishReason.ERROR and transcripts["a"].last and transcripts["a"].last.error
    assert transcripts["b"].token_ids == alone([9], SamplingParams(temperature=0.0))[0]
    assert "no such state" in caplog.text


def test_a_grammar_that_breaks_its_compiler_is_that_requests_error() -> None:
    def compile_grammar(_: GrammarSpec) -> CountingMatcher:
        raise RecursionError("too deep")

    core = make_core(small_config(), make_matcher=compile_grammar)
    with pytest.raises(InvalidSchemaError, match="too deep"):
        core.add(make_request("a", [1], grammar=GrammarSpec(kind="regex", source="x")))


def test_bad_words_of_several_tokens_are_avoided() -> None:
    tokens, _ = alone([1, 2, 3], GREEDY)
    bad = (tokens[1], tokens[2])
    core = make_core(small_config())
    found = run_all(core, [make_request("a", [1, 2, 3], max_tokens=6, bad_words_token_ids=(bad,))])["a"].token_ids
    assert found[:2] == tokens[:2] and found[2] == (tokens[2] + 1) % VOCAB
    assert bad not in itertools.pairwise(found)


def test_without_a_compiler_a_grammar_is_refused_by_name() -> None:
    core = make_core(small_config())
    with pytest.raises(UnsupportedParameterError) as refused:
        core.add(make_request("a", [1], grammar=GrammarSpec(kind="regex", source="x")))
    assert refused.value.param == "response_format" and not core.has_work


# --- after a restart


@pytest.mark.parametrize("kept", [1, 3, 5])
def test_a_resumed_output_goes_on_where_it_was(kept: int) -> None:
    tokens, _ = alone([1, 2, 3], GREEDY)
    transcripts = run_all(
        make_core(small_config()), [make_request("a", [1, 2, 3], max_tokens=6, resumed_token_ids=tokens[:kept])]
    )
    assert transcripts["a"].token_ids == tokens[kept:] and transcripts["a"].reason is FinishReason.LENGTH


def test_a_resumed_output_that_was_complete_only_ends() -> None:
    core = make_core(small_config(), eos_token_ids=(7,))
    transcripts = run_all(
        core,
        [
            make_request("long", [1], max_tokens=3, resumed_token_ids=[1, 2, 3]),
            make_request("eos", [1], max_tokens=9, resumed_token_ids=[1, 7]),
        ],
    )
    assert [transcripts[name].reason for name in ("long", "eos")] == [FinishReason.LENGTH, FinishReason.STOP]
    assert all(transcript.token_ids == [] for transcript in transcripts.values())
    assert core.scheduler.counters.steps == 0


def test_a_resumed_output_has_moved_its_grammar_on() -> None:
    grammar = GrammarSpec(kind="regex", source="4")
    whole = run_all(grammar_core(), [make_request("a", [1, 2], max_tokens=50, grammar=grammar)])["a"].token_ids
    for kept in (2, 4):
        resumed = make_request("a", [1, 2], max_tokens=50, grammar=grammar, resumed_token_ids=whole[:kept])
        transcript = run_all(grammar_core(), [resumed])["a"]
        assert transcript.token_ids == whole[kept:] and transcript.reason is FinishReason.STOP


def test_only_the_choices_of_one_request_share_the_time_for_their_masks() -> None:
    """An engine in this process adds the prompts of a call together."""
    core, grammar = grammar_core(), GrammarSpec(kind="regex", source="2")
    groups = {"a": "one", "b": "one", "c": "", "d": ""}
    core.add(*(make_request(name, [1, 2], grammar=grammar, group=group) for name, group in groups.items()))
    found = [core.scheduler.find(name) for name in groups]
    budgets = [request.mask_budget for request in found if request is not None]
    assert budgets[0] is budgets[1] and len(set(map(id, budgets))) == 3
