"""An engine whose weights are replaced: the tokens of one that started with them, and nothing left of the old ones."""

from __future__ import annotations

import gc
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import Engine, SamplingParams
from jaxserve.errors import InvalidValueError, ModelLoadError, ServerError
from jaxserve.types.calls import UpdateFromDirectory, UpdateFromFile
from jaxserve.types.step import FinishReason
from tests.api.fakes import DEMO
from tests.conftest import FEW_PAGES

PROMPTS = ["Once upon a time", "A dog and a cat went to the sea. They", "a"]
LONG = "The cat saw a red ball near the old house, and she ran to the garden. " * 4
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.9, seed=7, max_tokens=12, logprobs=3, prompt_logprobs=1),
]
Tensors = dict[str, np.ndarray]


def tensors(seed: int) -> Tensors:
    """The demo model's, with noise; 0: as they are."""
    rng, found = np.random.default_rng(seed), load_file(DEMO / "model.safetensors")
    return {
        name: (array.astype(np.float32) * (1 + 0.2 * (seed > 0) * rng.normal(size=array.shape))).astype(array.dtype)
        for name, array in found.items()
    }


def answers(engine: Engine) -> list[Any]:
    """Tokens and log-probabilities, computed without the cached prefixes of earlier calls."""
    engine.core.flush_prefix_cache()
    rows = [row for params in PARAMS for row in (*engine.generate(LONG, params), *engine.generate(PROMPTS, params))]
    return [(one.token_ids, one.logprobs, one.prompt_logprobs) for [one] in rows]


@pytest.fixture(scope="module")
def engine(compile_cache: str) -> Iterator[Engine]:
    with Engine(compile_cache=compile_cache, **FEW_PAGES) as engine:
        yield engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(DEMO, directory)
    save_file(tensors(1), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def expected(checkpoint: Path, compile_cache: str) -> list[Any]:
    """The answers of an engine that starts with the new weights."""
    with Engine(str(checkpoint), compile_cache=compile_cache, **FEW_PAGES) as engine:
        return answers(engine)


@pytest.fixture(scope="module")
def originals(engine: Engine) -> list[Any]:
    return answers(engine)


@pytest.fixture(autouse=True)
def as_at_the_start(engine: Engine, originals: list[Any]) -> Iterator[None]:
    """Nothing compiles whatever is done, every page comes back, and the old weights too."""
    compiles = engine.runner.num_compiles()
    yield
    engine.resume()
    engine.wake()
    engine.update_weights(tensors(0), running="abort")
    while engine.has_unfinished:
        engine.step()
    assert answers(engine) == originals
    assert engine.runner.num_compiles() == compiles
    engine.core.scheduler.check_integrity()
    assert engine.core.scheduler.stats().num_pages_held == 0


TABLE = "model.embed_tokens.weight"
UPDATES: dict[str, Callable[[Engine, Path], Any]] = {
    "names": lambda engine, _: engine.update_weights(tensors(1)),
    "pairs": lambda engine, _: engine.update_weights(iter(tensors(1).items()), delete_old=False),
    "directory": lambda engine, path: engine.control.update_from_directory(UpdateFromDirectory(path=str(path))),
    "file": lambda engine, path: engine.control.update_from_file(UpdateFromFile(path=str(path / "model.safetensors"))),
    "tied": lambda engine, _: engine.update_weights(tensors(1) | {"lm_head.weight": tensors(1)[TABLE]}),
}


@pytest.mark.parametrize("form", UPDATES)
def test_answers_are_those_of_an_engine_that_started_so(
    engine: Engine, checkpoint: Path, expected: list[Any], originals: list[Any], form: str
) -> None:
    UPDATES[form](engine, checkpoint)
    assert answers(engine) == expected != originals
    [one] = engine.generate(LONG, PARAMS[0])[0]
    assert one.num_cached_tokens > 0 and one.weight_versions == (engine.weight_version,)


def test_prefixes_of_old_weights_are_never_used(engine: Engine) -> None:
    engine.generate(LONG, PARAMS[0])
    assert engine.generate(LONG, PARAMS[0])[0][0].num_cached_tokens > 0
    engine.update_weights(tensors(1))
    assert engine.core.scheduler.stats().num_pages_cached == 0
    assert engine.generate(LONG, PARAMS[0])[0][0].num_cached_tokens == 0


BAD: dict[str, Callable[[Tensors], Any]] = {
    "missing": lambda t: {name: t[name] for name in list(t)[:-1]},
    "shape": lambda t: t | {"model.norm.weight": t["model.norm.weight"][:-1]},
    "no arrays": lambda t: dict.fromkeys(t, 1.0),
    "another head than the tied one": lambda t: t | {"lm_head.weight": np.zeros_like(t[TABLE])},
    "version": lambda t: t,
    "mode": lambda t: t,
}


@pytest.mark.parametrize("case", BAD)
def test_a_failed_update_leaves_everything_as_it_was(engine: Engine, originals: list[Any], case: str) -> None:
    answers(engine)
    version, cached = engine.weight_version, engine.core.scheduler.stats().num_pages_cached
    options: dict[str, Any] = {"version": {"version": ""}, "mode": {"running": "later"}}.get(case, {})
    with pytest.raises((ModelLoadError, InvalidValueError)):
        engine.update_weights(BAD[case](tensors(1)), **options)
    assert engine.weight_version == version and engine.core.scheduler.stats().num_pages_cached == cached
    assert answers(engine) == originals


def run(engine: Engine, steps: int = 10**6) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    while engine.has_unfinished and steps:
        steps -= 1
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def begin(engine: Engine) -> dict[str, list[Any]]:
    """Run until the request has some tokens and goes on."""
    found: dict[str, list[Any]] = {}
    while sum(len(output.token_ids) for output in found.get("r", [])) < 3:
        for name, outputs in run(engine, 1).items():
            found.setdefault(name, []).extend(outputs)
    return found


def joined(*parts: dict[str, list[Any]]) -> tuple[list[int], list[Any], list[Any]]:
    outputs = [output for part in parts for output in part.get("r", [])]
    return (
        [token for output in outputs for token in output.token_ids],
        [entry for output in outputs for entry in output.logprobs or []],
        [output.weight_versions for output in outputs if output.token_ids],
    )


@pytest.mark.parametrize("running", [None, "in_place", "abort"])
def test_running_requests(engine: Engine, running: Any) -> None:
    """Computed again: each token after the update is the one that follows the text so far under the new weights."""
    params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, ignore_eos=True)
    engine.add_request(PROMPTS[1], params, request_id="r")
    before = run(engine, 8)
    engine.update_weights(tensors(1), version="new", running=running)
    after = run(engine)
    token_ids, logprobs, versions = joined(before, after)
    if running == "abort":
        assert after["r"][-1].finish_reason is FinishReason.ABORT and "new" not in str(versions)
        return
    assert len(token_ids) == 20
    crossing = versions.index(("new",))
    old = [token for output in [*before["r"], *after["r"]][:crossing] for token in output.token_ids]
    assert 5 <= len(old) < 20 and set(versions[crossing:]) == {("new",)}
    prompt = engine.tokenizer.encode(PROMPTS[1])
    [fresh] = engine.generate([prompt + old], params)[0]
    same = fresh.token_ids[: 20 - len(old)] == token_ids[len(old) :]
    assert same == (running is None)
    if running is None:
        found = [entry.logprob for entry in logprobs[len(old) :]]
        np.testing.assert_allclose(found, [e.logprob for e in (fresh.logprobs or [])[: len(found)]], atol=2e-5)


def test_in_the_middle_of_a_long_prompt(engine: Engine, expected: list[Any]) -> None:
    """The prompt's log-probabilities are of the new weights alone, though chunks had been computed with the old."""
    engine.add_request(LONG, PARAMS[1], request_id="r")
    assert run(engine, 2) == {}
    engine.update_weights(tensors(1))
    outputs = run(engine)["r"]
    token_ids = [token for output in outputs for token in output.token_ids]
    assert (token_ids, outputs[0].prompt_logprobs) == (expected[4][0], expected[4][2])


def test_pause(engine: Engine, originals: list[Any]) -> None:
    for mode in ("retract", "in_place"):
        engine.core.flush_prefix_cache()
        engine.add_request(LONG, PARAMS[0], request_id="r")
        first = begin(engine)
        engine.pause(mode)
        running = engine.core.stats().num_running
        assert running == (mode == "in_place")
        waiting = [run(engine, 3) for _ in range(2)]  # what had been read, then nothing
        assert waiting[1] == {} and not engine.core.has_work
        with pytest.raises(ServerError, match="paused"):
            engine.generate("a")
        engine.resume()
        token_ids, logprobs, _ = joined(first, waiting[0], run(engine))
        assert token_ids == originals[0][0]
        if mode == "in_place":
            assert logprobs == originals[0][1]
    engine.add_request(LONG, PARAMS[0], request_id="r")
    run(engine, 3)
    engine.pause()
    assert run(engine)["r"][-1].finish_reason is FinishReason.ABORT


def test_updates_while_paused_and_asleep(engine: Engine, expected: list[Any], originals: list[Any]) -> None:
    engine.pause("retract")
    engine.add_request(LONG, PARAMS[0], request_id="r")
    engine.update_weights(tensors(1))
    assert engine.core.serving.halted and run(engine, 3) == {}
    engine.resume()
    assert joined(run(engine))[0] == expected[0][0]
    for level in (1, 2):
        engine.sleep(level)
        engine.update_weights(tensors(0))
        assert engine.core.serving.asleep == {"kv_cache"}
        engine.wake()
        assert answers(engine) == originals


def test_a_wake_that_fails_keeps_the_pages_of_the_cache(
    engine: Engine, originals: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(engine)
    cached = engine.core.scheduler.stats().num_pages_cached
    engine.control.sleep(1, tags=["weights"])

    def fail(*_: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    with monkeypatch.context() as patch:
        patch.setattr(jax, "device_put", fail)
        with pytest.raises(ServerError, match="the engine cannot wake"):
            engine.wake()
    assert engine.control.state()["asleep"] == ["weights"]
    engine.wake()
    assert engine.core.scheduler.stats().num_pages_cached == cached > 0
    assert answers(engine) == originals


def test_asleep(engine: Engine, originals: list[Any]) -> None:
    """Level 1 gives back what was; level 2 waits for an update. Requests that come meanwhile wait."""
    held, own = live_bytes(), sum(leaf.nbytes for leaf in jax.tree.leaves((engine.runner.caches, engine.runner.leaves)))
    engine.add_request(LONG, PARAMS[0], request_id="r")
    first = begin(engine)
    engine.sleep(1, "retract")
    assert held - live_bytes() > 0.9 * own and engine.control.state()["asleep"] == ["kv_cache", "weights"]
    assert engine.control.wake(["weights"]) == ["kv_cache"] and run(engine, 3).keys() <= {"r"}
    engine.wake()
    assert joined(first, run(engine))[0][:3] == originals[0][0][:3]
    assert answers(engine) == originals
    engine.sleep(2)
    engine.wake()
    assert engine.control.state()["asleep"] == ["weights"]
    with pytest.raises(ServerError, match="paused or asleep"):
        engine.generate("a")
    with pytest.raises(InvalidValueError, match="no request keeps its KV"):
        engine.sleep(1, "in_place")
    with pytest.raises(InvalidValueError, match="level is 3"):
        engine.sleep(3)


def live_bytes() -> int:
    """Bytes of the arrays on the devices, without those that `pinned_host` keeps."""
    live = [array for array in jax.live_arrays() if not array.is_deleted()]
    return sum(array.nbytes for array in live if array.sharding.memory_kind == "device")


def test_weights_that_are_not_numbers_end_requests_and_nothing_else(engine: Engine, expected: list[Any]) -> None:
    wrong = tensors(1)
    wrong["model.norm.weight"] = np.full_like(wrong["model.norm.weight"], np.nan)
    engine.update_weights(wrong)
    [one] = engine.generate(LONG, PARAMS[0])[0]
    assert one.error is not None and "not finite" in one.error.message and one.token_ids == []
    engine.update_weights(tensors(1))
    assert answers(engine) == expected


def updates_under_load(engine: Engine, count: int) -> None:
    """Update again and again while requests come, and compare what is held before and after."""
    rng, weights = random.Random(0), [list(tensors(seed).items()) for seed in (0, 1)]

    def one(number: int) -> None:
        while engine.core.stats().num_running + engine.core.stats().num_waiting < 12:
            params = SamplingParams(temperature=0.8, seed=number, max_tokens=rng.randint(1, 40), logprobs=1)
            engine.add_request(rng.choice([LONG, *PROMPTS]), params)
        for _ in range(rng.randint(0, 4)):
            engine.step()
        mode: Any = rng.choice([None, "in_place", "abort"])
        engine.update_weights(weights[number % 2], running=mode, delete_old=rng.random() < 0.5)

    for number in range(4):
        one(number)
    gc.collect()
    held, arrays, memory = live_bytes(), len(jax.live_arrays()), psutil.Process().memory_info().rss
    for number in range(count):
        one(number)
        if number % 50 == 0:
            engine.core.scheduler.check_integrity()
    gc.collect()
    assert live_bytes() == held and abs(len(jax.live_arrays()) - arrays) < 20
    grown = psutil.Process().memory_info().rss - memory
    print(json.dumps({"updates": count, "grown_mb": round(grown / 2**20, 1)}))
    assert grown < 100 * 2**20


def test_many_updates_under_load_leak_nothing(engine: Engine) -> None:
    updates_under_load(engine, 60)


@pytest.mark.slow
def test_a_thousand_updates_under_load_leak_nothing(engine: Engine) -> None:
    updates_under_load(engine, 1000)
