"""The parts common to all causal language models: embedding, loop over the layers, final norm, head.

A family only defines its layer (`make_layer`). The caller passes attention in as a function, so nothing here depends
on a cache layout, a backend or a request.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import AttentionLayer, ModelConfig
from jaxserve.models.layers import (
    MLP,
    AttendFn,
    Attention,
    Cache,
    Embed,
    Linear,
    RMSNorm,
    RopeTable,
    StateInputs,
    layer_norm,
)
from jaxserve.models.moe import KeepsChoices, take_choices
from jaxserve.models.rope import RopeConfig, rope_table
from jaxserve.models.sharding import depth_axes
from jaxserve.models.vision.tower import Tower
from jaxserve.ops.linear import Products
from jaxserve.ops.paged_attention import Heads
from jaxserve.ops.state import StateSpec


class AttendLayer(Protocol):
    """`AttendFn` with a layer index as its first argument. The caller of a model passes it.

    Layers with the same static description are traced once, so the index is the first such layer's. Use it to
    look up the attention spec, never the cache: that is an argument. It runs under a nested jit and must be pure.
    """

    def __call__(
        self, layer_index: int, heads: Heads | StateInputs, cache: Cache, sinks: jax.Array | None = None
    ) -> tuple[jax.Array, Cache]: ...


class AttentionBlock(Protocol):
    """The attention block of a layer: x [T, D] -> (out [T, D], cache)."""

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]: ...


class FeedForward(Protocol):
    """The feed-forward block of a layer, an MLP or experts: x [T, D] -> [T, D]."""

    def __call__(self, x: jax.Array, linear: Products) -> jax.Array: ...


class Layer(nnx.Module):
    """The interface of a family's decoder layer."""

    @abstractmethod
    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        """Run the layer: x [T, D] -> (x [T, D], cache)."""


def scaled(x: jax.Array, scale: float) -> jax.Array:
    """Return x [...] * scale in x's dtype. The product is in float32, because the scale itself is not rounded."""
    return x if scale == 1.0 else (x.astype(jnp.float32) * scale).astype(x.dtype)


class PreNormLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)): the layer of Llama and of most other families.

    Granite scales what is added by `residual_scale`. block and mixer are the checkpoint's names of the feed-forward
    and of the attention, or of what stands in its place.
    """

    def __init__(
        self,
        config: ModelConfig,
        dtype: jnp.dtype,
        attention: AttentionBlock,
        mlp: FeedForward,
        block: str = "mlp",
        mixer: str = "self_attn",
    ) -> None:
        self.input_layernorm = layer_norm(config, dtype)
        self.mixer = mixer
        setattr(self, mixer, attention)
        self.post_attention_layernorm = layer_norm(config, dtype)
        self.block = block
        setattr(self, block, mlp)
        self.residual_scale = config.residual_scale

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        out, cache = getattr(self, self.mixer)(self.input_layernorm(x), rope, cache, attend, linear)
        x = x + scaled(out, self.residual_scale)
        out = getattr(self, self.block)(self.post_attention_layernorm(x), linear)
        return x + scaled(out, self.residual_scale), cache


class PostNormLayer(Layer):
    """x + norm(attention(x)), then x + norm(mlp(x)): OLMo 2, EXAONE 4."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.self_attn = Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config, dtype)
        self.mlp = MLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(x, rope, cache, attend, linear)
        x = x + self.post_attention_layernorm(out)
        return x + self.post_feedforward_layernorm(self.mlp(x, linear)), cache


class SandwichLayer(Layer):
    """PreNormLayer with another norm after attention and after the MLP, each before the residual: Gemma 2 and 3."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, attention: AttentionBlock | None = None) -> None:
        size = config.hidden_size
        outer = config if config.post_norm_eps is None else config.replace(norm_eps=config.post_norm_eps)
        self.input_layernorm = RMSNorm(size, config, dtype)
        self.self_attn = attention or Attention(config, dtype)
        self.post_attention_layernorm = RMSNorm(size, outer, dtype)
        self.pre_feedforward_layernorm = RMSNorm(size, config, dtype)
        self.mlp = MLP(config, dtype)
        self.post_feedforward_layernorm = RMSNorm(size, outer, dtype)

    def __call__(
        self, x: jax.Array, rope: RopeTable | None, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, Cache]:
        out, cache = self.self_attn(self.input_layernorm(x), rope, cache, attend, linear)
        x = x + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(x), linear)
        return x + self.post_feedforward_layernorm(out), cache


class Decoder(KeepsChoices):
    """Embedding, layers and final norm: the part that checkpoints call `model`."""

    def __init__(self, config: ModelConfig, layers: Sequence[Layer], dtype: jnp.dtype) -> None:
        self.config = config
        self.embed_tokens = Embed(config, dtype)
        self.layers = nnx.List(layers)
        self.norm = layer_norm(config, dtype)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        caches: Sequence[Cache],
        attend: AttendLayer,
        linear: Products,
        added: Sequence[jax.Array] = (),
        taps: Taps | None = None,
    ) -> tuple[jax.Array, tuple[Cache, ...]]:
        """Run all layers: x [T, D], positions int32 [T] -> (normed hidden [T, D], caches, one per layer).

        The cache of a layer that reads another's is None. added, taps: see `run_layers`
        """
        ropes, specs = self.config.ropes, self.config.mixers
        tables = {rope: rope_table(rope, positions) for rope in ropes if rope is not None}
        frames = [LayerFrame(spec, rope, rope and tables[rope]) for spec, rope in zip(specs, ropes, strict=True)]
        x, new_caches, choices = self.run(x, frames, caches, attend, linear, added, taps)
        if choices:
            self.keep_choices(jnp.stack(choices, axis=1))
        return self.norm(x), new_caches

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
        """Run the layers on x [T, D], see `run_layers`. frames: one for each cache"""
        return run_layers(self.layers, x, frames, caches, attend, linear, added, taps)


@dataclass
class Taps:
    """Hidden states inside a decoder that its caller wants.

    layers: numbers of layers after which they are taken, ascending, from 1 on. states: [T, D] each, added by the call
    """

    layers: tuple[int, ...] = ()
    states: list[jax.Array] = field(default_factory=list)


@dataclass(frozen=True)
class LayerFrame:
    """The inputs of a layer besides its weights. `table` is `rope` evaluated at the step's positions.

    Layers of equal (spec, rope) and structure share one trace.
    """

    spec: AttentionLayer | StateSpec
    rope: RopeConfig | None
    table: RopeTable | None


def run_layers(
    layers: Sequence[Layer],
    x: jax.Array,
    frames: Sequence[LayerFrame],
    caches: Sequence[Cache],
    attend: AttendLayer,
    linear: Products,
    added: Sequence[jax.Array] = (),
    taps: Taps | None = None,
) -> tuple[jax.Array, tuple[Cache, ...], list[jax.Array]]:
    """Run the layers in order on x [T, D] -> (x [T, D], caches, expert ids int32 [T, K] of each sparse layer).

    Equal layers share one trace and one lowering through a nested jit, keyed by the layer's graphdef, attention and
    rotation. This shortens the start of a 32-layer model by a quarter. XLA inlines the calls. A layer that reads
    another layer's cache gets it as that layer left it, and returns it unchanged.

    added: [T, D] to add to the hidden states after each of the first layers (DeepStack, arXiv:2406.04334)
    """

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def call(
        graphdef: nnx.GraphDef, index: int, state: nnx.State, x: jax.Array, rope: RopeTable | None, cache: Cache
    ) -> tuple[jax.Array, Cache, jax.Array | None]:
        """Run one layer on x [T, D]."""
        layer = nnx.merge(graphdef, state)
        return *layer(x, rope, cache, functools.partial(attend, index), linear), take_choices(layer)

    first_of_kind: dict[tuple[nnx.GraphDef, AttentionLayer | StateSpec, RopeConfig | None], int] = {}
    new_caches: list[Cache] = []
    choices: list[jax.Array] = []
    for index, (layer, frame, cache) in enumerate(zip(layers, frames, caches, strict=True)):
        graphdef, state = nnx.split(layer)
        first = first_of_kind.setdefault((graphdef, frame.spec, frame.rope), index)
        reads = frame.spec.reads if isinstance(frame.spec, AttentionLayer) else None
        x, cache, chosen = call(graphdef, first, state, x, frame.table, cache if reads is None else new_caches[reads])
        new_caches.append(cache if reads is None else None)
        choices += [] if chosen is None else [chosen]
        if index < len(added):
            x = x + added[index]
        if taps is not None and index + 1 in taps.layers:
            taps.states.append(x)
    return x, tuple(new_caches), choices


class PictureRows(NamedTuple):
    """The rows of a tower that stand for tokens of a step."""

    tokens: jax.Array  # int32 [T]  the token's row in the pool; -1: the token is text
    pool: jax.Array  # [1 + deepstack blocks, E, D]

    def of(self, part: int) -> jax.Array:
        """Return a part of each token's row, 0 for a token of text: [T, D]."""
        found = self.pool[part].at[self.tokens].get(mode="clip")
        return jnp.where(self.tokens[:, None] >= 0, found, 0)


class CausalLM(nnx.Module):
    """A causal language model. A subclass is one architecture and defines `make_layer`.

    Made under `nnx.eval_shape`, so it holds only shapes until `ModelStructure.bind` puts the weights in.
    decoder: the class of `model`.
    """

    decoder: ClassVar[type[Decoder]] = Decoder

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        self.config = config
        layers = [self.make_layer(config, index, dtype) for index in range(config.num_layers)]
        self.model = self.decoder(config, layers, dtype)
        size = config.vocab_size, config.hidden_size
        tied = config.tie_word_embeddings or bool(config.labels)
        self.lm_head = None if tied else Linear(size, ("vocab", "embed"), dtype)
        head = len(config.labels), config.hidden_size
        self.score = Linear(head, (None, "embed"), dtype) if config.labels else None
        if config.vision is not None:
            self.visual = Tower(config.vision, dtype)

    @classmethod
    @abstractmethod
    def make_layer(cls, config: ModelConfig, index: int, dtype: jnp.dtype) -> Layer:
        """Make decoder layer `index`. The layer must not store the index, because equal layers share one trace."""

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
        """Run token_ids and positions int32 [T] -> (hidden [T, D] after the final norm, caches per layer).

        The cache of a layer that reads another's is None. positions: of the rotation; [3, T] for a model that has a
        tower, see `rope_table`. taps: filled with hidden states inside the model
        """
        x = linear.whole(self.embed(token_ids))
        if pictures is None:
            return self.model(x, positions, caches, attend, linear, taps=taps)
        first, *added = (pictures.of(part).astype(x.dtype) for part in range(pictures.pool.shape[0]))
        x = jnp.where(pictures.tokens[:, None] >= 0, first, x)
        return self.model(x, positions, caches, attend, linear, added, taps)

    def embed(self, token_ids: jax.Array) -> jax.Array:
        """Embed token_ids int32 [T] -> [T, D], the input of the first layer."""
        x = self.model.embed_tokens(token_ids)
        scale = jnp.asarray(self.config.embed_scale, x.dtype)  # rounded to the dtype first, as in training
        return x if self.config.embed_scale == 1.0 else x * scale

    def logits(self, hidden: jax.Array, linear: Products = Products()) -> jax.Array:
        """Compute the logits of hidden [R, D] -> float32 [R, V]."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        weight = head.weight[...]
        logits = linear(hidden, weight, out_dtype=jnp.float32, split=depth_axes(("vocab", "embed"), weight))
        logits, cap = scaled(logits, self.config.logit_scale), self.config.logit_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def scores(self, hidden: jax.Array, linear: Products = Products()) -> jax.Array:
        """Compute the scores of a classification head from hidden [R, D] of last tokens -> float32 [R, labels]."""
        assert self.score is not None, self.config.architecture
        return self.score.in_float32(hidden, linear)
