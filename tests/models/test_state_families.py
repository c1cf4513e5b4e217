"""Families with recurrent layers against transformers' own implementation: logits, greedy tokens and final states.

They have tables of their own, because their final states are compared too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.config import ModelConfig
from jaxserve.ops.state import StateArrays
from tests.models import paged
from tests.models.checkpoints import write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import GOLDENS, STATE_CASES, golden_tensors

TOLERANCE = 1e-4
FLOAT32 = jnp.dtype("float32")
Load = Callable[..., LoadedModel]


def golden(case: str) -> Any:
    return np.load(GOLDENS / f"{case}.npz")


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Load:
    @functools.cache
    def directory(case: str) -> Path:
        tensors = golden_tensors(case)
        return write_checkpoint(tmp_path_factory.mktemp(case), STATE_CASES[case], tensors)

    def model(case: str, config: ModelConfig | None = None, **more: Any) -> LoadedModel:
        return load_model(directory(case), dtype=FLOAT32, config=config or from_hf(STATE_CASES[case]), **more)

    return model


def error(model: LoadedModel, case: str) -> float:
    """On the prompt, relative to the largest logit."""
    ids, logits = golden(case)["ids"], golden(case)["logits"]
    found = np.asarray(dense_logits(model.structure, model.leaves, jnp.asarray(ids)))
    return float(np.abs(found - logits).max() / np.abs(logits).max())


@pytest.mark.parametrize("case", STATE_CASES)
def test_logits_and_greedy_tokens(case: str, load: Load) -> None:
    found, model = golden(case), load(case)
    ids = jnp.asarray([*found["ids"], *found["greedy"]], jnp.int32)
    logits = np.asarray(dense_logits(model.structure, model.leaves, ids))
    prompt = len(found["ids"])
    assert np.abs(logits[:prompt] - found["logits"]).max() / np.abs(found["logits"]).max() < TOLERANCE
    assert logits[prompt - 1 : -1].argmax(axis=-1).tolist() == found["greedy"].tolist()


# Families whose kinds of layers, or the parts of these, others have too: only their goldens are in the usual tiers.
LATER = STATE_CASES.keys() - {"qwen3_next", "qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe"}
STEPS = [
    pytest.param(case, chunk, marks=[pytest.mark.slow] if case in LATER and (case, chunk) != ("bamba", 40) else [])
    for case in STATE_CASES
    for chunk in (16, 40)
]


@pytest.mark.parametrize(("case", "chunk"), STEPS)
def test_greedy_and_final_states_in_steps(case: str, chunk: int, load: Load) -> None:
    """The prompt in chunks and then token by token; the states after the prompt are transformers'."""
    found, model = golden(case), load(case)
    prompt = found["ids"].tolist()
    assert paged.greedy(model, prompt, len(found["greedy"]), chunk) == found["greedy"].tolist()
    _, caches = paged.generate(model, prompt, 2, chunk)  # its second step folds the prompt's last token
    states = [cache.state for cache in caches if isinstance(cache, StateArrays) and cache.state is not None]
    names = [name for name in found.files if name.startswith("state")]  # in the order of the layers
    assert len(states) == len(names)
    for name, state in zip(names, states, strict=True):
        want = found[name][0]
        assert np.abs(np.asarray(state[1]) - want).max() < TOLERANCE * np.abs(want).max()


MUTANTS: list[tuple[str, Callable[[ModelConfig], ModelConfig]]] = [
    ("norms have weight + 1", lambda c: c.replace(norm_offset=0.0)),
    ("a quarter of a head is rotated", lambda c: c.replace(rope=replace(c.rope, rotary_dim=16))),
    ("base of the rotation", lambda c: c.replace(rope=replace(c.rope, theta=1e4))),
    ("size of epsilon", lambda c: c.replace(norm_eps=0.1)),
]


def state_with(**changes: Any) -> Callable[[ModelConfig], ModelConfig]:
    return lambda c: c.replace(layer_states=tuple(state and replace(state, **changes) for state in c.layer_states))


def of_falcon(**changes: float) -> Callable[[ModelConfig], ModelConfig]:
    return lambda c: c.replace(falcon_h1=c.falcon_h1 and replace(c.falcon_h1, **changes))


def of_mamba(row: str) -> Callable[[ModelConfig], ModelConfig]:
    """Without the scale of some rows of the first projection."""

    def changed(config: ModelConfig) -> ModelConfig:
        assert config.mamba2 is not None
        kept = zip(("z", "x", "B", "C", "dt"), config.mamba2.scales, strict=True)
        return config.replace(mamba2=replace(config.mamba2, scales=tuple(1.0 if n == row else s for n, s in kept)))

    return changed


OTHER_MUTANTS: list[tuple[str, str, Callable[[ModelConfig], ModelConfig]]] = [
    (
        "lfm2",
        "norm of queries and keys",
        lambda c: c.replace(qk_norm="none", ignored_tensors=(r"\.[qk]_(layer)?norm\.",)),
    ),
    ("lfm2", "base of the rotation", lambda c: c.replace(rope=replace(c.rope, theta=1e4))),
    ("lfm2", "size of epsilon", lambda c: c.replace(norm_eps=0.1)),
    ("lfm2_moe", "scale of experts", lambda c: c.replace(moe=replace(c.moe, scale=1.0) if c.moe else None)),
    ("lfm2_moe", "sum of gates", lambda c: c.replace(moe=replace(c.moe, normalize=False) if c.moe else None)),
    ("bamba", "limits of dt", state_with(dt_limits=(0.0, 1e9))),
    ("bamba", "half a head is rotated", lambda c: c.replace(rope=replace(c.rope, rotary_dim=8))),
    ("granite4", "scale of embeddings", lambda c: c.replace(embed_scale=1.0)),
    ("granite4", "no rotation", lambda c: c.replace(rope_layers=())),
    ("nemotron_h", "squared ReLU", lambda c: c.replace(activation="silu")),
    ("nemotron_h", "no rotation", lambda c: c.replace(rope_layers=())),
    ("nemotron_h", "scale of experts", lambda c: c.replace(moe=replace(c.moe, scale=1.0) if c.moe else None)),
    ("falcon_h1", "scale of embeddings", lambda c: c.replace(embed_scale=1.0)),
    ("falcon_h1", "scale of logits", lambda c: c.replace(logit_scale=1.0)),
    ("falcon_h1", "scale of keys", lambda c: c.replace(attention_scale=None)),
    *(
        ("falcon_h1", f"scale {name}", of_falcon(**{name: 1.0}))
        for name in ("state_in", "state_out", "attention_in", "attention_out", "gate", "down")
    ),
    *(("falcon_h1", f"scale of {row}", of_mamba(row)) for row in ("z", "x", "B", "C", "dt")),
    ("falcon_h1", "base of the rotation", lambda c: c.replace(rope=replace(c.rope, theta=1e4))),
    (
        "falcon_h1_norm",
        "norm before the gate",
        lambda c: c.replace(mamba2=c.mamba2 and replace(c.mamba2, norm="gated")),
    ),
    ("kimi_linear", "no rotation", lambda c: c.replace(rope_layers=())),
    ("kimi_linear", "decay without a floor", state_with(decay_floor=-5.0)),
]


MUTANTS_BY_CASE = [
    pytest.param(case, name, change, marks=[pytest.mark.slow] if case in LATER else [])
    for case, name, change in OTHER_MUTANTS
]


@pytest.mark.parametrize(("case", "name", "change"), MUTANTS_BY_CASE)
def test_another_model_without_a_feature_is_off(
    case: str, name: str, change: Callable[[ModelConfig], ModelConfig], load: Load
) -> None:
    assert error(load(case, change(from_hf(STATE_CASES[case]))), case) > 30 * TOLERANCE


@pytest.mark.parametrize(
    ("keys", "width"),
    [
        ({"block_ff_dim": 12288, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}, 8192),
        ({"block_ff_dim": 10240, "block_multiple_of": 256, "block_ffn_dim_multiplier": 1.0}, 6912),
        ({"intermediate_size": 10752, "block_auto_adjust_ff_dim": False}, 10752),
        ({"block_ff_dim": 50, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.3}, 48),
    ],
)
def test_the_width_of_lfm2s_feed_forward(keys: dict[str, Any], width: int) -> None:
    """2/3 of a number, times a factor, rounded up."""
    plain = {key: value for key, value in STATE_CASES["lfm2"].items() if not key.startswith("block")}
    assert from_hf(plain | keys).intermediate_size == width


@pytest.mark.parametrize(("name", "change"), MUTANTS)
def test_a_model_without_a_feature_is_off(name: str, change: Callable[[ModelConfig], ModelConfig], load: Load) -> None:
    assert error(load("qwen3_5", change(from_hf(STATE_CASES["qwen3_5"]))), "qwen3_5") > 30 * TOLERANCE


def test_a_limit_beyond_float32_is_none() -> None:
    """Nemotron 3 Ultra is published with 1e308."""
    config = from_hf(STATE_CASES["bamba"] | {"time_step_limit": [0.0, 1e308]})
    assert {state.dt_limits for state in config.layer_states if state} == {(0.0, math.inf)}


@pytest.mark.parametrize(
    ("case", "change", "cause"),
    [
        ("qwen3_5", {"mamba_ssm_dtype": "bfloat16"}, "'mamba_ssm_dtype' is 'bfloat16'"),
        ("qwen3_5", {"attn_output_gate": False}, "'attn_output_gate' is False"),
        ("qwen3_5", {"linear_num_value_heads": 5}, "5 value heads are no multiple of 2 key heads"),
        (
            "qwen3_5",
            {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
            "'sliding_attention'",
        ),
        ("qwen3_next", {"layer_types": ["linear_attention"]}, "layer_states are given for 3 layers"),
        ("lfm2", {"conv_bias": True}, "'conv_bias' is True"),
        ("lfm2_moe", {"layer_types": ["conv", "linear_attention", "conv"]}, "'linear_attention'"),
        ("bamba", {"mamba_d_head": 17}, "4 Mamba-2 heads of 17 are not 64 numbers"),
        ("bamba", {"mamba_n_groups": 3}, "4 Mamba-2 heads are no multiple of 3 groups"),
        ("bamba", {"time_step_limit": [1.0, 0.5]}, "'time_step_limit' must be two numbers"),
        ("bamba", {"attn_layer_indices": None}, "models without attention"),
        ("granite4", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu' in Mamba-2 layers"),
        ("granite4", {"layer_types": ["mamba", "conv", "mamba"]}, "'conv'"),
        ("nemotron_h", {"hybrid_override_pattern": "EM*-MM"}, "layer 0 is an MLP or experts that follow neither"),
        ("nemotron_h", {"hybrid_override_pattern": "MEX*-M"}, "layers must be M, [*], E or -"),
        ("nemotron_h", {"hybrid_override_pattern": "ME*-M"}, "5 layers are described"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' is 'silu'"),
        ("falcon_h1", {"ssm_multipliers": [1.0, 2.0]}, "'ssm_multipliers' must be 5 numbers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, "2"]}, "'mlp_multipliers' must be 2 numbers"),
        ("falcon_h1", {"projectors_bias": True}, "'mamba_proj_bias' and 'projectors_bias' must be equal"),
        ("falcon_h1", {"mamba_d_head": 17}, "4 Mamba-2 heads of 17 are not 64 numbers"),
        ("falcon_h1", {"mamba_use_mlp": False}, "'mamba_use_mlp' is False"),
        ("falcon_h1", {"hidden_act": "gelu"}, "'hidden_act' must be 'silu' in Mamba-2 layers"),
        ("kimi_linear", {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2]}}, "each of 3 layers once"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "router of DeepSeek-V3"),
    ],
)
def test_what_is_not_supported_is_named(case: str, change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        from_hf(STATE_CASES[case] | change)


def test_the_published_nested_form_is_the_one_inside() -> None:
    inside = STATE_CASES["qwen3_5_moe"]
    text = {key: value for key, value in inside.items() if key not in ("architectures", "intermediate_size")}
    rotation = text["rope_parameters"] | {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    outside = {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": text | {"rope_parameters": rotation, "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": False,
    }
    found = from_hf(outside)
    assert found.rope is not None
    assert found.rope.axes == (0, 1)
    same = {"ignored_tensors": (), "tensor_names": (), "intermediate_size": 0, "vision": None, "rope": None}
    assert found.replace(**same) == from_hf(inside).replace(**same)
