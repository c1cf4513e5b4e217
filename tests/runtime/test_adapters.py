"""Adapters through the step programs: several in a batch, written to slots while a step is in flight."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.adapters import AdapterShape
from jaxserve.models.checkpoint.adapter import Adapter, adapter_of
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import SchedulerOutput
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.lora import merged, peft_config, peft_tensors, random_pairs
from tests.runtime.hand_scheduler import HandScheduler, Sequence
from tests.runtime.oracles import exact_logprobs, prompts

PARAMS = SamplingParams(temperature=0, logprobs=20)
SHAPE = AdapterShape(slots=3, rank=16)
HF = TINY_LLAMA | {"vocab_size": 96, "max_position_embeddings": 128}
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def adapted(tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return with_adapters(make_runner(tiny_model, lora=SHAPE, early=True, deterministic=True))


@pytest.fixture(scope="module")
def plain(tiny_model: LoadedModel, make_runner: Callable[..., ModelRunner]) -> ModelRunner:
    return make_runner(tiny_model, early=True, deterministic=True)


def with_adapters(runner: ModelRunner) -> ModelRunner:
    """The runner with the three adapters in the memory of the host."""
    assert runner.adapters is not None
    for name in NAMES:
        runner.adapters.held[name] = adapter(runner, name)
    return runner


def adapter(runner: ModelRunner, name: str) -> Adapter:
    assert runner.adapters is not None
    places = runner.adapters.adapted
    pairs = random_pairs({module: tensor.shape for module, tensor in places.tensors.items()}, 4, NAMES.index(name), 0.2)
    return adapter_of(peft_tensors(pairs), peft_config(4, 4), places)


def write(runner: ModelRunner, writes: Mapping[int, str]) -> None:
    runner.execute(SchedulerOutput(0, [], 0, [], adapter_writes=dict(writes)))


def add(scheduler: HandScheduler, prompt: list[int], slot: int) -> Sequence:
    seq = scheduler.add(prompt, PARAMS, seed=7)
    scheduler.inits[-1] = dataclasses.replace(scheduler.inits[-1], adapter=slot)
    return seq


def trace(seq: Sequence) -> tuple[object, ...]:
    return tuple(seq.output), tuple((p, rank, *ids, *top) for p, rank, ids, top in seq.logprobs)


def test_each_row_of_a_batch_is_that_row_alone_and_equals_merged_weights(
    adapted: ModelRunner, plain: ModelRunner, tiny_model: LoadedModel, tmp_path: Path
) -> None:
    """To the bit in deterministic mode: in any slot, beside any others, and without one as in a runner without room."""
    write(adapted, {2: "one", 0: "two", 1: "three"})
    scheduler = HandScheduler(adapted)
    slots = {"one": 2, "two": 0, "three": 1, None: -1}
    seqs = {name: add(scheduler, prompt, slots[name]) for name, prompt in zip(slots, prompts(4, seed=5), strict=True)}
    scheduler.generate([*seqs.values()], 8, chunk=9)
    for name, seq in seqs.items():
        prompt, own = seq.tokens[: seq.num_prompt], -1
        if name is not None:
            own = (slots[name] + 1) % 3
            write(adapted, {own: name})
        for runner in (adapted,) if name else (adapted, plain):
            scheduler = HandScheduler(runner)
            alone = add(scheduler, prompt, own)
            scheduler.generate([alone], 8)
            assert trace(alone) == trace(seq)
    assert adapted.adapters is not None
    shapes = {module: tensor.shape for module, tensor in adapted.adapters.adapted.tensors.items()}
    tensors = random_tensors(HF, seed=1)
    for name, seq in seqs.items():
        own = tensors if name is None else merged(tensors, random_pairs(shapes, 4, NAMES.index(name), 0.2), 1.0)
        model = load_model(write_checkpoint(tmp_path / str(name), HF, own), dtype=jnp.dtype("float32"))
        ids = np.zeros(128, np.int32)
        ids[: len(seq.tokens)] = seq.tokens
        logits = np.asarray(dense_logits(model.structure, model.leaves, jnp.asarray(ids)))[: len(seq.tokens) - 1]
        expected = exact_logprobs(logits)[seq.num_prompt - 1 :]
        assert seq.output == expected.argmax(axis=-1).tolist()
        for position, (logprob, _, ids_, top) in enumerate(seq.logprobs):
            assert logprob == pytest.approx(expected[position].max(), abs=1e-5)
            np.testing.assert_allclose(top, expected[position][ids_], atol=1e-5)


def test_a_write_does_not_reach_the_step_in_flight(adapted: ModelRunner) -> None:
    outputs, before = [], adapted.num_compiles()  # the oracles of other tests count too
    for replaced in (False, True):
        write(adapted, {0: "one"})
        scheduler = HandScheduler(adapted)
        seq = add(scheduler, list(range(30)), 0)
        handle = scheduler.execute([scheduler.row(seq, 30)])
        if replaced:
            write(adapted, {0: "two"})
        scheduler.read([seq], handle.result())
        outputs.append(trace(seq))
    assert outputs[0] == outputs[1]
    assert adapted.num_compiles() == before
