"""GGUF files of tiny checkpoints, written by the format's own package."""

from __future__ import annotations

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
    "Lfm2ForCausalLM": gguf.MODEL_ARCH.LFM2,
}
# where the blocks of 256 numbers have float16 scales, which random bytes would make infinite
_HALVES = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.Q3_K: (108,)}


def write_gguf(path: Path, hf: dict[str, Any], tensors: Tensors, kind: str, **others: str) -> Tensors:
    """Write a checkpoint with its matrices as `kind`, and return its numbers as the package decodes them.

    tensors: by their published names
    others: the kind of single tensors, by their name in the file before `weight`, or its last part.
    """
    architecture = _ARCHITECTURES[hf["architectures"][0]]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    config = from_hf(hf)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    states = config.layer_states or (None,)
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    if any(states):
        writer.add_head_count_kv([0 if state else kv_heads for state in states])
        writer.add_shortconv_l_cache(hf["conv_L_cache"])
    else:
        writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"t{i}" for i in range(hf["vocab_size"])])
    writer.add_token_scores([0.0] * hf["vocab_size"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(hf.get("eos_token_id") or 2)
    names = gguf.get_tensor_name_map(architecture, hf["num_hidden_layers"])
    decoded: Tensors = {}
    for name, wide in tensors.items():
        short = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        whole = short.rpartition(".")[0]
        part = whole.split(".")[-1]
        plain = Kind[others.get(whole, others.get(part, kind)) if wide.ndim == 2 else "F32"]
        count = {"attn_q": heads, "attn_k": kv_heads}.get(part, 0) if architecture is gguf.MODEL_ARCH.LLAMA else 0
        raw = _encoded(_interleaved(wide[:, 0] if wide.ndim == 3 else wide, count), plain)  # taps are a matrix there
        writer.add_tensor(short, raw, raw_dtype=plain)
        decoded[name] = _ordered(gguf.quants.dequantize(raw, plain).astype(np.float32), count).reshape(wide.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return decoded


def _encoded(wide: np.ndarray, kind: Kind) -> np.ndarray:
    """The bytes of a type; of those that the package cannot make, random ones."""
    if kind not in _HALVES:
        return gguf.quants.quantize(wide, kind)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(wide.size)
    blocks = rng.integers(0, 256, (wide.shape[0], wide.shape[1] // count, size)).astype(np.uint8)
    for at in _HALVES[kind]:
        scale = rng.uniform(1e-4, 3e-4, blocks.shape[:2]).astype(np.float16)
        scale[rng.random(scale.shape) < 0.1] = 0
        blocks[..., at : at + 2] = scale.view(np.uint8).reshape(*scale.shape, 2)
    return blocks.reshape(len(wide), -1)


def _interleaved(wide: np.ndarray, heads: int) -> np.ndarray:
    """The rows of each head with the two numbers of a rotated pair beside each other; 0 heads: as they are."""
    if not heads:
        return wide
    order = np.arange(len(wide)).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)
    return np.ascontiguousarray(wide[order])


def _ordered(mixed: np.ndarray, heads: int) -> np.ndarray:
    order = _interleaved(np.arange(len(mixed)), heads)
    out = np.empty_like(mixed)
    out[order] = mixed
    return out
