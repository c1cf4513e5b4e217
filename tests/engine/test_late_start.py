"""An engine that is ready before all its programs are: equal answers, and in the end all programs, measured."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest

from jaxserve.config import Config
from jaxserve.engine.factory import build_engine, locate
from jaxserve.engine.server import BuiltEngine
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.runtime.compilation.compiler import Program, num_threads
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.runtime.saved_programs.program_store import ProgramStore
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.scheduling import StepTimes
from tests.quick import quick_programs

PROMPTS = [[7, 11, 13] * 9, [5] * 17, list(range(20, 60))]


def answers(built: BuiltEngine, name: str) -> list[list[int]]:
    """Greedy tokens of all prompts, run together."""
    tokens: dict[str, list[int]] = {f"{name}{i}": [] for i in range(len(PROMPTS))}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    built.core.add(
        *(EngineRequest(request_id=key, prompt_token_ids=PROMPTS[i], params=params) for i, key in enumerate(tokens))
    )
    while built.core.has_work:
        for output in built.core.step():
            tokens[output.request_id] += output.token_ids
    return list(tokens.values())


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with quick_programs():
        yield


@pytest.fixture(scope="module")
def config(compile_cache: str) -> Config:
    return Config.of(max_num_seqs=4, max_num_batched_tokens=16, compile_cache=compile_cache, wait_for_programs=False)


def test_every_step_before_while_and_after_programs_come(config: Config) -> None:
    whole = build_engine(config, lambda message: None)
    assert whole.late is None
    expected = answers(whole, "whole")
    built = build_engine(config, lambda message: None, early=True)
    late, runner = built.late, built.core.runner
    assert late is not None and isinstance(runner, ModelRunner)
    assert not [name for name in runner.compiled if name.startswith("decode[")]
    assert len(runner.compiled) < built.info.num_programs == whole.info.num_programs
    assert late.stats()["programs_ready"] == len(runner.compiled)
    assert answers(built, "early") == expected
    assert not late.has_work, "nothing is measured before all programs are there"

    late.start()
    rounds = 0
    while not runner.late.is_complete:
        assert answers(built, f"round {rounds} ") == expected
        rounds += 1
    assert rounds
    runner.late.wait()
    stats = late.stats()
    assert stats["programs_ready"] == stats["programs_total"] == len(runner.compiled) == built.info.num_programs
    pages = built.core.scheduler.kv.page_counts()
    calls = 0
    while late.has_work:
        late.proceed()
        calls += 1
    assert calls > len(runner.buckets.decode) and late.stats()["useful_rows"] >= 1
    assert built.core.scheduler.step_sizes == runner.buckets.extend
    assert built.core.scheduler.kv.page_counts() == pages, "the prefix cache keeps its pages"
    assert answers(built, "last") == expected, "and their content"
    assert runner.num_compiles() == 0, "no step compiled anything"
    runner.close()


def test_a_program_that_cannot_be_compiled_leaves_the_others(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    built = build_engine(config, lambda message: None, early=True)
    runner = built.core.runner
    assert built.late is not None and isinstance(runner, ModelRunner)
    with monkeypatch.context() as broken:
        broken.setattr(Program, "compile", _fail)
        broken.setattr(ProgramStore, "find", lambda store, program: None)
        built.late.start()
        with pytest.raises(RuntimeError, match="no room"):
            runner.late.wait()
    assert "the other programs are not compiled" in caplog.text
    assert not built.late.has_work and answers(built, "still")
    runner.close()


def _fail(program: Program) -> None:
    raise RuntimeError("no room")


def test_nothing_is_measured_while_a_request_is_live(config: Config) -> None:
    built = build_engine(config, lambda message: None, early=True)
    assert built.late is not None and isinstance(built.core.runner, ModelRunner)
    built.late.start()
    built.core.runner.late.wait()
    assert built.late.has_work
    built.core.serving.asleep.add("kv_cache")
    assert not built.late.has_work, "nor while the arrays are not on the device"
    built.core.serving.asleep.clear()
    built.core.add(EngineRequest(request_id="r", prompt_token_ids=[1, 2, 3], params=SamplingParams(max_tokens=2)))
    assert not built.late.has_work
    built.late.proceed()
    assert "useful_rows" not in built.late.stats()
    built.core.runner.close()


@pytest.mark.parametrize(
    "keys",
    [
        {"deterministic": True},
        {"wait_for_programs": True},
        {"method": "ngram"},
        {"host_memory": "1MiB"},
        {"bundle": "b"},
        {"hosts": 2},
    ],
    ids=str,
)
def test_these_wait_for_all_programs(config: Config, keys: dict[str, Any]) -> None:
    model = read_config(locate(config))
    asked = Config.of(None, max_num_seqs=4, max_num_batched_tokens=16, **keys)
    assert RunnerConfig.resolve(config, model, "cpu", jnp.dtype("float32")).early
    assert not RunnerConfig.resolve(asked, model, "cpu", jnp.dtype("float32")).early
    assert not RunnerConfig.resolve(config, model, "gpu", jnp.dtype("float32")).early


def test_programs_come_in_the_order_of_use(config: Config) -> None:
    built = build_engine(config, lambda message: None, early=True)
    runner = built.core.runner
    assert isinstance(runner, ModelRunner)
    rest = [program.name for program in runner._programs.rest()]
    assert rest[:2] == ["decode_hidden[1]", "head_sample[1]"] and rest[-1] == "decode[4]"
    assert not set(rest) & set(runner.compiled)
    runner.close()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (8, 2), (64, 4)])
def test_threads_of_late_programs(cores: int, threads: int) -> None:
    assert num_threads(cores) == threads


def test_times_without_attention_are_scaled() -> None:
    first, padded = StepTimes({}, {32: 6.0}), StepTimes({1: 1.0}, {8: 1.0, 32: 3.0})
    assert padded.like(first) == StepTimes({1: 1.0}, {8: 2.0, 32: 6.0})
    assert padded.like(StepTimes({}, {})) == padded
