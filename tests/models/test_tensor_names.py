"""Names of tensors, from those of a checkpoint and back."""

import pytest

from jaxserve.models.family import IN_TOWERS
from jaxserve.models.tensor_names import Rules, published_names, renamed

RULES: Rules = (
    *IN_TOWERS,
    (".post_attention_layernorm.", ".pre_feedforward_layernorm."),
    (".post_self_attn_layernorm.", ".post_attention_layernorm."),
    (".shared_mlp.", ".mlp."),
)


@pytest.mark.parametrize(
    ("there", "here"),
    [
        ("model.language_model.layers.0.shared_mlp.up.weight", "model.layers.0.mlp.up.weight"),
        ("model.layers.0.post_attention_layernorm.weight", "model.layers.0.pre_feedforward_layernorm.weight"),
        ("model.layers.0.post_self_attn_layernorm.weight", "model.layers.0.post_attention_layernorm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("model.layers.0.shared_mlp_norm.weight", "model.layers.0.shared_mlp_norm.weight"),
    ],
)
def test_there_and_back(there: str, here: str) -> None:
    assert renamed(there, RULES) == here
    assert there.removesuffix(".weight") in published_names(here.removesuffix(".weight"), RULES)


def test_a_name_that_is_already_the_one_here_stays() -> None:
    rules: Rules = ((".share_expert.", ".moe.share_expert."),)
    here = "model.layers.1.moe.share_expert.up_proj.weight"
    assert renamed("model.layers.1.share_expert.up_proj.weight", rules) == renamed(here, rules) == here
