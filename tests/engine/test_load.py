"""Many requests at once: nothing is lost, and the prefix cache saves what arithmetic says. Times are printed only."""

import random
import time
from collections.abc import Sequence

import numpy as np
import pytest

from benchmarks.scheduler import decode_step_seconds
from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.types.step import FinishReason, SampledTokens, SchedulerOutput
from tests.fakes import VOCAB, Transcripts, drain, make_core, make_request, run_all, small_config
from tests.waiting import with_quick_collections


class RandomStep:
    """A handle whose tokens are drawn at random."""

    def __init__(self, rows: int, rng: np.random.Generator) -> None:
        self._rows = rows
        self._rng = rng

    def sample(self, bitmask: np.ndarray, late: Sequence[int] = ()) -> None:
        raise AssertionError("nothing here is masked")

    def result(self) -> SampledTokens:
        tokens = self._rng.integers(0, VOCAB, (self._rows, 1), np.int32)
        return SampledTokens(tokens, np.ones(self._rows, np.int32), np.zeros(self._rows, np.uint8))


class RandomRunner:
    """A device that costs nothing, for runs in which only the host's work counts."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def execute(self, output: SchedulerOutput) -> RandomStep:
        return RandomStep(len(output.rows), self._rng)

    def rebuild(self) -> None:
        raise AssertionError("nothing here fails")

    def num_compiles(self) -> int:
        return 0

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("policy", "count"),
    [("fcfs", 2000), ("lpm", 1000), ("priority", 1000), pytest.param("fcfs", 5000, marks=pytest.mark.slow)],
)
def test_thousands_of_requests_on_a_small_pool(policy: str, count: int) -> None:
    config = small_config(
        num_pages=1280, page_size=16, max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=4096,
        policy=policy, new_token_ratio=0.1,
    )  # fmt: skip
    # CPU time of this thread as the clock: other work on the machine does not count
    core = EngineCore(RandomRunner(), config, CoreOptions(vocab_size=VOCAB, eos_token_ids=(0,), clock=time.thread_time))
    rng = random.Random(0)
    for i in range(count):
        prompt = rng.choices(range(VOCAB), k=rng.randrange(10, 400))
        core.add(make_request(f"r{i}", prompt, max_tokens=rng.randrange(8, 300), priority=i % 5))
    transcripts, slowest, before = Transcripts(), 0.0, 0.0
    with with_quick_collections():
        while core.has_work:
            transcripts.take(core.step())
            slowest, before = max(slowest, core._scheduler_seconds - before), core._scheduler_seconds
    core.scheduler.check_integrity()
    assert len(transcripts) == count
    assert {transcript.reason for transcript in transcripts.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    counters = core.scheduler.counters
    assert counters.retractions > 0
    print(
        f"\n{policy}: {counters.steps} steps, {counters.retractions} retractions, {counters.priority_preemptions} "
        f"preemptions; scheduler {core._scheduler_seconds / counters.steps * 1e6:.0f} us a step, "
        f"slowest {slowest * 1e3:.1f} ms"
    )


def test_all_of_5000_requests_can_be_cancelled() -> None:
    core = make_core(small_config(num_pages=1280, page_size=16, max_num_seqs=64, max_num_batched_tokens=512))
    for i in range(5000):
        core.add(make_request(f"r{i}", [i % VOCAB, 1, 2, 3] * 8, max_tokens=60))
    transcripts = Transcripts()
    for _ in range(20):
        transcripts.take(core.step())
    ended = sum(transcript.last is not None for transcript in transcripts.values())
    transcripts.take(core.abort([f"r{i}" for i in range(5000)]))
    run_all(core, transcripts=transcripts)
    reasons = [transcript.reason for transcript in transcripts.values()]
    assert reasons.count(FinishReason.ABORT) == 5000 - ended and None not in reasons
    assert core.scheduler.stats().num_pages_held == 0


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_a_shared_system_prompt_is_computed_once(policy: str) -> None:
    """1,000 requests: 512 shared tokens (32 pages) and 5 to 30 of their own, all queued at once."""
    config = small_config(
        num_pages=4096, page_size=16, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=1024, policy=policy
    )
    core, rng = make_core(config), random.Random(0)
    system = rng.choices(range(VOCAB), k=512)
    tails = [[i % VOCAB, i // VOCAB, *rng.choices(range(VOCAB), k=rng.randrange(3, 29))] for i in range(1000)]
    for i, tail in enumerate(tails):
        core.add(make_request(f"r{i}", system + tail, max_tokens=2))
    drain(core)
    counters = core.scheduler.counters
    assert counters.prompt_tokens == 1000 * 512 + sum(map(len, tails))
    assert counters.cached_tokens == 999 * 512
    assert counters.prefill_tokens == 512 + sum(map(len, tails))


def test_siblings_of_many_groups_share_their_prefills() -> None:
    """100 requests with n = 8 and a shared system prompt, interleaved as a server would queue them."""
    config = small_config(
        num_pages=4096, page_size=16, max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=1024
    )
    core, rng = make_core(config), random.Random(0)
    system = rng.choices(range(VOCAB), k=512)
    for group in range(100):
        prompt = [*system, group % VOCAB, *rng.choices(range(VOCAB), k=63)]
        for index in range(8):
            core.add(make_request(f"r{group}-{index}", prompt, max_tokens=2, temperature=1.0, seed=index))
    drain(core)
    assert core.scheduler.counters.prefill_tokens == 512 + 100 * (64 + 7 * 16)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_the_benchmark_runs(num_rows: int) -> None:
    assert 0 < decode_step_seconds(num_rows, num_steps=20) < 1
