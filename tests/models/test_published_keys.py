"""Keys of config.json that change the numbers, in the forms that transformers reads: heeded, or refused by name.

The numbers of each form were compared with transformers 5.24; here a form must give the configuration of one that
`test_families` compares with it.
"""

import math
from typing import Any

import pytest

from jaxserve.models.checkpoint.hf_config import from_hf
from jaxserve.models.rope import LinearScaling, LongRopeScaling, RopeConfig, YarnScaling
from tests.models.families import CASES, ENCODERS

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
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
        ("qwen2", {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "both given and differ"),
        ("qwen2", {"rope_scaling": [1]}, "must be objects"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(case: str, change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        from_hf(CASES[case] | change)


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
