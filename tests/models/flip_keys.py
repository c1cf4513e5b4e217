"""Changes every key of a family's configuration and lists the keys that change nothing, each with the reason.

    python -m tests.models.flip_keys [case ...]

The keys are those of the case in families.py, and those of transformers' configuration class, whose names and defaults
goldens/keys.json has (`python -m tests.models.make_goldens keys`). A key counts as read if another value gives another
ModelConfig, whose features test_families holds to the logits, or is refused. Ends with 1 if a key changes nothing and
no reason is known.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.errors import JaxserveError
from jaxserve.models.checkpoint.hf_config import from_hf
from tests.models.families import CASES, STATE_CASES

KEYS = Path(__file__).parent / "goldens" / "keys.json"
FAMILIES = CASES | STATE_CASES
_OF_ANY_TYPE = (True, False, 0, 1, 3, 0.5, "other", ["other"], {"other": 1})

# Why a key changes nothing: for all families, and for one case.
_TRAINING = "of training only"
_LIBRARY = "of transformers' own functions"
_TASK = "of other tasks than text"
_LABEL = "of a classification head, which the architecture's name decides"
REASONS: dict[str, str] = {
    **dict.fromkeys(
        (
            "attention_dropout attn_pdrop embd_pdrop resid_pdrop hidden_dropout_prob attention_probs_dropout_prob "
            "embedding_dropout residual_dropout classifier_dropout initializer_range router_aux_loss_coef "
            "aux_loss_alpha router_jitter_noise jitter_noise seq_aux output_router_logits expert_dropout use_bfloat16 "
            "router_z_loss_coef z_loss_coefficient mtp_loss_coef hidden_dropout rescale_prenorm_residual "
            "time_step_max time_step_floor"
        ).split(),
        _TRAINING,
    ),
    **dict.fromkeys(
        (
            "use_cache return_dict output_hidden_states output_attentions chunk_size_feed_forward _name_or_path "
            "transformers_version auto_map torchscript pruned_heads is_encoder_decoder add_cross_attention "
            "cross_attention_hidden_size tie_encoder_decoder gradient_checkpointing _attn_implementation "
            "_attn_implementation_internal _commit_hash cache_implementation _experts_implementation "
            "_experts_implementation_internal num_logits_to_keep use_mamba_kernels moe_shared_expert_overlap"
        ).split(),
        _LIBRARY,
    ),
    **dict.fromkeys(("id2label", "label2id", "num_labels", "problem_type", "finetuning_task"), _LABEL),
    "model_type": "the architecture decides, and in a nested configuration the text's",
    "pad_token_id": "rows are not padded with a token",
    "pretraining_tp": "the weights are published whole",
    "ep_size": "the weights are published whole",
    "eod_token_id": "transformers does not read it: eos_token_id ends an output",
    "qk_head_dim": "the sum of qk_nope_head_dim and qk_rope_head_dim",
    "_sliding_window_pattern": "layer_types says it, in the files that have it",
    **dict.fromkeys(("chunk_size", "mamba_chunk_size"), "tokens that a scan takes at once: last bits"),
}
_OUTER = "the configuration around it decides"
NESTED_REASONS = {"architectures": _OUTER, "tie_word_embeddings": _OUTER}
_WINDOW = "has an effect with use_sliding_window: true only"
_NEEDS_WINDOW = "has an effect with a sliding_window only"
_NO_CAP = "Gemma 3 has no cap on scores, and transformers does not read it either"
_EXPERTS_OF_GEMMA4 = ("moe_intermediate_size", "num_experts", "top_k_experts")
_OF_STATES = (
    *("mamba_chunk_size", "mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
    *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
)
_OF_KIMI = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
_OWN_BIASES = "InternLM3 has qkv_bias and bias instead"
CASE_REASONS: dict[tuple[str, str], str] = {
    ("qwen2", "sliding_window"): _WINDOW,
    ("qwen2", "max_window_layers"): _WINDOW,
    ("qwen3", "sliding_window"): _WINDOW,
    ("qwen3", "max_window_layers"): _WINDOW,
    ("qwen3", "use_sliding_window"): _NEEDS_WINDOW,
    ("qwen3_moe", "sliding_window"): _WINDOW,
    ("qwen3_moe", "use_sliding_window"): _NEEDS_WINDOW,
    ("qwen3_moe", "num_local_experts"): "another name of num_experts, which counts",
    ("smollm3", "sliding_window"): _WINDOW,
    ("smollm3", "use_sliding_window"): _NEEDS_WINDOW,
    ("phi3", "original_max_position_embeddings"): "has an effect with a rope_scaling only",
    ("internlm3", "attention_bias"): _OWN_BIASES,
    ("internlm3", "mlp_bias"): _OWN_BIASES,
    ("gemma3", "attn_logit_softcapping"): _NO_CAP,
    **{("gemma4_e", key): "has an effect with enable_moe_block only" for key in _EXPERTS_OF_GEMMA4},
    ("gemma3_pictures", "attn_logit_softcapping"): _NO_CAP,
    ("mimo_v2", "sliding_window"): "sliding_window_size counts if there is one",
    ("exaone4", "sliding_window_pattern"): "layer_types says it",
    ("step3p7", "mtp_layer_types"): "the last entries of layer_types say it",
    ("step3p7", "per_layer_config"): "num_sliding_attention_heads says it",
    ("exaone_moe", "sliding_window_pattern"): "layer_types says it",
    **{("granite_dense4", key): "of layers with a state, which it lacks" for key in _OF_STATES},
    ("granite_dense4", "num_experts_per_tok"): "has an effect with num_local_experts only, which must be 0",
    ("granite4", "position_embedding_type"): "rope rotates, and any other value does not, as in transformers",
    ("nemotron_h", "layers_block_type"): "hybrid_override_pattern counts if there is one",
    ("nemotron_h", "mtp_layers_block_type"): "has an effect with num_nextn_predict_layers only",
    ("nemotron_h", "expand"): "mamba_num_heads and mamba_head_dim say it",
    ("nemotron_h", "mamba_proj_bias"): "use_bias counts, as in transformers",
    ("nemotron_h", "residual_in_fp32"): "residuals are in the activations' type: last bits of bfloat16",
    ("nemotron_h", "time_step_min"): "of first weights; in transformers also a limit, of prompts only",
    ("falcon_h1", "mamba_norm_before_gate"): "has an effect with mamba_rms_norm only",
    **{("kimi_linear", key): "linear_attn_config counts if there is one" for key in _OF_KIMI},
    ("kimi_linear", "model_max_length"): "max_position_embeddings counts if there is one",
    ("hunyuan", "eod_token_id"): "ends documents of the training; eos_token_id ends an output",
    ("hy_v3", "enable_moe_fp32_combine"): "the shared expert is added in the activations' type: last bits of bfloat16",
}


def flat(hf: dict[str, Any]) -> dict[str, Any]:
    """The keys of the language model."""
    return hf.get("text_config", hf)


def with_key(hf: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The configuration with another value of a key of the language model."""
    return hf | {"text_config": hf["text_config"] | {key: value}} if "text_config" in hf else hf | {key: value}


def other_values(value: Any) -> Iterator[Any]:
    """Values that are not the given one, of its type if it has one."""
    match value:
        case bool():
            yield not value
        case int() | float():
            yield from (value + 1, value * 2, value / 2, 0)
        case str():
            yield "other"
        case [first, *rest]:
            yield [*rest, first]
            yield [next(other_values(first)), *rest]
            yield rest
        case dict() if value:
            for key, inner in value.items():
                yield from (value | {key: each} for each in other_values(inner))
        case _:
            yield from _OF_ANY_TYPE


def is_read(hf: dict[str, Any], key: str, value: Any) -> bool:
    """Whether another value of the key gives another model, or is refused."""
    before = from_hf(hf)
    for other in other_values(value):
        try:
            if from_hf(with_key(hf, key, other)) != before:
                return True
        except (ValueError, TypeError, KeyError, ArithmeticError, JaxserveError):
            return True
    return False


def unread(case: str) -> dict[str, str]:
    """The keys of a case that change nothing, with the reason; "" if none is known."""
    hf = FAMILIES[case]
    keys = json.loads(KEYS.read_text())[case] | flat(hf)
    silent = [key for key, value in keys.items() if not is_read(hf, key, value)]
    reasons = REASONS | (NESTED_REASONS if "text_config" in hf else {})
    return {key: CASE_REASONS.get((case, key), reasons.get(key, "")) for key in sorted(silent)}


def main(cases: list[str]) -> int:
    """Print the keys of each case that change nothing."""
    found = {case: unread(case) for case in cases}
    for case, keys in found.items():
        print(f"{case}: {len(keys)} keys change nothing")
        for key, reason in keys.items():
            print(f"    {key}: {reason or 'NO REASON IS KNOWN'}")
    return int(any(not reason for keys in found.values() for reason in keys.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(FAMILIES)))
