"""The configuration of a model as frozen data: dimensions and features that modules, loader and runtime read.

`checkpoint.hf_config` makes a ModelConfig from a published config.json. Only that file and the families know Hugging
Face's keys.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from jaxserve.models.rope import LongRopeScaling, RopeConfig
from jaxserve.models.stored_form import StoredForm


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that the checkpoint's generation_config.json recommends. None: it has no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True)
class AttentionLayer:
    """The properties of one layer that the KV cache and the attention kernel depend on.

    A token stores K and V of `num_kv_heads` heads of `head_dim` values each.
    sliding_window w: a token at position p sees [p - w + 1, p].
    soft_cap c: a score s becomes c * tanh(s / c), after the scale.
    sinks: the layer passes one score per query head that is added to the softmax's denominator.
    latent: multi-head latent attention (MLA). V is the beginning of K, so a layout may store K alone.
    value_columns: size of V per head; None: head_dim.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    latent: bool = False
    value_columns: int | None = None


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts. Layers marked in `sparse_layers` have them; the others have a dense MLP.

    router: how scores become weights.
      "softmax"       Softmax over all experts, then the top k. If `normalize`, divided by their sum.
      "topk_softmax"  The top k scores, then softmax over those.
      "sigmoid"       Sigmoid. A learned correction is added for the choice only. The best `topk_groups` of
                      `num_groups` groups are kept, ranked by the sum of their two best experts. If `normalize`,
                      divided by the sum of the chosen. Multiplied by `scale`.
    """

    num_experts: int
    experts_per_token: int
    ffn: int
    sparse_layers: tuple[bool, ...]
    router: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    normalize: bool = True
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    shared_ffn: int = 0  # width of the shared expert, which every token uses; 0: there is none


@dataclass(frozen=True)
class LatentConfig:
    """Multi-head latent attention (MLA): K and V of all heads are projections of one vector of `kv_rank` per token.

    A head's query and key have `nope_dim` values without position and `rope_dim` rotated ones. All heads share the
    rotated part of the key. A head's V has `v_dim` values. q_rank None: queries are projected directly.
    """

    kv_rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int


@dataclass(frozen=True)
class ModelConfig:
    """One model's configuration, made by `hf_config.from_hf`. Every field is static and hashable."""

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
    kv_repeat: int = 1  # copies of each of the checkpoint's kv heads; num_kv_heads includes the copies
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"  # RMSNorm over each head, or over all heads at once
    activation: Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"] = "silu"
    activation_limit: float = 0.0  # clamp of "clamped_swiglu"
    norm_offset: float = 0.0  # added to every RMSNorm weight
    embed_scale: float = 1.0
    logit_soft_cap: float | None = None
    layer_windows: tuple[int | None, ...] = ()  # sliding window of each layer; () means none has one
    local_rope: RopeConfig | None = None  # rotation of the layers with a window, if it differs from `rope`
    rope_layers: tuple[bool, ...] = ()  # which layers rotate; () means all
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    packed_projections: bool = False  # the checkpoint stores q, k, v and gate, up as one tensor each
    packed_experts: Literal["none", "bfloat16", "mxfp4"] = "none"  # form of a tensor with all experts of a layer
    weight_block: tuple[int, int] | None = None  # rows and columns of an FP8 weight that share a scale
    bidirectional: bool = False  # an encoder: makes embeddings and generates no text
    type_vocab_size: int = 0  # token types of an encoder
    position_offset: int = 0  # row of an encoder's position table that the first token uses
    labels: tuple[str, ...] = ()  # of a classification head, in place of an output head; (): there is none
    multi_label: bool = False  # each label has a probability of its own
    ignored_tensors: tuple[str, ...] = ()  # regular expressions of checkpoint names that the model does not use
    dtype: str = "float32"  # of the checkpoint
    activation_dtype: str | None = None  # None: the weights'
    stored_form: StoredForm | None = None  # of a checkpoint's quantized weights
    # quantization of linear layers and experts at load; "stored": as in the checkpoint, see stored_form
    quantization: Literal["none", "stored", "int8", "int4", "fp8"] = "none"
    quantized_head: bool = False  # at load, with the linear layers
    generation: GenerationDefaults = GenerationDefaults()

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Return the attention of each layer, in order. The runtime makes caches and kernel specs from it."""
        return tuple(self._attention_layer(window) for window in self.windows)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for a layer without one."""
        return self.layer_windows or (None,) * self.num_layers

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Return the rotation of each layer, None for a layer without positions."""
        rotated = self.rope_layers or (True,) * self.num_layers
        pairs = zip(rotated, self.windows, strict=True)
        local = self.local_rope or self.rope
        return tuple(None if not r else self.rope if window is None else local for r, window in pairs)

    def _attention_layer(self, window: int | None) -> AttentionLayer:
        head_dim = self.head_dim if self.latent is None else self.latent.kv_rank + self.latent.rope_dim
        return AttentionLayer(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads if self.latent is None else 1,
            head_dim=head_dim,
            scale=head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            sliding_window=window,
            soft_cap=self.attention_soft_cap,
            sinks=self.attention_sinks,
            latent=self.latent is not None,
            value_columns=None if self.latent is None else self.latent.kv_rank,
        )

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def for_tensor(self, size: int) -> ModelConfig:
        """Return the configuration for `size` tensor-parallel devices.

        If there are fewer kv heads than devices, each head is copied to several. Raises ValueError if the heads
        cannot be split evenly.
        """
        if self.num_heads % size:
            raise ValueError(f"{self.num_heads} attention heads cannot be split over {size} devices")
        if self.latent is not None or self.num_kv_heads % size == 0:
            return self
        if size % self.num_kv_heads:
            raise ValueError(f"{self.num_kv_heads} kv heads can be neither split nor copied evenly over {size} devices")
        return self.replace(num_kv_heads=size, kv_repeat=self.kv_repeat * size // self.num_kv_heads)

    def for_context(self, max_model_len: int) -> ModelConfig:
        """Return the configuration for a context of `max_model_len` tokens, which chooses LongRoPE's factors."""
        scaling = self.rope.scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        scaling = dataclasses.replace(scaling, long=max_model_len > scaling.original_max_position)
        return self.replace(rope=dataclasses.replace(self.rope, scaling=scaling))
