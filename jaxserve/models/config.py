"""What a model is, as frozen data: the dimensions and features that modules, loader and runtime read.

Owns ModelConfig and its parts, in this project's words. hf_config.py translates a published config.json into it;
no other file knows Hugging Face's keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.models.rope import LongRopeScaling, RopeConfig


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that the checkpoint's generation_config.json recommends; None: it says nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """What a KV cache and an attention kernel must know of one layer.

    A token stores K and V of `num_kv_heads` heads of `head_dim` numbers each. `sliding_window` w: a token at p sees
    [p - w + 1, p]. `soft_cap` c: scores become c * tanh(s / c) after the scale. `sinks`: the layer passes a score
    per query head that joins the softmax's denominator.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False


@dataclass(frozen=True)
class ModelConfig:
    """One causal language model. Built by `from_hf`; every field is static and hashable."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rope: RopeConfig
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # RMSNorm over each head, or over all heads at once
    activation: Literal["silu", "gelu_tanh"] = "silu"
    layer_windows: tuple[int | None, ...] = ()  # sliding window of each layer; () is None for all
    attention_scale: float | None = None  # None: head_dim ** -0.5
    dtype: str = "float32"  # the checkpoint's own
    generation: GenerationDefaults = GenerationDefaults()

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """The attention of each layer, in order: what the runtime builds caches and specs from."""
        return tuple(self._attention_layer(window) for window in self.windows)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Sliding window of each layer, one entry a layer."""
        return self.layer_windows or (None,) * self.num_layers

    def _attention_layer(self, window: int | None) -> AttentionLayer:
        return AttentionLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            sliding_window=window,
        )

    def replace(self, **changes: Any) -> ModelConfig:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def for_context(self, max_model_len: int) -> ModelConfig:
        """The configuration that serves `max_model_len` tokens: LongRoPE takes its long or its short factors."""
        scaling = self.rope.scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        scaling = dataclasses.replace(scaling, long=max_model_len > scaling.original_max_position)
        return self.replace(rope=dataclasses.replace(self.rope, scaling=scaling))
