"""The frame of every causal language model: embedding, layers, final norm, head.

Owns the walk over the layers and the model's call. A family gives the layer (`make_layer`) and nothing else.
Knows no cache layout, backend or request: attention is a function that the caller passes in.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.choices import KeepsChoices, take_choices
from jaxserve.models.config import AttentionLayer, ModelConfig
from jaxserve.models.layers import (
    MLP,
    AttendFn,
    Attention,
    Cache,
    Embed,
    Linear,
    LinearFn,
    RMSNorm,
    RopeTable,
)
from jaxserve.models.rope import RopeConfig, rope_table
from jaxserve.ops.linear import linear as default_linear


class AttendLayer(Protocol):
    """What the caller of a model passes: `AttendFn` with the index of a layer before it.

    The index is that of the first layer of the same kind (equal static description), because layers of one kind are
    traced once: take from it the spec, never the cache, which is an argument. It is traced under a nested jit: pure.
    """

    def __call__(
        self, layer_index: int, q: jax.Array, k: jax.Array, v: jax.Array, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]: ...


class AttentionBlock(Protocol):
    """Attention, MLA: x [T, D] -> (out [T, D], cache)."""

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]: ...


class FeedForward(Protocol):
    """MLP, experts: x [T, D] -> [T, D]."""

    def __call__(self, x: jax.Array, linear: LinearFn) -> jax.Array: ...


class Layer(nnx.Module):
    """What the frame asks of a family's decoder layer."""

    @abstractmethod
    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]:
        """x [T, D] -> (x [T, D], cache)."""


class PreNormLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)): Llama and its many relatives."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, attention: AttentionBlock, mlp: FeedForward) -> None:
        self.input_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.mlp = mlp

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(self.input_layernorm(x), rope, cache, attend, linear)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x), linear), cache


class SandwichLayer(Layer):
    """As PreNormLayer, with a norm after attention and MLP too, before each is added: Gemma 2 and 3."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, config, dtype)
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(size, config, dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, config, dtype)
        self.mlp = MLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(size, config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: LinearFn
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(self.input_layernorm(x), rope, cache, attend, linear)
        x = x + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(x), linear)
        return x + self.post_feedforward_layernorm(out), cache


class Decoder(KeepsChoices):
    """The part that checkpoints call `model`."""

    def __init__(self, config: ModelConfig, layers: Sequence[Layer], dtype: jnp.dtype) -> None:
        self.config = config
        self.embed_tokens = Embed(config, dtype)
        self.layers = nnx.List(layers)
        self.norm = RMSNorm(config.hidden_size, config, dtype)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        caches: Sequence[Cache],
        attend: AttendLayer,
        linear: LinearFn,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """x [T, D] at int32 positions [T] -> (normed hidden [T, D], the caches, one a layer)."""
        ropes, specs = self.config.ropes, self.config.attention_layers
        tables = {rope: rope_table(rope, positions) for rope in ropes if rope is not None}
        frames = [LayerFrame(spec, rope, rope and tables[rope]) for spec, rope in zip(specs, ropes, strict=True)]
        x, new_caches, choices = run_layers(self.layers, x, frames, caches, attend, linear)
        if choices:
            self.keep_choices(jnp.stack(choices, axis=1))
        return self.norm(x), new_caches


@dataclass(frozen=True)
class LayerFrame:
    """What a layer is given besides its weights: (spec, rope) tell its kind, `table` is rope at the positions."""

    spec: AttentionLayer
    rope: RopeConfig | None
    table: RopeTable | None


def run_layers(
    layers: Sequence[Layer],
    x: jax.Array,
    frames: Sequence[LayerFrame],
    caches: Sequence[Cache],
    attend: AttendLayer,
    linear: LinearFn,
) -> tuple[jax.Array, tuple[Cache, ...], list[jax.Array]]:
    """Every layer in turn; what each sparse one chose is int32 [T, K].

    Layers of one kind share one trace and one lowering: a nested jit, keyed by the layer's graphdef and attention,
    which takes a quarter off the start of a 32-layer model; XLA inlines the calls.
    """

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def call(
        graphdef: nnx.GraphDef, index: int, state: nnx.State, x: jax.Array, rope: RopeTable | None, cache: Cache
    ) -> tuple[jax.Array, Cache, jax.Array | None]:
        layer = nnx.merge(graphdef, state)
        return *layer(x, rope, cache, functools.partial(attend, index), linear), take_choices(layer)

    first_of_kind: dict[tuple[nnx.GraphDef, AttentionLayer, RopeConfig | None], int] = {}
    new_caches, choices = [], []
    for index, (layer, frame, cache) in enumerate(zip(layers, frames, caches, strict=True)):
        graphdef, state = nnx.split(layer)
        first = first_of_kind.setdefault((graphdef, frame.spec, frame.rope), index)
        x, cache, chosen = call(graphdef, first, state, x, frame.table, cache)
        new_caches.append(cache)
        choices += [] if chosen is None else [chosen]
    return x, tuple(new_caches), choices


class CausalLM(nnx.Module):
    """A causal language model. Subclasses are final and give `make_layer`.

    Built under `nnx.eval_shape` (then it holds shapes only), filled by the loader or by `LoadedModel.bind`.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        layers = [self.make_layer(config, index, dtype) for index in range(config.num_layers)]
        self.model = Decoder(config, layers, dtype)
        size = config.vocab_size, config.hidden_size
        self.lm_head = None if config.tie_word_embeddings else Linear(size, ("vocab", "embed"), dtype)

    @classmethod
    @abstractmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        """Decoder layer number `index` of the family. It must not keep the index: equal layers share a trace."""

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        caches: Sequence[Cache],
        attend: AttendLayer,
        linear: LinearFn = default_linear,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """int32 [T] tokens at int32 [T] positions -> (hidden [T, D] after the final norm, caches, one a layer)."""
        return self.model(self.embed(token_ids), positions, caches, attend, linear)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """int32 [T] -> [T, D], as the first layer takes it."""
        x = self.model.embed_tokens(token_ids)
        scale = jnp.asarray(self.config.embed_scale, x.dtype)  # rounded to the dtype first, as it was trained
        return x if self.config.embed_scale == 1.0 else x * scale

    def logits(self, hidden: jax.Array, linear: LinearFn = default_linear) -> jax.Array:
        """hidden [R, D] -> float32 [R, V]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        logits = linear(hidden, head.weight[...], out_dtype=jnp.float32)
        cap = self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)
