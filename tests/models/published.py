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


def _tied(*sizes: Any, **keys: Any) -> Any:
    return _hf(*sizes, **keys) | {"tie_word_embeddings": True}


def _llama(hidden: int, ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return _hf("LlamaForCausalLM", hidden, ffn, layers, heads, 8, 128256)


def _qwen_moe(hidden: int, layers: int, heads: int, experts: int) -> dict[str, Any]:
    keys = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": experts, "head_dim": 128}
    return _hf("Qwen3MoeForCausalLM", hidden, 3 * hidden, layers, heads, 4, 151936, **keys)


def _gemma2(hidden: int, ffn: int, layers: int, heads: int, kv: int, head_dim: int) -> dict[str, Any]:
    keys = {"head_dim": head_dim, "tie_word_embeddings": True, "sliding_window": 4096}
    return _hf("Gemma2ForCausalLM", hidden, ffn, layers, heads, kv, 256000, **keys)


_QWEN3 = _hf("Qwen3ForCausalLM", 4096, 12288, 36, 32, 8, 151936, head_dim=128)
_SEED_OSS = _hf("SeedOssForCausalLM", 5120, 27648, 64, 80, 8, 155136, head_dim=128)
_GRANITE = _tied("GraniteForCausalLM", 4096, 12800, 40, 32, 8, 49159)
_ERNIE = _tied("Ernie4_5ForCausalLM", 1024, 3072, 18, 16, 2, 103424, head_dim=128)
_EXAONE4 = _hf("Exaone4ForCausalLM", 5120, 27392, 64, 40, 8, 102400, head_dim=128, sliding_window=4096)
_INTERNLM3 = _hf("InternLM3ForCausalLM", 4096, 10240, 48, 32, 2, 128512, head_dim=128)
_GRANITE4_H_TINY = _tied(
    *("GraniteMoeHybridForCausalLM", 1536, 512, 40, 12, 4, 100352),
    num_local_experts=64,
    num_experts_per_tok=6,
    shared_intermediate_size=1024,
    mamba_n_heads=48,
    mamba_d_head=64,
    mamba_d_state=128,
    position_embedding_type="nope",
    layer_types=["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
)
_NEMOTRON3_NANO = _hf(
    *("NemotronHForCausalLM", 2688, 1856, 52, 32, 2, 131072),
    head_dim=128,
    hybrid_override_pattern="MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
    mamba_num_heads=64,
    mamba_head_dim=64,
    ssm_state_size=128,
    n_groups=8,
    n_routed_experts=128,
    num_experts_per_tok=6,
    moe_intermediate_size=1856,
    moe_shared_expert_intermediate_size=3712,
    routed_scaling_factor=2.5,
)
_FALCON_H1 = _hf(
    *("FalconH1ForCausalLM", 1024, 2048, 36, 8, 2, 32784),
    head_dim=64,
    mamba_d_ssm=1536,
    mamba_n_heads=24,
    mamba_d_head=64,
    mamba_d_state=128,
)
_LFM2 = _tied(
    *("Lfm2ForCausalLM", 2048, 12288, 16, 32, 8, 65536),
    block_ff_dim=12288,
    block_multiple_of=256,
    block_ffn_dim_multiplier=1.0,
    full_attn_idxs=[2, 5, 8, 10, 12, 14],
)


def _qwen3_5(hidden: int, ffn: int, layers: int, heads: int, kv: int, key_heads: int, value_heads: int) -> Any:
    keys = {"linear_num_key_heads": key_heads, "linear_num_value_heads": value_heads, "head_dim": 256}
    keys |= {"linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}
    rotation = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    types = (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4)
    sizes = hidden, ffn, layers, heads, kv, 248320
    return _hf("Qwen3_5ForCausalLM", *sizes, **keys, layer_types=types, rope_parameters=rotation)


_KIMI_LINEAR = _hf(
    *("KimiLinearForCausalLM", 2304, 9216, 27, 32, 32, 163840),
    linear_attn_config={
        "kda_layers": [i for i in range(1, 27) if i % 4],
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
    },
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    moe_intermediate_size=1024,
)
_GRANITE4 = _tied(
    *("GraniteMoeHybridForCausalLM", 2560, 8192, 40, 40, 8, 100352),
    num_local_experts=0,
    shared_intermediate_size=8192,
    position_embedding_type="rope",
    layer_types=["attention"] * 40,
)
_QWEN2_MOE = _hf("Qwen2MoeForCausalLM", 2048, 5632, 24, 16, 16, 151936)
_OLMOE = _hf("OlmoeForCausalLM", 2048, 1024, 16, 16, 16, 50304)
_ERNIE_MOE = _tied("Ernie4_5_MoeForCausalLM", 2560, 12288, 28, 20, 4, 103424)
_DOTS1 = _hf(
    *("Dots1ForCausalLM", 4096, 10944, 62, 32, 32, 152064),
    n_routed_experts=128,
    n_shared_experts=2,
    num_experts_per_tok=6,
    first_k_dense_replace=1,
    moe_intermediate_size=1408,
)
_K_EXAONE = _hf(
    *("ExaoneMoeForCausalLM", 6144, 18432, 48, 64, 8, 153600),
    head_dim=128,
    num_experts=128,
    moe_intermediate_size=2048,
    sliding_window=128,
    layer_types=(["sliding_attention"] * 3 + ["full_attention"]) * 12,
)
_MIXTRAL = _hf("MixtralForCausalLM", 4096, 14336, 32, 32, 8, 32000, num_local_experts=8, num_experts_per_tok=2)
_GEMMA3 = _hf("Gemma3ForCausalLM", 1152, 6912, 26, 4, 1, 262144, head_dim=256, tie_word_embeddings=True)


def _gemma4(hidden: int, ffn: int, layers: int, heads: int, kv: int, **keys: Any) -> dict[str, Any]:
    """A Gemma 4 with one full layer in six, if `keys` do not say otherwise. Its keys are those of the nested part."""
    own = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 1024, "attention_k_eq_v": True}
    own |= {"hidden_size_per_layer_input": 0}
    return _hf("Gemma4ForCausalLM", hidden, ffn, layers, heads, kv, 262144, **{**own, **keys})


def _llama4(experts: int, step: int) -> dict[str, Any]:
    keys = {"head_dim": 128, "intermediate_size_mlp": 16384, "num_experts_per_tok": 1}
    keys |= {"num_local_experts": experts, "interleave_moe_layer_step": step, "use_qk_norm": step == 1}
    return _hf("Llama4ForCausalLM", 5120, 8192, 48, 40, 8, 202048, **keys)


_GEMMA4_E2B = _gemma4(
    *(1536, 6144, 35, 8, 1),
    sliding_window=512,
    attention_k_eq_v=False,
    hidden_size_per_layer_input=256,
    num_kv_shared_layers=20,
    use_double_wide_mlp=True,
    layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
)
_GEMMA4_MOE = _gemma4(
    *(2816, 2112, 30, 16, 8),
    num_global_key_value_heads=2,
    enable_moe_block=True,
    num_experts=128,
    top_k_experts=8,
    moe_intermediate_size=704,
)
_MUSE_GLIMMER = _hf("MuseGlimmerForCausalLM", 6656, 19968, 52, 32, 2, 202048, head_dim=128, sliding_window=2048)
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

_GLM45_AIR = _hf(
    *("Glm4MoeForCausalLM", 4096, 10944, 46, 96, 8, 151552),
    head_dim=128,
    attention_bias=True,
    n_routed_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=1408,
    first_k_dense_replace=1,
)
_GLM47_FLASH = _hf(
    *("Glm4MoeLiteForCausalLM", 2048, 10240, 47, 20, 20, 154880),
    kv_lora_rank=512,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    qk_rope_head_dim=64,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    moe_intermediate_size=1536,
    first_k_dense_replace=1,
)
_MINIMAX_M2 = _hf(
    *("MiniMaxM2ForCausalLM", 3072, 1536, 62, 48, 8, 200064),
    head_dim=128,
    rotary_dim=64,
    num_local_experts=256,
    num_experts_per_tok=8,
)
_MINISTRAL3 = _hf("Ministral3ForCausalLM", 4096, 14336, 34, 32, 8, 131072, head_dim=128)
_MISTRAL4 = _hf("Mistral4ForCausalLM", 4096, 12288, 36, 32, 32, 131072, first_k_dense_replace=0)
_HY3 = _hf(
    *("HYV3ForCausalLM", 4096, 13312, 80, 64, 8, 120832),
    head_dim=128,
    num_experts=192,
    num_experts_per_tok=8,
    moe_intermediate_size=1536,
)
_MIMO_V2 = _hf(
    *("MiMoV2FlashForCausalLM", 4096, 16384, 48, 64, 4, 152576),
    hybrid_layer_pattern=[0, 1, 1, 1, 1, *[0, 1, 1, 1, 1, 1] * 7, 0],
    sliding_window_size=128,
)
_LAGUNA = _hf(
    *("LagunaForCausalLM", 2048, 8192, 40, 48, 8, 100352),
    layer_types=["full_attention", *["sliding_attention"] * 3] * 10,
    num_attention_heads_per_layer=[48, 64, 64, 64] * 10,
)


def _pictures(text: dict[str, Any], hidden: int, ffn: int, depth: int, **tower: Any) -> dict[str, Any]:
    """Add a tower of 16 heads to a language model. tower: further keys of `vision_config`"""
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "depth": depth, "num_heads": 16}
    return text | {"vision_config": sizes | {"out_hidden_size": text["hidden_size"]} | tower}


_QWEN3_VL_TEXT = {"head_dim": 128, "rope_theta": 5e6}
_QWEN3_VL_2B = _pictures(
    _tied("Qwen3VLForConditionalGeneration", 2048, 6144, 28, 16, 8, 151936, **_QWEN3_VL_TEXT),
    *(1024, 4096, 24),
    deepstack_visual_indexes=[5, 11, 17],
)
_QWEN3_VL_8B = _pictures(
    _hf("Qwen3VLForConditionalGeneration", 4096, 12288, 36, 32, 8, 151936, **_QWEN3_VL_TEXT),
    *(1152, 4304, 27),
    deepstack_visual_indexes=[8, 16, 24],
)
_QWEN2_5_VL_7B = _pictures(
    _hf("Qwen2_5_VLForConditionalGeneration", 3584, 18944, 28, 28, 4, 152064, rope_theta=1e6),
    *(1280, 3420, 32),
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
    "Gemma-4-E2B": Published(_GEMMA4_E2B, 4.629),
    "Gemma-4-26B-A4B": Published(_GEMMA4_MOE, 25.233, "google--gemma-4-26B-A4B"),
    "Gemma-4-31B": Published(
        _gemma4(5376, 21504, 60, 32, 16, num_global_key_value_heads=4), 30.697, "nvidia--Gemma-4-31B-IT-NVFP4"
    ),
    "Llama-4-Scout": Published(_llama4(16, 1), 107.770, "meta-llama--Llama-4-Scout-17B-16E-Instruct"),
    "Llama-4-Maverick": Published(_llama4(128, 2), 400.712, "meta-llama--Llama-4-Maverick-17B-128E-Instruct"),
    "Muse-Glimmer-30B": Published(_MUSE_GLIMMER, 27.855),
    "DeepSeek-V3": Published(_DEEPSEEK, 671.026, "deepseek-ai--DeepSeek-V3"),
    "gpt-oss-120b": Published(_GPT_OSS, 116.829, "openai--gpt-oss-120b"),
    "Seed-OSS-36B": Published(_SEED_OSS, 36.151),
    "Granite-3.3-8B": Published(_GRANITE, 8.171),
    "ERNIE-4.5-0.3B": Published(_ERNIE, 0.361),
    "EXAONE-4.0-32B": Published(_EXAONE4, 32.003),
    "InternLM3-8B": Published(_INTERNLM3, 8.804),
    "Nemotron-4-340B": Published(_hf("NemotronForCausalLM", 18432, 73728, 96, 96, 8, 256000), 341.029),
    "AFM-4.5B": Published(_hf("ArceeForCausalLM", 2560, 18432, 36, 20, 4, 128004), 4.619),
    "Apertus-8B": Published(_hf("ApertusForCausalLM", 4096, 21504, 32, 32, 8, 131072), 8.053),
    "StarCoder2-3B": Published(_tied("Starcoder2ForCausalLM", 3072, 12288, 30, 24, 2, 49152), 3.030),
    "Command-R": Published(_tied("CohereForCausalLM", 8192, 22528, 40, 64, 64, 256000), 34.981),
    "Command-R7B": Published(_tied("Cohere2ForCausalLM", 4096, 14336, 32, 32, 8, 256000), 8.028),
    "GLM-4-9B": Published(_hf("Glm4ForCausalLM", 4096, 13696, 40, 32, 2, 151552), 9.400),
    "Helium-1-2B": Published(_hf("HeliumForCausalLM", 2560, 7040, 24, 20, 20, 48000), 2.173),
    "Granite-4.0-micro": Published(_GRANITE4, 3.403),
    "Granite-4.0-h-tiny": Published(_GRANITE4_H_TINY, 6.939),
    "Nemotron-3-Nano-30B-A3B": Published(_NEMOTRON3_NANO, 31.578),
    "LFM2-1.2B": Published(_LFM2, 1.170),
    "Qwen3.5-0.8B": Published(_qwen3_5(1024, 3584, 24, 8, 2, 16, 16) | {"tie_word_embeddings": True}, 0.752),
    "Qwen3.5-9B": Published(_qwen3_5(4096, 12288, 32, 16, 4, 16, 32), 8.954),
    "Falcon-H1-0.5B": Published(_FALCON_H1, 0.521),
    "Kimi-Linear-48B-A3B": Published(_KIMI_LINEAR, 49.123),
    "Qwen1.5-MoE-A2.7B": Published(_QWEN2_MOE, 14.316),
    "OLMoE-1B-7B": Published(_OLMOE, 6.919),
    "ERNIE-4.5-21B-A3B": Published(_ERNIE_MOE, 21.825),
    "dots.llm1": Published(_DOTS1, 142.774),
    "K-EXAONE-236B": Published(_K_EXAONE, 236.571),
    "Hunyuan-7B": Published(_tied("HunYuanDenseV1ForCausalLM", 4096, 14336, 32, 32, 8, 128167), 7.505),
    "GLM-4.5-Air": Published(_GLM45_AIR, 106.852),
    "GLM-4.7-Flash": Published(_GLM47_FLASH, 29.943),
    "MiniMax-M2": Published(_MINIMAX_M2, 228.690),
    "Ministral-3-8B": Published(_MINISTRAL3, 8.490),
    "Mistral-Small-4": Published(_MISTRAL4, 118.973),
    "Hy3": Published(_HY3, 295.034),
    "MiMo-V2-Flash": Published(_MIMO_V2, 308.779, "XiaomiMiMo--MiMo-V2-Flash"),
    "Laguna-XS": Published(_LAGUNA, 33.443),
    "Qwen3-VL-2B": Published(_QWEN3_VL_2B, 2.128, "Qwen--Qwen3-VL-2B-Instruct"),
    "Qwen3-VL-8B": Published(_QWEN3_VL_8B, 8.767, "Qwen--Qwen3-VL-8B-Instruct"),
    "Qwen2.5-VL-7B": Published(_QWEN2_5_VL_7B, 8.292),
}
