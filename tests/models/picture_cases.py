"""Tiny models with towers: their configurations, pictures and prompts, for the goldens and for the tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

PAD, START, END = 60, 61, 62
MERGE = 2
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_heads": 4,
    "in_channels": 3,
    "patch_size": 4,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
OUTER = {
    "image_token_id": PAD,
    "video_token_id": 59,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
    "tie_word_embeddings": False,
}
INTERLEAVED = {"rope_parameters": ROPE | {"mrope_section": [2, 2, 2], "mrope_interleaved": True}}
QWEN3_5_TOWER = VISION | {"hidden_act": "gelu_pytorch_tanh", "num_position_embeddings": 36}
QWEN3_TOWER = QWEN3_5_TOWER | {"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": [0, 2]}
DELTA = {
    "head_dim": 24,
    "linear_num_key_heads": 4,  # for four devices
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": INTERLEAVED["rope_parameters"] | {"partial_rotary_factor": 0.5},
}
CASES: dict[str, dict[str, Any]] = {
    "qwen3_vl_pictures": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": TEXT | INTERLEAVED | {"model_type": "qwen3_vl_text"},
        "vision_config": QWEN3_TOWER,
        **OUTER,
    },
    "qwen3_vl_moe_pictures": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "model_type": "qwen3_vl_moe",
        "text_config": TEXT
        | INTERLEAVED
        | {
            "model_type": "qwen3_vl_moe_text",
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        "vision_config": QWEN3_TOWER | {"model_type": "qwen3_vl_moe_vision"},
        **OUTER,
    },
    "qwen2_5_vl_pictures": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "text_config": {key: value for key, value in TEXT.items() if key != "head_dim"}
        | {
            "model_type": "qwen2_5_vl_text",
            "hidden_size": 48,
            "rope_parameters": ROPE | {"mrope_section": [1, 2, 3]},
            "use_sliding_window": False,
        },
        "vision_config": VISION
        | {
            "model_type": "qwen2_5_vl_vision",
            "hidden_act": "silu",
            "out_hidden_size": 48,
            "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        **OUTER,
    },
    "qwen3_5_pictures": {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": TEXT | DELTA | {"model_type": "qwen3_5_text"},
        "vision_config": QWEN3_5_TOWER | {"model_type": "qwen3_5_vision"},
        **OUTER,
    },
    "qwen3_5_moe_pictures": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "text_config": {key: value for key, value in TEXT.items() if key != "intermediate_size"}
        | DELTA
        | {
            "model_type": "qwen3_5_moe_text",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 8,
        },
        "vision_config": QWEN3_5_TOWER | {"model_type": "qwen3_5_moe_vision"},
        **OUTER,
    },
}
# Rows and columns of patches of each picture, and the tokens of text before each and after the last.
PROMPTS: dict[str, tuple[list[tuple[int, int]], list[int]]] = {
    "none": ([], [20]),
    "one": ([(6, 10)], [7, 9]),
    "two": ([(4, 4), (2, 8)], [0, 5, 0]),  # at the start and at the end
    "five": ([(2, 2), (6, 4), (4, 4), (2, 10), (8, 2)], [3, 1, 1, 6, 2, 4]),
    "long": ([(8, 12), (8, 8)], [40, 45, 10]),  # token 64 is in the first picture, token 128 behind the second
}


def prompts_of(case: str) -> tuple[str, ...]:
    """The prompts of a case. The long one is for models with recurrent states, which are kept at multiples of 64."""
    return tuple(name for name in PROMPTS if name != "long" or case.startswith("qwen3_5"))


class Pixels(NamedTuple):
    """A picture of random pixels, as the arguments of `types.picture.Picture` without the digest."""

    patches: bytes
    grid: tuple[int, int, int]
    start: int
    num_tokens: int


def prompt(name: str) -> tuple[list[int], tuple[Pixels, ...]]:
    """Return the token ids of a prompt, and its pictures."""
    rng = np.random.default_rng(list(PROMPTS).index(name))
    grids, texts = PROMPTS[name]
    ids: list[int] = rng.integers(3, 58, texts[0]).tolist()
    pictures = []
    for (rows, columns), count in zip(grids, texts[1:], strict=True):
        pictures.append(picture(rng, rows, columns, len(ids) + 1))
        ids += [START, *[PAD] * pictures[-1].num_tokens, END, *rng.integers(3, 58, count).tolist()]
    return ids, tuple(pictures)


def picture(rng: np.random.Generator, rows: int, columns: int, start: int) -> Pixels:
    """Return a picture of random pixels at a position."""
    width = 3 * VISION["patch_size"] ** 2
    patches = rng.integers(0, 256, (rows * columns, width), np.uint8).tobytes()
    return Pixels(patches, (1, rows, columns), start, rows * columns // MERGE**2)
