"""The sizes of published models, as their config.json states them, with the number of parameters that each has.

Only what sets shapes and caches; a test holds them to the whole files where these are at hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """`billions` of parameters, as counted by the authors or by transformers; `file` of hf_configs, if there is one."""

    hf: dict[str, Any]
    billions: float
    file: str | None = None


def _hf(architecture: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocab: int, **keys: Any) -> Any:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv, "max_position_embeddings": 131072}
    return {"architectures": [architecture], "tie_word_embeddings": False, **sizes, **keys}


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return _hf("LlamaForCausalLM", hidden, ffn, layers, heads, 8, 128256)


def _qwen_moe(hidden: int, layers: int, heads: int, experts: int) -> dict[str, Any]:
    keys = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": experts, "head_dim": 128}
    return _hf("Qwen3MoeForCausalLM", hidden, 3 * hidden, layers, heads, 4, 151936, **keys)


def _gemma2(hidden: int, ffn: int, layers: int, heads: int, kv: int, head_dim: int) -> dict[str, Any]:
    keys = {"head_dim": head_dim, "tie_word_embeddings": True, "sliding_window": 4096}
    return _hf("Gemma2ForCausalLM", hidden, ffn, layers, heads, kv, 256000, **keys)


_QWEN3 = _hf("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 151936, head_dim=128)
_MIXTRAL = _hf("MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
_GEMMA3 = _hf("Gemma3ForCausalLM", 1152, 6912, 26, 4, 1, 262144, head_dim=256, tie_word_embeddings=True)
_GPT_OSS = _hf("GptOssForCausalLM", 2880, 2880, 36, 64, 8, 201088, num_local_experts=128, num_experts_per_tok=4)
_DEEPSEEK = _hf(
    *("DeepseekV3ForCausalLM", 7168, 18432, 61, 128, 128, 129280),
    kv_lora_rank=512,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=256,
    n_shared_experts=1,
    num_experts_per_tok=8,
    moe_intermediate_size=2048,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=3,
)

PUBLISHED = {
    "Llama-3.1-8B": Published(_llama(4096, 14336, 32, 32), 8.030, "meta-llama--Meta-Llama-3.1-8B"),
    "Llama-3.1-70B": Published(_llama(8192, 28672, 80, 64), 70.554, "meta-llama--Meta-Llama-3.1-70B"),
    "Llama-3.1-405B": Published(_llama(16384, 53248, 126, 128), 405.853, "meta-llama--Meta-Llama-3.1-405B"),
    "Qwen3-8B": Published(_QWEN3, 8.191, "Qwen--Qwen3-8B"),
    "Qwen3-30B-A3B": Published(_qwen_moe(2048, 48, 32, 768), 30.532, "Qwen--Qwen3-30B-A3B"),
    "Qwen3-235B-A22B": Published(_qwen_moe(4096, 94, 64, 1536), 235.094, "Qwen--Qwen3-235B-A22B"),
    "Mixtral-8x7B": Published(_MIXTRAL, 46.703, "mistralai--Mixtral-8x7B-v0.1"),
    "Gemma-2-2B": Published(_gemma2(2304, 9216, 26, 8, 4, 256), 2.614, "executorch--gemma2_2b_it"),
    "Gemma-2-9B": Published(_gemma2(3584, 14336, 42, 16, 8, 256), 9.242),
    "Gemma-2-27B": Published(_gemma2(4608, 36864, 46, 32, 16, 128), 27.227),
    "Gemma-3-1B": Published(_GEMMA3, 1.000, "executorch--gemma3_1b_it"),
    "DeepSeek-V3": Published(_DEEPSEEK, 671.026, "deepseek-ai--DeepSeek-V3"),
    "gpt-oss-120b": Published(_GPT_OSS, 116.829, "openai--gpt-oss-120b"),
}
