"""The runner as a whole, driven by hand: against the dense forward, alone and in a crowd, with every feature."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.sampling import sampler, slots
from jaxserve.types.extras import ExtraParams
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import RowStatus
from tests.runtime.hand_scheduler import HandScheduler, Sequence
from tests.runtime.oracles import GREEDY, V, exact_logprobs, greedy_oracle, prompts

pytestmark = pytest.mark.usefixtures("no_compilation")


@pytest.mark.parametrize("chunk", [1, 5, 8, 32])
def test_decode_equals_extend_equals_the_dense_forward(
    runner: ModelRunner, dense: Callable[[list[int]], np.ndarray], chunk: int
) -> None:
    """Greedy tokens exactly, and every log-probability within 1e-5."""
    params = SamplingParams(temperature=0, logprobs=20)
    scheduler = HandScheduler(runner)
    seqs = [scheduler.add(prompt, params) for prompt in prompts(8, seed=chunk)]
    scheduler.generate(seqs, 12, chunk=chunk)
    for seq in seqs:
        expected = exact_logprobs(dense(seq.tokens[:-1]))[seq.num_prompt - 1 :]
        assert seq.output == expected.argmax(axis=-1).tolist()
        for position, (logprob, rank, ids, top) in enumerate(seq.logprobs):
            order = np.argsort(-expected[position], kind="stable")[:20]
            assert rank == 1
            assert logprob == pytest.approx(expected[position].max(), abs=1e-5)
            np.testing.assert_allclose(top, expected[position][order], atol=1e-5)
            np.testing.assert_allclose(expected[position][ids], expected[position][order], atol=1e-5)


def test_a_request_is_the_same_alone_and_in_a_crowd(runner: ModelRunner) -> None:
    params = [
        GREEDY,
        SamplingParams(seed=1),
        SamplingParams(temperature=0.7, top_p=0.9, frequency_penalty=0.5),
    ]
    requests = [(prompt, params[i % 3], i * 7) for i, prompt in enumerate(prompts(8, seed=3))]
    alone = []
    for prompt, p, seed in requests:
        scheduler = HandScheduler(runner)
        alone += scheduler.generate([scheduler.add(prompt, p, seed=seed)], 15)
    crowd = HandScheduler(runner)
    order = [5, 2, 7, 0, 1, 3, 6, 4]
    seqs = [crowd.add(requests[i][0], requests[i][1], seed=requests[i][2]) for i in order]
    together = crowd.generate(seqs, 15, chunk=11)
    assert together == [alone[i] for i in order]


def test_two_steps_in_flight(runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]) -> None:
    """Step t + 1 is dispatched before step t is read: its tokens are known to the device alone."""
    scheduler = HandScheduler(runner)
    first, second = (scheduler.add(prompt, GREEDY) for prompt in prompts(2, seed=4, longest=10))
    previous = (
        [first, second],
        scheduler.execute([scheduler.row(s, len(s.tokens)) for s in (first, second)]),
    )
    for _ in range(10):
        handle = scheduler.execute([scheduler.row(s) for s in (first, second)])
        scheduler.read(previous[0], previous[1].result())
        previous = ([first, second], handle)
    for seq in (first, second):
        assert seq.output == greedy_oracle(dense, seq.tokens[: seq.num_prompt], 10)


def test_decode_rows_and_several_prompts_in_one_step(
    runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]
) -> None:
    """A ragged step: two decodes, a chunk in the middle of a prompt, two whole prompts."""
    scheduler = HandScheduler(runner)
    a, b, c, d, e = (scheduler.add(prompt, GREEDY) for prompt in [[1, 2, 3], [4], list(range(20)), [9] * 5, [7]])
    scheduler.step([(a, 3), (b, 1)])
    result = scheduler.step([(a, None), (b, None), (c, 11), (d, 5), (e, 1)])
    assert result.num_valid.tolist() == [1, 1, 0, 1, 1]
    scheduler.step([(a, None), (d, None), (e, None), (c, 9)])
    scheduler.step([(s, None) for s in (c, a, e, b, d)])
    for seq in (a, b, c, d, e):
        assert seq.output == greedy_oracle(dense, seq.tokens[: seq.num_prompt], len(seq.output))


# --- every feature of the sampler through the whole decode program


def sampled_oracle(
    dense: Callable[[list[int]], np.ndarray],
    seq: Sequence,
    params: SamplingParams,
    seed: int,
    eos: tuple[int, ...],
) -> list[int]:
    """Token by token from the dense logits: logits shaped in numpy, the draw by the sampler's tested parts."""
    tokens = seq.tokens[: seq.num_prompt]
    while len(tokens) < len(seq.tokens):
        logits = shape_in_numpy(dense(tokens)[-1], params, tokens, seq.num_prompt, eos)
        if params.temperature == 0:
            tokens.append(int(logits.argmax()))
            continue
        probs = np.exp((logits - logits.max()) / params.temperature).astype(np.float32)
        one = functools.partial(jnp.full, 1)
        kept = sampler.filter_probs(
            jnp.asarray(probs)[None],
            one(params.top_k, jnp.int32),
            one(params.top_p, jnp.float32),
            one(params.min_p, jnp.float32),
            one(True, jnp.bool_),
        )
        uniform = sampler.random_uniform(one(seed, jnp.uint32)[:, None] * jnp.asarray([[1, 0]], jnp.uint32),
                                         one(len(tokens), jnp.int32))  # fmt: skip
        tokens.append(int(sampler.inverse_cdf(kept, uniform)[0]))
    return tokens[seq.num_prompt :]


def shape_in_numpy(
    logits: np.ndarray, params: SamplingParams, tokens: list[int], num_prompt: int, eos: tuple[int, ...]
) -> np.ndarray:
    out, output = logits.astype(np.float64).copy(), tokens[num_prompt:]
    for token in set(tokens):
        factor = params.repetition_penalty
        out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
    for token in set(output):
        out[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    for token, value in params.logit_bias.items():
        out[token] += value
    if len(output) < params.min_tokens:
        out[[*eos, *params.stop_token_ids]] = -1e30
    if params.allowed_token_ids is not None:
        banned = np.ones(V, bool)
        banned[list(params.allowed_token_ids)] = False
        out[banned] = -np.inf
    return out


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0, repetition_penalty=1.5),
        SamplingParams(temperature=0, frequency_penalty=0.8, presence_penalty=0.3),
        SamplingParams(temperature=0, logit_bias={5: 4.0, 6: 3.5, 7: -100.0}),
        SamplingParams(temperature=0, min_tokens=6, stop_token_ids=(10, 11)),
        SamplingParams(temperature=0, allowed_token_ids=tuple(range(20, 30))),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.4, top_k=10),
        SamplingParams(temperature=0.8, top_p=0.8),
        SamplingParams(temperature=1.2, min_p=0.1),
        SamplingParams(temperature=1.1, top_k=40, top_p=0.9, repetition_penalty=1.2, logit_bias={3: 2.0}),
    ],
    ids=str,
)
def test_sampling_through_the_whole_step(
    runner: ModelRunner, dense: Callable[[list[int]], np.ndarray], params: SamplingParams
) -> None:
    """Beside two neighbours with features of their own; the first token comes from extend, the others from decode."""
    eos = tuple(range(12, 40))
    scheduler = HandScheduler(runner)
    busy = SamplingParams(temperature=2.0, top_k=3, presence_penalty=1.0, logit_bias={1: 50.0})
    prompt = prompts(1, seed=6)[0]
    neighbours = [scheduler.add([1, 2, 3], busy, seed=9), scheduler.add([4, 5], GREEDY)]
    seq = scheduler.add(prompt, params, seed=21, eos=eos)
    scheduler.generate([neighbours[0], seq, neighbours[1]], 14)
    assert seq.output == sampled_oracle(dense, seq, params, 21, eos)


def test_kept_output_counts_for_penalties_and_min_tokens(runner: ModelRunner) -> None:
    """A request that comes back after a preemption continues as if it had never left."""
    params = SamplingParams(temperature=0.9, frequency_penalty=0.7, presence_penalty=0.5, min_tokens=12)
    prompt, eos = prompts(1, seed=8)[0], tuple(range(40, 90))
    scheduler = HandScheduler(runner)
    whole = scheduler.generate([scheduler.add(prompt, params, seed=5, eos=eos)], 20)[0]
    again = HandScheduler(runner)
    seq = again.add(prompt, params, seed=5, eos=eos, output=whole[:9])
    while seq.computed < len(prompt) + 9:
        again.step([(seq, min(13, len(prompt) + 9 - seq.computed))])
    while len(seq.output) < 20:
        again.step([(seq, None)])
    assert seq.output == whole


def test_a_slot_forgets_its_last_request(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    busy = SamplingParams(
        temperature=1.0, presence_penalty=5.0, logit_bias={1: 60.0}, allowed_token_ids=(1, 2), min_tokens=9
    )
    scheduler.generate([scheduler.add([3, 4], busy, slot=0)], 5)
    fresh = HandScheduler(runner)
    other = fresh.generate([fresh.add([3, 4], GREEDY, slot=1)], 5)
    scheduler.next_page = 100
    assert scheduler.generate([scheduler.add([3, 4], GREEDY, slot=0)], 5) == other


# --- masks


def test_masked_steps(runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]) -> None:
    """A bitmask for a chunk's sample and for decode rows; all ones leave a row free."""
    scheduler = HandScheduler(runner)
    held, free = scheduler.add([1, 2, 3], GREEDY), scheduler.add([4, 5], GREEDY)
    only = lambda *ids: slots.pack_bits(ids, V, allow=True)
    everything = only(*range(V))
    scheduler.step([(held, 3), (free, 2)], np.stack([only(70), everything]))
    for token in (71, 72, 73):
        scheduler.step([(held, None), (free, None)], np.stack([only(token), everything]))
    scheduler.step([(held, None), (free, None)])
    assert held.output[:4] == [70, 71, 72, 73]
    assert held.output[4] == int(dense(held.tokens[:-1])[-1].argmax())
    assert free.output == greedy_oracle(dense, [4, 5], 5)


APART = [
    {"logprobs": 0, "extras": ExtraParams(logprob_token_ids=(5, 7))},
    {"logprobs": 0, "extras": ExtraParams(sampling_mask=True)},
    {"logprobs": 0, "extras": ExtraParams(hidden_states="last")},
]


@pytest.mark.parametrize("changes", [None, *APART], ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, 7])
def test_decode_rows_beside_one_that_is_sampled_apart(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any] | None, num_rows: int
) -> None:
    """One forward pass for all rows and one head; None: the row is masked."""
    requests = [(prompt, i) for i, prompt in enumerate(prompts(num_rows, seed=31, longest=9))]
    free = HandScheduler(runner)
    expected = free.generate([free.add(prompt, SamplingParams(), seed=seed) for prompt, seed in requests], 4)
    scheduler = HandScheduler(runner)
    first = SamplingParams(**(changes or {}))
    seqs = [scheduler.add(p, SamplingParams() if i else first, seed=seed) for i, (p, seed) in enumerate(requests)]
    scheduler.generate(seqs, 1)
    for family in ("extend", "decode"):
        monkeypatch.setitem(runner._by_size, family, {})
    before = runner.num_dispatches
    mask = None if changes else np.full((num_rows, slots.mask_words(V)), -1, np.int32)
    for _ in range(3):
        scheduler.step([(seq, None) for seq in seqs], mask)
    assert [seq.output for seq in seqs] == expected
    assert runner.num_dispatches - before == 3 * (3 if changes == APART[2] else 2), "a hidden state is a dispatch more"


def test_masked_step_without_a_sampling_row(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    seq = scheduler.add(list(range(20)), GREEDY)
    assert scheduler.step([(seq, 8)]).num_valid.tolist() == [0]


def test_a_row_whose_mask_is_late_gets_the_same_tokens_later(runner: ModelRunner) -> None:
    """Late at the end of its prompt and twice after it, where the place of a drawn token counts, beside another row."""
    params = SamplingParams(temperature=1.0, repetition_penalty=1.3)
    outputs = []
    for late in ((), (0, 2, 3)):
        scheduler = HandScheduler(runner)
        seqs = [scheduler.add(list(range(3, 15 + i)), params, seed=i) for i in range(2)]
        mask = np.full((2, slots.mask_words(V)), -1, np.int32)
        for step in range(6 + len(late)):
            chunks = [(seq, None if step else len(seq.tokens)) for seq in seqs]
            result = scheduler.step(chunks, mask, {1} if step in late else ())
            assert result.num_valid.tolist() == [1, int(step not in late)]
            assert result.status.tolist() == [RowStatus.FINE] * 2
        outputs.append([seq.output[:6] for seq in seqs])
    assert outputs[0] == outputs[1]


def test_a_masked_step_must_be_sampled_before_the_next(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    seq = scheduler.add([1, 2], GREEDY)
    handle = scheduler.execute([scheduler.row(seq, 2, masked=True)])
    with pytest.raises(RuntimeError, match="no result before"):
        handle.result()
    with pytest.raises(RuntimeError, match="masked step in flight"):
        scheduler.execute([scheduler.row(seq)])
    handle.sample(np.full((1, slots.mask_words(V)), -1, np.int32))
    with pytest.raises(RuntimeError, match="sampled already"):
        handle.sample(np.full((1, slots.mask_words(V)), -1, np.int32))
    assert handle.result().num_valid.tolist() == [1]


# --- pages


def test_steps_write_to_their_own_pages_only(runner: ModelRunner) -> None:
    """Padding rows and tokens, page 0 included, leave no trace: every page but those in use stays as it was."""
    marks = np.random.default_rng(0).normal(size=(64, 8, 4, 4)).astype(np.float32)
    pages = list(range(64))
    runner.caches = runner.pages.fill(runner.caches, pages, [marks, marks])
    scheduler = HandScheduler(runner)
    scheduler.next_page = 3
    seqs = [scheduler.add(prompt, GREEDY) for prompt in prompts(3, seed=9)]
    scheduler.generate(seqs, 5, chunk=9)
    used = {page for seq in seqs for page in seq.pages}
    untouched = [page for page in pages if page not in used]
    for layer in jax.tree.leaves(runner.pages.export(runner.caches, pages)):
        np.testing.assert_array_equal(layer[untouched], marks[untouched])
        assert all((layer[page] != marks[page]).any() for page in used)


def test_pages_moved_by_export_and_import(runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]) -> None:
    """A sequence continues from other pages: more of them than one dispatch takes."""
    scheduler = HandScheduler(runner)
    seqs = [scheduler.add(prompt, GREEDY) for prompt in prompts(6, seed=10)]
    scheduler.generate(seqs, 4)
    pages = [page for seq in seqs for page in seq.pages]
    many = [*pages, *range(500, 600)]
    content = runner.pages.export(runner.caches, many)
    runner.caches = runner.pages.fill(runner.caches, [page + 1000 for page in many], content)
    runner.caches = runner.pages.fill(
        runner.caches, pages, jax.tree.map(lambda layer: np.zeros_like(layer[: len(pages)]), content)
    )
    for seq in seqs:
        seq.pages, seq.sent_pages = [page + 1000 for page in seq.pages], 0
    scheduler.next_page = 1900
    scheduler.step([(seq, None) for seq in seqs])
    for seq in seqs:
        assert seq.output == greedy_oracle(dense, seq.tokens[: seq.num_prompt], 5)


def test_a_prefix_hit_brings_more_pages_than_the_step_carries(
    runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]
) -> None:
    """One token of 97 is computed: its extend has room for one page-table entry, and thirteen come."""
    scheduler = HandScheduler(runner)
    prompt = prompts(1, seed=11)[0][:1] + list(range(95)) + [3]
    first = scheduler.add(prompt, GREEDY)
    scheduler.generate([first], 1)
    second = scheduler.add(prompt, GREEDY)
    second.pages, second.computed = first.pages.copy(), len(prompt) - 1
    scheduler.step([(second, 1)])
    scheduler.step([(second, None)])
    assert second.output == greedy_oracle(dense, prompt, 2)


def test_pages_beyond_the_context_may_hold_anything(runner: ModelRunner) -> None:
    """What another request left in a page, NaN included, does not reach a row that has not written it."""
    scheduler = HandScheduler(runner)
    expected = scheduler.generate([scheduler.add([1, 2, 3, 4, 5], GREEDY)], 10)
    poison = [np.full((4, 8, 4, 4), np.nan, np.float32)] * 2
    runner.caches = runner.pages.fill(runner.caches, range(300, 304), poison)
    scheduler.next_page = 300
    assert scheduler.generate([scheduler.add([1, 2, 3, 4, 5], GREEDY)], 10) == expected


def test_first_runs_leave_no_position_before_the_first(runner: ModelRunner) -> None:
    """A kernel of recurrent states in C would read the inputs of such a token from nowhere."""
    try:
        for family, size in runner.sizes():
            runner.timed_run(family, size)
            assert np.asarray(runner.state.position).min() >= 0, (family, size)
    finally:
        runner.rebuild()


def test_a_row_that_is_not_finite_fails_alone(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    seqs = [scheduler.add(prompt, GREEDY) for prompt in prompts(3, seed=12, longest=8)]
    healthy = HandScheduler(runner)
    healthy.next_page = 500
    expected = healthy.generate([healthy.add(seqs[0].tokens[:], GREEDY), healthy.add(seqs[2].tokens[:], GREEDY)], 6)
    scheduler.generate(seqs, 3)
    page = seqs[1].pages[0]
    runner.caches = runner.pages.fill(runner.caches, [page], [np.full((1, 8, 4, 4), np.nan, np.float32)] * 2)
    results = [scheduler.step([(seq, None) for seq in seqs]) for _ in range(3)]
    expected_status = [RowStatus.FINE, RowStatus.NOT_FINITE, RowStatus.FINE]
    assert [result.status.tolist() for result in results] == [expected_status] * 3
    assert [seqs[0].output, seqs[2].output] == expected
    runner.caches = runner.pages.fill(runner.caches, [page], [np.zeros((1, 8, 4, 4), np.float32)] * 2)


def test_a_chunk_that_is_not_finite_shows_before_its_prompt_ends(runner: ModelRunner) -> None:
    """No row of the last two steps samples: their status comes from the hidden states."""
    scheduler = HandScheduler(runner)
    bad, good = (scheduler.add(list(range(1 + i, 31 + i)), GREEDY) for i in range(2))
    fine = scheduler.step([(bad, 9), (good, 8)]).status.tolist()
    runner.caches = runner.pages.fill(runner.caches, bad.pages[:1], [np.full((1, 8, 4, 4), np.nan, np.float32)] * 2)
    both = scheduler.step([(bad, 5), (good, 9)])
    alone = scheduler.step([(good, 1)])
    runner.caches = runner.pages.fill(runner.caches, bad.pages[:1], [np.zeros((1, 8, 4, 4), np.float32)] * 2)
    assert fine == [RowStatus.FINE] * 2 and not both.num_valid.any()
    assert both.status.tolist() == [RowStatus.NOT_FINITE, RowStatus.FINE] and not alone.status.any()


def test_a_row_whose_mask_allows_nothing_fails_alone(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    seqs = [scheduler.add(prompt, GREEDY) for prompt in prompts(2, seed=21, longest=8)]
    mask = np.stack([slots.pack_bits([], V, allow=True), slots.pack_bits([7], V, allow=True)])
    result = scheduler.step([(seq, len(seq.tokens)) for seq in seqs], bitmask=mask)
    assert result.status.tolist() == [RowStatus.NOTHING_ALLOWED, RowStatus.FINE] and result.token_ids[1, 0] == 7
