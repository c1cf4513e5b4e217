"""Heads that guess the tokens after a model's last one from its hidden states: MTP and EAGLE-3.

A head is one layer of the decoder, or several. At position p it takes the model's hidden state of p and the embedding
of the token at p + 1, and its result stands for the token at p + 2. Then it goes on with its own result in place of the
model's:

    MTP      x = join [norm_e(embedding), norm_h(hidden)];  y = layer(x);  logits = model's head(norm(y))
    EAGLE-3  h = fc [three hidden states inside the model], and for further guesses its own last y;
             y = h + attention [norm_e(embedding), norm_h(h)];  y = y + mlp(norm(y));  logits = own head(norm(y))

MTP is the form of DeepSeek-V3 (https://arxiv.org/abs/2412.19437, section 2.2), MiMo, Qwen3-Next and others, which
docs/models.md lists. They differ in names, in the order of the joined halves, in whether the hidden states, the model's
and y, are those before or after the last norm, and in the layer (`PredictorHead`). EAGLE-3 is
https://arxiv.org/abs/2503.01840. Embeddings, and in most forms MTP's output head, are the model's: published heads have
copies of them or none.

Of several MTP layers the one of number k, from 0, makes guess k: at position p it takes the token at p + 1 + k, and its
result stands for the token at p + 2 + k. In place of the model's hidden state of p it takes the result of layer k - 1
at p if the head is chained. After its last layer a head goes on with the result of that one.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import EagleHead, ModelConfig, PredictorHead
from jaxserve.models.decoder import CausalLM, Layer
from jaxserve.models.layers import MLP, AttendFn, Attention, Cache, Linear, QKVProj, RMSNorm
from jaxserve.models.rope import rope_table
from jaxserve.models.tensor_names import Rules
from jaxserve.models.weights import param
from jaxserve.ops.linear import Products


class DraftHead(nnx.Module):
    """The interface of a layer of a head.

    taps: `decoder.Taps.layers`; (): it reads the hidden states after the final norm
    """

    taps: tuple[int, ...] = ()

    @abstractmethod
    def states(self, hidden: Sequence[jax.Array], linear: Products) -> jax.Array:
        """Make the head's input of a model's hidden states, [T, D] each -> [T, D]."""

    @abstractmethod
    def __call__(
        self, x: jax.Array, hidden: jax.Array, positions: jax.Array, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, jax.Array, Cache]:
        """Run embeddings x and hidden [T, D] at positions int32 [T] -> (input of the logits, next `hidden`, cache)."""

    @abstractmethod
    def guess(self, out: jax.Array, model: CausalLM, linear: Products, of_model: Products) -> jax.Array:
        """Return the likeliest token of each row of out [R, D], int32 [R]. model: whose tokens it guesses"""


class Predictor(DraftHead):
    """An MTP head. Its layer is of the model's family."""

    def __init__(self, config: ModelConfig, layer: Layer, dtype: jnp.dtype) -> None:
        assert isinstance(config.head, PredictorHead)
        size = config.hidden_size
        self.form, self.rope, self.taps = config.head, config.ropes[0], config.head.taps
        self.token_norm = RMSNorm(size, config, dtype)
        self.hidden_norm = RMSNorm(size, config, dtype)
        self.join = Linear((size, 2 * size), ("embed", None), dtype)
        self.layer = layer
        self.norm = RMSNorm(size, config, dtype) if self.form.own_norm else None
        own = self.form.own_output
        self.lm_head = Linear((config.vocab_size, size), ("vocab", "embed"), dtype) if own else None

    def states(self, hidden: Sequence[jax.Array], linear: Products) -> jax.Array:
        (last,) = hidden
        return last

    def __call__(
        self, x: jax.Array, hidden: jax.Array, positions: jax.Array, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, jax.Array, Cache]:
        halves = self.token_norm(x), self.hidden_norm(hidden)
        joined = jnp.concatenate(halves if self.form.token_first else halves[::-1], axis=-1)
        table = None if self.rope is None else rope_table(self.rope, positions)
        y, cache = self.layer(self.join(joined, linear), table, cache, attend, linear)
        out = y if self.norm is None else self.norm(y)
        return out, out if self.form.feeds_normed else y, cache

    def guess(self, out: jax.Array, model: CausalLM, linear: Products, of_model: Products) -> jax.Array:
        out = model.model.norm(out) if self.norm is None else out
        own = self.lm_head
        logits = model.logits(out, of_model) if own is None else own(out, linear).astype(jnp.float32)
        return jnp.argmax(logits, axis=1).astype(jnp.int32)


class Predictors(nnx.Module):
    """An MTP head of several layers, in the order of their guesses."""

    def __init__(self, layers: Sequence[Predictor]) -> None:
        self.layers = nnx.List(layers)


class EagleLayer(nnx.Module):
    """The modules of the head's layer: attention over [embedding, hidden state] of 2 D numbers, and an MLP.

    `Eagle` runs them.
    """

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        size = config.hidden_size
        self.input_layernorm = RMSNorm(size, config, dtype)
        self.hidden_norm = RMSNorm(size, config, dtype)
        self.self_attn = Attention(config, dtype)
        self.self_attn.qkv_proj = QKVProj(config.replace(hidden_size=2 * size), dtype)
        self.post_attention_layernorm = RMSNorm(size, config, dtype)
        self.mlp = MLP(config, dtype)


class Eagle(DraftHead):
    """An EAGLE-3 head, which guesses among V' tokens. d2t: int32 [V'], the model's token minus the head's."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype) -> None:
        assert isinstance(config.head, EagleHead)
        size, form = config.hidden_size, config.head
        self.taps, self.rope, self.norm_first = form.taps, config.ropes[0], form.norm_first
        self.fc = Linear((size, 3 * form.width), ("embed", None), dtype)
        self.midlayer = EagleLayer(config, dtype)
        self.norm = RMSNorm(size, config, dtype)
        self.lm_head = Linear((form.vocab_size, size), ("vocab", "embed"), dtype)
        self.d2t = param((form.vocab_size,), (None,), jnp.dtype(jnp.int32), init="zeros")

    def states(self, hidden: Sequence[jax.Array], linear: Products) -> jax.Array:
        return self.fc(jnp.concatenate(hidden, axis=-1), linear)

    def __call__(
        self, x: jax.Array, hidden: jax.Array, positions: jax.Array, cache: Cache, attend: AttendFn, linear: Products
    ) -> tuple[jax.Array, jax.Array, Cache]:
        layer = self.midlayer
        normed = layer.hidden_norm(hidden)
        joined = jnp.concatenate([layer.input_layernorm(x), normed], axis=-1)
        table = None if self.rope is None else rope_table(self.rope, positions)
        out, cache = layer.self_attn(joined, table, cache, attend, linear)
        y = (normed if self.norm_first else hidden) + out
        y = y + layer.mlp(layer.post_attention_layernorm(y), linear)
        return self.norm(y), y, cache

    def guess(self, out: jax.Array, model: CausalLM, linear: Products, of_model: Products) -> jax.Array:
        index = jnp.argmax(self.lm_head(out, linear).astype(jnp.float32), axis=1)
        return (index + self.d2t[...][index]).astype(jnp.int32)


def predictor_config(model: ModelConfig) -> ModelConfig | None:
    """Return the configuration of the head in a model's own checkpoint; None if the family declares none."""
    if model.predictor is None:
        return None
    form = model.predictor
    count = form.layers
    moe = model.moe and dataclasses.replace(model.moe, sparse_layers=(form.sparse,) * count)
    names = (*form.tensors, *model.tensor_names)
    parts = "layers" if count > 1 else "token_norm|hidden_norm|join|layer|norm" + "|lm_head" * form.own_output
    by_layer: dict[str, tuple[Any, ...]] = {"layer_chunks": (), "layer_reads": ()}
    by_layer["mlp_layers"] = (True,) * count if model.mlp_layers else ()
    for name in ("layer_windows", "layer_heads", "layer_limits", "rope_layers"):
        values = getattr(model, name)
        by_layer[name] = () if form.like is None else values[form.like : form.like + 1] * count
    return model.replace(
        num_layers=count,
        layer_states=(None,) * count if model.layer_states else (),
        moe=moe,
        head=form,
        predictor=None,
        vision=None,
        tie_word_embeddings=False,
        quantized_head=False,
        tensor_names=names,
        ignored_tensors=(rf"^(?!({parts})\.)[^.]+",),  # any other name
        stored_form=model.stored_form and model.stored_form.with_names(names),
        **by_layer,
    )


def make_head(config: ModelConfig, model: object, dtype: jnp.dtype) -> DraftHead | Predictors:
    """Make the head of a configuration that has one. model: the family's class"""
    if isinstance(config.head, EagleHead):
        return Eagle(config, dtype)
    assert isinstance(model, type) and issubclass(model, CausalLM), config.architecture
    layers = [Predictor(config, model.make_layer(config, index, dtype), dtype) for index in range(config.num_layers)]
    return layers[0] if len(layers) == 1 else Predictors(layers)


def taps_of(head: ModelConfig) -> tuple[int, ...]:
    """Return `DraftHead.taps` of a head's configuration, which names them (`with_taps`)."""
    return () if head.head is None else head.head.taps


def with_taps(head: ModelConfig, model: ModelConfig) -> ModelConfig:
    """Return an EAGLE-3 head's configuration with the layers of `model` that it reads. Others have none."""
    if not isinstance(head.head, EagleHead) or head.head.taps:
        return head
    layers = model.num_layers
    return head.replace(head=dataclasses.replace(head.head, taps=(2, layers // 2, layers - 3)))


def of_layers(count: int, rules: Callable[[int], Rules]) -> Rules:
    """Return `PredictorHead.tensors` of a head of `count` layers. rules: those of a layer as the only one"""
    if count == 1:
        return rules(0)
    return tuple((there, f"layers.{index}.{here}") for index in range(count) for there, here in rules(index))


UNDER_MTP = (  # the names of a head below `mtp.`, of Qwen3-Next and others
    ("mtp.pre_fc_norm_embedding.", "token_norm."),
    ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
    ("mtp.fc.", "join."),
    ("mtp.norm.", "norm."),
    ("mtp.layers.0.", "layer."),
)


def of_deepseek(layer: int, norm: str = "shared_head.norm.", *, feeds_normed: bool = False) -> PredictorHead:
    """Return the head of DeepSeek-V3, GLM-4.5 and Hy3, whose tensors have the names of one more layer.

    norm: what the last norm is called there
    """
    start = f"model.layers.{layer}."
    parts = {"enorm.": "token_norm.", "hnorm.": "hidden_norm.", "eh_proj.": "join.", norm: "norm."}
    copies = {"shared_head.": "copy.", "embed_tokens.": "copy."}
    rules = tuple((f"{start}{there}", here) for there, here in (parts | copies | {"": "layer."}).items())
    return PredictorHead(rules, feeds_normed=feeds_normed)
