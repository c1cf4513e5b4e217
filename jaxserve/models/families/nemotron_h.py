"""Nemotron-H (https://arxiv.org/abs/2504.03624) and Nemotron 3: Mamba-2, some attention, MLPs or experts, no rotation.

A published layer is one of these alone. An MLP or the experts are the second half of the layer before here, so that
there are fewer layers than published and each has a state or attention: M E M - * is (M E), (M -), (*). The head for
multi-token prediction is (* E).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, boolean, integer, number, optional_integer, shown
from jaxserve.models.config import Mamba2Config, ModelConfig, PredictorHead
from jaxserve.models.decoder import AttentionBlock, CausalLM, Layer, PreNormLayer
from jaxserve.models.families.bamba import mamba2_state
from jaxserve.models.families.deepseek_v3 import deepseek_experts
from jaxserve.models.family import Family
from jaxserve.models.layers import AttendFn, Attention, Cache, RMSNorm, RopeTable
from jaxserve.models.mamba2 import Mamba2
from jaxserve.models.moe import feed_forward
from jaxserve.models.tensor_names import Rules
from jaxserve.ops.linear import Products

_HEAD = (
    ("mtp.layers.0.enorm.", "token_norm."),
    ("mtp.layers.0.hnorm.", "hidden_norm."),
    ("mtp.layers.0.eh_proj.", "join."),
    ("mtp.layers.0.norm.", "layer.input_layernorm."),
    ("mtp.layers.0.mixer.", "layer.self_attn."),
    ("mtp.layers.1.norm.", "layer.post_attention_layernorm."),
    ("mtp.layers.1.mixer.", "layer.mlp."),
    ("mtp.layers.1.final_layernorm.", "norm."),
)
_MIXERS = {"M": "mamba", "*": "self_attn"}
_KINDS = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "moe": "E", "mlp": "-"}


class MixerLayer(Layer):
    """x + mixer(norm(x)): a layer without a feed-forward. name: of the mixer"""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, mixer: AttentionBlock, name: str) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.name = name
        setattr(self, name, mixer)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        out, cache = getattr(self, self.name)(self.input_layernorm(x), rope, cache, attend, linear)
        return x + out, cache


class NemotronHForCausalLM(CausalLM):
    """Layers with Mamba-2 or attention, with or without an MLP or experts behind it."""

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        spec = config.layer_states[index]
        mixer = Attention(config, dtype) if spec is None else Mamba2(config, spec, dtype)
        name = _MIXERS["*" if spec is None else "M"]
        if not config.mlp_layers[index]:
            return MixerLayer(config, dtype, mixer, name)
        return PreNormLayer(config, dtype, mixer, feed_forward(config, index, dtype), mixer=name)


@dataclass(frozen=True)
class _Layer:
    """A layer: the kinds of its halves, and the published layer of each. Without a second half that is None."""

    mixer: str
    first: int
    feed_forward: str | None = None
    second: int | None = None


def _layers(kinds: Sequence[str]) -> tuple[_Layer, ...]:
    """Join the published layers. Raises ValueError for an MLP or experts that do not follow Mamba-2 or attention."""
    found: list[_Layer] = []
    for index, kind in enumerate(kinds):
        if kind in _MIXERS:
            found.append(_Layer(kind, index))
        elif not found or found[-1].feed_forward is not None:
            raise ValueError(f"layer {index} is an MLP or experts that follow neither attention nor Mamba-2")
        else:
            found[-1] = replace(found[-1], feed_forward=kind, second=index)
    return tuple(found)


def _kinds(hf: Json) -> str:
    """Return the kind of each published layer: M, *, E or -. Raises ValueError for others."""
    pattern = hf.get("hybrid_override_pattern")
    if pattern is None:
        names = hf.get("layers_block_type") or hf.get("layer_types") or ("mamba", "moe", "attention", "mlp")
        pattern = "".join(_KINDS.get(name, "?") for name in names)
    if not isinstance(pattern, str) or set(pattern) - {"M", "*", "E", "-"}:
        raise ValueError(f"layers must be M, *, E or -, and are {shown(pattern)}")
    return pattern


def _published(hf: Json) -> Json:
    """Return a parsed config.json with the number of layers, which Nemotron 3 Ultra's files leave to their kinds."""
    return hf if hf.get("num_hidden_layers") is not None else {**hf, "num_hidden_layers": len(_kinds(hf))}


def _names(layers: Sequence[_Layer]) -> Rules:
    rules = [("backbone.embeddings.", "model.embed_tokens."), ("backbone.norm_f.", "model.norm.")]
    for index, layer in enumerate(layers):
        there, here = f"backbone.layers.{layer.first}.", f"model.layers.{index}."
        rules += [(f"{there}norm.", f"{here}input_layernorm."), (f"{there}mixer.", f"{here}{_MIXERS[layer.mixer]}.")]
        there = f"backbone.layers.{layer.second}."
        if layer.second is not None:
            rules += [(f"{there}norm.", f"{here}post_attention_layernorm."), (f"{there}mixer.", f"{here}mlp.")]
    return tuple(rules)


def _nemotron_h(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    kinds = _kinds(hf)
    if len(kinds) != fields["num_layers"]:
        raise ValueError(f"{len(kinds)} layers are described, and 'num_hidden_layers' is {fields['num_layers']}")
    layers = _layers(kinds)
    state = mamba2_state(
        hf,
        integer(hf, "n_groups"),
        integer(hf, "mamba_num_heads"),
        integer(hf, "ssm_state_size"),
        integer(hf, "mamba_head_dim"),
        integer(hf, "conv_kernel"),
    )
    sparse = tuple(layer.feed_forward == "E" for layer in layers)
    experts = replace(
        deepseek_experts(hf, fields, dense=0),
        sparse_layers=sparse,
        shared_ffn=integer(hf, "moe_shared_expert_intermediate_size"),
        latent=optional_integer(hf, "moe_latent_size", 0),
    )
    return {
        "num_layers": len(layers),
        "norm_eps": number(hf, "layer_norm_epsilon", 1e-5),
        "rope_layers": (False,) * len(layers),
        "gated_mlp": False,
        "activation": "relu2",
        "layer_states": tuple(state if layer.mixer == "M" else None for layer in layers),
        "mlp_layers": tuple(layer.feed_forward is not None for layer in layers),
        "mamba2": Mamba2Config(boolean(hf, "use_conv_bias", True), boolean(hf, "use_bias", False)),
        "moe": experts if any(sparse) else None,
        "ignored_tensors": (r"^mtp\.",),
        "tensor_names": _names(layers),
        "predictor": _head(hf, layers),
    }


def _head(hf: Json, layers: Sequence[_Layer]) -> PredictorHead | None:
    """Return the head; None: there is none, or it is not one attention and experts that are like the model's."""
    names = hf.get("mtp_layers_block_type") or ("attention", "moe")
    kinds = hf.get("mtp_hybrid_override_pattern") or "".join(_KINDS.get(name, "?") for name in names)
    mixers, blocks = [layer.mixer for layer in layers], [layer.feed_forward for layer in layers]
    if not optional_integer(hf, "num_nextn_predict_layers", 0) or kinds != "*E":
        return None
    if "*" not in mixers or "E" not in blocks:
        return None
    return PredictorHead(_HEAD, like=mixers.index("*"))


_DEFAULTS = {
    "vocab_size": 131072,
    "hidden_size": 4096,
    "intermediate_size": 21504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
FAMILIES = (
    Family(
        "NemotronHForCausalLM",
        NemotronHForCausalLM,
        _nemotron_h,
        defaults=_DEFAULTS,
        published=_published,
        supported={
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",),
            "mamba_ssm_cache_dtype": ("float32",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "sliding_window": (),
        },
    ),
)
