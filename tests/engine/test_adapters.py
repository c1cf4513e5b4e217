"""Adapters of a whole engine in this process: loaded, replaced and unloaded while requests run."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest

from jaxserve.engine.engine import TextEngine
from jaxserve.errors import InvalidValueError, ModelNotFoundError, ServerError
from jaxserve.library.in_process import Engine, _SteppedEngine
from jaxserve.models.adapters import AdapterShape, adapt
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.structure import build
from jaxserve.types.sampling import SamplingParams
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_words
from tests.models.dense import dense_logits
from tests.models.families import STATE_CASES, golden_tensors
from tests.models.heads import FORMS, eagle_config, eagle_tensors, head_tensors, write_with_head
from tests.models.lora import peft_config, peft_tensors, random_pairs, write_adapter
from tests.models.test_pictures import write_case
from tests.models.test_quantize_at_load import load as load_quantized
from tests.models.test_quantize_at_load import widened
from tests.quick import quick_programs

HF = TINY_LLAMA | {"vocab_size": 96, "max_position_embeddings": 128}
KEYS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "num_pages": 64,
    "page_size": 8,
    "slots": 2,
    "max_rank": 4,
    "compile_cache": None,
}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPT = [7, 8, 9, 30, 31, 32, 33, 34, 35, 36, 37, 38]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_checkpoint(tmp_path_factory.mktemp("base"), HF, random_tensors(HF, seed=1))
    return write_words(directory, 96)


@pytest.fixture(scope="module")
def engine(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextEngine]:
    places = adapt(build(from_hf(HF), jnp.dtype("float32")), AdapterShape(2, 4)).tensors
    pairs = random_pairs({name: place.shape for name, place in places.items()}, 3, 1, 0.3)
    start = write_adapter(tmp_path_factory.mktemp("start"), pairs, peft_config(3, 3))
    with quick_programs(), TextEngine(str(base), **KEYS, adapters=[{"name": "start", "path": str(start)}]) as engine:
        yield engine


def tensors(engine: TextEngine, seed: int, rank: int = 3) -> dict[str, np.ndarray]:
    places = engine.runner.adapters.adapted.tensors
    return peft_tensors(random_pairs({name: place.shape for name, place in places.items()}, rank, seed, 0.3))


def load(engine: TextEngine, name: str, seed: int) -> str:
    return engine.load_adapter(name, tensors(engine, seed), config=peft_config(3, 3))


def tokens(engine: TextEngine, adapter: str | None, prompt: list[int] = PROMPT) -> list[int]:
    return engine.generate(prompt, PARAMS, adapter=adapter)[0][0].token_ids


def test_versions_pages_and_a_request_that_has_begun(engine: TextEngine) -> None:
    assert load(engine, "a", 1) == "a@1"
    first = tokens(engine, "a")
    cached = engine.generate(PROMPT, PARAMS, adapter="a")[0][0]
    assert (cached.token_ids, cached.num_cached_tokens) == (first, 8)
    assert cached.weight_versions == ("default", "a@1")
    plain = engine.generate(PROMPT, PARAMS)[0][0]
    assert plain.num_cached_tokens == 0 and plain.weight_versions == () and plain.token_ids != first
    name = engine.add_request(PROMPT, PARAMS, adapter="a")
    begun = engine.step()
    assert load(engine, "a", 2) == "a@2"
    after = engine.generate(PROMPT, PARAMS, adapter="a")[0][0]
    assert after.num_cached_tokens == 0 and after.token_ids != first and after.weight_versions == ("default", "a@2")
    while engine.has_unfinished:
        begun += engine.step()
    assert [token for output in begun if output.request_id == name for token in output.token_ids] == first
    load(engine, "again", 1)  # the same tensors: the same pages
    again = engine.generate(PROMPT, PARAMS, adapter="again")[0][0]
    assert (again.token_ids, again.num_cached_tokens) == (first, 8)
    engine.unload_adapter("a")
    engine.unload_adapter("again")
    with pytest.raises(ModelNotFoundError):
        tokens(engine, "a")
    assert engine.runner.num_compiles() == 0


def churn(engine: TextEngine, times: int) -> None:
    """Load, replace and unload under requests; each answer is that of the adapter that its name meant at the start."""
    rng = random.Random(times)
    wanted: dict[int | None, list[int]] = {None: tokens(engine, None)}
    for seed in range(6):
        load(engine, "x", seed)
        wanted[seed] = tokens(engine, "x")
    assert len(set(map(tuple, wanted.values()))) >= 5
    engine.unload_adapter("x")
    named: dict[str, int] = {}
    running: dict[str, int | None] = {}
    found: dict[str, list[int]] = {}
    sizes: list[tuple[int, int, int]] = []  # adapters on the host, bytes of the devices' arrays, and of the process
    for number in range(times):
        if number % 3 == 2 and named:
            name = rng.choice(sorted(named))
            del named[name]
            engine.unload_adapter(name)
        else:
            name, seed = rng.choice("pqrst"), rng.randrange(6)
            load(engine, name, seed)
            named[name] = seed
        for adapter in rng.sample([None, *named], min(2, 1 + len(named))):
            running[engine.add_request(PROMPT, PARAMS, adapter=adapter)] = None if adapter is None else named[adapter]
        for _ in range(3):
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        if number % 50 == 0:
            gc.collect()
            arrays = sum(array.nbytes for array in jax.live_arrays())
            sizes.append((len(engine.runner.adapters.held), arrays, psutil.Process().memory_info().rss))
    while engine.has_unfinished:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert {name: found[name] for name in running} == {name: wanted[seed] for name, seed in running.items()}
    assert engine.runner.num_compiles() == 0
    engine.core.scheduler.check_integrity()
    for name in named:
        engine.unload_adapter(name)
    engine.core.stats()
    assert len(engine.runner.adapters.held) == 1
    held, arrays, resident = (list(column) for column in zip(*sizes, strict=True))
    print(f"{times} changes, {len(running)} requests; arrays of the device: {arrays}; the process: {resident}")
    assert max(held) <= 12 and max(arrays) - min(arrays) < 2**18
    early, late = resident[: len(resident) // 4], resident[len(resident) // 4 :]
    assert not early or max(late) - max(early) < 2**23  # those that a thousand changes load have 20 MB


def test_load_replace_and_unload_under_load(engine: TextEngine) -> None:
    churn(engine, 60)


@pytest.mark.slow
def test_a_thousand_changes_under_load(engine: TextEngine) -> None:
    churn(engine, 1000)


def test_what_does_not_fit_changes_nothing(engine: TextEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(engine, "kept", 1)
    first = tokens(engine, "kept")
    spoiled = tensors(engine, 2)
    next(iter(spoiled.values()))[0, 0] = np.nan
    with pytest.raises(InvalidValueError, match="not finite"):
        engine.load_adapter("kept", spoiled, config=peft_config(3))
    with pytest.raises(InvalidValueError, match="has no adapter_config"):
        engine.load_adapter("kept", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").mkdir()
    with pytest.raises(InvalidValueError, match="no regular file"):
        engine.load_adapter("kept", tmp_path)
    with monkeypatch.context() as patch:  # a file of another user, which root can read
        patch.setattr("jaxserve.engine.adapters.read_adapter", Mock(side_effect=PermissionError("Permission denied")))
        with pytest.raises(ServerError, match="PermissionError"):
            engine.load_adapter("kept", tmp_path)
    with pytest.raises(InvalidValueError, match="no name"):
        load(engine, "../kept", 1)
    named = engine.control.adapters
    (start,) = (each for each in named.statuses() if each.name == "start")
    with pytest.raises(InvalidValueError, match=r"'start' is not loaded: .*has changed since it was loaded"):
        named.load_directory("start", start.path, replace=True, digest="0" * 32)
    assert named.digest_of("start") == start.digest
    with pytest.raises(InvalidValueError, match="at most 1"):
        engine.load_adapter("one", tensors(engine, 3), config=peft_config(3), pinned=True)
        engine.load_adapter("two", tensors(engine, 4), config=peft_config(3), pinned=True)
    assert tokens(engine, "kept") == first
    given = tensors(engine, 5)
    engine.load_adapter("mine", given, config=peft_config(3, 3))
    mine = tokens(engine, "mine")
    for array in given.values():
        array[...] = 0
    assert tokens(engine, "mine", [1, *PROMPT]) != tokens(engine, None, [1, *PROMPT])
    assert tokens(engine, "mine") == mine
    for name in ("kept", "one", "mine"):
        engine.unload_adapter(name)


def test_sleep_and_a_failed_device_keep_the_loaded_adapters(engine: TextEngine) -> None:
    load(engine, "a", 1)
    first = tokens(engine, "a")
    engine.sleep()
    engine.wake()
    assert tokens(engine, "a") == first
    name = engine.add_request(PROMPT, PARAMS, adapter="a")
    outputs = engine.step()
    engine.core.recover()
    while engine.has_unfinished:
        outputs += engine.step()
    assert [token for output in outputs if output.request_id == name for token in output.token_ids] == first
    engine.unload_adapter("a")


def test_statistics_wait_while_another_thread_loads_an_adapter(engine: TextEngine) -> None:
    # Routes in process look adapters up in the statistics, which drop the adapters that nobody needs: in the middle of
    # a load that would change the dictionary that the load reads.
    stepped, found = _SteppedEngine(cast("Engine", engine)), []
    reader = threading.Thread(target=lambda: found.append(stepped.stats()))
    with engine._lock.held():
        reader.start()
        reader.join(0.2)
        assert reader.is_alive() and not found
    reader.join()
    assert [each.name for each in found[0].adapters] == [each.name for each in engine.core.stats().adapters]


def test_the_configured_adapter_is_there_from_the_start(engine: TextEngine) -> None:
    (start,) = engine.core.stats().adapters
    assert (start.name, start.version, start.rank, start.pinned) == ("start", 1, 3, False)
    load(engine, "same", 1)
    assert {each.digest for each in engine.core.stats().adapters} == {start.digest}
    assert tokens(engine, "start") == tokens(engine, "same") != tokens(engine, None)
    engine.unload_adapter("same")


LONG_PROMPT = list(range(3, 59))
LONGER = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
WITH: dict[str, tuple[str, dict[str, Any]]] = {
    "deterministic": ("base", {"deterministic": True}),
    "int8": ("wide", {"quantization": "int8"}),
    "ngram": ("base", {"method": "ngram", "prompt_lookup_min": 1}),
    "draft model": ("eight layers", {"method": "draft_model"}),  # one layer guesses: with fewer it would rest
    "mtp": ("with a head", {"method": "mtp"}),
    "eagle3": ("deep", {"method": "eagle3"}),
    "states": ("lfm2", {"page_size": 16}),
    "pictures": ("qwen3_vl_pictures", {}),
}


def checkpoint(name: str, directory: Path) -> Path:
    if name == "qwen3_vl_pictures":
        return write_words(write_case(name, directory), 64)
    if name in STATE_CASES:
        written = golden_tensors(name)
        return write_words(write_checkpoint(directory, STATE_CASES[name], written), STATE_CASES[name]["vocab_size"])
    if name == "with a head":
        return write_words(write_with_head(directory, FORMS["mimo"], head_tensors(FORMS["mimo"])), 96)
    layers = {"deep": 3, "eight layers": 8, "one layer": 1}.get(name, HF["num_hidden_layers"])
    wide = {"hidden_size": 64, "intermediate_size": 64} if name == "wide" else {}
    hf = HF | wide | {"num_hidden_layers": layers}
    return write_words(write_checkpoint(directory, hf, random_tensors(hf, seed=1)), 96)


def together(engine: TextEngine, names: list[str | None]) -> list[list[int]]:
    """The tokens of requests that run in one batch, each with the adapter of its name."""
    found: dict[str, list[int]] = {engine.add_request(LONG_PROMPT, LONGER, adapter=name): [] for name in names}
    while engine.has_unfinished:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return list(found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", WITH)
def test_each_row_of_a_batch_is_that_of_merged_weights_with(kind: str, tmp_path: Path) -> None:
    """Drafts, quantized weights, recurrent states, a tower, deterministic mode: with each of them.

    A model whose adapter is merged into its weights is one without adapters.
    """
    name, more = WITH[kind]
    directory = checkpoint(name, tmp_path / "base")
    keys: dict[str, Any] = KEYS | {"num_pages": "auto" if kind == "states" else 64} | more
    if kind == "draft model":
        keys["draft_model"] = str(checkpoint("one layer", tmp_path / "draft"))
    if kind == "eagle3":
        hf = eagle_config(HF, 60, (1, 2, 3))
        keys["draft_model"] = str(write_checkpoint(tmp_path / "head", hf, eagle_tensors(hf)))
    names = ["a", "b", None]
    with quick_programs(), TextEngine(str(directory), **keys) as engine:
        for adapter, seed in (("a", 1), ("b", 4)):
            load(engine, adapter, seed)
        found = together(engine, names)
        assert found == [tokens_of(engine, adapter) for adapter in names] == together(engine, names)
        assert len(set(map(tuple, found))) > 1 and engine.runner.num_compiles() == 0
        own, named, drafts = engine.runner.adapters, engine.core.adapters, engine.core.stats().drafts
        assert own is not None and named is not None
        adapted, leaves = own.adapted, engine.runner.leaves
        updates = [own.held[named.digest_of(each)].updates for each in "ab"]
        engine.core.scheduler.check_integrity()
        assert kind not in ("ngram", "draft model", "mtp", "eagle3") or (
            drafts is not None and drafts.num_draft_tokens > 0
        )
    if kind == "int8":
        wide = widened(load_quantized(directory, "int8"))
        adapted, leaves = adapt(wide.structure, adapted.shape), wide.leaves
    for tokens, update in zip(found, [*updates, None], strict=True):
        merged = leaves if update is None else adapted.merge(leaves, update)
        ids = jnp.asarray([*LONG_PROMPT, *tokens])
        logits = np.asarray(dense_logits(adapted.structure, merged, ids))
        assert logits[len(LONG_PROMPT) - 1 : -1].argmax(axis=-1).tolist() == tokens


def tokens_of(engine: TextEngine, adapter: str | None) -> list[int]:
    return engine.generate(LONG_PROMPT, LONGER, adapter=adapter)[0][0].token_ids
