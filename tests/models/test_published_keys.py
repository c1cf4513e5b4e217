"""Keys of config.json that change the numbers, in the forms that transformers reads: heeded, or refused by name.

The numbers of each form were compared with transformers 5.24; here a form must give the configuration of one that
`test_families` compares with it.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import transformers

from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.rope import LinearScaling, LongRopeScaling, RopeConfig, YarnScaling
from tests.models.families import CASES, ENCODERS
from tests.models.flip_keys import FAMILIES, unread

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# fields of another form and the same meaning: no window in any layer, 1 / sqrt(head_dim), scales of 1; and the ids that
# Gemma 3's class has where the case names none
SAVED_OTHERWISE = {
    "gemma3_pictures": ("eos_token_ids", "bos_token_id"),
    "laguna_per_element": ("layer_windows",),
    "step3p7": ("attention_scale",),
    "falcon_h1_norm": ("mamba2",),
}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def without(case: str, *keys: str) -> dict[str, Any]:
    return {key: value for key, value in CASES[case].items() if key not in keys}


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("phi3", "rms_norm_eps", 1e-5),
        ("mixtral", "rms_norm_eps", 1e-5),
        ("olmo2", "rms_norm_eps", 1e-5),
        ("olmo3", "rms_norm_eps", 1e-5),
        ("gpt_oss", "rms_norm_eps", 1e-5),
        ("ernie4_5", "rms_norm_eps", 1e-5),
        ("ernie4_5", "tie_word_embeddings", True),
        ("internlm3", "rms_norm_eps", 1e-5),
        ("exaone4", "rms_norm_eps", 1e-5),
        ("exaone4", "sliding_window", 4096),
        ("seed_oss", "attention_out_bias", False),
        ("granite", "attention_multiplier", 1.0),
        ("nemotron", "hidden_act", "relu2"),
        ("qwen2_moe", "shared_expert_intermediate_size", 5632),
        ("qwen2_moe", "max_window_layers", 28),
        ("qwen2_moe", "num_experts", 60),
        ("olmoe", "num_experts", 64),
        ("olmoe", "norm_topk_prob", False),
        ("ernie4_5_moe", "moe_k", 6),
        ("ernie4_5_moe", "moe_num_shared_experts", 2),
        ("dots1", "norm_topk_prob", False),
        ("dots1", "max_window_layers", 62),
        ("exaone_moe", "routed_scaling_factor", 2.5),
        ("granite_moe", "num_experts_per_tok", 2),
        ("granite_dense4", "shared_intermediate_size", 1024),
        ("granite_dense4", "position_embedding_type", None),
        ("nemotron", "partial_rotary_factor", 0.5),
        ("arcee", "hidden_act", "relu2"),
        ("apertus", "rms_norm_eps", 1e-5),
        (
            "apertus",
            "rope_scaling",
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        ),
        ("starcoder2", "hidden_act", "gelu_pytorch_tanh"),
        ("starcoder2", "use_bias", True),
        ("starcoder2", "tie_word_embeddings", True),
        ("cohere", "logit_scale", 0.0625),
        ("cohere", "tie_word_embeddings", True),
        ("cohere2", "sliding_window", 4096),
        ("cohere2", "sliding_window_pattern", 4),
        ("glm4", "partial_rotary_factor", 0.5),
        ("glm4", "attention_bias", True),
        ("glm", "head_dim", 128),
        ("helium", "rms_norm_eps", 1e-8),
        ("hunyuan", "rms_norm_eps", 1e-5),
        ("deepseek_v3", "routed_scaling_factor", 2.5),
        ("deepseek_v3", "n_group", 8),
        ("deepseek_v3", "topk_group", 4),
        ("deepseek_v3", "n_shared_experts", 1),
        (
            "gpt_oss",
            "rope_scaling",
            {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096},
        ),
    ],
)
def test_a_key_that_is_left_out_has_the_default_of_its_class(case: str, key: str, value: Any) -> None:
    assert from_hf(without(case, key)) == from_hf(CASES[case] | {key: value})


@pytest.mark.parametrize(
    ("case", "change", "cause"),
    [
        ("llama3", {"is_causal": False}, "'is_causal' is False"),
        (
            "mistral",
            {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            "'layer_types' of Mistral",
        ),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "'chunked_attention'"),
        ("gemma2", {"hidden_activation": "silu"}, "'hidden_activation' is 'silu'"),
        ("gemma3", {"hidden_activation": "gelu"}, "'hidden_activation' is 'gelu'"),
        ("gpt_oss", {"swiglu_alpha": 1.0}, "'swiglu_alpha' is 1.0"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "'no_rope_layers' has 2 entries for 3 layers"),
        ("ernie4_5", {"compression_ratio": 2.0}, "'compression_ratio' is 2.0"),
        ("llama3", {"hidden_act": "xielu"}, "'xielu' is not supported in an MLP with a gate"),
        ("cohere", {"use_qk_norm": True}, "'use_qk_norm' is True"),
        ("cohere2", {"order_of_interleaved_layers": "global_attn_first"}, "'order_of_interleaved_layers'"),
        ("hunyuan", {"use_cla": True}, "'use_cla' is True"),
        ("olmoe", {"clip_qkv": 8.0}, "'clip_qkv' is not supported"),
        ("ernie4_5_moe", {"use_bias": True}, "'use_bias' is True"),
        ("ernie4_5_moe", {"moe_norm_min": 0.5}, "'moe_norm_min' is 0.5"),
        ("granite_dense4", {"layer_types": None}, "models without attention are not supported"),
        ("internlm3", {"bias": False}, "'qkv_bias' and 'bias' must be equal"),
        ("exaone4", {"layer_types": None, "sliding_window_pattern": "LLLG"}, "'sliding_window_pattern' must be"),
        ("qwen2", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "both given and differ"),
        ("qwen2", {"rope_scaling": [1]}, "must be objects"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(case: str, change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        from_hf(CASES[case] | change)


@pytest.mark.parametrize(
    ("case", "key", "value"),
    [
        ("minimax_m2", "use_qk_norm", False),
        ("minimax_m2", "use_routing_bias", False),
        ("minimax_m2", "scoring_func", "softmax"),
        ("glm4_moe", "scoring_func", "softmax"),
        ("glm4_moe", "mlp_layer_types", ["dense", "sparse", "linear"]),
        ("glm4_moe_lite", "topk_method", "greedy"),
    ],
)
def test_a_value_that_a_family_does_not_compute_is_refused(case: str, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        from_hf(CASES[case] | {key: value})


def test_two_lists_of_sparse_layers_must_agree() -> None:
    hf = CASES["glm4_moe_lite"] | {"mlp_layer_types": ["dense", "dense", "sparse"]}
    assert from_hf(hf) == from_hf(CASES["glm4_moe_lite"] | {"first_k_dense_replace": 2})
    with pytest.raises(ValueError, match="'mlp_layer_types' and 'first_k_dense_replace' differ"):
        from_hf(hf | {"first_k_dense_replace": 1})


def test_families_that_are_another_by_another_name() -> None:
    """Kimi K2.5's language model is DeepSeek-V3, and MiMo 7B is Qwen2."""
    inside = {key: value for key, value in CASES["deepseek_v3"].items() if key != "architectures"}
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": inside | {"model_type": "kimi_k2"}}
    assert from_hf(kimi).replace(ignored_tensors=(), tensor_names=()) == from_hf(CASES["deepseek_v3"])
    mimo = from_hf(CASES["qwen2"] | {"architectures": ["MiMoForCausalLM"]})
    assert mimo.replace(architecture="Qwen2ForCausalLM", ignored_tensors=()) == from_hf(CASES["qwen2"])


@pytest.mark.parametrize("change", [{"hidden_act": "gelu_new"}, {"hidden_act": "silu"}, {"is_decoder": True}])
def test_an_encoder_of_another_kind_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(change))):
        from_hf(ENCODERS["bert"] | change)


def test_the_logits_of_gemma3_can_be_capped() -> None:
    assert from_hf(CASES["gemma3"]).logit_soft_cap is None
    assert from_hf(CASES["gemma3"] | {"final_logit_softcapping": 20.0}).logit_soft_cap == 20.0


def test_experts_by_the_newer_name_and_a_longer_list_of_layers() -> None:
    named = without("qwen3_moe", "num_experts") | {"num_local_experts": CASES["qwen3_moe"]["num_experts"]}
    assert from_hf(named) == from_hf(CASES["qwen3_moe"])
    assert from_hf(CASES["smollm3"] | {"no_rope_layers": [1, 0, 1, 0]}) == from_hf(CASES["smollm3"])


def test_mistral_without_a_window_in_any_layer() -> None:
    assert from_hf(CASES["mistral"] | {"layer_types": ["full_attention"] * 3}).windows == (None,) * 3
    assert from_hf(CASES["mistral"] | {"layer_types": ["sliding_attention"] * 3}) == from_hf(CASES["mistral"])


@pytest.mark.parametrize("case", FAMILIES)
def test_no_key_is_ignored_without_a_reason(case: str) -> None:
    assert not [key for key, reason in unread(case).items() if not reason]


@pytest.mark.parametrize("case", [case for case in FAMILIES if case != "internlm3"])  # transformers has no class of it
def test_what_transformers_saves_again_is_the_same_model(case: str, tmp_path: Path) -> None:
    """A fine-tuned checkpoint has a file with every key of the class, and with transformers' form of infinity."""
    hf = FAMILIES[case]
    transformers.CONFIG_MAPPING[hf["model_type"]](**hf).save_pretrained(tmp_path)
    saved, given = read_config(tmp_path), from_hf(hf)
    same = {name: getattr(given, name) for name in SAVED_OTHERWISE.get(case, ())}
    assert saved.replace(**same) == given


def test_kimi_linear_in_transformers_own_keys(tmp_path: Path) -> None:
    """A configuration that is made there has no linear_attn_config."""
    hf = FAMILIES["kimi_linear"]
    linear = hf["linear_attn_config"]
    own = {"linear_num_heads": 2, "linear_head_dim": 16, "linear_conv_kernel_dim": 4}
    types = ["linear_attention" if n in linear["kda_layers"] else "full_attention" for n in (1, 2, 3)]
    keys = {key: value for key, value in hf.items() if key != "linear_attn_config"}
    assert from_hf(keys | own | {"layer_types": types}) == from_hf(hf)


# --- the rotation ----------------------------------------------------------------------------------------------


def test_both_forms_of_the_rotation_may_say_the_same() -> None:
    both = {"rope_parameters": YARN | {"rope_theta": 1e4}, "rope_scaling": {"type": "yarn"} | YARN}
    assert from_hf(CASES["qwen2"] | both) == from_hf(CASES["qwen2"] | {"rope_scaling": YARN})


def test_the_original_context_beside_the_rotation_counts() -> None:
    scaling = from_hf(CASES["qwen2"] | {"rope_scaling": YARN, "original_max_position_embeddings": 16}).rope.scaling
    assert isinstance(scaling, YarnScaling) and scaling.original_max_position == 16


def test_the_factor_of_longrope_counts_before_the_contexts() -> None:
    hf = CASES["phi3"] | {"original_max_position_embeddings": 32}
    found = [from_hf(hf | {"rope_scaling": LONG | more}).rope.scaling for more in ({}, {"factor": 2.0})]
    assert [each.attention_factor for each in found if isinstance(each, LongRopeScaling)] == [
        math.sqrt(1 + math.log(factor) / math.log(32)) for factor in (4.0, 2.0)
    ]
    assert from_hf(hf | {"rope_scaling": LONG | {"rope_type": "yarn"}}).rope.scaling == found[0]


@pytest.mark.parametrize(
    ("given", "full", "local"),
    [
        ({"full_attention": {"rope_type": "linear", "factor": 4.0}}, (1e6, LinearScaling(4.0)), 1e4),
        ({"sliding_attention": {"rope_type": "default", "rope_theta": 50.0}}, (1e6, None), 50.0),
        ({"full_attention": {"rope_theta": 500.0}, "sliding_attention": None}, (500.0, None), 1e4),
        ({"full_attention": {}, "sliding_attention": {"rope_type": "default"}}, (1e6, None), 1e4),
    ],
)
def test_a_rotation_by_layer_type_that_leaves_something_out(given: Any, full: tuple[Any, ...], local: float) -> None:
    config = from_hf(
        without("gemma3", "rope_theta", "rope_local_base_freq", "rope_scaling") | {"rope_parameters": given}
    )
    assert (config.rope.theta, config.rope.scaling) == full
    assert config.local_rope == RopeConfig(config.head_dim, local)
