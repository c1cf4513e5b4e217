"""What the factory decides from the model and the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import Engine
from jaxserve.config import Config
from jaxserve.engine.factory import load_draft_model, pages_name, with_drafts
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.structure import build
from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import LongRopeScaling, RopeConfig
from jaxserve.runtime.runner_config import RunnerConfig
from jaxserve.types.sampling import SamplingParams
from jaxserve.types.step import FinishReason
from tests.conftest import ONE_ROW
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_words
from tests.models.heads import eagle_config
from tests.quick import quick_programs


def name(directory: Path, model: ModelConfig) -> str:
    config = Config.of(None)
    loaded: Any = SimpleNamespace(leaves=[np.zeros(1, np.float32)], config=model)
    mesh: Any = SimpleNamespace(devices=jax.devices(), tensor=1)
    resolved = RunnerConfig.resolve(config, model, "cpu", np.dtype(np.float32))
    return pages_name(config, resolved, loaded, mesh, directory)


def test_a_draft_model_that_is_not_worth_its_time_is_left_out(tmp_path: Path) -> None:
    """By the sizes, so that two starts decide alike. A method that is chosen is kept."""
    directory = str(write_checkpoint(tmp_path, TINY_LLAMA, random_tensors(TINY_LLAMA, seed=1)))
    served: Any = SimpleNamespace(
        structure=build(from_hf(TINY_LLAMA), jnp.dtype("float32")), config=from_hf(TINY_LLAMA)
    )
    config, drafter = with_drafts(Config.of(draft_model=directory), served, "cpu")
    assert (config.speculation.source, config.speculation.draft_model) == ("off", None)
    assert drafter == f"none: {directory} would make 0.44 x"
    served.config = served.config.replace(num_layers=400)
    config, drafter = with_drafts(Config.of(draft_model=directory), served, "cpu")
    assert config.speculation.method == "draft_model" and "at most 4 tokens a step, by its size 2.0 x" in drafter
    chosen = Config.of(method="draft_model", draft_model=directory)
    assert with_drafts(chosen, served, "cpu") == (chosen, f"{directory}, at most 4 tokens a step")


def test_a_head_is_no_draft_model(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, eagle_config(TINY_LLAMA, 11, (1, 2, 3)), {"x": np.zeros(1)})
    served: Any = SimpleNamespace(
        structure=build(from_hf(TINY_LLAMA), jnp.dtype("float32")), config=from_hf(TINY_LLAMA)
    )
    for method in ("auto", "draft_model"):
        config = Config.of(method=method, draft_model=str(path))
        unread: Any = None
        with pytest.raises(ConfigError, match="is a head in EAGLE-3's form") as error:
            load_draft_model(with_drafts(config, served, "cpu")[0], served, unread, unread, unread)
        assert error.value.fix == "set speculation.method to eagle3"


def test_the_served_context_is_part_of_the_pages_name(tmp_path: Path) -> None:
    """It chooses LongRoPE's factors, by which keys are rotated."""
    (tmp_path / "config.json").write_text("{}")
    rope = RopeConfig(2, scaling=LongRopeScaling((1.0,), (3.0,), 64, 1.2, long=False))
    model = ModelConfig("X", 8, 8, 8, 1, 1, 1, 2, 256, rope)
    short, long = model.for_context(64), model.for_context(65)
    assert name(tmp_path, short) == name(tmp_path, model.for_context(32))
    assert name(tmp_path, short) != name(tmp_path, long)


def test_the_eos_token_of_the_tokenizer_ends_an_output_too(tmp_path: Path) -> None:
    """As in vLLM and SGLang: a model trained for chats may have the token that ends a turn in no other file."""
    hf = TINY_LLAMA | {"eos_token_id": 2}
    tensors = random_tensors(hf)
    tensors["lm_head.weight"][:] = 0  # so that greedy tokens are 0, [PAD]
    directory = write_words(write_checkpoint(tmp_path, hf, tensors), hf["vocab_size"])
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[PAD]"}))
    with quick_programs():
        engine = Engine(str(directory), compile_cache=None, num_pages=64, **ONE_ROW)
    try:
        [[completion]] = engine.generate([[5, 6, 7]], SamplingParams(temperature=0.0, max_tokens=4))
        assert (completion.token_ids, completion.finish_reason) == ([0], FinishReason.STOP)
        assert engine.info.eos_token_ids == [2, 0]
    finally:
        engine.close()
