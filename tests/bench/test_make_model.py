"""Models that benchmarks serve."""

from __future__ import annotations

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from benchmarks.make_model import widen
from examples.demo_model.evaluate import load_params
from examples.demo_model.model import DemoConfig, forward
from tests.api.fakes import DEMO


def test_a_widened_demo_model_writes_the_demo_models_text(tmp_path: Path) -> None:
    widen(tmp_path, 2, layers=6)
    hf = json.loads((tmp_path / "config.json").read_text())
    wide = DemoConfig(**{name: hf[name] for name in DemoConfig.__dataclass_fields__})
    assert (wide.hidden_size, wide.num_attention_heads, wide.num_hidden_layers) == (512, 16, 6)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 2048, (1, 12)))
    rest = jnp.ones_like(tokens), jnp.arange(12, dtype=jnp.int32)[None]
    found = forward(load_params(tmp_path), tokens, *rest, wide)
    np.testing.assert_allclose(found, forward(load_params(DEMO), tokens, *rest, DemoConfig()), atol=1e-3)
