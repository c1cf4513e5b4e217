"""config.json and generation_config.json as they are published, and as they are broken."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.config import GenerationDefaults
from jaxserve.models.rope import Llama3Scaling, LongRopeScaling
from jaxserve.runtime.runner_config import context_length
from tests.models.checkpoints import TINY_LLAMA
from tests.models.families import CASES, ENCODERS


def published(shared_data: Path, name: str) -> dict[str, Any]:
    return json.loads((shared_data / "hf_configs" / f"{name}_config.json").read_text())


def test_llama_3_1(shared_data: Path) -> None:
    config = from_hf(published(shared_data, "meta-llama--Meta-Llama-3.1-8B"))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert config.rope.theta == 500000.0
    assert config.rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    assert not config.qkv_bias and not config.tie_word_embeddings and config.dtype == "bfloat16"


def test_qwen2_has_biases_that_its_config_does_not_mention(shared_data: Path) -> None:
    config = from_hf(published(shared_data, "executorch--Qwen2.5-0.5B-Instruct"))
    assert config.qkv_bias and not config.out_bias
    assert config.windows == (None,) * config.num_layers


def test_qwen3_heads_are_wider_than_hidden_over_heads(shared_data: Path) -> None:
    config = from_hf(published(shared_data, "Qwen--Qwen3-0.6B"))
    assert config.head_dim == config.rope.rotary_dim == 128 and config.qk_norm == "head"


def test_longrope_follows_the_served_context() -> None:
    scaling = {"type": "longrope", "short_factor": [1.0, 1.0], "long_factor": [2.0, 3.0]}
    hf = TINY_LLAMA | {"rope_scaling": scaling, "original_max_position_embeddings": 32}
    config = from_hf(hf)
    assert isinstance(config.rope.scaling, LongRopeScaling) and config.rope.scaling.long
    shorter = config.for_context(32).rope.scaling
    assert isinstance(shorter, LongRopeScaling) and not shorter.long
    assert from_hf(TINY_LLAMA).for_context(8) == from_hf(TINY_LLAMA)


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([1, 106], (1, 106)), (None, (7,))])
def test_eos_is_an_id_or_a_list_and_the_generation_config_wins(eos: Any, expected: tuple[int, ...]) -> None:
    assert from_hf(TINY_LLAMA | {"eos_token_id": 7}, {"eos_token_id": eos}).eos_token_ids == expected


def test_generation_defaults() -> None:
    given = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    expected = GenerationDefaults(temperature=0.6, top_k=20, top_p=0.95)
    assert from_hf(TINY_LLAMA, given).generation == expected
    assert from_hf(TINY_LLAMA, given | {"do_sample": False}).generation == GenerationDefaults()
    greedy = given | {"do_sample": False, "repetition_penalty": 1.1}
    assert from_hf(TINY_LLAMA, greedy).generation == GenerationDefaults(repetition_penalty=1.1)


def test_newer_rope_parameters_mean_the_same() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 32}  # fmt: skip
    old = from_hf(TINY_LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})
    assert from_hf(TINY_LLAMA | {"rope_parameters": scaling | {"rope_theta": 5e5}}) == old


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"hidden_size": "16"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "4 attention heads are no multiple of 3"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"rope_scaling": {"type": "spiral", "factor": 2.0}}, "spiral"),
        ({"vocab_size": 0}, "'vocab_size' must be an integer from 1"),
        ({"num_attention_heads": 0}, "'num_attention_heads' must be"),
        ({"architectures": None}, "architectures"),
        ({"quantization_config": "gptq"}, "'quantization_config' must be an object, not 'gptq'"),
        ({"quantization_config": [1]}, "'quantization_config' must be an object"),
        ({"eos_token_id": 2**31 - 1}, "'eos_token_id' must be a token id up to"),
    ],
)
def test_a_wrong_value_is_named(change: dict[str, Any], cause: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA | change))
    with pytest.raises(ModelLoadError, match=cause) as caught:
        read_config(tmp_path)
    assert "config.json" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "other.json"])
def test_what_is_no_regular_file_is_not_opened(name: str, tmp_path: Path) -> None:
    """A FIFO would be waited for, and /dev/zero has no end: `jaxserve plan FILE` reads a file by any name."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelLoadError, match="is no regular file"):
        read_config(ModelFiles.of_config(tmp_path / name))
    (tmp_path / "link.json").symlink_to("/dev/zero")
    with pytest.raises(ModelLoadError, match="is no regular file"):
        read_config(ModelFiles.of_config(tmp_path / "link.json"))


def test_token_ids_of_the_generation_config_have_the_same_range(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 2**31 - 1]}))
    with pytest.raises(ModelLoadError, match=r"generation_config\.json: 'eos_token_id' must be"):
        read_config(tmp_path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in TINY_LLAMA.items() if k != "hidden_size"}))
    with pytest.raises(ModelLoadError, match="'hidden_size' is missing"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", [None, "", "[1]", "{", "\x00"])
def test_no_config_or_no_json(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_config(tmp_path)


FLOATING: dict[str, dict[str, Any]] = {
    "llama": TINY_LLAMA | {"head_dim": 4, "bos_token_id": 1, "eos_token_id": [2, 3]},
    **{name: CASES[name] for name in ("llama3", "qwen2_window", "qwen3_moe", "gemma3", "phi4_mini_long", "olmo3")},
    **{name: CASES[name] for name in ("smollm3", "gpt_oss", "deepseek_v3", "mixtral")},
    "bert": ENCODERS["bert"],
    "block fp8": TINY_LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "gptq": TINY_LLAMA | {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}},
    "awq": TINY_LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
    "compressed": TINY_LLAMA
    | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "a": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
                }
            },
        }
    },
}


def floated(value: Any) -> Any:
    """Every integer of a JSON value as some tools write it: 8.0."""
    if isinstance(value, dict):
        return {key: floated(each) for key, each in value.items()}
    if isinstance(value, list):
        return [floated(each) for each in value]
    return float(value) if type(value) is int else value


@pytest.mark.parametrize("name", FLOATING)
def test_integers_with_a_point_are_read(name: str, tmp_path: Path) -> None:
    hf, generation = FLOATING[name], {"eos_token_id": [2, 5], "bos_token_id": 1, "top_k": 20, "temperature": 1}
    read = from_hf(floated(hf), floated(generation))
    assert read == from_hf(hf, generation) and repr(read) == repr(from_hf(hf, generation))
    (tmp_path / "config.json").write_text(json.dumps(floated(hf)))
    assert read_config(tmp_path) == from_hf(hf)


@pytest.mark.parametrize("key", ["max_position_embeddings", "num_hidden_layers", "eos_token_id"])
@pytest.mark.parametrize("value", [32.5, float("inf"), float("nan"), 1e300, True, "32"])
def test_what_is_no_integer_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        from_hf(TINY_LLAMA | {key: value})


def test_yarn_allows_the_context_of_its_factor() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    qwen = CASES["qwen3"] | {"max_position_embeddings": 40960}
    plain, scaled = from_hf(qwen), from_hf(qwen | {"rope_scaling": scaling})
    newer = from_hf(qwen | {"rope_parameters": scaling | {"rope_theta": 1e6}})
    for model in (scaled, newer):
        assert [context_length(asked, model) for asked in (None, 131072, 50000)] == [40960, 131072, 50000]
    with pytest.raises(ConfigError, match="131073, and the model was made for 131072 tokens"):
        context_length(131073, scaled)
    with pytest.raises(ConfigError, match="40961, and the model was made for 40960 tokens") as caught:
        context_length(40961, plain)
    assert "rope_scaling" in str(caught.value.fix)
    own = from_hf(qwen | {"rope_scaling": {"type": "yarn", "factor": 2.0}})  # the original is the model's own
    assert context_length(81920, own) == 81920
    linear = from_hf(qwen | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    with pytest.raises(ConfigError, match="made for 40960"):
        context_length(81920, linear)


def test_gemma4_heads_of_newer_files() -> None:
    published = CASES["gemma4_moe"]
    text = {key: value for key, value in published["text_config"].items() if "global" not in key}

    def with_heads(by_layer: dict[str, Any]) -> dict[str, Any]:
        return published | {"text_config": text | {"per_layer_config": by_layer}}

    full = {"head_dim": 24, "num_key_value_heads": 2}
    assert from_hf(with_heads({"01": full, "03": full})) == from_hf(published)
    for other in ({"00": full}, {"01": full, "03": {"head_dim": 16}}, {"01": {"scale": 1}, "03": {"scale": 1}}):
        with pytest.raises(ValueError, match="per_layer_config"):
            from_hf(with_heads(other))
