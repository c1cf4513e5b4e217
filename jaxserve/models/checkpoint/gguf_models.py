"""Present a GGUF file as the checkpoint that it was made of: the keys of its config.json, and its tensors.

A tensor has the name that it has in the published checkpoint, or that its module has here. What llama.cpp's converter
changed is undone: interleaved rows, value heads in another order, experts as one tensor, norms to which 1 was added.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from jaxserve.errors import ModelLoadError
from jaxserve.model_files import Omitted, read_object
from jaxserve.models.checkpoint.gguf import BlockTensor, GgufFile, read_gguf
from jaxserve.models.checkpoint.read_config import Json, shown
from jaxserve.models.checkpoint.safetensors_file import TensorInfo, read_rows
from jaxserve.models.stored_form import HELD_BLOCKS, of_all_experts

_EPSILON = "attention.layer_norm_rms_epsilon"
_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    _EPSILON: "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_EXPERT_KEYS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_SCALING_KEYS = MappingProxyType(
    {
        "original_context_length": "original_max_position_embeddings",
        "yarn_beta_fast": "beta_fast",
        "yarn_beta_slow": "beta_slow",
    }
)
# Keys that change nothing here, or that are read below; any other is refused unless it is 0.
_OTHER_KEYS = ("vocab_size", "rope.dimension_count", "attention.value_length", "attention.causal")
_OTHER_KEYS += ("rope.scaling.type", "rope.scaling.factor", "rope.scaling.finetuned")
# Values of other keys that are computed: llama.cpp's defaults, and notes of converters.
_DEFAULTS: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale", "rope.scaling.attn_factor"), (1,)),
        **dict.fromkeys(("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_ext_factor"), (1,)),
        "attention.max_alibi_bias": (0,),
        "attention.layer_norm_epsilon": (1e-5, 1e-6),
        "pooling_type": (3,),  # the last token's state, as here
        "tensor_data_layout": ("Meta AI original pth", "reference"),
    }
)
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_EACH = ".experts.*."  # in a name: the tensor has all experts


def _with_experts(block: str, shared: str = "shared_experts") -> dict[str, str]:
    """Return the names of a router, experts and a shared one in a layer's `block`."""
    found = {"ffn_gate_inp": f"{block}.gate", "ffn_gate_inp_shexp": f"{block}.shared_expert_gate"}
    for name in ("gate", "up", "down"):
        found |= {
            f"ffn_{name}_exps": f"{block}{_EACH}{name}_proj",
            f"ffn_{name}_shexp": f"{block}.{shared}.{name}_proj",
        }
    return found


def _with_state(mixer: str) -> dict[str, str]:
    """Return the names of a recurrent state's parameters in the mixer of a layer."""
    own = {"ssm_a": "A_log", "ssm_d": "D", "ssm_dt.bias": "dt_bias", "ssm_conv1d": "conv1d", "ssm_norm": "norm"}
    return {name: f"{mixer}.{there}" for name, there in (own | {"ssm_in": "in_proj", "ssm_out": "out_proj"}).items()}


@dataclass(frozen=True, eq=False)
class Architecture:
    """An architecture, which `general.architecture` names.

    published: its name in config.json. keys: of the metadata -> of config.json. needed: those that a file must have
    values: {key: those that are computed} beside _DEFAULTS. read: keys that `changes` reads
    changes: (file, its metadata below the architecture's name) -> keys of config.json to add or replace
    layers: what the names of layers begin with. names: of tensors, or of modules -> as published, or as here
    interleaved: whether rows 0, 1, 2 of a head of q or k are the published rows 0, H / 2, 1
    restored: (name in the file below the layer, tensor, the same metadata) -> the tensor as published
    """

    published: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: _KEYS)
    needed: tuple[str, ...] = (_EPSILON,)
    values: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    read: tuple[str, ...] = ()
    changes: Callable[[GgufFile, Json], dict[str, Any]] = lambda file, given: {}
    layers: str = "model.layers"
    names: Mapping[str, str] = dataclasses.field(default_factory=lambda: _NAMES)
    interleaved: bool = False
    restored: Callable[[str, BlockTensor, Json], BlockTensor] = lambda name, tensor, given: tensor


def _one_number(value: Any) -> Any:
    """Return the common entry of a list whose entries are equal. Other lists become Omitted; other values stay."""
    if not isinstance(value, list):
        return value
    return value[0] if value and value.count(value[0]) == len(value) else Omitted(f"{len(value)} different numbers")


def _list(file: GgufFile, given: Json, key: str) -> list[Any] | None:
    """Return a value of each layer; None: the file has one of all. Raises ModelLoadError for another number of them."""
    found, layers = given.get(key), given.get("block_count")
    if not isinstance(found, list):
        return None
    if len(found) != layers:
        raise ModelLoadError(
            f"{file.path}: {key} must have 0 or one number for each of {shown(layers)} layers",
            fix="download the file again",
        )
    return found


def _kv_heads(file: GgufFile, given: Json) -> tuple[list[bool], int] | None:
    """Return which layers have attention, and the number of their kv heads; None: the file has one of all layers."""
    found = _list(file, given, "attention.head_count_kv")
    if found is None:
        return None
    heads = {*found} - {0}
    if len(heads) != 1:
        raise ModelLoadError(
            f"{file.path}: attention.head_count_kv must have 0 or one number for each of {len(found)} layers",
            fix="download the file again",
        )
    return [count != 0 for count in found], heads.pop()


def _whole(given: Json, key: str) -> int:
    """Return a positive integer. Raises ValueError for anything else."""
    value = _one_number(given.get(key))
    if type(value) is not int or not 0 < value < 2**31:
        raise ValueError(f"{key!r} must be a positive integer, not {shown(value)}")
    return value


def _share(given: Json, key: str, of: str) -> int:
    """Return one number divided by another. Raises ValueError if there is a remainder."""
    whole, count = _whole(given, key), _whole(given, of)
    if whole % count:
        raise ValueError(f"{key!r} {whole} is no multiple of {of!r} {count}")
    return whole // count


def _layers(given: Json) -> int:
    """Return the number of layers without those of heads that predict further tokens, which are the last."""
    heads = given.get("nextn_predict_layers", 0)
    return _whole(given, "block_count") - (heads if type(heads) is int and 0 <= heads else 0)


def _width(file: GgufFile) -> dict[str, Any]:
    """Return the width of the MLPs, which is that of the first one's tensors."""
    ends = (".ffn_gate.weight", ".ffn_up.weight")
    found = next((each for name, each in file.tensors.items() if name.endswith(ends)), None)
    return {} if found is None else {"intermediate_size": found.shape[0]}


def _has(file: GgufFile, name: str) -> bool:
    """Return whether a layer has the tensor."""
    return any(each.endswith(f".{name}") for each in file.tensors)


# --- LFM2 ------------------------------------------------------------------------------------------------------------


def _lfm2(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the kinds of LFM2's layers, of which those without kv heads are convolutions, and the MLP's width.

    The width is that of the tensors: files of Ollama give block_ff_dim, of which the model computes the width.
    """
    config: dict[str, Any] = {"block_auto_adjust_ff_dim": False} | _width(file)
    config["use_expert_bias"] = _has(file, "exp_probs_b.bias")
    found = _kv_heads(file, given)
    if found is None:
        return config
    kinds = ["full_attention" if attends else "conv" for attends in found[0]]
    return config | {"layer_types": kinds, "num_key_value_heads": found[1]}


_L_CACHE = "shortconv.l_cache"
_LFM2 = Architecture(
    "Lfm2ForCausalLM",
    keys=_KEYS | {_EPSILON: "norm_eps", _L_CACHE: "conv_L_cache"},
    needed=(_EPSILON, _L_CACHE),
    names=_NAMES
    | {"token_embd_norm": "model.norm"}  # in llama.cpp's files; Ollama's have output_norm
    | {f"shortconv.{name}": f"conv.{name}" for name in ("conv", "in_proj", "out_proj")},
    changes=_lfm2,
)
_SIGMOID = 2  # of expert_gating_func
_LFM2_MOE = dataclasses.replace(
    _LFM2,
    published="Lfm2MoeForCausalLM",
    keys={**_LFM2.keys, **_EXPERT_KEYS, "leading_dense_block_count": "num_dense_layers"},
    needed=(*_LFM2.needed, *_EXPERT_KEYS),
    values={"expert_gating_func": (_SIGMOID,)},
    names={**_LFM2.names, **_with_experts("mlp"), "exp_probs_b.bias": "mlp.expert_bias"},
)


# --- Qwen3-Next, Qwen3.5 ---------------------------------------------------------------------------------------------


def _qwen3_5(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the kinds of Qwen3.5's layers, the sizes of its states and the rotated part of a head.

    In the file key heads and value heads are numbered apart: `time_step_rank` is the number of value heads.
    """
    layers, recurrent = _layers(given), _list(file, given, "attention.recurrent_layers")
    config: dict[str, Any] = {
        "num_hidden_layers": layers,
        "linear_value_head_dim": _share(given, "ssm.inner_size", "ssm.time_step_rank"),
        "partial_rotary_factor": _whole(given, "rope.dimension_count") / _whole(given, "attention.key_length"),
        "mtp_num_hidden_layers": 0,
    }
    if recurrent is None:
        return config
    return config | {"layer_types": ["linear_attention" if each else "full_attention" for each in recurrent[:layers]]}


def _less_one(name: str, tensor: BlockTensor, given: Json) -> BlockTensor:
    """Return a tensor of Qwen3-Next as published: the file has 1 + weight for a norm."""
    if name.endswith("_norm.weight") and name != "ssm_norm.weight":
        return dataclasses.replace(tensor, change=lambda numbers: numbers - 1)
    return tensor


def _qwen3_5_tensor(name: str, tensor: BlockTensor, given: Json) -> BlockTensor:
    """Return a tensor of Qwen3.5 as published, norms as those of Qwen3-Next.

    With r value heads for each of n key heads, value head i r + j is the file's head j n + i, so that an operand of key
    heads is repeated as a whole.
    """
    tensor = _less_one(name, tensor, given)
    keys, heads = _whole(given, "ssm.group_count"), _whole(given, "ssm.time_step_rank")
    key_dim, size = _whole(given, "ssm.state_size"), _share(given, "ssm.inner_size", "ssm.time_step_rank")
    per_head, first = {
        "attn_qkv.weight": (size, 2 * keys * key_dim),
        "ssm_conv1d.weight": (size, 2 * keys * key_dim),
        "attn_gate.weight": (size, 0),
        "ssm_out.weight": (size, 0),
        **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"), (1, 0)),
    }.get(name, (0, 0))
    length = tensor.shape[-1 if name == "ssm_out.weight" else 0]
    if heads == keys or not per_head or heads % keys or length != first + heads * per_head:
        return tensor
    values = np.arange(heads * per_head).reshape(heads // keys, keys, per_head).swapaxes(0, 1).reshape(-1)
    order = np.concatenate([np.arange(first), first + values])
    return dataclasses.replace(tensor, **{"columns" if name == "ssm_out.weight" else "order": order})


_QWEN3_5 = Architecture(
    "Qwen3_5ForCausalLM",
    keys=_KEYS
    | {"ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim"}
    | {"ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads"}
    | {"full_attention_interval": "full_attention_interval"},
    needed=(_EPSILON, "ssm.conv_kernel", "ssm.state_size", "ssm.group_count"),
    read=(
        *("ssm.inner_size", "attention.recurrent_layers", "nextn_predict_layers", "rope.dimension_count"),
        "rope.dimension_sections",  # of positions in pictures: all three are equal in texts
    ),
    changes=_qwen3_5,
    names=_NAMES
    | _with_state("linear_attn")
    | {"attn_qkv": "linear_attn.in_proj_qkv", "attn_gate": "linear_attn.in_proj_z"}
    | {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
    | {"post_attention_norm": "post_attention_layernorm"},
    restored=_qwen3_5_tensor,
)
_QWEN3_5_MOE = dataclasses.replace(
    _QWEN3_5,
    published="Qwen3_5MoeForCausalLM",
    keys={
        **_QWEN3_5.keys,
        **_EXPERT_KEYS,
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    needed=(*_QWEN3_5.needed, *_EXPERT_KEYS, "expert_shared_feed_forward_length"),
    names={**_QWEN3_5.names, **_with_experts("mlp", "shared_expert")},
)
_QWEN3_NEXT = dataclasses.replace(
    _QWEN3_5_MOE,
    published="Qwen3NextForCausalLM",
    names={**_QWEN3_5_MOE.names, "ssm_ba": "linear_attn.in_proj_ba"},
    restored=_less_one,
)


# --- Mamba-2: Granite 4, Bamba, Nemotron-H, Falcon-H1 ----------------------------------------------------------------

_SSM_SIZES = ("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size")
_MAMBA_KEYS = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}


def _mamba2(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the size of a Mamba-2 head, and which projections have a bias."""
    return {
        "mamba_d_head": _share(given, "ssm.inner_size", "ssm.time_step_rank"),
        "mamba_conv_bias": _has(file, "ssm_conv1d.bias"),
        "mamba_proj_bias": _has(file, "ssm_in.bias"),
    }


def _granite(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the kinds of the layers, of which those without kv heads have states. Bamba's attention rotates heads."""
    attends, kv_heads = _kv_heads(file, given) or ([], given.get("attention.head_count_kv"))
    config = _mamba2(file, given) | {
        "mamba_expand": _share(given, "ssm.inner_size", "embedding_length"),
        "num_key_value_heads": kv_heads,
    }
    if given.get("rope.scaling.finetuned") is True:
        half = _share(given, "embedding_length", "attention.head_count") // 2
        if given.get("rope.dimension_count") != half:
            raise ModelLoadError(f"{file.path}: Bamba must rotate half of a head, see rope.dimension_count")
        layers = [i for i, each in enumerate(attends) if each]
        return config | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": layers}
    shared = given.get("expert_shared_feed_forward_length", given.get("feed_forward_length"))
    return config | {
        "layer_types": ["attention" if each else "mamba" for each in attends],
        "position_embedding_type": "nope",
        "num_local_experts": given.get("expert_count", 0),
        "shared_intermediate_size": _width(file).get("intermediate_size", shared),
    }


_GRANITE = Architecture(
    "GraniteMoeHybridForCausalLM",
    keys=_KEYS
    | _MAMBA_KEYS
    | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
    | {"embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier"}
    | {"residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"},
    needed=(_EPSILON, *_SSM_SIZES),
    read=("ssm.inner_size", "expert_shared_feed_forward_length", "rope.dimension_count"),
    changes=_granite,
    names=_NAMES | _with_state("mamba") | _with_experts("mlp"),
    interleaved=True,
)


def _nemotron_h(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the kinds of the published layers, which their tensors show, and the sizes of the states."""
    layers, kinds = _layers(given), ""
    for i in range(layers):
        has = {kind: f"blk.{i}.{name}.weight" in file.tensors for kind, name in _SHOWN_BY.items()}
        kinds += next((kind for kind, shown_by in has.items() if shown_by), "M")
    _, kv_heads = _kv_heads(file, given) or ([], given.get("attention.head_count_kv"))
    return {
        "num_hidden_layers": layers,
        "hybrid_override_pattern": kinds,
        "num_key_value_heads": kv_heads,
        "mamba_head_dim": _share(given, "ssm.inner_size", "ssm.time_step_rank"),
        "use_conv_bias": _has(file, "ssm_conv1d.bias"),
        "use_bias": _has(file, "ssm_in.bias"),
        "num_nextn_predict_layers": 0,
    } | _width(file)


_SHOWN_BY = {"*": "attn_output", "E": "ffn_gate_inp", "-": "ffn_up"}  # the other kind is Mamba-2
_NEMOTRON_H = Architecture(
    "NemotronHForCausalLM",
    keys={key: name for key, name in _KEYS.items() if key != "feed_forward_length"}
    | {_EPSILON: "layer_norm_epsilon", "ssm.conv_kernel": "conv_kernel", "ssm.state_size": "ssm_state_size"}
    | {"ssm.group_count": "n_groups", "ssm.time_step_rank": "mamba_num_heads"},
    needed=(_EPSILON, *_SSM_SIZES),
    read=(
        *("ssm.inner_size", "feed_forward_length", "nextn_predict_layers"),
        *("rope.dimension_count", "attention.layer_norm_epsilon"),
    ),
    changes=_nemotron_h,
    layers="backbone.layers",
    names={name: there.replace("self_attn.", "mixer.").replace("mlp.", "mixer.") for name, there in _NAMES.items()}
    | _with_state("mixer")
    | _with_experts("mixer")
    | {"attn_norm": "norm", "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"}
    | {"ffn_latent_down": "mixer.fc1_latent_proj", "ffn_latent_up": "mixer.fc2_latent_proj"},
    interleaved=True,
)
_NEMOTRON_H_MOE = dataclasses.replace(
    _NEMOTRON_H,
    keys={
        **_NEMOTRON_H.keys,
        "expert_count": "n_routed_experts",
        "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
        "expert_shared_count": "n_shared_experts",
        "expert_weights_norm": "norm_topk_prob",
        "expert_weights_scale": "routed_scaling_factor",
        "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group",
        "moe_latent_size": "moe_latent_size",
    },
    needed=(*_NEMOTRON_H.needed, *_EXPERT_KEYS, "expert_shared_feed_forward_length"),
    values={"expert_gating_func": (_SIGMOID,)},
)


def _falcon_h1(file: GgufFile, given: Json) -> dict[str, Any]:
    """Return the sizes of Falcon-H1's states. Its scales are multiplied into the weights of the file."""
    own = _mamba2(file, given)
    return own | {
        "mamba_d_ssm": given.get("ssm.inner_size"),
        "mamba_rms_norm": _has(file, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,  # as llama.cpp computes all files
        "projectors_bias": own["mamba_proj_bias"],
    }


_FALCON_H1 = Architecture(
    "FalconH1ForCausalLM",
    keys=_KEYS | _MAMBA_KEYS,
    needed=(_EPSILON, *_SSM_SIZES),
    read=("ssm.inner_size",),
    changes=_falcon_h1,
    names=_NAMES
    | _with_state("mamba")
    | dict.fromkeys(("ffn_norm", "ffn_norm.weight"), "post_attention_layernorm.weight"),  # llama.cpp's has no ending
)

# ---------------------------------------------------------------------------------------------------------------------

ARCHITECTURES = MappingProxyType(
    {
        "llama": Architecture("LlamaForCausalLM", interleaved=True),
        "qwen2": Architecture("Qwen2ForCausalLM"),
        "qwen3": Architecture("Qwen3ForCausalLM"),
        "qwen3moe": Architecture(
            "Qwen3MoeForCausalLM",
            keys=_KEYS | _EXPERT_KEYS,
            needed=(_EPSILON, *_EXPERT_KEYS),
            changes=lambda file, given: {"norm_topk_prob": True},  # as llama.cpp computes all files
            names=_NAMES | _with_experts("mlp"),
        ),
        "qwen3next": _QWEN3_NEXT,
        "qwen35": _QWEN3_5,
        "qwen35moe": _QWEN3_5_MOE,
        "lfm2": _LFM2,
        "lfm2moe": _LFM2_MOE,
        "granitehybrid": _GRANITE,
        "nemotron_h": _NEMOTRON_H,
        "nemotron_h_moe": _NEMOTRON_H_MOE,
        "falcon-h1": _FALCON_H1,
    }
)
# values that a file may have for each layer
_PER_LAYER = ("attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length")
_PER_LAYER += ("attention.sliding_window", "feed_forward_length", "rope.dimension_count", "rope.freq_base")
_PER_LAYER += ("attention.recurrent_layers",)
_BY_LAYER = frozenset(f"{name}.{key}" for name in ARCHITECTURES for key in _PER_LAYER)
# matrices that are float32 in a file of any form
_ROUTERS = ("mlp.gate.weight", "mixer.gate.weight", ".shared_expert_gate.weight")
_MAX_EXPERTS = 4096  # of a layer
_MAX_TENSORS = 2**20  # 60 layers of 512 experts have 92,000
_LAYER = re.compile(r"blk\.(\d{1,6})\.(.+)")
_ROPE_FACTORS = "rope_freqs.weight"
_DTYPES = MappingProxyType({"F32": "float32", "F16": "float16"})


def published_config(file: Path) -> dict[str, Any]:
    """Return the object of a config.json, or make it from a GGUF file's header. Raises ModelLoadError."""
    return _as_published(read_gguf(file, _BY_LAYER)) if file.suffix.lower() == ".gguf" else read_object(file)


def published_tensors(path: Path) -> dict[str, TensorInfo | BlockTensor]:
    """Return the tensors of a GGUF file by their published names, in the shapes of a safetensors checkpoint.

    Raises ModelLoadError if the file is damaged or its architecture is not supported.
    """
    file = read_gguf(path, _BY_LAYER)
    _config(file)  # refuses what is not computed
    return {name: _plain(tensor) for name, tensor in _tensors(file).items()}


def _plain(tensor: BlockTensor) -> TensorInfo | BlockTensor:
    """Return an unquantized tensor in the form that is read without a copy."""
    as_stored = tensor.block.count == 1 and tensor.order is None and tensor.columns is None and tensor.change is None
    return TensorInfo(tensor.raw.file, tensor.dtype, tensor.shape, tensor.raw.begin) if as_stored else tensor


def _tensors(file: GgufFile) -> dict[str, BlockTensor]:
    """Return the tensors by their published names. Raises ModelLoadError if two have the same, or for too many."""
    architecture, given = _architecture(file), _metadata(file)
    found: dict[str, BlockTensor] = {}
    for name, stored in file.tensors.items():
        for full, tensor in _named(name, stored, architecture, given):
            if full in found:
                raise ModelLoadError(
                    f"{file.path} has {full} twice, one of them as {name[:100]}", fix="download it again"
                )
            found[full] = tensor
        if len(found) > _MAX_TENSORS:
            raise ModelLoadError(f"{file.path} has more than {_MAX_TENSORS} tensors, each expert's counted")
    return found


def _named(
    name: str, stored: BlockTensor, architecture: Architecture, given: Json
) -> Iterator[tuple[str, BlockTensor]]:
    """Yield a tensor as published, or that of each expert, with its name.

    An unknown name is yielded unchanged, and is later reported as a misfit. The tensors of heads that predict further
    tokens become mtp.*, which no model loads.
    """
    layer = _LAYER.fullmatch(name)
    own = layer.group(2) if layer else name
    base, _, kind = own.rpartition(".")
    there = architecture.names.get(own) or (
        f"{architecture.names[base]}.{kind}" if base in architecture.names else None
    )
    if name == _ROPE_FACTORS:
        return
    if layer and given.get("nextn_predict_layers") and int(layer.group(1)) >= _layers(given):
        yield f"mtp.{name}", stored
    elif there is None:
        yield name, stored
    else:
        tensor = architecture.restored(own, _flat(own, stored), given)
        if architecture.interleaved and base in ("attn_q", "attn_k"):
            tensor = _by_halves(tensor, _head_dim(given))
        full = f"{architecture.layers}.{layer.group(1)}.{there}" if layer else there
        if _EACH not in there or len(tensor.shape) != 3 or tensor.shape[0] > _MAX_EXPERTS:
            yield full, tensor
        else:
            yield from ((full.replace("*", str(i), 1), _of_expert(tensor, i)) for i in range(tensor.shape[0]))


def _flat(name: str, tensor: BlockTensor) -> BlockTensor:
    """Return the taps of a convolution with an axis of 1 before them, and vectors of states without axes of 1.

    The file has -exp(A_log) for A_log. A matrix of one row may be a vector in it.
    """
    raw, item = tensor.raw, tensor.raw.num_bytes // math.prod(tensor.shape)
    if name in ("ssm_conv1d.weight", "shortconv.conv.weight"):
        return dataclasses.replace(tensor, shape=(tensor.shape[0], 1, *tensor.shape[1:]))
    if tensor.block.count > 1:
        return tensor
    if name in ("ssm_a", "ssm_d", "ssm_norm.weight"):
        shape = (math.prod(tensor.shape),)
        raw = TensorInfo(raw.file, raw.dtype, (shape[0], item), raw.begin)
        return dataclasses.replace(tensor, raw=raw, shape=shape, change=_log_of_negative if name == "ssm_a" else None)
    if name == "ffn_gate_inp_shexp.weight" and len(tensor.shape) == 1:
        raw = TensorInfo(raw.file, raw.dtype, (1, raw.num_bytes), raw.begin)
        return dataclasses.replace(tensor, raw=raw, shape=(1, *tensor.shape))
    return tensor


def _log_of_negative(numbers: np.ndarray) -> np.ndarray:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.log(-numbers)


def _by_halves(tensor: BlockTensor, size: int) -> BlockTensor:
    """Return a tensor whose heads of `size` rows have the first number of each rotated pair before the second ones."""
    count = tensor.shape[0]
    if size % 2 or count % size:
        return tensor  # its shape is refused later
    order = np.arange(count).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
    return dataclasses.replace(tensor, order=order)


def _of_expert(tensor: BlockTensor, index: int) -> BlockTensor:
    raw, rows = tensor.raw, tensor.shape[1]
    begin = raw.begin + index * (raw.num_bytes // tensor.shape[0])
    raw = TensorInfo(raw.file, raw.dtype, (rows, raw.shape[1]), begin)
    return dataclasses.replace(tensor, raw=raw, shape=tensor.shape[1:])


def _quantized_types(tensors: Mapping[str, BlockTensor]) -> dict[str, str]:
    """Return the types of the quantized modules; none if no layer is quantized. All experts have one name.

    Embeddings are not among them, nor a head of a type that does not stay quantized, nor a matrix whose groups of
    columns are not together in the file: they are dequantized at load.
    """
    found: dict[str, str] = {}
    for name, tensor in tensors.items():
        held = HELD_BLOCKS.get(tensor.block.name)
        if tensor.block.count == 1 or len(tensor.shape) != 2 or name.startswith("mtp."):
            continue
        if ".layers." in name or held is not None:
            if held is None or tensor.keeps_groups(held.group):
                found[of_all_experts(name.removesuffix(".weight"))] = tensor.block.name
    return found if any(".layers." in name for name in found) else {}


def _head_dim(given: Json) -> int:
    """Return the size of a head. Raises ValueError if the header gives no possible one."""
    own = {key: _one_number(value) for key, value in given.items()}
    hidden, heads = own.get("embedding_length"), own.get("attention.head_count")
    sizes = (own.get("attention.key_length", 0), hidden, heads)
    if not all(type(size) is int and size >= 0 for size in sizes) or not heads:
        raise ValueError(f"heads of {shown(sizes)} cannot be")
    return sizes[0] or hidden // heads


def _architecture(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Raises ModelLoadError if it is not supported."""
    name = file.values.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        if name == "clip":
            raise ModelLoadError(
                f"{file.path} has a tower for pictures and no language model (mmproj)",
                fix="serve the model's safetensors checkpoint, which has both; no tower is read from GGUF files",
            )
        supported = ", ".join(ARCHITECTURES)
        raise ModelLoadError(
            f"{file.path}: {shown(name)} of GGUF is not supported", fix=f"serve one of: {supported}, or safetensors"
        )
    return ARCHITECTURES[name]


def _metadata(file: GgufFile) -> Json:
    """Return the values of the architecture, by their keys below its name."""
    prefix = f"{file.values['general.architecture']}."
    return {key.removeprefix(prefix): value for key, value in file.values.items() if key.startswith(prefix)}


def _as_published(file: GgufFile) -> dict[str, Any]:
    return _config(file) | _numbers(_tensors(file))


def _config(file: GgufFile) -> dict[str, Any]:
    """Return the keys of a config.json but for the form of the weights. Raises ModelLoadError for what is not computed.

    tensors_apart: see `hf_config.from_hf`
    """
    architecture, given = _architecture(file), _metadata(file)
    own = {key: _one_number(value) for key, value in given.items()}
    _refuse_others(file.path, own, architecture)
    config: dict[str, Any] = {"architectures": [architecture.published], "tensors_apart": True}
    config |= {key: own[name] for name, key in architecture.keys.items() if name in own}
    config |= {"head_dim": _head_dim(given)} | _token_ids(file) | architecture.changes(file, given)
    tensors = file.tensors
    config["tie_word_embeddings"] = "output.weight" not in tensors
    config["attention_bias"] = _has(file, "attn_output.bias")
    config["mlp_bias"] = _has(file, "ffn_down.bias")
    if "token_embd.weight" in tensors:
        config["vocab_size"] = tensors["token_embd.weight"].shape[0]
    rotated = own.get("rope.dimension_count")
    if rotated not in (None, config["head_dim"]) and "rope.dimension_count" not in architecture.read:
        raise ModelLoadError(f"{file.path}: partly rotated heads are not supported")
    return config | _scaling(file, own)


def _refuse_others(path: Path, own: Json, architecture: Architecture) -> None:
    known = {*architecture.keys, *architecture.read, *_OTHER_KEYS, *(f"rope.scaling.{key}" for key in _SCALING_KEYS)}
    computed = {**_DEFAULTS, **architecture.values}
    others = sorted(
        key for key, value in own.items() if value and key not in known and not _is_default(own, key, computed)
    )
    if others:
        raise ModelLoadError(f"{path} has values that are not supported: {', '.join(others)[:200]}")
    if own.get("attention.causal", True) is not True:
        raise ModelLoadError(f"{path}: attention to later tokens (attention.causal) is not supported")
    for key in architecture.needed:
        if key not in own:
            raise ModelLoadError(f"{path}: {key} is missing", fix="download the file again")


def _is_default(own: Json, key: str, computed: Mapping[str, tuple[Any, ...]]) -> bool:
    """Return whether a key has llama.cpp's default, or a value that is computed or changes nothing."""
    value = own[key]
    match key:
        case "attention.scale":
            size = own.get("attention.key_length") or own["embedding_length"] // own["attention.head_count"]
            return math.isclose(value, size**-0.5, rel_tol=1e-5)
        case "attention.sliding_window":
            return isinstance(value, int) and value >= own.get("context_length", math.inf)
        case "expert_used_count" | "expert_shared_count" | "expert_weights_scale" | "expert_weights_norm":
            return not own.get("expert_count")
        case "rope.dimension_count_swa" | "attention.key_length_swa" | "attention.value_length_swa":
            return not own.get("attention.sliding_window")
    return key in computed and value in computed[key]


def _token_ids(file: GgufFile) -> dict[str, Any]:
    bos, *ends = (file.values.get(f"tokenizer.ggml.{key}_token_id") for key in ("bos", "eos", "eot", "eom"))
    return {"bos_token_id": bos, "eos_token_id": sorted({*ends} - {None}, key=str)}


def _numbers(tensors: Mapping[str, BlockTensor]) -> dict[str, Any]:
    """Return the keys of a config.json that describe the form of its weights."""
    types = _quantized_types(tensors)
    if types:
        return {"dtype": "float16", "quantization_config": {"quant_method": "gguf", "types": types}}
    matrices = {name: each for name, each in tensors.items() if ".layers." in name and len(each.shape) == 2}
    kinds = {tensor.block.name for name, tensor in matrices.items() if not name.endswith(_ROUTERS)}
    return {"dtype": _DTYPES.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16"}


def _scaling(file: GgufFile, own: Json) -> dict[str, Any]:
    """Return `rope_scaling`. As in llama.cpp, the type is linear if the file gives none, and a factor of 0 means 1."""
    kind, factor = own.get("rope.scaling.type", "linear"), own.get("rope.scaling.factor") or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise ModelLoadError(f"{file.path}: rope scaling {shown(kind)} of GGUF is not supported")
    plain = kind == "none" or (kind == "linear" and factor == 1)
    if _ROPE_FACTORS in file.tensors:
        if not plain:
            raise ModelLoadError(f"{file.path}: {_ROPE_FACTORS} beside rope scaling {shown(kind)} is not supported")
        return {"rope_scaling": _divided(file.path, file.tensors[_ROPE_FACTORS])}
    if plain:
        return {}
    given = {key: own.get(f"rope.scaling.{name}") for name, key in _SCALING_KEYS.items()}
    return {"rope_scaling": {"rope_type": kind, "factor": factor} | given}


def _divided(path: Path, tensor: BlockTensor) -> dict[str, Any]:
    """Return Llama 3's scaling, a divisor for each frequency, as LongRoPE's keys express it."""
    if tensor.block.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > 2**12:
        raise ModelLoadError(f"{path}: {_ROPE_FACTORS} is no vector of float32", fix="download the file again")
    factors = read_rows(tensor.raw, 0, tensor.shape[0], np.empty(tensor.raw.num_bytes, np.uint8)).view(np.float32)
    divisors = [float(factor) for factor in factors[:, 0]]
    return {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
