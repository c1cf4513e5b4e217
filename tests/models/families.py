"""The tiny models that goldens are made of: a config in the published form a case, and weights drawn by name.

Weights are never stored: each tensor is drawn from a generator seeded by its name, so that the golden maker (with
torch) and the tests (without) have the same. No jax and no torch here.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

GOLDENS = Path(__file__).parent / "goldens"
VOCAB = 96
NUM_PROMPT = 40  # tokens of a golden's prompt; windows and original contexts below are shorter
NUM_GREEDY = 64

_BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


def _case(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type, **_BASE, **changes}


def _inside(architecture: str, model_type: str, text: dict[str, Any], **outside: Any) -> dict[str, Any]:
    """A language model inside an architecture that also takes pictures, whose own keys do not matter here."""
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": text,
        "vision_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8},
        "tie_word_embeddings": text.get("tie_word_embeddings", True),
        **outside,
    }


# How the tensors of a language model inside another architecture are called in published checkpoints: a beginning
# of transformers' names of the language model alone, and what it is there.
PUBLISHED_NAMES = {
    "Gemma3ForConditionalGeneration": ("", "language_model."),
    "Gemma4ForConditionalGeneration": ("model.", "model.language_model."),
    "Llama4ForConditionalGeneration": ("", "language_model."),
}

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 32}  # fmt: skip
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.5, 6.0]}

_GEMMA4 = {
    **_BASE,
    "model_type": "gemma4_text",
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "final_logit_softcapping": 1.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
_LLAMA4 = {
    **_BASE,
    "model_type": "llama4_text",
    "head_dim": 16,
    "intermediate_size": 24,
    "intermediate_size_mlp": 48,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 12,
    "use_qk_norm": False,
    "no_rope_layers": [1, 1, 0],
    "floor_scale": 10,
    "attn_scale": 0.8,
    "rope_theta": 500.0,
}

CASES: dict[str, dict[str, Any]] = {
    "llama3": _case("LlamaForCausalLM", "llama", rope_theta=500.0, rope_scaling=_LLAMA3, attention_bias=True),
    "smollm2": _case("LlamaForCausalLM", "llama", num_key_value_heads=4, tie_word_embeddings=True),
    "mistral": _case("MistralForCausalLM", "mistral", sliding_window=12, head_dim=16),
    "qwen2": _case("Qwen2ForCausalLM", "qwen2", rope_theta=1e4, use_sliding_window=False, sliding_window=12),
    "qwen2_window": _case("Qwen2ForCausalLM", "qwen2", use_sliding_window=True, sliding_window=12, max_window_layers=1),
    "qwen3": _case("Qwen3ForCausalLM", "qwen3", head_dim=16),
    "mixtral": _case("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2, sliding_window=None),
    "qwen3_moe": _case(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    "gemma2": _case(
        "Gemma2ForCausalLM",
        "gemma2",
        head_dim=16,
        query_pre_attn_scalar=24,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=1.0,
        sliding_window=12,
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "gemma3": _case(
        "Gemma3ForCausalLM",
        "gemma3_text",
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=12,
        sliding_window_pattern=3,
        rope_theta=1e6,
        rope_local_base_freq=100.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    ),
    "phi3": _case("Phi3ForCausalLM", "phi3", sliding_window=12, rope_scaling=None),
    "phi4_mini_long": _case(
        "Phi3ForCausalLM",
        "phi3",
        partial_rotary_factor=0.75,
        rope_scaling=_LONGROPE,
        original_max_position_embeddings=32,
        tie_word_embeddings=True,
    ),
    "phi4_mini_short": _case(
        "Phi3ForCausalLM",
        "phi3",
        partial_rotary_factor=0.75,
        rope_scaling=_LONGROPE,
        max_position_embeddings=1024,
        original_max_position_embeddings=128,
        tie_word_embeddings=True,
    ),
    "olmo2": _case("Olmo2ForCausalLM", "olmo2"),
    "olmo3": _case(
        "Olmo3ForCausalLM",
        "olmo3",
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_scaling=_YARN | {"attention_factor": 1.2},
    ),
    "smollm3": _case("SmolLM3ForCausalLM", "smollm3", no_rope_layers=[1, 0, 1], rope_theta=5e4),
    "gpt_oss": _case(
        "GptOssForCausalLM",
        "gpt_oss",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_theta=1000.0,
        rope_scaling=_YARN | {"truncate": False},
        attention_bias=True,
        swiglu_limit=1.0,
    ),
    "deepseek_v3": _case(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=12,
        n_routed_experts=8,
        n_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        rope_scaling=_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        num_nextn_predict_layers=0,
    ),
    "seed_oss": _case("SeedOssForCausalLM", "seed_oss", head_dim=12, rope_theta=1e7, attention_out_bias=True),
    "granite": _case(
        "GraniteForCausalLM",
        "granite",
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.22,
        logits_scaling=8.0,
    ),
    "ernie4_5": _case("Ernie4_5ForCausalLM", "ernie4_5", head_dim=12, use_bias=True, rope_theta=500.0),
    "internlm3": _case("InternLM3ForCausalLM", "internlm3", head_dim=12, qkv_bias=True, bias=True),
    "granite_dense4": _case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        num_local_experts=0,
        shared_intermediate_size=40,
        position_embedding_type="rope",
        layer_types=["attention"] * 3,
        mamba_n_heads=8,
    ),
    "granite_moe": _case(
        "GraniteMoeForCausalLM",
        "granitemoe",
        embedding_multiplier=3.0,
        attention_multiplier=0.5,
        residual_multiplier=0.22,
        logits_scaling=8.0,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "qwen2_moe": _case(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        mlp_only_layers=[1],
        use_sliding_window=True,
        sliding_window=12,
        max_window_layers=3,
    ),
    "olmoe": _case("OlmoeForCausalLM", "olmoe", num_experts=8, num_experts_per_tok=3, norm_topk_prob=True),
    "ernie4_5_moe": _case(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        moe_num_experts=8,
        moe_k=3,
        moe_intermediate_size=24,
        moe_num_shared_experts=2,
        moe_layer_start_index=1,
        rope_theta=500.0,
    ),
    "dots1": _case(
        "Dots1ForCausalLM",
        "dots1",
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        sliding_window=12,
        max_window_layers=2,
    ),
    "exaone_moe": _case(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        num_experts=8,
        num_shared_experts=1,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rope_theta=500.0,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "helium": _case("HeliumForCausalLM", "helium", head_dim=8, rope_theta=1e5),
    "hunyuan": _case(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        head_dim=12,
        attention_bias=True,
        rope_scaling={"type": "dynamic", "alpha": 100.0, "factor": 1.0},
    ),
    "nemotron": _case("NemotronForCausalLM", "nemotron", hidden_act="relu2", partial_rotary_factor=0.5, norm_eps=1e-5),
    "arcee": _case("ArceeForCausalLM", "arcee", hidden_act="relu2", mlp_bias=True),
    "apertus": _case("ApertusForCausalLM", "apertus", hidden_act="xielu", rope_theta=500.0, rope_scaling=_LLAMA3),
    "starcoder2": _case(
        "Starcoder2ForCausalLM",
        "starcoder2",
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=1e-5,
        sliding_window=12,
        use_bias=True,
    ),
    "cohere": _case("CohereForCausalLM", "cohere", logit_scale=0.5, rope_theta=8e6, layer_norm_eps=1e-5),
    "cohere2": _case(
        "Cohere2ForCausalLM",
        "cohere2",
        logit_scale=0.5,
        rope_theta=5e4,
        sliding_window=12,
        sliding_window_pattern=3,
        layer_norm_eps=1e-5,
    ),
    "glm": _case("GlmForCausalLM", "glm", head_dim=16, partial_rotary_factor=0.5, attention_bias=True),
    "glm4": _case("Glm4ForCausalLM", "glm4", head_dim=16, partial_rotary_factor=0.5, attention_bias=True),
    "exaone4": _case(
        "Exaone4ForCausalLM",
        "exaone4",
        head_dim=12,
        rope_theta=500.0,
        rope_scaling=_LLAMA3,
        sliding_window=12,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "glm4_moe": _case(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        head_dim=16,
        partial_rotary_factor=0.5,
        attention_bias=True,
        use_qk_norm=True,
        rope_theta=500.0,
        first_k_dense_replace=1,
        moe_intermediate_size=24,
        n_routed_experts=8,
        num_experts_per_tok=3,
        routed_scaling_factor=2.5,
        num_nextn_predict_layers=0,
    ),
    "glm4_moe_lite": _case(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        rope_theta=500.0,
    ),
    "minimax_m2": _case(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        head_dim=16,
        rotary_dim=8,
        rope_theta=500.0,
        intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=3,
    ),
    "ministral3": _case(
        "Ministral3ForCausalLM",
        "ministral3",
        head_dim=16,
        rope_parameters=_YARN
        | {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "mistral4": _case(
        "Mistral4ForCausalLM",
        "mistral4",
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=6,
        v_head_dim=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=24,
        routed_scaling_factor=2.5,
        rope_parameters=_YARN
        | {"rope_theta": 1000.0, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "hy_v3": _case(
        "HYV3ForCausalLM",
        "hy_v3",
        head_dim=16,
        rope_theta=500.0,
        num_experts=8,
        num_experts_per_tok=3,
        num_shared_experts=1,
        moe_intermediate_size=24,
    ),
    "laguna": _case(
        "LagunaForCausalLM",
        "laguna",
        head_dim=16,
        num_attention_heads_per_layer=[4, 8, 4],
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window=12,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
        moe_routed_scaling_factor=2.5,
        moe_router_logit_softcapping=2.0,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 1.0},
        },
    ),
    "laguna_per_element": _case(
        "LagunaForCausalLM",
        "laguna",
        head_dim=16,
        num_hidden_layers=2,
        gating="per-element",
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=24,
    ),
    "mimo_v2": _case(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        num_attention_heads=8,
        head_dim=24,
        v_head_dim=16,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        sliding_window_size=11,
        n_routed_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        routed_scaling_factor=2.5,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.334},
        },
    ),
    "gemma4_e": _inside(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": VOCAB,
        },
    ),
    "gemma4_moe": _inside(
        "Gemma4ForConditionalGeneration",
        "gemma4",
        _GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "llama4": _inside(
        "Llama4ForConditionalGeneration",
        "llama4",
        _LLAMA4
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 1, 0],
            "interleave_moe_layer_step": 2,
            "use_qk_norm": True,
            "rope_scaling": _LLAMA3,
        },
    ),
    "llama4_top2": _inside("Llama4ForConditionalGeneration", "llama4", _LLAMA4 | {"num_experts_per_tok": 2}),
    "muse_glimmer": _inside(
        "MuseGlimmerForConditionalGeneration",
        "muse_glimmer",
        {
            **_BASE,
            "model_type": "muse_glimmer_text",
            "num_hidden_layers": 4,
            "head_dim": 16,
            "sliding_window": 12,
            "final_logit_softcapping": 2.0,
            "output_multiplier": 0.3,
            "post_norm_eps": 0.1,
            "qk_scale_factor": 2.5,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        },
    ),
    "step3p7": _inside(
        "Step3p7ForConditionalGeneration",
        "step3p7",
        {
            **{key: value for key, value in _BASE.items() if key != "num_key_value_heads"},
            "model_type": "step3p5",
            "tie_word_embeddings": False,
            "head_dim": 16,
            "num_attention_groups": 2,
            "attention_other_setting": {"num_attention_heads": 8, "num_attention_groups": 2, "head_dim": 16},
            "num_nextn_predict_layers": 1,
            "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 12,
            "rope_theta": [500.0, 100.0, 500.0, 100.0],
            "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
            "moe_layers_enum": "1,2",
            "moe_num_experts": 8,
            "moe_top_k": 3,
            "moe_intermediate_size": 24,
            "share_expert_dim": 24,
            "moe_router_scaling_factor": 2.0,
            "swiglu_limits": [0.0, 0.0, 0.1, 0.0],
            "swiglu_limits_shared": [0.2, 0.0, 0.15, 0.0],
        },
        image_token_id=VOCAB - 1,
    ),
    "gemma3_pictures": _inside(
        "Gemma3ForConditionalGeneration",
        "gemma3",
        {
            "model_type": "gemma3_text",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "vocab_size": VOCAB,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window": 12,
            "sliding_window_pattern": 2,
        },
    ),
}


_DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
    "rms_norm_eps": 1e-6,
}
_SHORT = {
    "conv_L_cache": 3,
    "norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "tie_word_embeddings": True,
}
_SHARED = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 12,
}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 32,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "time_step_limit": [0.4, 1.0],
}
_EXPERTS_OF_NEMOTRON = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 20,
    "moe_latent_size": 16,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_SCALES_OF_FALCON = {
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.4,
    "attention_in_multiplier": 1.5,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 0.8, 1.2, 1.5, 0.9],
    "mlp_multipliers": [0.9, 0.6],
}
# Families with recurrent layers.
STATE_CASES: dict[str, dict[str, Any]] = {
    "qwen3_next": _case(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        **_DELTA,
        **_SHARED,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[1],
    ),
    "qwen3_5": _case("Qwen3_5ForCausalLM", "qwen3_5_text", **_DELTA | {"linear_num_value_heads": 6}),
    "qwen3_5_moe": _case("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", **_DELTA, **_SHARED),
    "lfm2": _case(
        "Lfm2ForCausalLM",
        "lfm2",
        **_SHORT,
        block_ff_dim=50,
        block_ffn_dim_multiplier=1.3,
        block_multiple_of=8,
        full_attn_idxs=[1],
    ),
    "lfm2_moe": _case(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        **_SHORT,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    "bamba": _case(
        "BambaForCausalLM",
        "bamba",
        **_MAMBA | {"mamba_n_groups": 2},
        attn_layer_indices=[1],
        mamba_proj_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "granite4": _case(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        **_MAMBA,
        layer_types=["mamba", "attention", "mamba"],
        shared_intermediate_size=24,
        num_local_experts=8,
        num_experts_per_tok=3,
        position_embedding_type="nope",
        embedding_multiplier=3.0,
        attention_multiplier=0.25,
        residual_multiplier=0.5,
        logits_scaling=2.0,
    ),
    "nemotron_h": _case(
        "NemotronHForCausalLM",
        "nemotron_h",
        **_EXPERTS_OF_NEMOTRON,
        hybrid_override_pattern="MEM*-M",
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=32,
        n_groups=2,
        conv_kernel=4,
        layer_norm_epsilon=1e-5,
        time_step_min=1e-6,  # transformers limits dt by it, in prompts only, and by no other key
    )
    | {"num_hidden_layers": 6},
    "falcon_h1": _case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        **_MAMBA | {"mamba_n_groups": 2},
        **_SCALES_OF_FALCON,
        mamba_d_ssm=64,
        mamba_rms_norm=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    ),
    "falcon_h1_norm": _case(
        "FalconH1ForCausalLM",
        "falcon_h1",
        **_MAMBA,
        mamba_d_ssm=64,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
        key_multiplier=0.5,
    ),
    "kimi_linear": _case(
        "KimiLinearForCausalLM",
        "kimi_linear",
        linear_attn_config={
            "num_heads": 2,
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "kda_layers": [1, 3],
            "full_attn_layers": [2],
        },
        kv_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        num_experts=8,
        num_experts_per_token=3,
        num_shared_experts=1,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
        first_k_dense_replace=1,
    )
    | {"num_key_value_heads": 4},
}

# encoders: hidden states instead of logits
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
    },
}
_HEAD = {"id2label": {"0": "bad", "1": "so so", "2": "good"}, "label2id": {"bad": 0, "so so": 1, "good": 2}}
_ROBERTA = {"pad_token_id": 1, "type_vocab_size": 1, "max_position_embeddings": 66, "layer_norm_eps": 1e-5}

# with a classification head: its numbers for a pair whose second text begins at PAIR_SECOND
PAIR_SECOND = 9
CLASSIFIERS: dict[str, dict[str, Any]] = {
    "bert_classifier": ENCODERS["bert"] | {"architectures": ["BertForSequenceClassification"]} | _HEAD,
    "roberta_classifier": ENCODERS["bert"]
    | {"architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta"}
    | _ROBERTA
    | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}},
    "qwen2_classifier": CASES["qwen2"] | {"architectures": ["Qwen2ForSequenceClassification"]} | _HEAD,
    "qwen3_classifier": CASES["qwen3"] | {"architectures": ["Qwen3ForSequenceClassification"]} | _HEAD,
    "gemma2_classifier": CASES["gemma2"] | {"architectures": ["Gemma2ForSequenceClassification"]} | _HEAD,
}
SENTENCES = (
    "The cat sits on the warm windowsill.",
    "A kitten is resting by the window.",
    "Stock markets fell sharply on Monday.",
    "Share prices dropped at the start of the week.",
    "How do I bake sourdough bread?",
    "A recipe for a loaf made with a wild yeast starter.",
    "日本の首都は東京です。",
    "The quick brown fox jumps over the lazy dog; " * 8,
)


def draw(name: str, shape: tuple[int, ...], *, zero_centred_norms: bool, embed_scale: float) -> np.ndarray:
    """A float32 tensor that depends on nothing but these arguments."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("norm.bias"):  # not BERT's, whose name is LayerNorm
        return 0.3 * values
    if "norm" in name.lower() or "scal" in name:
        zero_centred = zero_centred_norms and "linear_attn" not in name and "visual" not in name
        return 0.3 * values + np.float32(0.0 if zero_centred else 1.0)
    if len(shape) <= 1:  # biases, sinks, router corrections, numbers of xIELU
        return np.asarray(0.5 * values)
    if "embed" in name:
        return values * np.float32(embed_scale)
    fan_in = shape[-1] if len(shape) == 2 else shape[1]  # packed experts are [E, in, out]
    return values * np.float32(1.5 / fan_in**0.5)


def tensors_of(case: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The checkpoint of a case, by published name."""
    gemma, delta = case.startswith("gemma"), case.startswith(("qwen3_next", "qwen3_5"))
    tied = (CASES | STATE_CASES).get(case, {}).get("tie_word_embeddings")
    scale = 0.1 if gemma else 0.3 if tied else 1.0  # or a tied head repeats its input
    centred = case.startswith(("gemma2", "gemma3")) or delta
    tensors = {name: draw(name, shape, zero_centred_norms=centred, embed_scale=scale) for name, shape in shapes.items()}
    if case.startswith("gemma4"):  # scores are not scaled, so that the norm of queries has to
        tensors |= {name: 0.25 * tensor for name, tensor in tensors.items() if "q_norm" in name}
    return tensors


def golden_tensors(case: str) -> dict[str, np.ndarray]:
    """The checkpoint of a case that has a golden, whose file has the shapes."""
    shapes = json.loads((GOLDENS / f"{case}.json").read_text())["shapes"]
    return tensors_of(case, {name: tuple(shape) for name, shape in shapes.items()})


def prompt(length: int = NUM_PROMPT) -> list[int]:
    """Token ids without the special ones."""
    return np.random.default_rng(7).integers(3, VOCAB, length).tolist()
