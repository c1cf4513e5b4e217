"""The tiny models that goldens are made of: a config in the published form a case, and weights drawn by name.

Weights are never stored: each tensor is drawn from a generator seeded by its name, so that the golden maker (with
torch) and the tests (without) have the same. No jax and no torch here.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

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


_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 32}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 4.0, "beta_slow": 1.0,
         "original_max_position_embeddings": 32}  # fmt: skip
_LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3], "long_factor": [1.2, 2.5, 6.0]}

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
    if "norm" in name.lower():
        return 0.3 * values + np.float32(0.0 if zero_centred_norms else 1.0)
    if len(shape) == 1:  # biases, sinks, router corrections
        return 0.5 * values
    if "embed" in name:
        return values * np.float32(embed_scale)
    fan_in = shape[-1] if len(shape) == 2 else shape[1]  # packed experts are [E, in, out]
    return values * np.float32(1.5 / fan_in**0.5)


def tensors_of(case: str, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The checkpoint of a case, by published name."""
    gemma, tied = case.startswith("gemma"), CASES.get(case, {}).get("tie_word_embeddings")
    scale = 0.1 if gemma else 0.3 if tied else 1.0  # or a tied head repeats its input
    return {name: draw(name, shape, zero_centred_norms=gemma, embed_scale=scale) for name, shape in shapes.items()}


def prompt(length: int = NUM_PROMPT) -> list[int]:
    """Token ids without the special ones."""
    return np.random.default_rng(7).integers(3, VOCAB, length).tolist()
