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
from jaxserve.models.tensor_names import Rules
from jaxserve.models.vision.config import VisionConfig
from jaxserve.ops.state import StateSpec


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling values that the checkpoint's generation_config.json recommends. None: it has no recommendation."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


# How a checkpoint stores the experts of a layer, see `moe.Experts`.
PackedExperts = Literal["none", "stacked", "rows", "columns", "bfloat16", "mxfp4"]
# How it stores the projections of a delta net: a tensor of q, k, v and z and one of the gates b and a, as Qwen3-Next's;
# a tensor of q, k and v and one each of z, b and a, as Qwen3.5's; or as the latter, but b and a as the former.
DeltaTensors = Literal["joined", "gates_joined", "apart"]

Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_silu", "clamped_swiglu", "xielu"]


@dataclass(frozen=True)
class AttentionLayer:
    """The properties of one layer that the KV cache and the attention kernel depend on.

    A token stores K and V of `num_kv_heads` heads of `head_dim` values each.
    sliding_window w: a token at position p sees [p - w + 1, p].
    chunk c: a token at position p sees [p - p % c, p]. A layer has a window, chunks or neither.
    reads: index of an earlier layer with the same heads. This layer attends to its cache and stores nothing.
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
    chunk: int | None = None
    reads: int | None = None


@dataclass(frozen=True)
class LayerHeads:
    """The heads of one layer's attention, for models whose layers differ. The fields are those of ModelConfig."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_repeat: int = 1


@dataclass(frozen=True)
class MoENames:
    """The checkpoint's names of a sparse layer's parts.

    block: the feed-forward itself, in the layer. The others are relative to it.
    router: the module with the scores' weight.
    correction: the whole name of that tensor. correction_is_row: it is [1, E].
    experts: an expert's gate, up and down. Without a gate the first is not used.
    """

    block: str = "mlp"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"
    correction_is_row: bool = False
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "shared_experts"
    shared_gate: str = "shared_expert_gate"


@dataclass(frozen=True)
class MoEConfig:
    """Routed experts. Layers marked in `sparse_layers` have them; the others have a dense MLP.

    In the order of computation:

    router_bias    the router has a bias beside its weight
    soft_cap c     a score s becomes c * tanh(s / c)
    router         how scores become gates: "softmax" over all experts, "sigmoid" of each, or "topk_softmax", which
                   is softmax over the chosen ones and knows none of the next three
    correction     a learned number per expert is added for the choice only
    num_groups     the best `topk_groups` groups of experts are kept, ranked by the sum of their two best
    normalize      the gates of the chosen are divided by their sum plus `normalize_eps`
    scale          the result is multiplied by it
    weights_input  an expert's input is multiplied by the weight, not its output
    expert_bias    the experts have biases
    shared_ffn     width of the shared expert, which every token uses; 0: there is none
    shared_gate    the shared expert's output is multiplied by the sigmoid of one more score
    latent         width of the experts' inputs and outputs, between two more projections; 0: the hidden size
    """

    num_experts: int
    experts_per_token: int
    ffn: int
    sparse_layers: tuple[bool, ...]
    router: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    router_bias: bool = False
    soft_cap: float | None = None
    correction: bool = False
    normalize: bool = True
    normalize_eps: float = 0.0
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    weights_input: bool = False
    expert_bias: bool = False
    shared_ffn: int = 0
    shared_gate: bool = False
    latent: int = 0
    names: MoENames = MoENames()


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
class Mamba2Config:
    """The options of Mamba-2 layers that `StateSpec` does not have.

    conv_bias, proj_bias: whether the convolution has a bias, and whether both projections have.
    norm: "gated": norm(result * silu(gate)); "before_gate": norm(result) * silu(gate); "none": result * silu(gate).
    scales: factors of the rows z, x, B, C and dt of the first projection; (): there are none.
    """

    conv_bias: bool = True
    proj_bias: bool = False
    norm: Literal["gated", "before_gate", "none"] = "gated"
    scales: tuple[float, ...] = ()


@dataclass(frozen=True)
class FalconH1Config:
    """The scales of Falcon-H1's layers: of the inputs and results of Mamba-2 and attention, and of two in the MLP."""

    state_in: float
    state_out: float
    attention_in: float
    attention_out: float
    gate: float
    down: float


@dataclass(frozen=True)
class Gemma4Config:
    """The options that only Gemma 4 has.

    key_is_value: in layers without a window V is the projection to K, before its norm.
    reader_ffn: width of the MLP of layers that read another layer's cache.
    input_size, input_vocab: size of each layer's own embeddings, and the tokens that have one. 0: there are none.
    """

    key_is_value: bool
    reader_ffn: int
    input_size: int
    input_vocab: int


@dataclass(frozen=True)
class PredictorHead:
    """A checkpoint's own head for multi-token prediction (MTP), see `models.draft_head`.

    tensors: rules from beginnings of the checkpoint's names to the parts here, which are token_norm, hidden_norm, join,
    layer, norm and lm_head. The first that fits counts.
    taps: the number of the model's last layer if the head reads the hidden states before the final norm; (): after it.
    token_first: the embedding comes before the hidden state in the input of `join`.
    feeds_normed: the next guess starts from the result after the last norm; else from the result before it.
    like: the model's layer whose window, heads, rotation and limits its layer has; None: those of a model whose layers
    are all alike.
    sparse: its layer has experts if the model has some; else it has an MLP.
    own_norm, own_output: its last norm and its output head are its own; else they are the model's.
    layers: of several, each with parts of its own, the first makes the first guess, the next one the second.
    chained: each of them reads the result of the one before; else all read the model's hidden states.
    """

    tensors: Rules
    taps: tuple[int, ...] = ()
    token_first: bool = True
    feeds_normed: bool = True
    like: int | None = None
    sparse: bool = True
    own_norm: bool = True
    own_output: bool = False
    layers: int = 1
    chained: bool = False


@dataclass(frozen=True)
class EagleHead:
    """A head in EAGLE-3's form (https://arxiv.org/abs/2503.01840), see `models.draft_head`.

    width: hidden size of the model that it guesses for. vocab_size: tokens that it can guess.
    taps: it reads the hidden states after so many layers; (): after 2, after half of them, and after all but 3.
    norm_first: the residual is the hidden state after its norm; else before it.
    """

    width: int
    vocab_size: int
    taps: tuple[int, ...] = ()
    norm_first: bool = False


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
    post_norm_eps: float | None = None  # of the norms after attention and MLP, if it differs
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False  # of the attention's output projection
    mlp_bias: bool = False
    # RMSNorm of queries and keys: over each head before or after the rotation, or without a weight, or over all heads
    qk_norm: Literal["none", "head", "rotated_head", "over_rms", "full"] = "none"
    gated_mlp: bool = True  # otherwise an MLP is down(activation(up(x)))
    activation: Activation = "silu"
    activation_limit: float = 0.0  # of "clamped_silu" and "clamped_swiglu"
    # of each layer: the limits of its routed experts and of its shared expert or MLP, 0: none; () means none has one
    layer_limits: tuple[tuple[float, float], ...] = ()
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False  # of "layer"
    norm_offset: float = 0.0  # added to the weight of every norm
    embed_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add to the hidden state
    logit_scale: float = 1.0
    logit_soft_cap: float | None = None
    layer_windows: tuple[int | None, ...] = ()  # sliding window of each layer; () means none has one
    layer_chunks: tuple[int | None, ...] = ()  # chunk of each layer, see AttentionLayer; () means none has one
    layer_reads: tuple[int | None, ...] = ()  # layer whose cache each layer attends to; None: its own; () means all
    layer_heads: tuple[LayerHeads, ...] = ()  # heads of each layer, see `at`; () means all have num_heads and so on
    local_rope: RopeConfig | None = None  # rotation of the layers with a window, if it differs from `rope`
    rope_layers: tuple[bool, ...] = ()  # which layers rotate; () means all
    unrotated: RopeConfig | None = None  # of the other layers, whose queries it may scale
    attention_scale: float | None = None  # None: head_dim ** -0.5
    attention_soft_cap: float | None = None
    attention_sinks: bool = False
    value_dim: int | None = None  # of a value head, if it is narrower than a key head
    value_scale: float = 1.0
    # of attention: by a projection of its own, or ("queries") by rows of q_proj behind those of each head
    output_gate: Literal["none", "per-head", "per-element", "queries"] = "none"
    layer_states: tuple[StateSpec | None, ...] = ()  # recurrent state in place of attention; () means none has one
    mlp_layers: tuple[bool, ...] = ()  # which layers have a feed-forward; () means all
    moe: MoEConfig | None = None
    latent: LatentConfig | None = None
    gemma4: Gemma4Config | None = None
    mamba2: Mamba2Config | None = None
    falcon_h1: FalconH1Config | None = None
    packed_qkv: bool = False  # the checkpoint stores q, k and v as one tensor
    packed_gate_up: bool = False  # the checkpoint stores gate and up as one tensor
    packed_experts: PackedExperts = "none"  # form of a tensor with all experts of a layer
    delta_tensors: DeltaTensors = "joined"
    weight_block: tuple[int, int] | None = None  # rows and columns of an FP8 weight that share a scale
    vision: VisionConfig | None = None  # a tower whose rows stand for tokens; None: the model takes no pictures
    predictor: PredictorHead | None = None  # the checkpoint's own head that guesses further tokens; None: none is known
    head: PredictorHead | EagleHead | None = None  # None: this is a model; else it is such a head
    bidirectional: bool = False  # an encoder: makes embeddings and generates no text
    type_vocab_size: int = 0  # token types of an encoder
    position_offset: int = 0  # row of an encoder's position table that the first token uses
    labels: tuple[str, ...] = ()  # of a classification head, in place of an output head; (): there is none
    multi_label: bool = False  # each label has a probability of its own
    ignored_tensors: tuple[str, ...] = ()  # regular expressions of checkpoint names that the model does not use
    tensor_names: Rules = ()  # how the checkpoint's names become the names of the modules
    dtype: str = "float32"  # of the checkpoint
    activation_dtype: str | None = None  # None: the weights'
    stored_form: StoredForm | None = None  # of a checkpoint's quantized weights
    # quantization of linear layers and experts at load; "stored": as in the checkpoint, see stored_form
    quantization: Literal["none", "stored", "int8", "int4", "fp8", "mxfp4", "nvfp4"] = "none"
    quantized_head: bool = False  # at load, with the linear layers
    generation: GenerationDefaults = GenerationDefaults()

    @property
    def attention_layers(self) -> tuple[AttentionLayer, ...]:
        """Return the attention of each layer, in order. The runtime makes caches and kernel specs from it."""
        nothing = (None,) * self.num_layers
        limits = zip(self.windows, self.layer_chunks or nothing, self.layer_reads or nothing, strict=True)
        return tuple(self.at(index)._attention_layer(*each) for index, each in enumerate(limits))

    @property
    def mixers(self) -> tuple[AttentionLayer | StateSpec, ...]:
        """Return how each layer mixes tokens: by attention or by a recurrent state."""
        states = self.layer_states or (None,) * self.num_layers
        return tuple(state or layer for state, layer in zip(states, self.attention_layers, strict=True))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the sliding window of each layer, None for a layer without one."""
        return self.layer_windows or (None,) * self.num_layers

    @property
    def ropes(self) -> tuple[RopeConfig | None, ...]:
        """Return the rotation of each layer, None for a layer that does not see positions."""
        rotated = self.rope_layers or (True,) * self.num_layers
        pairs = zip(rotated, self.windows, strict=True)
        local = self.local_rope or self.rope
        return tuple(self.unrotated if not r else self.rope if window is None else local for r, window in pairs)

    def at(self, index: int) -> ModelConfig:
        """Return the configuration whose heads are those of layer `index`. Its modules are made from it."""
        if not self.layer_heads:
            return self
        return self.replace(**dataclasses.asdict(self.layer_heads[index]))

    def _attention_layer(self, window: int | None, chunk: int | None, reads: int | None) -> AttentionLayer:
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
            chunk=chunk,
            reads=reads,
        )

    def replace(self, **changes: Any) -> ModelConfig:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def for_tensor(self, size: int) -> ModelConfig:
        """Return the configuration for `size` tensor-parallel devices.

        If there are fewer kv heads than devices, each head is copied to several, and so are B and C of Mamba-2.
        Raises ValueError if the heads cannot be split evenly.
        """
        own = LayerHeads(self.num_heads, self.num_kv_heads, self.head_dim, self.kv_repeat)
        heads, *by_layer = (self._split(each, size) for each in (own, *self.layer_heads))
        states = tuple(state and _split_state(state, size) for state in self.layer_states)
        if (heads, tuple(by_layer), states) == (own, self.layer_heads, self.layer_states):
            return self
        return self.replace(**dataclasses.asdict(heads), layer_heads=tuple(by_layer), layer_states=states)

    def _split(self, heads: LayerHeads, size: int) -> LayerHeads:
        if heads.num_heads % size:
            raise ValueError(f"{heads.num_heads} attention heads cannot be split over {size} devices")
        count = heads.num_kv_heads
        if self.latent is not None or count % size == 0:
            return heads
        if size % count:
            raise ValueError(f"{count} kv heads can be neither split nor copied evenly over {size} devices")
        return dataclasses.replace(heads, num_kv_heads=size, kv_repeat=heads.kv_repeat * size // count)

    def without_tower(self) -> ModelConfig:
        """Return the configuration of the language model alone, which takes no pictures."""
        if self.vision is None:
            return self
        return self.replace(vision=None, ignored_tensors=(*self.ignored_tensors, r"^visual\."))

    def for_context(self, max_model_len: int) -> ModelConfig:
        """Return the configuration for a context of `max_model_len` tokens, which chooses LongRoPE's factors."""
        scaling = self.rope.scaling
        if not isinstance(scaling, LongRopeScaling):
            return self
        scaling = dataclasses.replace(scaling, long=max_model_len > scaling.original_max_position)
        return self.replace(rope=dataclasses.replace(self.rope, scaling=scaling))


def _split_state(state: StateSpec, size: int) -> StateSpec:
    """Return a state's description for `size` devices. Raises ValueError if its heads cannot be split evenly."""
    heads = state.key_heads
    if heads % size == 0:
        return state
    if state.kind != "mamba2" or size % heads or state.heads % size:
        raise ValueError(f"{heads} key heads of a state cannot be split over {size} devices")
    return dataclasses.replace(state, key_heads=size, copies=state.copies * size // heads)
