"""Requests that leave no token to sample end with a 400 that says why, and take nobody's prefix with them."""

import pytest

from jaxserve.errors import InvalidValueError
from jaxserve.scheduler.stopping import check_allowed, nothing_allowed
from jaxserve.types.sampling import GrammarSpec, SamplingParams
from jaxserve.types.step import FinishReason
from tests.fake_grammar import CountingMatcher
from tests.fakes import VOCAB, make_core, make_request, next_token, run_all, small_config

V = 10
PROMPT = list(range(1, 14))


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(allowed_token_ids=(3, 4), bad_words_token_ids=((4,), (3,))), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=()), "allowed_token_ids"),
        (SamplingParams(allowed_token_ids=(V, -1)), "allowed_token_ids"),
        (SamplingParams(bad_words_token_ids=tuple((token,) for token in range(V))), "bad_words"),
    ],
)
def test_what_leaves_nothing_from_the_start_is_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidValueError, match="no token to sample") as caught:
        check_allowed(params, V)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(allowed_token_ids=(3, 4), bad_words_token_ids=((4,), (3, 4))),
        SamplingParams(bad_words_token_ids=(*((token,) for token in range(V - 1)), (V - 1, V - 1))),
    ],
)
def test_what_leaves_a_token_is_accepted(params: SamplingParams) -> None:
    check_allowed(params, V)


def test_the_engine_refuses_it_when_it_is_added() -> None:
    core = make_core(small_config())
    with pytest.raises(InvalidValueError, match="no token to sample"):
        core.add(make_request("r", PROMPT, allowed_token_ids=(5,), bad_words_token_ids=((5,),)))
    assert not core.has_work


@pytest.mark.parametrize("word", [(), (1, VOCAB), (-1, 2), (1, 2**31 - 1)])
def test_a_bad_word_that_no_output_can_have_is_refused(word: tuple[int, ...]) -> None:
    """Masks of other requests are made together with this one's."""
    core = make_core(small_config())
    with pytest.raises(InvalidValueError, match=r"in \[0, 97\)") as caught:
        core.add(make_request("r", PROMPT, bad_words_token_ids=((3,), word)))
    assert caught.value.param == "bad_words" and not core.has_work


def test_a_bad_word_against_a_grammars_only_token_ends_that_request_alone() -> None:
    """Its second token is the only multiple of 96 but 0, and 0 after the first is a bad word, and so is 96."""
    core = make_core(small_config(), make_matcher=lambda spec: CountingMatcher(96, 3))
    run_all(core, [make_request("before", PROMPT, max_tokens=1)])
    first = 96 if 0 < next_token(PROMPT) else 0
    stuck = make_request(
        "stuck",
        PROMPT,
        max_tokens=5,
        grammar=GrammarSpec(kind="regex", source=""),
        bad_words_token_ids=((first, 0), (first, 96)),
    )
    transcripts = run_all(core, [stuck, make_request("beside", PROMPT, max_tokens=5)])
    last = transcripts["stuck"].last
    assert last is not None and (last.finish_reason, last.error_status) == (FinishReason.ERROR, 400)
    assert transcripts["stuck"].token_ids == [first]
    assert last.error == "no token is left to sample: response_format and bad_words exclude every one"
    assert transcripts["beside"].reason is FinishReason.LENGTH
    after = run_all(core, [make_request("after", PROMPT, max_tokens=1)])["after"]
    assert after.outputs[0].num_cached_tokens == 12, "its prefix stays in the cache"


def test_parameters_without_a_named_cause() -> None:
    assert "the sampling parameters exclude" in nothing_allowed(SamplingParams(repetition_penalty=1e-6))
