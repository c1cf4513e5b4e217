"""Gemma 4 as text: E2B, E4B, 26B-A4B, 31B.

It differs from Gemma 3 in this. Full layers have other heads than window layers, and rotate a part of each head. V is
normalized. Scores are not scaled. The last layers may read the cache of the last earlier layer of their kind. In full
layers V may be K before its norm. In the small models each layer has an embedding of its own of every token; in
26B-A4B each layer has experts beside its MLP. A layer's result is multiplied by a learned number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.checkpoint.read_config import (
    Json,
    boolean,
    integer,
    optional_integer,
    rope_by_layer_type,
    ropes_by_layer_type,
    windows_but_every,
)
from jaxserve.models.config import Gemma4Config, LayerHeads, ModelConfig, MoEConfig, MoENames
from jaxserve.models.decoder import AttendLayer, CausalLM, Decoder, Layer, PictureRows, Taps
from jaxserve.models.family import Family, Nested
from jaxserve.models.layers import (
    MLP,
    AttendFn,
    Cache,
    Embed,
    GatedActivation,
    Linear,
    QKVProj,
    RMSNorm,
    RopeTable,
    over_rms,
)
from jaxserve.models.moe import ExpertRouter, Experts, KeepsChoices
from jaxserve.models.rope import apply_rope
from jaxserve.models.weights import param
from jaxserve.ops.linear import Products
from jaxserve.ops.moe import Chosen
from jaxserve.ops.paged_attention import Heads


class Gemma4Attention(nnx.Module):
    """Grouped-query attention whose V is normalized. A layer that reads another's cache has neither K nor V."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, reads: bool, key_is_value: bool) -> None:
        names = ("q_proj",) if reads else ("q_proj", "k_proj") if key_is_value else ("q_proj", "k_proj", "v_proj")
        self.qkv_proj = QKVProj(config, dtype, names)
        heads = config.num_heads * config.head_dim
        self.o_proj = Linear((config.hidden_size, heads), ("embed", "q_heads"), dtype, bias=config.out_bias)
        self.q_norm = RMSNorm(config.head_dim, config, dtype)
        self.k_norm = None if reads else RMSNorm(config.head_dim, config, dtype)
        self.group = config.num_heads // config.num_kv_heads

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Attend x [T, D] -> (out [T, D], cache)."""
        assert rope is not None
        y = self.qkv_proj(x, linear)
        q = y[:, :, : self.group].reshape(x.shape[0], -1, y.shape[3])
        q = apply_rope(self.q_norm(q), rope)
        if self.k_norm is None:
            heads = Heads(q, None, None)
        else:
            k, v = y[:, :, self.group], y[:, :, -1]  # one and the same if V is K before its norm
            heads = Heads(q, apply_rope(self.k_norm(k), rope), over_rms(v, self.q_norm.eps).astype(v.dtype))
        out, cache = attend(heads, cache, None)
        return self.o_proj(out.reshape(x.shape[0], -1), linear), cache


class Gemma4Router(ExpertRouter):
    """A router that sees x over its RMS times a learned scale, and multiplies each weight by its expert's scale."""

    def __init__(self, config: ModelConfig, moe_config: MoEConfig, dtype: jnp.dtype) -> None:
        super().__init__(config, moe_config, dtype)
        self.scale = param((config.hidden_size,), (None,), dtype, "ones")
        self.per_expert_scale = param((moe_config.num_experts,), (None,), dtype, "ones")
        self.eps, self.root = config.norm_eps, config.hidden_size**-0.5

    def __call__(self, x: jax.Array) -> Chosen:
        """Choose the experts of x [T, D]."""
        scale, expert_scale = (w[...].astype(jnp.float32) for w in (self.scale, self.per_expert_scale))
        chosen = super().__call__(over_rms(x, self.eps) * (scale * self.root)[None, :])
        return chosen._replace(weights=chosen.weights * expert_scale[chosen.ids])


class LayerInput(nnx.Variable):
    """A layer's further input beside the hidden state, [T, P]: its own embeddings of the step's tokens."""


class Gemma4Layer(KeepsChoices, Layer):
    """Norms on both sides of attention and MLP; then, if the model has them, experts and the layer's own embedding.

    config: of this layer, see `ModelConfig.at`. reads: whether it reads another layer's cache. full: without a window
    """

    token_input: LayerInput  # set before the layer is called, by `Gemma4Decoder.give_inputs`

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, *, reads: bool, full: bool) -> None:
        size, own = config.hidden_size, config.gemma4
        assert own is not None
        self.input_layernorm = RMSNorm(size, config, dtype)
        self.self_attn = Gemma4Attention(config, dtype, reads=reads, key_is_value=own.key_is_value and full)
        self.post_attention_layernorm = RMSNorm(size, config, dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, config, dtype)
        self.mlp = MLP(config, dtype, own.reader_ffn if reads else None)
        self.post_feedforward_layernorm = RMSNorm(size, config, dtype)
        self.layer_scalar = param((1,), (None,), dtype, "ones")
        self.has_experts, self.has_input = config.moe is not None, own.input_size > 0
        if config.moe is not None:
            self.router = Gemma4Router(config, config.moe, dtype)
            self.experts = Experts(config, config.moe, dtype)
            self.post_feedforward_layernorm_1 = RMSNorm(size, config, dtype)
            self.pre_feedforward_layernorm_2 = RMSNorm(size, config, dtype)
            self.post_feedforward_layernorm_2 = RMSNorm(size, config, dtype)
        if self.has_input:
            self.activation = GatedActivation(config.activation, config.activation_limit)
            self.per_layer_input_gate = Linear((own.input_size, size), (None, "embed"), dtype)
            self.per_layer_projection = Linear((size, own.input_size), ("embed", None), dtype)
            self.post_per_layer_input_norm = RMSNorm(size, config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(self.input_layernorm(x), rope, cache, attend, linear)
        x = x + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(x), linear)
        if self.has_experts:
            routed = self.experts(self.pre_feedforward_layernorm_2(x), self.router(x), linear)
            out = self.post_feedforward_layernorm_1(out) + self.post_feedforward_layernorm_2(routed)
        x = x + self.post_feedforward_layernorm(out)
        if self.has_input:
            own = self.activation(self.per_layer_input_gate(x, linear), self.token_input[...])
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(own, linear))
        return x * self.layer_scalar[...].astype(x.dtype)[None, :], cache


class Gemma4Decoder(Decoder):
    """A decoder that may have a second table, of each layer's own embeddings of a token."""

    def __init__(self, config: ModelConfig, layers: Sequence[Layer], dtype: jnp.dtype) -> None:
        super().__init__(config, layers, dtype)
        own = config.gemma4
        assert own is not None
        self.input_size = own.input_size
        if self.input_size:
            width = config.num_layers * own.input_size
            table = config.replace(vocab_size=own.input_vocab, hidden_size=width)
            self.embed_tokens_per_layer = Embed(table, dtype)
            self.per_layer_model_projection = Linear((width, config.hidden_size), (None, "embed"), dtype)
            self.per_layer_projection_norm = RMSNorm(own.input_size, config, dtype)

    def give_inputs(self, token_ids: jax.Array, x: jax.Array, linear: Products) -> None:
        """Give each layer its own embeddings of token_ids int32 [T]. x [T, D]: the input of the first layer."""
        if not self.input_size:
            return
        shape = x.shape[0], len(self.layers), self.input_size
        of_token = linear.whole(self.embed_tokens_per_layer(token_ids)).reshape(shape)
        of_token = of_token * jnp.asarray(self.input_size**0.5, x.dtype)
        of_hidden = self.per_layer_model_projection(x, linear) * x.shape[1] ** -0.5
        inputs = (self.per_layer_projection_norm(of_hidden.reshape(shape)) + of_token) * 2**-0.5
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Gemma4Layer)
            layer.token_input = LayerInput(inputs[:, index])


class Gemma4ForCausalLM(CausalLM):
    """Layers of two kinds, with their own heads, and maybe with inputs of their own."""

    decoder = Gemma4Decoder

    @classmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        attention = config.attention_layers[index]
        reads, full = attention.reads is not None, attention.sliding_window is None
        return Gemma4Layer(config.at(index), dtype, reads=reads, full=full)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        caches: Sequence[Cache],
        attend: AttendLayer,
        linear: Products = Products(),
        pictures: PictureRows | None = None,
        taps: Taps | None = None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        x = linear.whole(self.embed(token_ids))
        assert pictures is None, "its tower is not served"
        assert isinstance(self.model, Gemma4Decoder)
        self.model.give_inputs(token_ids, x, linear)
        return self.model(x, positions, caches, attend, linear, taps=taps)


_ROPES = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
_FULL_EVERY = 6  # layers, if the file has no layer_types


def _gemma4(hf: Json, fields: dict[str, Any]) -> dict[str, Any]:
    if hf.get("use_bidirectional_attention") not in (None, "vision"):
        raise ValueError("'use_bidirectional_attention' is supported for pictures only, which are not served")
    layers, window = fields["num_layers"], optional_integer(hf, "sliding_window", 512)
    windows = (*windows_but_every(hf, window, layers, _FULL_EVERY)[:-1], None)  # the last layer is always full
    readers = optional_integer(hf, "num_kv_shared_layers", 0)
    key_is_value = boolean(hf, "attention_k_eq_v", False)
    own_heads = LayerHeads(fields["num_heads"], fields["num_kv_heads"], fields["head_dim"])
    full_heads = _full_heads(hf, own_heads, windows, key_is_value)
    ropes = hf if rope_by_layer_type(hf) else {**hf, "rope_parameters": _ROPES}
    rope, _ = ropes_by_layer_type(ropes, full_heads.head_dim)
    _, local_rope = ropes_by_layer_type(ropes, own_heads.head_dim)
    reads = _reads(windows, readers)
    wide = boolean(hf, "use_double_wide_mlp", False)
    return {
        "layer_windows": windows,
        "layer_heads": tuple(full_heads if each is None else own_heads for each in windows),
        "layer_reads": reads,
        "rope": rope,
        "local_rope": local_rope,
        "attention_scale": 1.0,
        "qk_norm": "head",
        "embed_scale": fields["hidden_size"] ** 0.5,
        "gemma4": Gemma4Config(
            key_is_value=key_is_value,
            reader_ffn=fields["intermediate_size"] * (2 if wide else 1),
            input_size=optional_integer(hf, "hidden_size_per_layer_input", 256),
            input_vocab=optional_integer(hf, "vocab_size_per_layer_input", 262144),
        ),
        "ignored_tensors": _of_readers(reads),
        **(_experts(hf, layers) if boolean(hf, "enable_moe_block", False) else {}),
    }


def _full_heads(hf: Json, own: LayerHeads, windows: Sequence[int | None], key_is_value: bool) -> LayerHeads:
    """Return the heads of full layers. Newer files, of transformers, have them in `per_layer_config`."""
    by_layer = hf.get("per_layer_config")
    if by_layer is None:
        copied = optional_integer(hf, "num_global_key_value_heads", own.num_kv_heads)
        kv_heads = copied if key_is_value else own.num_kv_heads
        return LayerHeads(own.num_heads, kv_heads, optional_integer(hf, "global_head_dim", 512))
    full = [index for index, window in enumerate(windows) if window is None]
    given = {int(index): keys for index, keys in by_layer.items()}
    first = given.get(full[0], {})
    if sorted(given) not in ([], full) or any(keys != first for keys in given.values()):
        raise ValueError("'per_layer_config' must be the same for all layers without a window, and for them alone")
    if other := first.keys() - {"head_dim", "num_key_value_heads"}:
        raise ValueError(f"{sorted(other)[0]!r} of 'per_layer_config' is not supported")
    kv_heads = optional_integer(first, "num_key_value_heads", own.num_kv_heads)
    return LayerHeads(own.num_heads, kv_heads, optional_integer(first, "head_dim", own.head_dim))


def _reads(windows: Sequence[int | None], readers: int) -> tuple[int | None, ...]:
    """Return the layer that each of the last `readers` layers reads: the last earlier one of its kind."""
    own = len(windows) - readers
    sources = {window: index for index, window in enumerate(windows[: max(own, 0)])}
    if readers and set(windows) != set(sources):
        raise ValueError(f"'num_kv_shared_layers' is {readers}, which leaves a kind of layer without a cache")
    return tuple(None if index < own else sources[window] for index, window in enumerate(windows)) if readers else ()


def _of_readers(reads: Sequence[int | None]) -> tuple[str, ...]:
    """Return an expression of the K and V tensors that checkpoints have for layers that do not use them."""
    readers = "|".join(str(index) for index, source in enumerate(reads) if source is not None)
    return (rf"^model\.layers\.({readers})\.self_attn\.[kv]_(proj|norm)\.",) if readers else ()


def _experts(hf: Json, layers: int) -> dict[str, Any]:
    experts = MoEConfig(
        num_experts=integer(hf, "num_experts"),
        experts_per_token=integer(hf, "top_k_experts"),
        ffn=integer(hf, "moe_intermediate_size"),
        sparse_layers=(True,) * layers,
        names=MoENames(router="router.proj"),
    )
    return {"moe": experts, "packed_experts": "rows"}


FAMILIES = (
    Family("Gemma4ForCausalLM", Gemma4ForCausalLM, _gemma4),
    Nested(("Gemma4ForConditionalGeneration",), {"gemma4_text": "Gemma4ForCausalLM"}),
)
