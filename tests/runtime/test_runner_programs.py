"""The runner's limits, its warm-up, and its compiled programs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.runtime.model_runner import ModelRunner
from tests.runtime.hand_scheduler import HandScheduler
from tests.runtime.oracles import GREEDY, V, greedy_oracle

pytestmark = pytest.mark.usefixtures("no_compilation")


# --- limits and weights


def test_a_step_above_the_limits_is_an_error(runner: ModelRunner) -> None:
    scheduler = HandScheduler(runner)
    with pytest.raises(ValueError, match="above the largest bucket"):
        scheduler.step([(scheduler.add(list(range(40)), GREEDY), 40)])


def test_an_empty_step(runner: ModelRunner) -> None:
    assert HandScheduler(runner).execute([]).result().token_ids.shape == (0, 1)


def test_warming_up_leaves_no_trace(runner: ModelRunner) -> None:
    tokens, before = [1, 2, 3], []
    for warm in (False, True):
        if warm:
            runner.warm_up()
            assert all(not np.asarray(array).any() for array in jax.tree.leaves((runner.caches, runner.hidden)))
        scheduler = HandScheduler(runner)
        before.append(scheduler.generate([scheduler.add(tokens, GREEDY)], 4)[0])
    assert before[0] == before[1]


def test_warming_up_attends_in_every_size(runner: ModelRunner) -> None:
    """A kernel first run by a request costs that 80 ms; a step without rows would leave the loops over them alone."""
    attended = 0
    for program in runner.sizes():
        runner._run_on_zeros(*program)
        if np.asarray(runner.caches[0]).any():
            attended += 1
            runner.rebuild()
    assert attended == sum(map(len, (runner.buckets.decode, runner.buckets.decode_hidden, runner.buckets.extend)))
    runner.rebuild()


def test_decode_fn_is_the_same_step_as_a_plain_function(
    runner: ModelRunner, dense: Callable[[list[int]], np.ndarray]
) -> None:
    scheduler = HandScheduler(runner)
    seqs = [scheduler.add(prompt, GREEDY) for prompt in ([1, 2, 3], [4, 5])]
    scheduler.generate(seqs, 1)
    rows = jnp.arange(2, dtype=jnp.int32)
    caches, state, sampled = runner.decode_fn(runner.leaves, runner.caches, runner.state, rows)
    _, _, again = runner.decode_fn(runner.leaves, caches, state, rows)
    for i, seq in enumerate(seqs):
        tokens = [int(sampled.tokens[i, 0]), int(again.tokens[i, 0])]
        assert [*seq.output, *tokens] == greedy_oracle(dense, seq.tokens[: seq.num_prompt], 3)
    scheduler.step([(seq, None) for seq in seqs])  # the runner's own state was not touched
    assert [seq.output[1] for seq in seqs] == np.asarray(sampled.tokens)[:, 0].tolist()


# --- the compiled programs


@pytest.mark.parametrize(
    "name", ["decode[1]", "decode[8]", "decode_hidden[8]", "extend[32]", "head_sample[8]", "admit"]
)
def test_no_copies_of_the_cache_or_the_counts(runner: ModelRunner, name: str) -> None:
    """Everything donated is updated in place: nothing of its size is copied or kept as temporary memory."""
    compiled, caches = runner.compiled[name], jax.tree.leaves(runner.caches)
    large = min(caches[0].nbytes, runner.state.token_counts.nbytes)
    cache = ",".join(map(str, caches[0].shape))
    text, analysis = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and analysis is not None
    assert not re.findall(rf"(?:f32\[{cache}\]|s16\[8,{V}\])\S* copy\(.*", text)
    assert analysis.temp_size_in_bytes < caches[0].nbytes / 2
    donated = 0 if name.startswith(("head", "admit")) else sum(array.nbytes for array in caches)
    assert analysis.alias_size_in_bytes >= donated + large


@pytest.mark.skipif(version("jaxlib") != "0.10.2", reason="other versions sum rightly, and keep their fusions")
def test_no_program_leaves_a_sum_to_the_library_that_gets_it_wrong(runner: ModelRunner) -> None:
    assert not any(library_sums(compiled) for compiled in runner.compiled.values())
    plain = dataclasses.replace(runner._programs, options={}).decode(8)
    assert library_sums(plain.compile()), "without the option it does"


def library_sums(compiled: jax.stages.Compiled) -> int:
    """Fusions that YNNPACK computes and that hold a reduction."""
    text = compiled.as_text() or ""
    bodies = dict(re.findall(r"^(%[\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S))
    called = [re.search(r"calls=(%[\w.-]+)", line) for line in text.splitlines() if "__ynn_fusion" in line]
    return sum(" reduce(" in bodies[match[1]] for match in called if match)


def test_plan_and_programs(runner: ModelRunner) -> None:
    assert runner.num_programs == len(runner.compiled) <= 30
    assert not [name for name in runner.compiled if "port_pages" in name], "compiled at their first use"
    assert runner.plan.kv_bytes == sum(cache.nbytes for cache in jax.tree.leaves(runner.caches))
    assert runner.plan.scratch_bytes > 0
    assert runner.plan.as_dict()["kv_tokens"] == 2048 * 8
