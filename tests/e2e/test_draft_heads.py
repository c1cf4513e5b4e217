"""Heads through an `Engine`, loaded and compiled as for a user: the output is that without drafts.

The demo model gets a head: as MiMo, which is it with biases of 0, one for multi-token prediction, whose layer is the
model's last one, and one of EAGLE-3 with random numbers, which is rarely right.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxserve import Engine
from jaxserve.engine import factory
from jaxserve.errors import ConfigError
from tests.api.fakes import DEMO
from tests.e2e.test_draft_model import DRAFTS, KEYS, PAYS, STORY, answers, drafts
from tests.models.heads import eagle_config, eagle_tensors
from tests.quick import quick_programs

HF = json.loads((DEMO / "config.json").read_text())


@pytest.fixture(scope="module")
def as_mimo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp") / "with-head"
    shutil.copytree(DEMO, directory)
    hf = HF | {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1, "attention_bias": True}
    (directory / "config.json").write_text(json.dumps(hf))
    tensors = load_file(DEMO / "model.safetensors")
    for name in list(tensors):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            tensors[name.replace(".weight", ".bias")] = np.zeros(len(tensors[name]), tensors[name].dtype)
    start, size = "model.mtp_layers.0.", HF["hidden_size"]
    last = f"model.layers.{HF['num_hidden_layers'] - 1}."
    tensors |= {
        start + name.removeprefix(last): tensors[name].copy() for name in list(tensors) if name.startswith(last)
    }
    ones = np.ones(size, tensors["model.norm.weight"].dtype)
    tensors |= {f"{start}{name}.weight": ones for name in ("token_layernorm", "hidden_layernorm")}
    tensors[f"{start}final_layernorm.weight"] = tensors["model.norm.weight"]
    tensors[f"{start}input_proj.weight"] = np.eye(size, 2 * size, k=size, dtype=ones.dtype)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("eagle3") / "an-eagle"
    directory.mkdir()
    hf = eagle_config(HF, 300, (1, 2, 4))
    (directory / "config.json").write_text(json.dumps(hf))
    save_file(eagle_tensors(hf), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def plain(compile_cache: str) -> list[list[Any]]:
    with quick_programs(), Engine(compile_cache=compile_cache, **KEYS) as engine:
        return answers(engine)


@pytest.fixture(scope="module", params=["mtp", "eagle3"])
def engine(request: pytest.FixtureRequest, compile_cache: str) -> Iterator[Engine]:
    keys: dict[str, Any] = {"method": request.param, "num_speculative_tokens": DRAFTS}
    if request.param == "mtp":
        model = [str(request.getfixturevalue("as_mimo"))]
    else:
        model = []
        keys["draft_model"] = str(request.getfixturevalue("eagle"))
    warm_up = factory._warm_up
    with pytest.MonkeyPatch.context() as patch, quick_programs():
        patch.setattr(factory, "_warm_up", lambda *args: (warm_up(*args), PAYS)[1])
        with Engine(*model, compile_cache=compile_cache, **KEYS, **keys) as engine:
            yield engine


@pytest.mark.slow  # a minute, for compiling
def test_the_output_is_that_without_drafts(engine: Engine, plain: list[list[Any]]) -> None:
    """Greedy and sampled, with a stop string and a grammar, and again from cached prefixes and after a sleep."""
    assert answers(engine) == plain
    cached = engine.core.scheduler.counters.cached_tokens
    assert answers(engine) == plain
    assert engine.core.scheduler.counters.cached_tokens > cached + len(STORY) // 8
    assert drafts(engine).num_draft_tokens > 0
    engine.sleep(1)
    assert all(leaf.is_deleted() for leaf in (*engine.runner.leaves, *engine.runner.draft_leaves))
    engine.wake()
    assert answers(engine) == plain
    assert engine.core.stats().compiles == 0


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM in .* has no head that is served"):
        Engine(method="mtp", **KEYS)
