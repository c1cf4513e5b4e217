"""GGUF files of tiny checkpoints, written by the format's own package as llama.cpp's converter writes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxserve.models.checkpoint.hf_config import from_hf

Tensors = dict[str, np.ndarray]
Kind = gguf.GGMLQuantizationType
_ARCHITECTURES = {
    "LlamaForCausalLM": gguf.MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": gguf.MODEL_ARCH.QWEN2,
    "Qwen3ForCausalLM": gguf.MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": gguf.MODEL_ARCH.QWEN3MOE,
    "Qwen3NextForCausalLM": gguf.MODEL_ARCH.QWEN3NEXT,
    "Qwen3_5ForCausalLM": gguf.MODEL_ARCH.QWEN35,
    "Qwen3_5MoeForCausalLM": gguf.MODEL_ARCH.QWEN35MOE,
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
    "Lfm2MoeForCausalLM": gguf.MODEL_ARCH.LFM2MOE,
    "GraniteMoeHybridForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "BambaForCausalLM": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "NemotronHForCausalLM": gguf.MODEL_ARCH.NEMOTRON_H,
    "FalconH1ForCausalLM": gguf.MODEL_ARCH.FALCON_H1,
}
_INTERLEAVED = (gguf.MODEL_ARCH.LLAMA, gguf.MODEL_ARCH.GRANITE_HYBRID)
_INTERLEAVED += (gguf.MODEL_ARCH.NEMOTRON_H, gguf.MODEL_ARCH.NEMOTRON_H_MOE)
_TILED = (gguf.MODEL_ARCH.QWEN35, gguf.MODEL_ARCH.QWEN35MOE)
_DELTA = (gguf.MODEL_ARCH.QWEN3NEXT, *_TILED)
# where the blocks of 256 numbers have float16 scales, which random bytes would make infinite
_HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q3_K: (108,)}
# matrices that the converter leaves in float32
_WIDE = re.compile(r"ssm_(conv1d|a|d|norm)\b|shortconv\.conv|ffn_gate_inp")


def write_gguf(path: Path, hf: dict[str, Any], tensors: Tensors, kind: str, **others: str) -> Tensors:
    """Write a checkpoint with its matrices as `kind`, and return its numbers as the package decodes them.

    tensors: by their published names
    others: the kind of single tensors, by their name in the file before `weight`, or its last part.
    """
    architecture = _ARCHITECTURES[hf["architectures"][0]]
    if architecture is gguf.MODEL_ARCH.NEMOTRON_H and "E" in hf["hybrid_override_pattern"]:
        architecture = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    config = from_hf(hf)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_head_count(config.num_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    if config.rope is not None and not (config.rope_layers and not any(config.rope_layers)):
        writer.add_rope_dimension_count(config.rope.rotary_dim or config.head_dim)
        writer.add_rope_freq_base(config.rope.theta)
    _add_widths(writer, hf, architecture)
    _add_experts(writer, hf)
    _add_states(writer, hf, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(hf["vocab_size"])])
    writer.add_token_scores([0.0] * hf["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(hf.get("eos_token_id") or 2)
    decoded: Tensors = {}
    for short, wide in converted(hf, tensors, architecture).items():
        whole = short.removesuffix(".weight")
        forward, _ = _change(short, architecture)
        plain = Kind["F32" if wide.ndim == 1 or _WIDE.search(short) else _kind(whole, kind, others)]
        raw = _encoded(forward(wide), plain)
        writer.add_tensor(short, raw, raw_dtype=plain)
        decoded[short] = gguf.quants.dequantize(raw, plain).astype(np.float32).reshape(wide.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return _published(hf, tensors, decoded, architecture)


def _kind(whole: str, kind: str, others: dict[str, str]) -> str:
    return others.get(whole, others.get(whole.split(".")[-1], kind))


def _published(hf: dict[str, Any], tensors: Tensors, decoded: Tensors, architecture: gguf.MODEL_ARCH) -> Tensors:
    """The decoded numbers at the places of the published tensors, which converting the places themselves shows."""
    ends = np.cumsum([each.size for each in tensors.values()])
    starts = dict(zip(tensors, ends - [each.size for each in tensors.values()], strict=True))
    places = {name: starts[name] + np.arange(each.size).reshape(each.shape) for name, each in tensors.items()}
    flat = np.full(int(ends[-1]), np.nan, np.float32)
    for short, where in converted(hf, places, architecture).items():
        flat[where] = _change(short, architecture)[1](decoded[short])
    assert np.isfinite(flat).all(), "a published number is in no tensor of the file"
    return {name: flat[where] for name, where in places.items()}


def _change(short: str, architecture: gguf.MODEL_ARCH) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What the converter does with the numbers of a tensor of this name, and how that is undone."""
    if short.endswith("ssm_a"):
        return lambda x: -np.exp(x), lambda x: np.log(-x)
    if architecture in _DELTA and short.endswith("norm.weight") and "ssm_norm" not in short:
        return lambda x: x + 1, lambda x: x - 1
    return lambda x: x, lambda x: x


def _add_widths(writer: gguf.GGUFWriter, hf: dict[str, Any], architecture: gguf.MODEL_ARCH) -> None:
    """Add the widths of MLPs and the numbers of kv heads, by layer where layers differ."""
    config, kv_heads = from_hf(hf), hf["num_key_value_heads"]
    if architecture in (gguf.MODEL_ARCH.NEMOTRON_H, gguf.MODEL_ARCH.NEMOTRON_H_MOE):
        kinds = hf["hybrid_override_pattern"]
        writer.add_feed_forward_length([hf["intermediate_size"] if kind in "-E" else 0 for kind in kinds])
        writer.add_head_count_kv([kv_heads if kind == "*" else 0 for kind in kinds])
        return
    adjusted = architecture is gguf.MODEL_ARCH.LFM2
    writer.add_feed_forward_length(config.intermediate_size if adjusted else hf["intermediate_size"])
    whole = not any(config.layer_states) or architecture in (*_DELTA, gguf.MODEL_ARCH.FALCON_H1)
    writer.add_head_count_kv(kv_heads if whole else [0 if state else kv_heads for state in config.layer_states])


def _add_experts(writer: gguf.GGUFWriter, hf: dict[str, Any]) -> None:
    count = next((hf[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if hf.get(key)), None)
    if "E" not in hf.get("hybrid_override_pattern", "E"):
        return
    shared = [hf.get(f"{name}_intermediate_size") for name in ("shared_expert", "shared", "moe_shared_expert")]
    for width in filter(None, shared):
        writer.add_expert_shared_feed_forward_length(width)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(hf["num_experts_per_tok"])
    if "moe_intermediate_size" in hf:
        writer.add_expert_feed_forward_length(hf["moe_intermediate_size"])
    if "num_dense_layers" in hf:
        writer.add_leading_dense_block_count(hf["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if "n_routed_experts" in hf:
        writer.add_expert_shared_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(hf["routed_scaling_factor"])
        writer.add_expert_group_count(hf["n_group"])
        writer.add_expert_group_used_count(hf["topk_group"])
        writer.add_moe_latent_size(hf["moe_latent_size"])


def _add_states(writer: gguf.GGUFWriter, hf: dict[str, Any], architecture: gguf.MODEL_ARCH) -> None:
    """Add the sizes of recurrent states and the scales of Granite."""
    states = [state for state in from_hf(hf).layer_states if state]
    if not states:
        return
    state = states[0]
    if state.kind == "convolution":
        writer.add_shortconv_l_cache(hf["conv_L_cache"])
        return
    writer.add_ssm_conv_kernel(state.conv_width)
    writer.add_ssm_state_size(state.k_dim)
    writer.add_ssm_group_count(state.key_heads)
    writer.add_ssm_time_step_rank(state.heads)
    writer.add_ssm_inner_size(state.heads * state.v_dim)
    if architecture in _DELTA:
        writer.add_full_attention_interval(hf["full_attention_interval"])
    if architecture in _TILED:
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    if architecture is gguf.MODEL_ARCH.GRANITE_HYBRID:
        writer.add_rope_scaling_finetuned(hf["architectures"] == ["BambaForCausalLM"])
    if "logits_scaling" in hf:
        writer.add_embedding_scale(hf["embedding_multiplier"])
        writer.add_attention_scale(hf["attention_multiplier"])
        writer.add_residual_scale(hf["residual_multiplier"])
        writer.add_logit_scale(hf["logits_scaling"])


def converted(hf: dict[str, Any], tensors: Tensors, architecture: gguf.MODEL_ARCH) -> Tensors:
    """The tensors as the file has them, but for changes of their numbers: by name, in its order and its shapes."""
    names = gguf.get_tensor_name_map(architecture, hf["num_hidden_layers"])
    config, found = from_hf(hf), {}
    for name, each in _joined_experts(tensors).items():
        published = name.replace(".dt_bias", ".dt_proj.bias").replace("expert_bias", "expert_bias.bias")
        published = published.replace("e_score_correction_bias", "e_score_correction.bias")
        if ".mixer.experts." in published:
            published = published.replace("backbone.", "model.").replace(".mixer.", ".mlp.")
        if ".feed_forward.experts." in published:
            published = published.removeprefix("model.")
        published = published.replace("in_proj_qkvz", "in_proj_qkv")
        short = names.get_name(published, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        part = short.removesuffix(".weight").split(".")[-1]
        if part in ("attn_q", "attn_k") and architecture in _INTERLEAVED:
            each = _interleaved(each, config.num_heads if part == "attn_q" else config.num_kv_heads)
        if architecture in _TILED:
            each = _tiled(short, each, config.layer_states[0])
        if name.endswith("in_proj_qkvz.weight"):
            found |= _apart(short.split(".")[1], each, config.layer_states[0])
            continue
        if part in ("ssm_conv1d", "conv") and each.ndim == 3:
            each = each[:, 0]
        elif part in ("ssm_a", "ssm_d") and architecture not in _DELTA:
            each = each[:, None]
        elif part == "ssm_norm" and architecture not in _DELTA:
            each = each.reshape(hf.get("mamba_n_groups") or hf["n_groups"], -1)
        found[short] = np.ascontiguousarray(each)
    return found


def _joined_experts(tensors: Tensors) -> Tensors:
    """The tensors with those of single experts stacked, and with gate and up apart."""
    shared = "mlp.shared_expert" if any("experts" in name or "block_sparse" in name for name in tensors) else "mlp"
    found: dict[str, Any] = {}
    for name, each in tensors.items():
        if match := re.search(r"\.experts\.\d+\.", name):
            found.setdefault(name.replace(match[0], ".experts."), []).append(each)
        elif match := re.fullmatch(
            r"(.*layers\.\d+\.).*\.(gate_up_proj|input_linear\.weight|output_linear\.weight)", name
        ):
            inside = f"{match[1]}{'mlp.experts' if each.ndim == 3 else shared}."
            halves = [each] if "output" in match[2] else np.split(each, 2, axis=-2)
            kinds = ["down"] if "output" in match[2] else ["gate", "up"]
            found |= {f"{inside}{kind}_proj.weight": half for kind, half in zip(kinds, halves, strict=True)}
        else:
            found[f"{name}.weight" if name.endswith(".experts.down_proj") else name] = each
    return {name: np.stack(each) if isinstance(each, list) else each for name, each in found.items()}


def _tiled(short: str, each: np.ndarray, state: Any) -> np.ndarray:
    """A tensor of a delta net with value head i r + j of n key heads with r each at j n + i."""
    first, size = {
        "attn_qkv.weight": (2 * state.key_heads * state.k_dim, state.v_dim),
        "ssm_conv1d.weight": (2 * state.key_heads * state.k_dim, state.v_dim),
        "attn_gate.weight": (0, state.v_dim),
        "ssm_out.weight": (0, state.v_dim),
        **dict.fromkeys(("ssm_alpha.weight", "ssm_beta.weight", "ssm_a", "ssm_dt.bias"), (0, 1)),
    }.get(short.split(".", 2)[-1], (0, 0))
    if not size:
        return each
    axis = 1 if short.endswith("ssm_out.weight") else 0
    before, values = np.split(each, [first], axis=axis)
    heads = np.moveaxis(values, axis, 0).reshape(state.key_heads, state.group, size, *np.delete(each.shape, axis))
    heads = heads.swapaxes(0, 1).reshape(-1, *np.delete(each.shape, axis))
    return np.concatenate([before, np.moveaxis(heads, 0, axis)], axis=axis)


def _apart(layer: str, rows: np.ndarray, state: Any) -> Tensors:
    """The rows of q, k, v and z of each key head as those of all q, all k and all v, and those of all z."""
    heads = rows.reshape(state.key_heads, -1, rows.shape[-1])
    sizes = np.cumsum([state.k_dim, state.k_dim, state.group * state.v_dim])
    *qkv, z = (part.reshape(-1, rows.shape[-1]) for part in np.split(heads, sizes, axis=1))
    return {f"blk.{layer}.attn_qkv.weight": np.concatenate(qkv), f"blk.{layer}.attn_gate.weight": z}


def _encoded(wide: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes of a type; of those that the package cannot make, random ones."""
    if kind not in _HALVES:
        return gguf.quants.quantize(wide.astype(np.float32), kind)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(wide.size)
    blocks = rng.integers(0, 256, (*wide.shape[:-1], wide.shape[-1] // count, size)).astype(np.uint8)
    for at in _HALVES[kind]:
        scale = rng.uniform(1e-4, 3e-4, blocks.shape[:-1]).astype(np.float16)
        scale[rng.random(scale.shape) < 0.1] = 0
        blocks[..., at : at + 2] = scale.view(np.uint8).reshape(*scale.shape, 2)
    return blocks.reshape(*wide.shape[:-1], -1)


def _interleaved(wide: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head with the two numbers of a rotated pair beside each other."""
    order = np.arange(len(wide)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return wide[order]
