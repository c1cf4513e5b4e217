"""Falcon-H1 (https://arxiv.org/abs/2507.22448): attention and Mamba-2 side by side in each layer, with many scales.

Both read the same normed input, and their results are added. So a published layer has a recurrent state and K and V. It
counts as two layers wherever caches are described: layer 2 i has the state of published layer i, 2 i + 1 its K and V.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxserve.models.checkpoint.read_config import Json, boolean, number, optional_integer, shown
from jaxserve.models.config import FalconH1Config, Mamba2Config, ModelConfig
from jaxserve.models.decoder import AttendLayer, CausalLM, Decoder, Layer, LayerFrame, Taps, run_layers, scaled
from jaxserve.models.families.bamba import NAMES, keyed_state
from jaxserve.models.family import Family
from jaxserve.models.layers import MLP, AttendFn, Attention, Cache, RMSNorm, RopeTable, StateInputs
from jaxserve.models.mamba2 import Mamba2
from jaxserve.ops.linear import Products
from jaxserve.ops.state import StateSpec


class ScaledMLP(MLP):
    """down_scale * down(silu(gate_scale * gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, scales: FalconH1Config, dtype: jnp.dtype) -> None:
        super().__init__(config, dtype)
        self.gate_scale, self.down_scale = scales.gate, scales.down

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array:
        gate, up = self.gate_up_proj(x, linear)
        out = self.down_proj(self.activation(scaled(gate, self.gate_scale), up), linear)
        return scaled(out, self.down_scale)


class FalconH1Layer(Layer):
    """x + mamba(norm(x)) + attention(norm(x)), then x + mlp(norm(x)), with a scale at each of the first two.

    The cache is a pair (state, pages).
    """

    def __init__(self, config: ModelConfig, spec: StateSpec, dtype: jnp.dtype) -> None:
        assert config.falcon_h1 is not None
        self.scales = config.falcon_h1
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.mamba = Mamba2(config, spec, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.mlp = ScaledMLP(config, self.scales, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        own, normed = self.scales, self.input_layernorm(x)
        state, cache = self.mamba(scaled(normed, own.state_in), None, cache, attend, linear)
        seen, cache = self.self_attn(scaled(normed, own.attention_in), rope, cache, attend, linear)
        x = x + scaled(state, own.state_out) + scaled(seen, own.attention_out)
        return x + self.mlp(self.post_attention_layernorm(x), linear), cache


class FalconH1Decoder(Decoder):
    """A decoder whose layers have two caches each."""

    def __init__(self, config: ModelConfig, layers: Sequence[Layer], dtype: jnp.dtype) -> None:
        super().__init__(config, layers[::2], dtype)

    def run(
        self,
        x: jax.Array,
        frames: Sequence[LayerFrame],
        caches: Sequence[Cache],
        attend: AttendLayer,
        linear: Products,
        added: Sequence[jax.Array],
        taps: Taps | None,
    ) -> tuple[jax.Array, tuple[Cache, ...], list[jax.Array]]:
        """Run the layers on x [T, D], each with its pair of caches, see `run_layers`."""

        def attend_one(
            layer_index: int, heads: Any, cache: Any, sinks: jax.Array | None = None
        ) -> tuple[jax.Array, Any]:
            """Advance the state or attend to the pages of a pair, see `AttendFn`."""
            state, pages = cache
            if isinstance(heads, StateInputs):
                out, state = attend(2 * layer_index, heads, state)
            else:
                out, pages = attend(2 * layer_index + 1, heads, pages, sinks)
            return out, (state, pages)

        pairs: Any = list(zip(caches[::2], caches[1::2], strict=True))
        x, pairs, choices = run_layers(self.layers, x, frames[1::2], pairs, attend_one, linear, added, taps)
        return x, tuple(cache for pair in pairs for cache in pair), choices


class FalconH1ForCausalLM(CausalLM):
    """Layers with Mamba-2, attention and an MLP."""

    decoder = FalconH1Decoder

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        """Make the published layer that the cache `index` belongs to."""
        spec = config.layer_states[index - index % 2]
        assert spec is not None
        return FalconH1Layer(config, spec, dtype)


def _falcon_h1(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if boolean(hf, "mamba_proj_bias", False) != boolean(hf, "projectors_bias", False):
        raise ValueError(
            "'mamba_proj_bias' and 'projectors_bias' must be equal: a bias of one projection alone is not supported"
        )
    layers = fields["num_layers"]
    expanded = optional_integer(hf, "mamba_expand", 2) * fields["hidden_size"]
    state = keyed_state(hf, fields, optional_integer(hf, "mamba_d_ssm", expanded))
    before = boolean(hf, "mamba_norm_before_gate", True)
    gate, down = _scales(hf, "mlp_multipliers", 2)
    return {
        "num_layers": 2 * layers,
        "layer_states": (state, None) * layers,
        "mamba2": Mamba2Config(
            boolean(hf, "mamba_conv_bias", True),
            boolean(hf, "mamba_proj_bias", False),
            norm=("before_gate" if before else "gated") if boolean(hf, "mamba_rms_norm", False) else "none",
            scales=() if hf.get("ssm_multipliers") is None else _scales(hf, "ssm_multipliers", 5),
        ),
        "falcon_h1": FalconH1Config(
            state_in=number(hf, "ssm_in_multiplier", 1.0),
            state_out=number(hf, "ssm_out_multiplier", 1.0),
            attention_in=number(hf, "attention_in_multiplier", 1.0),
            attention_out=number(hf, "attention_out_multiplier", 1.0),
            gate=gate,
            down=down,
        ),
        "embed_scale": number(hf, "embedding_multiplier", 1.0),
        "logit_scale": number(hf, "lm_head_multiplier", 1.0),
        "attention_scale": fields["head_dim"] ** -0.5 * number(hf, "key_multiplier", 1.0),
        "tensor_names": NAMES,
    }


def _scales(hf: Json, key: str, count: int) -> tuple[float, ...]:
    """Return a list of numbers, each 1 if there is none. Raises ValueError if it is damaged."""
    given = hf.get(key)
    if given is None:
        return (1.0,) * count
    numbers = [float(x) for x in given if type(x) in (int, float)] if isinstance(given, list) else []
    if len(numbers) != count or len(given) != count or not all(map(math.isfinite, numbers)):
        raise ValueError(f"{key!r} must be {count} numbers, not {shown(given)}")
    return tuple(numbers)


_DEFAULTS = {
    "vocab_size": 128000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "mamba_d_ssm": 1024,
}
FAMILIES = (
    Family(
        "FalconH1ForCausalLM",
        FalconH1ForCausalLM,
        _falcon_h1,
        defaults=_DEFAULTS,
        supported={"mamba_use_mlp": (True,), "sliding_window": ()},
    ),
)
