"""Which tokens may be drawn, and how often they are."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.sampling import sampler, slots
from jaxserve.runtime.sampling.vocab import top_k_by_groups
from jaxserve.types.sampling import SamplingParams, threefry2x32
from tests.runtime.test_sampler import GREEDY, S, V, oracle_support, programs, random_logits, run, state_of, tokens

# --- which tokens may be drawn


def support(logits: np.ndarray, params: SamplingParams) -> set[int]:
    probs = np.exp((logits - logits.max()) / params.temperature).astype(np.float32)[None]

    def one(value: float, dtype: type) -> jax.Array:
        return jnp.full(1, value, dtype)

    kept = programs()["filter"](
        jnp.asarray(probs),
        one(params.top_k, jnp.int32),
        one(params.top_p, jnp.float32),
        one(params.min_p, jnp.float32),
        jnp.ones(1, bool),
    )
    return set(np.flatnonzero(np.asarray(kept)[0]).tolist())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=1),
        SamplingParams(top_k=7),
        SamplingParams(top_k=V),
        SamplingParams(top_k=10**6),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=0.3),
        SamplingParams(top_p=0.95),
        SamplingParams(top_p=0.9999),
        SamplingParams(min_p=0.02),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(top_k=40, top_p=0.9, min_p=0.05, temperature=1.7),
        SamplingParams(top_p=0.9, temperature=0.2),
    ],
    ids=str,
)
@pytest.mark.parametrize("seed", range(4))
def test_filters_against_a_sorting_oracle(params: SamplingParams, seed: int) -> None:
    logits = random_logits(1, seed=seed)[0]
    assert support(logits, params) == oracle_support(logits, params)


def test_ties_at_the_border_of_top_k_are_all_kept() -> None:
    logits = np.zeros(V, np.float32)
    logits[[3, 60, 61, 190]] = 5.0, 4.0, 4.0, 4.0
    assert support(logits, SamplingParams(top_k=2)) == {3, 60, 61, 190}
    assert support(logits, SamplingParams(top_k=1)) == {3}
    assert support(np.zeros(V, np.float32), SamplingParams(top_p=0.5)) == set(range(V))


def test_filters_agree_with_float64_sorting_on_a_large_vocabulary() -> None:
    logits = random_logits(1, vocab=50_000, seed=5, scale=2.0)[0]
    for params in (
        SamplingParams(top_k=50),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=1000, top_p=0.7),
    ):
        got, expected = support(logits, params), oracle_support(logits, params)
        assert len(got ^ expected) <= max(1, len(expected) // 2000)  # float32 sums decide the last token


# --- drawing


def draw_many(logits: np.ndarray, params: SamplingParams, count: int) -> np.ndarray:
    """`count` draws of one request: its positions 0..count-1."""
    probs = jnp.exp((jnp.asarray(logits) - logits.max()) / params.temperature)[None].repeat(count, axis=0)
    full = functools.partial(jnp.full, count)
    kept = sampler.filter_probs(
        probs,
        full(params.top_k, jnp.int32),
        full(params.top_p, jnp.float32),
        full(params.min_p, jnp.float32),
        jnp.ones(count, bool),
    )
    seed = jnp.full((count, 2), 1234, jnp.uint32)
    return np.asarray(sampler.inverse_cdf(kept, sampler.random_uniform(seed, jnp.arange(count, dtype=jnp.int32))))


@pytest.mark.parametrize(
    "params",
    [SamplingParams(), SamplingParams(temperature=0.5), SamplingParams(top_k=5), SamplingParams(top_p=0.7)],
    ids=str,
)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    """Chi-square over 20,000 draws: 0.999 quantile by Wilson and Hilferty's approximation."""
    logits, count = random_logits(1, vocab=12, seed=3, scale=1.0)[0], 20_000
    allowed = sorted(oracle_support(logits, params))
    probs = np.exp(logits[allowed].astype(np.float64) / params.temperature)
    expected = probs / probs.sum() * count
    observed = np.bincount(draw_many(logits, params, count), minlength=12)
    assert observed.sum() == observed[allowed].sum() == count
    statistic = ((observed[allowed] - expected) ** 2 / expected).sum()
    freedom = len(allowed) - 1
    quantile = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < quantile


def test_inverse_cdf_hits_every_token_and_never_one_of_probability_zero() -> None:
    probs = np.zeros((1, V), np.float32)
    probs[0, [0, 127, 128, 199]] = 1.0
    uniform = np.linspace(0, 1, 1000, dtype=np.float32)  # both ends included
    drawn = sampler.inverse_cdf(jnp.asarray(probs.repeat(1000, axis=0)), jnp.asarray(uniform))
    assert np.unique(np.asarray(drawn)).tolist() == [0, 127, 128, 199]
    assert np.bincount(np.asarray(drawn))[[0, 127, 128, 199]].tolist() == pytest.approx([250] * 4, abs=1)


def test_threefry_equals_jax() -> None:
    """JAX's own generator is an independent implementation of the published algorithm."""
    key = np.array([0x12345678, 0x9ABCDEF0], np.uint32)
    counts = np.arange(10, dtype=np.uint32)
    with jax.threefry_partitionable(False):
        expected = jax.random.bits(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"), (20,))
    low, high = (jnp.full(10, word, jnp.uint32) for word in key)
    got = threefry2x32(low, high, jnp.asarray(counts), jnp.asarray(counts + 10))
    assert np.concatenate(got).tolist() == np.asarray(expected).tolist()


def test_a_row_depends_on_itself_alone() -> None:
    """The same request among other neighbours, in another slot and another row, draws the same token."""
    busy = SamplingParams(temperature=1.3, top_k=50, top_p=0.9, min_p=0.01, frequency_penalty=0.5, seed=1)
    mine = SamplingParams(temperature=1.0, top_p=0.95)
    logits = random_logits(4, scale=1.0)
    alone = tokens(run(logits[:1], state_of([mine], seeds=[2**40 + 7])))[0]
    state = state_of([busy, GREEDY, mine, busy], seeds=[1, 2, 2**40 + 7, 4], prompt=[1, 2], output=[3])
    crowd = tokens(run(logits[[1, 2, 0, 3]], state))[2]
    assert alone == crowd


def test_seed_and_position_decide_the_draw() -> None:
    logits = random_logits(1, scale=1.0)
    state = state_of([SamplingParams()], seeds=[5])
    at = [tokens(run(logits, state.replace(position=jnp.full(S, p, jnp.int32))))[0] for p in range(20)]
    again = [tokens(run(logits, state.replace(position=jnp.full(S, p, jnp.int32))))[0] for p in range(20)]
    other = [
        tokens(run(logits, state_of([SamplingParams()], seeds=[6]).replace(position=jnp.full(S, p, jnp.int32))))[0]
        for p in range(20)
    ]
    assert at == again != other and len(set(at)) > 5


def test_padding_rows_change_nothing() -> None:
    logits = random_logits(3)
    state = state_of([SamplingParams(temperature=0)])
    sampled = run(logits, state, rows=[0, S, S])
    after = slots.append_tokens(state, jnp.asarray([0, S, S], jnp.int32), sampled.tokens[:, 0])
    assert int(after.token_counts.astype(jnp.int32).sum()) == 1 and int(after.num_outputs.sum()) == 1


# --- reductions for a GPU, which no CPU program takes


def test_the_argmax_in_one_pass_is_the_first_maximum() -> None:
    logits = random_logits(6)
    logits[1, [3, 90]], logits[2], logits[3, 7], logits[4, 5] = 50.0, -np.inf, np.inf, np.nan
    found, peak = jax.jit(sampler.argmax_in_one_pass)(jnp.asarray(logits))
    np.testing.assert_array_equal(np.asarray(found), logits.argmax(axis=1))  # numpy takes NaN for a maximum too
    np.testing.assert_array_equal(np.asarray(peak), logits.max(axis=1))


@pytest.mark.parametrize("size, k", [(4096, 20), (4099, 20), (2560, 20), (300, 20), (40_000, 256)])
def test_top_k_by_groups_is_top_k(size: int, k: int) -> None:
    logits = np.random.default_rng(3).normal(size=(5, size)).astype(np.float32)
    logits[1] = np.round(logits[1])  # many equal values: the first tokens of them
    logits[2], logits[3, 10:] = 1.0, -np.inf
    for found, expected in zip(top_k_by_groups(jnp.asarray(logits), k), jax.lax.top_k(logits, k), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
