"""What the factory decides from the model and the configuration."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxserve.config import Config
from jaxserve.engine.factory import pages_name
from jaxserve.models.config import ModelConfig
from jaxserve.models.rope import LongRopeScaling, RopeConfig
from jaxserve.runtime.runner_config import RunnerConfig


def name(directory: Path, model: ModelConfig) -> str:
    config = Config.of(None)
    loaded: Any = SimpleNamespace(leaves=[np.zeros(1, np.float32)], config=model)
    mesh: Any = SimpleNamespace(devices=jax.devices(), tensor=1)
    resolved = RunnerConfig.resolve(config, model, "cpu", np.dtype(np.float32))
    return pages_name(config, resolved, loaded, mesh, directory)


def test_the_served_context_is_part_of_the_pages_name(tmp_path: Path) -> None:
    """It chooses LongRoPE's factors, by which keys are rotated."""
    (tmp_path / "config.json").write_text("{}")
    rope = RopeConfig(2, scaling=LongRopeScaling((1.0,), (3.0,), 64, 1.2, long=False))
    model = ModelConfig("X", 8, 8, 8, 1, 1, 1, 2, 256, rope)
    short, long = model.for_context(64), model.for_context(65)
    assert name(tmp_path, short) == name(tmp_path, model.for_context(32))
    assert name(tmp_path, short) != name(tmp_path, long)
