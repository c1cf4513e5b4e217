"""The text side of a sequence: whole characters, stop strings over token borders, the counts, whatever the cuts."""

import itertools
import random
from importlib.resources import files
from pathlib import Path

import pytest

from jaxserve.text.detokenizer import RequestOutput, SequenceText
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.types.sampling import SamplingParams, ThinkingForm
from jaxserve.types.step import FinishReason, TokenLogprobs, TokenOutput

TEXT = "naïve café 👩‍👩‍👧‍👦 日本語のテキスト e\u0301 \u0928\u093f — done. And more."


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(Path(str(files("jaxserve") / "assets" / "demo")))


def run(tokenizer: Tokenizer, cuts: list[list[int]], params: SamplingParams, last: FinishReason) -> list[RequestOutput]:
    """Push the tokens cut into outputs; stops when the sequence has ended."""
    sequence = SequenceText("r", 0, [5, 6], params, tokenizer)
    results = []
    for i, ids in enumerate(cuts):
        reason = last if i == len(cuts) - 1 else None
        results.append(sequence.push(TokenOutput(request_id="r-0", token_ids=ids, finish_reason=reason)))
        if results[-1].finished:
            break
    return results


def random_cuts(ids: list[int], rng: random.Random) -> list[list[int]]:
    borders = sorted({0, len(ids), *(rng.randrange(len(ids)) for _ in range(rng.randrange(len(ids))))})
    return [ids[a:b] for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("seed", range(8))
def test_joined_deltas_are_the_text_and_no_character_is_half(tokenizer: Tokenizer, seed: int) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    results = run(tokenizer, random_cuts(ids, random.Random(seed)), SamplingParams(), FinishReason.LENGTH)
    assert "".join(r.text for r in results) == TEXT
    assert all("\ufffd" not in r.text for r in results)
    assert [t for r in results for t in r.token_ids] == ids
    assert results[-1].num_output_tokens == len(ids)
    assert results[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_stop_string_ends_the_text_wherever_the_tokens_are_cut(
    tokenizer: Tokenizer, seed: int, include: bool
) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    params = SamplingParams(stop=("done.",), include_stop_str_in_output=include)
    results = run(tokenizer, random_cuts(ids, random.Random(seed)), params, FinishReason.LENGTH)
    before = TEXT[: TEXT.index("done.")]
    assert "".join(r.text for r in results) == before + ("done." if include else "")
    assert results[-1].finish_reason is FinishReason.STOP
    assert results[-1].matched_stop == "done."


def test_the_engine_is_told_only_if_it_still_runs(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a stop", add_special_tokens=False)
    for reason in (None, FinishReason.LENGTH):
        sequence = SequenceText("r", 0, [], SamplingParams(stop=("stop",)), tokenizer)
        result = sequence.push(TokenOutput(request_id="r-0", token_ids=ids, finish_reason=reason))
        assert result.finished
        assert sequence.stopped_by_text is (reason is None)


def test_text_held_for_a_stop_that_did_not_come_is_given_out(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("almost do", add_special_tokens=False)
    params = SamplingParams(stop=("done",))
    results = run(tokenizer, [[i] for i in ids], params, FinishReason.LENGTH)
    assert "".join(r.text for r in results) == "almost do"


def test_a_stop_string_does_not_count_before_min_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one. two. three.", add_special_tokens=False)
    first = len(tokenizer.encode("one. two", add_special_tokens=False))
    params = SamplingParams(stop=(".",), min_tokens=first)
    results = run(tokenizer, [[i] for i in ids], params, FinishReason.LENGTH)
    assert "".join(r.text for r in results) == "one. two"


def test_a_stop_token_is_counted_but_not_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("yes no", add_special_tokens=False)
    output = TokenOutput(
        request_id="r-0", token_ids=ids, finish_reason=FinishReason.STOP, stop_token_id=ids[-1], num_cached_tokens=16
    )
    shown = SequenceText("r", 0, [], SamplingParams(), tokenizer).push(output)
    kept = SequenceText("r", 0, [], SamplingParams(include_stop_str_in_output=True), tokenizer).push(output)
    assert (shown.text, kept.text) == (tokenizer.decode(ids[:-1]), "yes no")
    assert shown.token_ids == ids
    assert (shown.matched_stop, shown.num_output_tokens, shown.num_cached_tokens) == (ids[-1], len(ids), 16)


def test_logprobs_stay_with_their_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b stop c d", add_special_tokens=False)
    logprobs = [TokenLogprobs(i, -0.5, 1) for i in ids]
    sequence = SequenceText("r", 0, [], SamplingParams(stop=("stop",), logprobs=0), tokenizer)
    result = sequence.push(TokenOutput(request_id="r-0", token_ids=ids, logprobs=logprobs))
    assert result.logprobs is not None
    assert [p.token_id for p in result.logprobs] == result.token_ids
    assert len(result.token_ids) < len(ids)


THOUGHTS = [
    (ThinkingForm(family="qwen3"), "<think>\nStop here: END. On.\n</think>\n\n", "It is 4."),
    (ThinkingForm(family="qwen3", inside=True), "Stop here: END. On.\n</think>\n\n", "It is < 4"),
    (ThinkingForm(family="qwen3"), "", "<thin END"),
    (ThinkingForm(family="qwen3", calls="hermes", tools=("f",)), "<think>END", '<tool_call>{"name": "f"} '),
    (ThinkingForm(family="deepseek_v3", calls="mistral", tools=("f",)), "<think>END", "[TOOL_CALLS]f[ARGS]{}"),
    (ThinkingForm(family="mistral"), "[THINK]END[/THINK]", "It is 4."),
    (ThinkingForm(family="qwen3"), "<think>hm</think>So <think>\n END </think> <think>END</think>\n", "It is 4. "),
    (ThinkingForm(family="glm45"), "Well.\n<think>END</think>", " `<think>` it is 4, </think> "),
    (ThinkingForm(family="kimi_k2"), "<think>hm</think></think><think>END</think>", "It is 4 <"),
    (ThinkingForm(family="qwen3", calls="hermes", tools=("f",)), "So\n<think>END", '<tool_call>{"name": "f"} '),
    (ThinkingForm(family="qwen3", only_first=True), "<think>END</think>", '"<think>END'),
    (ThinkingForm(family="granite"), "Here is my thought process: END Here is my response:", " It is 4."),
    (
        ThinkingForm(family="harmony"),
        "<|channel|>analysis<|message|>END<|end|><|start|>assistant<|channel|>final<|message|>",
        "It is 4.",
    ),
    (ThinkingForm(family="harmony"), "<|channel|>final<|message|>", "It is 4."),
    (
        ThinkingForm(family="muse_glimmer"),
        " to=self<|message|>END<|eom|><|start|>assistant to=user<|message|>",
        "It is 4.",
    ),
    (ThinkingForm(family="muse_glimmer"), " to=user<|message|>", "It is 4."),
    (ThinkingForm(family="muse_glimmer"), "", "It is to=4."),
]


@pytest.mark.parametrize("form, thought, answer", THOUGHTS)
@pytest.mark.parametrize("seed", range(3))
def test_stops_do_not_count_while_the_model_thinks(
    tokenizer: Tokenizer, form: ThinkingForm, thought: str, answer: str, seed: int
) -> None:
    """They end the answer, wherever the tokens are cut, and no character of the thinking is lost."""
    for params in (
        SamplingParams(stop=("END",), stops_after=form),
        SamplingParams(stop_regex=("EN?D",), stops_after=form),
    ):
        shown = "END" if params.stop_regex else ""
        for rest, reason in ((answer + "END and more", FinishReason.STOP), (answer, FinishReason.LENGTH)):
            ids = tokenizer.encode(thought + rest, add_special_tokens=False, plain=True)
            results = run(tokenizer, random_cuts(ids, random.Random(seed)), params, FinishReason.LENGTH)
            expected = thought + answer + (shown if reason is FinishReason.STOP else "")
            if answer.endswith("END"):  # the stop is within the answer itself
                expected, reason = thought + answer.removesuffix("END") + shown, FinishReason.STOP
            assert "".join(result.text for result in results) == expected
            assert results[-1].finish_reason is reason
