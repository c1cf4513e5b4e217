"""The sampler against numpy oracles, its distribution, and the independence of its rows."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.sampling import logprobs, sampler, slots
from jaxserve.runtime.sampling import sampler as draw
from jaxserve.runtime.sampling.sampler import LogitRules
from jaxserve.text.watermark import token_numbers
from jaxserve.types.extras import MAX_CANDIDATES
from jaxserve.types.sampling import MAX_LOGIT_BIAS, SamplingParams
from jaxserve.types.step import RowStatus, SlotInit
from tests.runtime.slot_states import empty_state

V = 200  # more than one block of the inverse CDF, and no multiple of 32 or 128
S = 8


@functools.lru_cache
def programs() -> dict[str, jax.stages.Wrapped]:
    return {
        "admit": jax.jit(slots.admit),
        "admit_masks": jax.jit(slots.admit_masks),
        "admit_bias": jax.jit(slots.admit_bias),
        "admit_tokens": jax.jit(slots.admit_tokens),
        "sample": jax.jit(sampler.sample),
        "filter": jax.jit(draw.filter_probs),
    }


def state_of(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: tuple[int, ...] = (),
    vocab: int = V,
) -> slots.SlotState:
    """Slots 0.. of the given requests, admitted as the runner does it."""
    state = empty_state(S, vocab, 4)
    tokens = [*prompt, *output]
    inits = [SlotInit(i, p, i if seeds is None else seeds[i], len(prompt), tokens, eos) for i, p in enumerate(params)]
    for group in slots.pack_admit(inits, S):
        state = programs()["admit"](state, group)
    for init in inits:
        if (masks := slots.pack_masks(init, vocab)) is not None:
            state = programs()["admit_masks"](state, masks)
        if (bias := slots.pack_bias(init)) is not None:
            state = programs()["admit_bias"](state, bias)
        for chunk in slots.pack_tokens(init):
            state = programs()["admit_tokens"](state, chunk)
    return state


def run(
    logits: np.ndarray,
    state: slots.SlotState,
    *,
    rows: Sequence[int] | None = None,
    bitmask: np.ndarray | None = None,
    want_logprobs: bool = False,
) -> sampler.Sampled:
    num_rows, vocab = logits.shape
    masked = bitmask is not None
    words = np.zeros((num_rows, slots.mask_words(vocab)), np.int32) if bitmask is None else bitmask
    ids = np.arange(num_rows) if rows is None else np.array(rows)
    return programs()["sample"](
        jnp.asarray(logits, jnp.float32),
        sampler.RowsToSample(jnp.asarray(ids, jnp.int32), jnp.asarray(masked), jnp.asarray(want_logprobs)),
        state,
        jnp.asarray(words),
    )


def tokens(sampled: sampler.Sampled) -> np.ndarray:
    return np.asarray(sampled.tokens)[:, 0]


def random_logits(num_rows: int, vocab: int = V, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=(num_rows, vocab)) * scale).astype(np.float32)


GREEDY = SamplingParams(temperature=0)


def test_greedy_takes_the_largest_and_of_equals_the_first() -> None:
    logits = random_logits(3)
    logits[1, [7, 50]] = 99.0
    assert tokens(run(logits, state_of([GREEDY] * 3))).tolist() == logits.argmax(axis=1).tolist()


# --- logits


def oracle_penalties(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    out = logits.astype(np.float64).copy()
    for token in set(prompt) | set(output):
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return out


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, repetition_penalty=1.7),
        SamplingParams(temperature=0, repetition_penalty=0.6),
        SamplingParams(temperature=0, frequency_penalty=0.9),
        SamplingParams(temperature=0, frequency_penalty=-0.4),
        SamplingParams(temperature=0, presence_penalty=1.5),
        SamplingParams(temperature=0, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=-0.8),
    ],
    ids=str,
)
def test_penalties_against_an_oracle(params: SamplingParams) -> None:
    prompt, output = [3, 3, 9, 150], [9, 9, 9, 27, 199]
    logits = random_logits(2)
    state = state_of([params, GREEDY], prompt=prompt, output=output)
    rows = jnp.arange(2, dtype=jnp.int32)
    rules = LogitRules.of(rows, state, jnp.zeros((2, 7), jnp.int32), jnp.asarray(False))
    shaped = rules.apply(jnp.asarray(logits))
    expected = oracle_penalties(logits[0], params, prompt, output)
    np.testing.assert_allclose(np.asarray(shaped)[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(np.asarray(shaped)[1], logits[1])  # a neighbour without penalties


def test_sampled_tokens_are_counted_for_the_penalties() -> None:
    state = state_of([SamplingParams(temperature=0, presence_penalty=2.0)])
    logits = np.zeros((1, V), np.float32)
    logits[0, [5, 6]] = 3.0, 2.5
    first = tokens(run(logits, state))
    state = slots.append_tokens(state, jnp.zeros(1, jnp.int32), jnp.asarray(first))
    assert (first[0], tokens(run(logits, state))[0]) == (5, 6)
    assert int(state.num_outputs[0]) == 1 and int(state.recent[0, -1]) == 5


def test_token_counts_saturate() -> None:
    state = state_of([GREEDY])
    state = state.replace(token_counts=state.token_counts.at[0, 5].set(slots.MAX_COUNT))
    state = slots.append_tokens(state, jnp.zeros(1, jnp.int32), jnp.full(1, 5, jnp.int32))
    assert int(state.token_counts[0, 5]) == slots.MAX_COUNT


def test_penalties_count_a_prompt_longer_than_one_chunk() -> None:
    prompt = [7] * (slots.TOKEN_CHUNK - 1) + [8]
    state = state_of([SamplingParams(frequency_penalty=1.0)], prompt=prompt, output=[8, 8, 9])
    assert np.asarray(state.in_prompt)[0].nonzero()[0].tolist() == [7, 8]
    assert {int(t): int(state.token_counts[0, t]) for t in (7, 8, 9)} == {7: 0, 8: 2, 9: 1}


def test_logit_bias_moves_the_choice_of_its_own_row_only() -> None:
    logits = random_logits(2)
    logits[1] = logits[0]
    best = int(logits[0].argmax())
    params = SamplingParams(temperature=0, logit_bias={best: -100.0, 11: 60.0, 12: 59.0})
    assert tokens(run(logits, state_of([params, GREEDY]))).tolist() == [11, best]


def test_as_many_biases_as_there_is_room_for() -> None:
    """Every entry counts: all of 4,096 tokens are moved, in as many different ways."""
    vocab = MAX_LOGIT_BIAS + 10
    bias = {token: float((token * 7919) % MAX_LOGIT_BIAS) / 64 for token in range(MAX_LOGIT_BIAS)}
    state = state_of([GREEDY, SamplingParams(temperature=0, logit_bias=bias)], vocab=vocab)
    rows = jnp.arange(2, dtype=jnp.int32)
    words = jnp.zeros((2, slots.mask_words(vocab)), jnp.int32)
    shaped = LogitRules.of(rows, state, words, jnp.asarray(False)).apply(jnp.zeros((2, vocab)))
    np.testing.assert_array_equal(np.asarray(shaped)[1], [bias.get(token, 0.0) for token in range(vocab)])
    assert not np.asarray(shaped)[0].any()


def test_min_tokens_bans_eos_and_stop_tokens_until_reached() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, [2, 40, 41]] = 9.0, 8.0, 7.0
    params = SamplingParams(temperature=0, min_tokens=1, stop_token_ids=(40,))
    state = state_of([params], eos=(2,))
    assert tokens(run(logits, state))[0] == 41
    state = slots.append_tokens(state, jnp.zeros(1, jnp.int32), jnp.full(1, 41, jnp.int32))
    assert tokens(run(logits, state))[0] == 2


def test_min_tokens_yields_to_a_grammar_that_allows_nothing_else() -> None:
    state = state_of([SamplingParams(temperature=0, min_tokens=5)], eos=(2,))
    only_eos = slots.pack_bits([2], V, allow=True)[None]
    sampled = run(random_logits(1), state, bitmask=only_eos)
    assert np.asarray(sampled.tokens).tolist() == [[2, RowStatus.FINE]]


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_static_and_step_masks(temperature: float) -> None:
    allowed = SamplingParams(
        temperature=temperature, allowed_token_ids=(5, 77, 150), bad_words_token_ids=((77,), (5, 6))
    )
    free = SamplingParams(temperature=temperature)
    logits = random_logits(3)
    state = state_of([allowed, free, free])
    step = np.stack([slots.pack_bits(ids, V, allow=True) for ids in ([150, 3], [199], range(V))])
    assert set(tokens(run(logits, state)).tolist()[:1]) <= {5, 150}
    assert tokens(run(logits, state, bitmask=step)).tolist()[:2] == [150, 199]


def test_three_masks_at_once() -> None:
    """What min_tokens bans may be drawn only where nothing else is left; what the other two ban, never."""
    params = SamplingParams(temperature=0, min_tokens=5, stop_token_ids=(2, 3), bad_words_token_ids=((4,),))
    logits = np.zeros((3, V), np.float32)
    logits[:, [4, 9]], logits[:, 2], logits[:, 3], logits[:, 7] = 9, 8, 7, 6
    ids = [[2, 3, 4, 7], [2, 3, 4], [4]]
    step = np.stack([slots.pack_bits(allowed, V, allow=True) for allowed in ids])
    sampled = np.asarray(run(logits, state_of([params] * 3), bitmask=step).tokens)
    # between two that are only banned early the first is taken: both are BANNED
    assert sampled[:, 1].tolist() == [RowStatus.FINE, RowStatus.FINE, RowStatus.NOTHING_ALLOWED]
    assert sampled[:2, 0].tolist() == [7, 2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_with_nothing_allowed_is_told_from_one_that_is_not_finite(temperature: float) -> None:
    only = SamplingParams(allowed_token_ids=(5,), temperature=temperature)
    state = state_of([only, only, only, GREEDY])
    step = np.stack([slots.pack_bits([6], V, allow=True)] * 4)
    logits = random_logits(4)
    logits[1, 100], logits[2] = np.nan, -np.inf
    status = np.asarray(run(logits, state, bitmask=step).tokens)[:, 1].tolist()
    assert status == [RowStatus.NOTHING_ALLOWED, RowStatus.NOT_FINITE, RowStatus.NOT_FINITE, RowStatus.FINE]


def test_parameters_that_overflow_are_not_the_models_fault() -> None:
    state = state_of([SamplingParams(repetition_penalty=1e-38)], prompt=range(V))
    assert np.asarray(run(random_logits(1) * 100, state).tokens)[:, 1].tolist() == [RowStatus.NOTHING_ALLOWED]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [V, 2056])
def test_logits_that_are_not_finite_fail_their_row_alone(poison: float, temperature: float, vocab: int) -> None:
    params = [SamplingParams(temperature=temperature, top_k=50, top_p=0.9)] * 3
    logits = random_logits(3, vocab=vocab)
    clean = tokens(run(logits, state_of(params, vocab=vocab)))
    logits[1, 17] = poison
    sampled = np.asarray(run(logits, state_of(params, vocab=vocab)).tokens)
    assert sampled[:, 1].tolist() == [RowStatus.FINE, RowStatus.NOT_FINITE, RowStatus.FINE]
    assert sampled[[0, 2], 0].tolist() == clean[[0, 2]].tolist()
    assert 0 <= sampled[1, 0] < vocab


def test_minus_infinity_in_the_logits_is_no_error() -> None:
    logits = random_logits(1)
    logits[0, 100:] = -np.inf
    sampled = np.asarray(run(logits, state_of([SamplingParams()])).tokens)
    assert sampled[0, 1] == RowStatus.FINE and sampled[0, 0] < 100


def oracle_support(logits: np.ndarray, params: SamplingParams) -> set[int]:
    """Tokens that may be drawn, by sorting."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    keep = np.ones(len(probs), bool)
    if params.top_k:
        keep &= logits >= np.sort(logits)[::-1][min(params.top_k, len(logits)) - 1]
    if params.top_p < 1:
        kept = np.where(keep, probs, 0)
        order = np.argsort(-kept, kind="stable")
        cumulative = np.cumsum(kept[order])
        last = int(np.searchsorted(cumulative, params.top_p * cumulative[-1]))
        keep &= kept >= kept[order[min(last, len(order) - 1)]]
    keep &= probs >= params.min_p
    return set(np.flatnonzero(keep).tolist())


# --- log-probabilities


def test_logprobs_rank_and_top_twenty() -> None:
    logits = random_logits(2)
    params = SamplingParams(temperature=3.0, top_p=0.99, presence_penalty=1.0)
    sampled = run(logits, state_of([params] * 2, output=[4, 5]), want_logprobs=True)
    logprob, rank, ids, top = logprobs.unpack_logprobs(np.asarray(sampled.logprobs))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    order = np.argsort(-exact, axis=1, kind="stable")
    for row, token in enumerate(tokens(sampled)):
        assert logprob[row] == pytest.approx(exact[row, token], abs=1e-5)
        assert order[row, rank[row] - 1] == token
        assert ids[row].tolist() == order[row, :20].tolist()
        np.testing.assert_allclose(top[row], exact[row, order[row, :20]], atol=1e-5)


def test_top_logprobs_of_a_vocabulary_below_twenty() -> None:
    logits = random_logits(1, vocab=6)
    sampled = run(logits, state_of([GREEDY], vocab=6), want_logprobs=True)
    assert logprobs.unpack_logprobs(np.asarray(sampled.logprobs))[2].shape == (1, 6)


def test_logprobs_are_zero_when_nobody_asks() -> None:
    assert not np.asarray(run(random_logits(1), state_of([GREEDY])).logprobs).any()


# --- details


def run_telling(logits: np.ndarray, state: slots.SlotState, ids: np.ndarray, wanted: bool = True) -> sampler.Sampled:
    num_rows, vocab = logits.shape
    return programs()["sample"](
        jnp.asarray(logits),
        sampler.RowsToSample(jnp.arange(num_rows, dtype=jnp.int32), jnp.asarray(False), jnp.asarray(True)),
        state,
        jnp.zeros((num_rows, slots.mask_words(vocab)), jnp.int32),
        sampler.ExtraInputs(jnp.asarray(wanted), jnp.asarray(ids, jnp.int32)),
    )


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.6, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=40, top_p=0.7, min_p=0.05),
        SamplingParams(temperature=1.3),
        GREEDY,
    ],
    ids=str,
)
def test_the_candidates_of_a_draw_and_their_log_probabilities(params: SamplingParams) -> None:
    logits = random_logits(4)
    state = state_of([params] * 4, seeds=range(4))
    sampled = run_telling(logits, state, np.zeros((4, 3)))
    assert sampled.candidates is not None
    chosen, counts, ids, top = logprobs.unpack_logprobs(np.asarray(sampled.candidates))
    assert tokens(sampled).tolist() == tokens(run(logits, state)).tolist()
    for row, token in enumerate(tokens(sampled).tolist()):
        expected = {token} if params is GREEDY else oracle_support(logits[row], params)
        kept = ids[row, : counts[row]].tolist()
        assert set(kept) == expected and len(kept) == len(expected)
        weights = np.exp(logits[row, kept].astype(np.float64) / (params.temperature or 1))
        exact = np.log(weights / weights.sum())
        np.testing.assert_allclose(top[row, : counts[row]], exact, atol=1e-5)
        assert sorted(exact, reverse=True) == pytest.approx(exact.tolist())
        assert chosen[row] == pytest.approx(exact[kept.index(token)], abs=1e-5)


def test_candidates_beyond_the_room_are_counted() -> None:
    logits = random_logits(1, vocab=400, scale=0.1)
    state = state_of([SamplingParams()], vocab=400)
    sampled = run_telling(logits, state, np.zeros((1, 1)))
    _, counts, ids, _ = logprobs.unpack_logprobs(np.asarray(sampled.candidates))
    assert counts.tolist() == [400] and ids.shape == (1, MAX_CANDIDATES)


def test_watched_ids_have_the_models_own_log_probabilities() -> None:
    logits = random_logits(2)
    params = SamplingParams(temperature=2.0, top_k=2, presence_penalty=1.0)
    ids = np.array([[3, 199, 0], [7, 7, 64]])
    sampled = run_telling(logits, state_of([params] * 2, output=[3, 7]), ids, wanted=False)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    watched = np.asarray(sampled.id_logprobs).view(np.float32)
    np.testing.assert_allclose(watched, np.take_along_axis(exact, ids, axis=1), atol=1e-5)
    assert not np.asarray(sampled.candidates).any()
    with_token = run_telling(logits, state_of([params] * 2), np.tile(tokens(sampled)[:, None], 3))
    logprob, *_ = logprobs.unpack_logprobs(np.asarray(with_token.logprobs))
    same = tokens(with_token) == tokens(sampled)
    assert (np.asarray(with_token.id_logprobs).view(np.float32)[same, 0] == logprob[same]).all()


# --- watermarks

KEY = 2**62 + 12345


def test_a_key_chooses_the_candidate_that_the_detector_computes() -> None:
    logits, prompt = random_logits(3), [5, 9, 199, 0, 77, 3]
    params = [
        SamplingParams(temperature=1.2, top_k=30, watermark_key=KEY, logprobs=0),
        SamplingParams(top_k=30),
        GREEDY,
    ]
    state = state_of([params[0], params[1], params[2]], prompt=prompt)
    sampled = run_telling(logits, state, np.zeros((3, 1)))
    assert sampled.candidates is not None
    _, counts, ids, top = logprobs.unpack_logprobs(np.asarray(sampled.candidates))
    candidates = ids[0, : counts[0]]
    windows = np.array([[*prompt[-4:], token] for token in candidates], np.uint32)
    scores = top[0, : counts[0]] - np.log(-np.log(token_numbers(windows, KEY)))
    plain = tokens(run_telling(logits, state_of([SamplingParams(top_k=30)] * 3, prompt=prompt), np.zeros((3, 1))))
    assert tokens(sampled).tolist() == [candidates[scores.argmax()], plain[1], logits[2].argmax()]


def test_over_all_contexts_a_key_draws_as_the_distribution_says() -> None:
    logits = random_logits(1, vocab=12, scale=1.0)[0]
    probs = np.exp(logits - logits.max())
    recent = np.random.default_rng(1).integers(0, 12, (20_000, 4)).astype(np.int32)
    recent[:, 0] = np.arange(20_000)  # no context twice
    keys = np.broadcast_to(np.array([KEY & 0xFFFFFFFF, KEY >> 32], np.uint32), (20_000, 2))
    wide = np.broadcast_to(probs.astype(np.float32), (20_000, 12))
    drawn = np.bincount(np.asarray(jax.jit(draw.draw_marked)(wide, keys, recent)), minlength=12)
    expected = 20_000 * probs / probs.sum()
    assert ((drawn - expected) ** 2 / expected).sum() < 31.3  # chi-square, 11 degrees of freedom, p = 0.001
