"""MiMo-V2-Flash: window layers with twice the kv heads and attention sinks, values narrower than keys, many experts.

The cache has rows of K's size for V too, whose last numbers are zeros. A full layer's sinks are so low that they add
nothing.

Its head for multi-token prediction has window layers with an MLP, one for each of three guesses. All of them read the
model's hidden states before the final norm, as in SGLang; vLLM reads those after it, and only with the first layer.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import Json, number, optional_integer, rope_config, shown
from jaxserve.models.config import LayerHeads, ModelConfig, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer, PreNormLayer
from jaxserve.models.draft_head import of_layers
from jaxserve.models.families.deepseek_v3 import deepseek_experts
from jaxserve.models.family import Family
from jaxserve.models.layers import AttendFn, Cache, Linear, RopeTable
from jaxserve.models.low_rank import Adaptable
from jaxserve.models.moe import feed_forward
from jaxserve.models.rope import RopeConfig, apply_rope
from jaxserve.models.weights import Part, param
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads

_NO_SINK = -1e30
_HEAD = (  # behind the beginning of the names of a layer of the head
    ("enorm.", "token_norm."),
    ("hnorm.", "hidden_norm."),
    ("eh_proj.", "join."),
    ("final_layernorm.", "norm."),
    ("pre_mlp_layernorm.", "layer.post_attention_layernorm."),
    ("", "layer."),
)
_HEAD_LAYERS = 3  # of the published models, whose config.json does not say it


class HeadsProj(Adaptable):
    """A weight [heads, rows, D], split over heads. The checkpoint stores it as [heads * rows, D], copies left out."""

    def __init__(
        self, name: str, heads: int, rows: int, model: int, axis: str, dtype: jnp.dtype, repeat: int = 1
    ) -> None:
        shape = (heads, rows, model)
        parts = (Part(f"{name}.weight", (heads // repeat * rows, model), shape, (0, 0, 0), repeat=repeat),)
        self.weight = param(shape, (axis, None, "embed"), dtype, parts=parts)

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        """Project x [T, D] -> [T, heads, rows]."""
        return self.adapted(x, linear(x, self.weight[...]), linear)


class MiMoAttention(nnx.Module):
    """Grouped-query attention whose values are narrower than its keys."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, value_dim: int, windowed: bool) -> None:
        model, head_dim, heads = config.hidden_size, config.head_dim, config.num_heads
        kv_heads, repeat = config.num_kv_heads, config.kv_repeat
        self.value_scale = config.value_scale
        self.q_proj = HeadsProj("q_proj", heads, head_dim, model, "q_heads", dtype)
        self.k_proj = HeadsProj("k_proj", kv_heads, head_dim, model, "kv_heads", dtype, repeat)
        self.v_proj = HeadsProj("v_proj", kv_heads, value_dim, model, "kv_heads", dtype, repeat)
        self.o_proj = Linear((model, heads * value_dim), ("embed", "q_heads"), dtype)
        self.attention_sink_bias = param((heads,), ("q_heads",), dtype) if windowed else None

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] with the rotary table of its positions -> (out [T, D], cache)."""
        assert rope is not None
        q, k = (apply_rope(proj(x, linear), rope) for proj in (self.q_proj, self.k_proj))
        v = self.v_proj(x, linear) * jnp.asarray(self.value_scale, x.dtype)
        width = v.shape[2]
        v = jnp.pad(v, ((0, 0), (0, 0), (0, k.shape[2] - width)))
        sinks = self.attention_sink_bias
        scores = jnp.full(q.shape[1:2], _NO_SINK, x.dtype) if sinks is None else sinks[...]
        out, cache = attend(Heads(q, k, v), cache, scores)
        return self.o_proj(out[:, :, :width].reshape(x.shape[0], -1), linear), cache


class MiMoV2FlashForCausalLM(CausalLM):
    """Pre-norm layers with a window and sinks, or neither."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        assert config.value_dim is not None
        attention = MiMoAttention(config.at(index), dtype, config.value_dim, config.windows[index] is not None)
        return PreNormLayer(config, dtype, attention, feed_forward(config, index, dtype))


def _mimo_v2(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim, heads = fields["num_layers"], optional_integer(hf, "head_dim", 192), fields["num_heads"]
    value_dim = optional_integer(hf, "v_head_dim", 128)
    for key, value in (("swa_num_attention_heads", heads), ("swa_head_dim", head_dim), ("swa_v_head_dim", value_dim)):
        if optional_integer(hf, key, value) != value:
            raise ValueError(
                f"{key!r} is {shown(hf[key])}, which is not supported (supported: {value}, as in full layers)"
            )
    windowed = _by_layer(hf, "layer_types", "sliding_attention", "hybrid_layer_pattern", layers)
    if windowed is None:
        windowed = tuple(i > 0 and (i + 1) % 6 != 0 for i in range(layers))
    sparse = _by_layer(hf, "mlp_layer_types", "sparse", "moe_layer_freq", layers) or tuple(i > 0 for i in range(layers))
    # `sliding_window_size` counts the tokens before the query
    size = optional_integer(hf, "sliding_window_size", None)
    window = optional_integer(hf, "sliding_window", 129) if size is None else size + 1
    if optional_integer(hf, "attention_chunk_size", size) != size:
        raise ValueError("'attention_chunk_size' must be 'sliding_window_size': chunks are not supported")
    kv_heads = fields["num_kv_heads"]
    local = LayerHeads(heads, optional_integer(hf, "swa_num_key_value_heads", 2 * kv_heads), head_dim)
    full = LayerHeads(heads, kv_heads, head_dim)
    rope, local_rope = _ropes(hf, head_dim)
    experts = deepseek_experts({**hf, "mlp_layer_types": None}, fields, dense=1)
    scale = number(hf, "attention_value_scale", None if "attention_value_scale" in hf else 0.707)
    return {
        "head_dim": head_dim,
        "value_dim": value_dim,
        "value_scale": 1.0 if scale is None else scale,
        "norm_eps": number(hf, "layernorm_epsilon", fields["norm_eps"]),
        "rope": rope,
        "local_rope": local_rope,
        "layer_windows": tuple(window if each else None for each in windowed),
        "layer_heads": tuple(local if each else full for each in windowed),
        "attention_sinks": True,
        "moe": dataclasses.replace(experts, sparse_layers=sparse, shared_ffn=0),
        "ignored_tensors": (r"^model\.mtp\.",),
        "predictor": _head(hf, windowed),
    }


def _head(hf: Json, windowed: tuple[bool, ...]) -> PredictorHead | None:
    """Return the head, for which published files have no key; None: 0 layers, or no window layer that it is like."""
    count = optional_integer(hf, "num_nextn_predict_layers", _HEAD_LAYERS)
    if count < 1 or True not in windowed:
        return None
    rules = of_layers(count, lambda index: tuple((f"model.mtp.layers.{index}.{there}", here) for there, here in _HEAD))
    like = windowed.index(True)
    return PredictorHead(rules, taps=(len(windowed),), feeds_normed=False, like=like, sparse=False, layers=count)


def _ropes(hf: Json, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """Return the rotations of full layers and of window layers, by transformers' keys or the published ones."""
    given = hf.get("rope_parameters") or {}
    by_type = (given.get("full_attention") or {}, given.get("sliding_attention") or {})
    bases = number(hf, "rope_theta", 5e6), number(hf, "swa_rope_theta", 1e4)
    part = number(hf, "partial_rotary_factor", 0.334)
    defaults = [{"rope_type": "default", "rope_theta": base, "partial_rotary_factor": part} for base in bases]
    full, local = (rope_config(hf, head_dim, plain | own) for plain, own in zip(defaults, by_type, strict=True))
    return full, local


def _by_layer(hf: Json, key: str, word: str, numbers: str, layers: int) -> tuple[bool, ...] | None:
    """Return for each layer whether `key` has the word, or the published key `numbers` has 1; None: neither is given.

    Raises ValueError if both are given and differ, or for another number of layers.
    """
    words, ones = hf.get(key), hf.get(numbers)
    found = [[each == word for each in words]] if isinstance(words, list) else []
    found += [[each == 1 for each in ones]] if isinstance(ones, list) else []
    if any(len(each) != layers for each in found) or any(each != found[0] for each in found):
        raise ValueError(f"{key!r} and {numbers!r} must have {layers} entries, and not differ")
    return tuple(found[0]) if found else None


_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
}

FAMILIES = (
    Family(
        "MiMoV2FlashForCausalLM",
        MiMoV2FlashForCausalLM,
        _mimo_v2,
        rope_theta=5e6,
        defaults=_DEFAULTS,
        supported={
            "add_swa_attention_sink_bias": (True,),
            "add_full_attention_sink_bias": (False,),
            "attention_bias": (False,),
        },
    ),
)
