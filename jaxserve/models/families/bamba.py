"""Bamba: most layers are Mamba-2 (https://arxiv.org/abs/2405.21060), the others attention that rotates half a head.

Granite 4 has the same layers and keys, see `granite.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, boolean, optional_integer, shown
from jaxserve.models.config import Mamba2Config, ModelConfig
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.family import Family
from jaxserve.models.layers import Attention
from jaxserve.models.mamba2 import Mamba2
from jaxserve.models.moe import feed_forward
from jaxserve.ops.state import StateSpec


class BambaForCausalLM(CausalLM):
    """Pre-norm layers with Mamba-2 or attention, and an MLP or experts."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        ffn = feed_forward(config, index, dtype)
        spec = config.layer_states[index] if config.layer_states else None
        if spec is None:
            return PreNormLayer(config, dtype, Attention(config, dtype), ffn)
        return PreNormLayer(config, dtype, Mamba2(config, spec, dtype), ffn, mixer="mamba")


def with_mamba2(hf: Json, fields: dict[str, Any], states: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of a model whose layers marked in `states` are Mamba-2. Raises ValueError as `keyed_state`."""
    state = keyed_state(hf, fields, optional_integer(hf, "mamba_expand", 2) * fields["hidden_size"])
    return {
        "layer_states": tuple(state if each else None for each in states),
        "mamba2": Mamba2Config(boolean(hf, "mamba_conv_bias", True), boolean(hf, "mamba_proj_bias", False)),
    }


def keyed_state(hf: Json, fields: dict[str, Any], inner: int) -> StateSpec:
    """Return the description of a Mamba-2 state by the keys `mamba_*`. inner: numbers of all heads together

    Raises ValueError for sizes that do not fit each other, and for another activation than silu.
    """
    if fields["activation"] != "silu":
        raise ValueError(f"'hidden_act' must be 'silu' in Mamba-2 layers, not {shown(hf.get('hidden_act'))}")
    heads, groups = optional_integer(hf, "mamba_n_heads", 128), optional_integer(hf, "mamba_n_groups", 1)
    given = None if hf.get("mamba_d_head") == "auto" else optional_integer(hf, "mamba_d_head", None)
    head_dim = inner // heads if given is None else given
    if heads * head_dim != inner:
        raise ValueError(f"{heads} Mamba-2 heads of {head_dim} are not {inner} numbers")
    size, width = optional_integer(hf, "mamba_d_state", 256), optional_integer(hf, "mamba_d_conv", 4)
    return mamba2_state(hf, groups, heads, size, head_dim, width)


def mamba2_state(hf: Json, groups: int, heads: int, state: int, head_dim: int, width: int) -> StateSpec:
    """Return the description of a Mamba-2 state, dt within `time_step_limit`. Raises ValueError if that is damaged.

    groups: heads of B and C. heads, head_dim: of x. state: numbers of a head of B or C. width: of the convolution
    """
    if heads % groups:
        raise ValueError(f"{heads} Mamba-2 heads are no multiple of {groups} groups")
    limits = hf.get("time_step_limit") or (0.0, math.inf)
    numbers = [x for x in limits if isinstance(x, int | float)] if isinstance(limits, list | tuple) else []
    if len(numbers) != 2 or len(limits) != 2 or not 0 <= numbers[0] <= numbers[1]:
        raise ValueError(f"'time_step_limit' must be two numbers, the smaller first, not {shown(limits)}")
    low, high = (float(x) if x <= _LARGEST else math.inf for x in numbers)  # Nemotron 3 Ultra has 1e308
    return StateSpec("mamba2", groups, heads, state, head_dim, width, dt_limits=(low, high))


_LARGEST = 3.4028235e38  # of float32
# rules of ModelConfig.tensor_names, Falcon-H1's too
NAMES = (
    ("model.final_layernorm.", "model.norm."),
    (".pre_ff_layernorm.", ".post_attention_layernorm."),
    (".feed_forward.", ".mlp."),
)


def _bamba(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    attention = hf.get("attn_layer_indices") or ()
    half = replace(fields["rope"], rotary_dim=fields["head_dim"] // 2)
    states = [i not in attention for i in range(fields["num_layers"])]
    return with_mamba2(hf, fields, states) | {"rope": half, "tensor_names": NAMES}


_DEFAULTS = {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "partial_rotary_factor": 0.5}
FAMILIES = (
    Family(
        "BambaForCausalLM",
        BambaForCausalLM,
        _bamba,
        defaults=_DEFAULTS,
        supported={"partial_rotary_factor": (0.5,)},
    ),
)
