"""The models of the device suite: their published shapes, of which only config.json and a tokenizer are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.device_suite.rows import Bench
from benchmarks.tokenizer_files import copy_tokenizer

PAGE = 16  # tokens

_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_QWEN_06B = _LLAMA_8B | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
_LLAMA_3B = _LLAMA_8B | {  # for a TPU v5e, whose 16 GB do not hold 8B in bfloat16
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "tie_word_embeddings": True,
}
_GPT_OSS_20B = _LLAMA_8B | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "quantization_config": {"quant_method": "mxfp4"},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": _LLAMA_8B,
    "llama-3b": _LLAMA_3B,
    "qwen3-0.6b": _QWEN_06B,
    "gpt-oss-20b": _GPT_OSS_20B,
}
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
_TINY_EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"],
}


def model_directory(bench: Bench, model: str) -> Path:
    """Make a model directory without weights: config.json and the demo model's tokenizer."""
    directory = bench.options.work / model
    directory.mkdir(parents=True, exist_ok=True)
    config = MODELS[model] | {"dtype": "bfloat16"}
    if bench.tiny:
        config = MODELS[model] | _TINY | (_TINY_EXPERTS if "num_local_experts" in config else {})
    (directory / "config.json").write_text(json.dumps(config))
    copy_tokenizer(directory)
    return directory


def compile_cache(bench: Bench, model: str) -> Path:
    """Return the folder of a model's compiled programs, which its sections share."""
    return bench.options.work / f"xla-{model}"


def limits(bench: Bench, model: str) -> dict[str, int]:
    """Return the limits of an engine of a model, the same for its steps and its server, so that programs are shared."""
    seqs, context, tokens = (4, 128, 32) if bench.tiny else (512, 2048 if model == "gpt-oss-20b" else 1024, 2048)
    pages = seqs * context // PAGE
    return {
        "max_num_seqs": seqs,
        "max_model_len": context if bench.tiny else max(context, tokens + PAGE),
        "max_num_batched_tokens": tokens,
        "page_size": PAGE,
        "num_pages": pages,
    }
