"""Tiny checkpoints with a head for multi-token prediction, in the published forms, and heads of EAGLE-3."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import CASES, STATE_CASES

Tensors = dict[str, np.ndarray]


class Form(NamedTuple):
    """How a family publishes its head: beginnings of names, the halves' order, and the config of its layer alone.

    others: names in the layer that the model's layers have -> the head's.
    feeds_normed: the next guess starts from the result after the head's last norm. before_norm: the first one starts
    from the hidden states before the model's. layers: each has all of `parts`, which are those of the first.
    """

    hf: dict[str, Any]
    # token_norm, hidden_norm, join, layer, and (if it has its own) norm and lm_head -> the beginning of its names
    parts: dict[str, str]
    alone: dict[str, Any]
    token_first: bool = True
    offset: float = 0.0  # of the norms' weights
    others: tuple[tuple[str, str], ...] = ()
    feeds_normed: bool = True
    before_norm: bool = False
    layers: int = 1

    def of_layer(self, index: int) -> Form:
        """The form of one of its layers, as if it were the only one."""
        first = self.parts["layer"]
        start, number = first.removesuffix(".").rsplit(".", 1)
        own = f"{start}.{int(number) + index}."
        return self._replace(parts={name: there.replace(first, own) for name, there in self.parts.items()}, layers=1)

    def published(self, name: str) -> str:
        """The head's name of a tensor of `model.layers.0.` of its layer alone."""
        inner = name.removeprefix("model.layers.0.")
        for here, there in self.others:
            inner = inner.replace(here, there)
        return self.parts["layer"] + inner


def _behind(layer: int, norm: str = "shared_head.norm.") -> dict[str, str]:
    names = {
        "token_norm": "enorm.",
        "hidden_norm": "hnorm.",
        "join": "eh_proj.",
        "norm": norm,
        "layer": "",
    }
    return {name: f"model.layers.{layer}.{there}" for name, there in names.items()}


_UNDER_MTP = {
    "token_norm": "mtp.pre_fc_norm_embedding.",
    "hidden_norm": "mtp.pre_fc_norm_hidden.",
    "join": "mtp.fc.",
    "norm": "mtp.norm.",
    "layer": "mtp.layers.0.",
}
_MIMO = CASES["qwen2"] | {"architectures": ["MiMoForCausalLM"], "attention_bias": True, "num_nextn_predict_layers": 1}
FORMS: dict[str, Form] = {
    "deepseek_v3": Form(
        CASES["deepseek_v3"] | {"num_nextn_predict_layers": 1},
        _behind(3),
        {"first_k_dense_replace": 0},
        feeds_normed=False,
    ),
    "glm4_moe": Form(
        CASES["glm4_moe"] | {"num_nextn_predict_layers": 1},
        _behind(3),
        {"first_k_dense_replace": 0},
        feeds_normed=False,
    ),
    "ernie4_5_moe": Form(
        CASES["ernie4_5_moe"] | {"num_nextn_predict_layers": 1},
        {
            "token_norm": "model.mtp_emb_norm.0.",
            "hidden_norm": "model.mtp_hidden_norm.0.",
            "join": "model.mtp_linear_proj.0.",
            "layer": "model.mtp_block.0.",
        },
        {"moe_layer_start_index": 1},
        feeds_normed=False,
        before_norm=True,
    ),
    "exaone_moe": Form(
        CASES["exaone_moe"] | {"num_nextn_predict_layers": 1}, _UNDER_MTP, {"layer_types": ["full_attention"]}
    ),
    "hy_v3": Form(CASES["hy_v3"], _behind(3, "final_layernorm."), {"first_k_dense_replace": 0}),
    "mimo": Form(
        _MIMO,
        {
            "token_norm": "model.mtp_layers.0.token_layernorm.",
            "hidden_norm": "model.mtp_layers.0.hidden_layernorm.",
            "join": "model.mtp_layers.0.input_proj.",
            "norm": "model.mtp_layers.0.final_layernorm.",
            "layer": "model.mtp_layers.0.",
        },
        {},
        token_first=False,
    ),
    "mimo_v2": Form(
        CASES["mimo_v2"] | {"num_nextn_predict_layers": 1},
        {
            "token_norm": "model.mtp.layers.0.enorm.",
            "hidden_norm": "model.mtp.layers.0.hnorm.",
            "join": "model.mtp.layers.0.eh_proj.",
            "norm": "model.mtp.layers.0.final_layernorm.",
            "layer": "model.mtp.layers.0.",
        },
        {"layer_types": ["sliding_attention"], "moe_layer_freq": [0]},
        others=(("post_attention_layernorm.", "pre_mlp_layernorm."),),
        feeds_normed=False,
        before_norm=True,
    ),
    "step3p7": Form(
        CASES["step3p7"]["text_config"] | {"architectures": ["Step3p5ForCausalLM"]},
        {
            "token_norm": "model.layers.3.enorm.",
            "hidden_norm": "model.layers.3.hnorm.",
            "join": "model.layers.3.eh_proj.",
            "norm": "model.layers.3.transformer.shared_head.norm.",
            "lm_head": "model.layers.3.transformer.shared_head.output.",
            "layer": "model.layers.3.",
        },
        {
            "layer_types": ["sliding_attention"],
            "rope_theta": [100.0],
            "partial_rotary_factors": [1.0],
            "moe_layers_enum": [],
            "swiglu_limits": [0.0],
            "swiglu_limits_shared": [0.0],
        },
        offset=1.0,
        feeds_normed=False,
        before_norm=True,
    ),
    "nemotron_h": Form(
        STATE_CASES["nemotron_h"] | {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"},
        {
            "token_norm": "mtp.layers.0.enorm.",
            "hidden_norm": "mtp.layers.0.hnorm.",
            "join": "mtp.layers.0.eh_proj.",
            "norm": "mtp.layers.1.final_layernorm.",
            "layer": "mtp.layers.",
        },
        {"hybrid_override_pattern": "*E", "num_hidden_layers": 2},
        others=(
            ("input_layernorm.", "0.norm."),
            ("self_attn.", "0.mixer."),
            ("post_attention_layernorm.", "1.norm."),
            ("mlp.", "1.mixer."),
        ),
    ),
    "qwen3_next": Form(
        STATE_CASES["qwen3_next"],
        _UNDER_MTP,
        {"layer_types": ["full_attention"], "mlp_only_layers": []},
        offset=1.0,
    ),
}


def of_three(form: Form) -> Form:
    """The form with a head of three layers. Lists of all layers' values have one value for each of them."""
    hf, count = form.hf, form.hf["num_hidden_layers"] + 1
    lists = {key: [*values, *values[-1:] * 2] for key, values in hf.items() if isinstance(values, list)}
    longer = {key: values for key, values in lists.items() if len(hf[key]) == count}
    return form._replace(hf=hf | {"num_nextn_predict_layers": 3} | longer, layers=3)


# by whether each layer reads the model's hidden states or the result of the layer before it
OF_THREE = {"mimo_v2 of three": of_three(FORMS["mimo_v2"]), "step3p7 of three": of_three(FORMS["step3p7"])}


def alone(form: Form) -> dict[str, Any]:
    """The config.json of a model whose only layer is of the head's kind."""
    return form.hf | {"num_hidden_layers": 1, "num_nextn_predict_layers": 0} | form.alone


def head_tensors(form: Form, seed: int = 5) -> Tensors:
    """The head's tensors by their published names, random."""
    if form.layers > 1:
        parts = (head_tensors(form.of_layer(index), seed + index) for index in range(form.layers))
        return {name: tensor for part in parts for name, tensor in part.items()}
    size, rng = form.hf["hidden_size"], np.random.default_rng(seed)
    start = "model.layers.0."
    layer = {name: t for name, t in random_tensors(alone(form), seed).items() if name.startswith(start)}
    found = {form.published(name): tensor for name, tensor in layer.items()}
    if "lm_head" in form.parts:
        found[f"{form.parts['lm_head']}weight"] = rng.normal(0, 0.2, (form.hf["vocab_size"], size)).astype(np.float32)
    for part in ("token_norm", "hidden_norm", *(["norm"] if "norm" in form.parts else [])):
        found[f"{form.parts[part]}weight"] = rng.normal(1, 0.2, size).astype(np.float32)
    found[f"{form.parts['join']}weight"] = rng.normal(0, 0.2, (size, 2 * size)).astype(np.float32)
    if "shared_head" in form.parts.get("norm", "") and "lm_head" not in form.parts:  # copies of the model's tensors
        for name in ("embed_tokens.weight", "shared_head.head.weight"):
            found[form.parts["layer"] + name] = np.zeros((form.hf["vocab_size"], size), np.float32)
    return found


def write_with_head(directory: Path, form: Form, tensors: Tensors, seed: int = 3) -> Path:
    """A checkpoint of a model and its head, whose tensors are given."""
    return write_checkpoint(directory, form.hf, random_tensors(form.hf, seed) | tensors)


def eagle_config(model: dict[str, Any], vocab_size: int, taps: tuple[int, int, int]) -> dict[str, Any]:
    """The config.json of an EAGLE-3 head for a model. taps: the layers after which it reads the hidden states"""
    return model | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "draft_vocab_size": vocab_size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in taps]},
    }


def eagle_tensors(hf: dict[str, Any], seed: int = 6) -> Tensors:
    """Random tensors of an EAGLE-3 head by their published names."""
    rng, size, ffn = np.random.default_rng(seed), hf["hidden_size"], hf["intermediate_size"]
    head_dim = hf.get("head_dim") or size // hf["num_attention_heads"]
    queries, keys = hf["num_attention_heads"] * head_dim, hf["num_key_value_heads"] * head_dim
    shapes = {
        "fc.weight": (size, 3 * size),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * size),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * size),
        "midlayer.self_attn.o_proj.weight": (size, queries),
        "midlayer.mlp.gate_proj.weight": (ffn, size),
        "midlayer.mlp.up_proj.weight": (ffn, size),
        "midlayer.mlp.down_proj.weight": (size, ffn),
        "lm_head.weight": (hf["draft_vocab_size"], size),
    }
    found = {name: rng.normal(0, 0.2, shape).astype(np.float32) for name, shape in shapes.items()}
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    found |= {f"{name}.weight": rng.normal(1, 0.2, size).astype(np.float32) for name in norms}
    chosen = np.sort(rng.choice(hf["vocab_size"], hf["draft_vocab_size"], replace=False))
    known = np.zeros(hf["vocab_size"], bool)
    known[chosen] = True
    return found | {"d2t": chosen - np.arange(len(chosen)), "t2d": known}
