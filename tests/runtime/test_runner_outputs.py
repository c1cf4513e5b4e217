"""The runner's rare outputs: log-probabilities, hidden states, candidates, and the watermark."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.text.watermark import watermark_score
from jaxserve.types.extras import ExtraParams
from jaxserve.types.sampling import SamplingParams
from tests.runtime.hand_scheduler import HandScheduler
from tests.runtime.oracles import GREEDY, exact_logprobs

pytestmark = pytest.mark.usefixtures("no_compilation")


# --- log-probabilities


@pytest.mark.parametrize("chunk", [7, 32])
def test_prompt_logprobs(runner: ModelRunner, dense: Callable[[list[int]], np.ndarray], chunk: int) -> None:
    params = SamplingParams(temperature=0, prompt_logprobs=0)
    scheduler = HandScheduler(runner)
    other, seq = scheduler.add([1, 2, 3], GREEDY), scheduler.add(list(range(5, 95)), params)
    scheduler.generate([other, seq], 3, chunk=chunk)
    prompt = seq.tokens[: seq.num_prompt]
    expected = exact_logprobs(dense(prompt))[np.arange(len(prompt) - 1), prompt[1:]]
    np.testing.assert_allclose(seq.prompt_logprobs, expected, atol=2e-5)


def test_logprobs_are_copied_only_when_asked(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    result = scheduler.step([(scheduler.add([1], GREEDY), 1)])
    assert result.logprobs is None and result.top_ids is None and result.prompt_logprobs is None


# --- extras


def head(runner: ModelRunner) -> np.ndarray:
    """float32 [D, V]"""
    names = [spec.name for spec in runner.structure.specs]
    weights = [leaf for name, leaf in zip(names, runner.leaves, strict=True) if "lm_head" in name]
    return np.asarray(weights[0]).T


def test_extras_of_rows_in_a_crowd(runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]) -> None:
    """Log-probabilities of chosen ids and hidden states, of a decoding row beside plain ones: the model's own."""
    extras = ExtraParams(logprob_token_ids=(90, 3, 3), hidden_states="last")
    asking = SamplingParams(temperature=0, logprobs=0, extras=extras)
    scheduler = HandScheduler(runner)
    plain, seq = scheduler.add([1, 2, 3], GREEDY), scheduler.add([9, 8, 7, 6], asking)
    alone = HandScheduler(runner)
    reference = alone.add([1, 2, 3], GREEDY, slot=2)
    alone.next_page = 100
    alone.generate([reference], 4)
    first = scheduler.step([(plain, 3), (seq, 4)])
    results = [first, *(scheduler.step([(plain, None), (seq, None)]) for _ in range(3))]
    exact = exact_logprobs(dense(seq.tokens))
    assert plain.output == reference.output
    for place, result in enumerate(results, start=len([9, 8, 7, 6]) - 1):
        found = result.extras
        assert found is not None and found.id_logprobs is not None
        assert found.hidden_states is not None and set(found.hidden_states) == {1}
        np.testing.assert_allclose(found.id_logprobs[1, :3], exact[place, [90, 3, 3]], atol=2e-5)
        hidden = found.hidden_states[1]
        assert hidden.shape == (1, runner.structure.config.hidden_size)
        np.testing.assert_allclose(exact_logprobs(hidden @ head(runner))[0], exact[place], atol=2e-5)
    assert scheduler.step([(plain, None)]).extras is None


@pytest.mark.parametrize("chunk", [7, 32])
def test_hidden_states_and_watched_ids_of_a_whole_prompt(
    runner: ModelRunner, dense: Callable[[list[int]], np.ndarray], chunk: int
) -> None:
    params = SamplingParams(
        temperature=0,
        logprobs=0,
        prompt_logprobs=0,
        extras=ExtraParams(logprob_token_ids=(4, 80), hidden_states="all"),
    )
    scheduler = HandScheduler(runner)
    prompt = list(range(5, 55))
    seq = scheduler.add(prompt, params)
    hidden, chosen = [], []
    while seq.computed < len(prompt):
        result = scheduler.step([(seq, min(chunk, len(prompt) - seq.computed))])
        assert result.extras is not None and result.extras.hidden_states is not None
        hidden.append(result.extras.hidden_states[0])
        of_prompt = result.extras.prompt_id_logprobs
        assert of_prompt is not None
        chosen += [of_prompt[0][:, :2]] if 0 in of_prompt else []
    exact = exact_logprobs(dense(prompt))
    np.testing.assert_allclose(exact_logprobs(np.concatenate(hidden) @ head(runner)), exact, atol=2e-5)
    np.testing.assert_allclose(np.concatenate(chosen), exact[:-1, [4, 80]], atol=2e-5)


def test_candidates_of_a_row_beside_a_greedy_one(runner: ModelRunner) -> None:
    drawn = SamplingParams(temperature=1.0, top_k=3, logprobs=0, extras=ExtraParams(sampling_mask=True))
    scheduler = HandScheduler(runner)
    seqs = [scheduler.add([1, 2, 3], drawn), scheduler.add([4, 5], GREEDY)]
    result = scheduler.step([(seqs[0], 3), (seqs[1], 2)])
    assert result.extras is not None
    masks = result.extras.sampling_masks
    assert masks is not None and masks.counts[0] == 3
    ids = masks.ids[0, :3].tolist()
    assert int(result.token_ids[0, 0]) in ids and np.exp(masks.top_logprobs[0, :3]).sum() == pytest.approx(1)


def test_a_watermark_is_found_by_its_key_alone(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    marked = SamplingParams(temperature=1.0, watermark_key=2**40 + 7)
    seqs = [scheduler.add([5, 6, 7, 8, 9], marked), scheduler.add([5, 6, 7, 8, 9], SamplingParams(), seed=3)]
    scheduler.generate(seqs, 100)
    before = runner.num_dispatches
    scheduler.step([(seq, None) for seq in seqs])
    assert runner.num_dispatches == before + 1, "a watermark costs no dispatch of its own"
    assert watermark_score(seqs[0].tokens, 2**40 + 7).z > 8
    assert abs(watermark_score(seqs[0].tokens, 2**40 + 6).z) < 5
    assert abs(watermark_score(seqs[1].tokens, 2**40 + 7).z) < 5
    again = HandScheduler(runner)
    again.next_page = 200
    kept = again.add([5, 6, 7, 8, 9], marked, output=seqs[0].output[:40])  # after a preemption
    again.step([(kept, 32)])
    again.step([(kept, 13)])
    again.generate([kept], 60)
    assert kept.output == seqs[0].output[:60]
