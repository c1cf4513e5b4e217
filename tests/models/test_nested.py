"""A language model inside an architecture that also takes pictures: its configuration and its tensors' names."""

import logging
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import inspect, load_model
from jaxserve.models.checkpoint.weight_sources import source_of
from jaxserve.text.tokenizer import Tokenizer
from tests.models.checkpoints import TINY_LLAMA, random_tensors, train_tokenizer, write_checkpoint

FLOAT32 = jnp.dtype("float32")
TEXT = TINY_LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "eos_token_id": 5}
TENSORS = random_tensors(TEXT)
TOWERS = {"vision_tower.patch_conv.weight": np.ones((4, 4), np.float32), "multi_modal_projector.norm": np.ones(4, "f4")}


def nested(**outside: Any) -> dict[str, Any]:
    inside = {key: value for key, value in TEXT.items() if key not in ("architectures", "tie_word_embeddings")}
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": inside,
        "vision_config": {"hidden_size": 4, "num_hidden_layers": 1},
        "tie_word_embeddings": False,
        **outside,
    }


def hub(name: str) -> str:
    return f"language_model.{name}"


def transformers(name: str) -> str:
    return name.replace("model.", "model.language_model.", 1)


@pytest.mark.parametrize("named", [hub, transformers])
def test_a_nested_model_is_the_one_inside(named: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    inside = write_checkpoint(tmp_path / "inside", TEXT, TENSORS)
    outside = {named(name): tensor for name, tensor in TENSORS.items()} | TOWERS
    directory = write_checkpoint(tmp_path / "outside", nested(), outside)
    caplog.set_level(logging.INFO, "jaxserve.models.checkpoint.loader")
    found, expected = (load_model(each, dtype=FLOAT32) for each in (directory, inside))
    assert found.config.replace(ignored_tensors=(), tensor_names=()) == expected.config
    for ours, theirs in zip(found.leaves, expected.leaves, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    [line] = [record.getMessage() for record in caplog.records]
    assert line.endswith("not used: multi_modal_projector. (1 tensors), vision_tower. (1 tensors)")
    update = source_of(outside, found.structure)  # new weights have the published names too
    assert update.parameters == {spec.name for spec in found.structure.specs}


def test_an_unknown_tensor_and_one_by_two_names_are_refused(tmp_path: Path) -> None:
    outside = {hub(name): tensor for name, tensor in TENSORS.items()}
    more = {"language_model.model.extra": TENSORS["model.norm.weight"], "model.norm.weight": np.zeros(16, np.float32)}
    directory = write_checkpoint(tmp_path, nested(), outside | more)
    with pytest.raises(ModelLoadError, match=r"unknown: model.extra; in more than one place: model.norm.weight"):
        inspect(directory, dtype=FLOAT32, config=read_config(directory))


def test_what_stands_beside_the_text_counts_if_it_says_nothing() -> None:
    assert from_hf(nested(eos_token_id=7, dtype="bfloat16")).eos_token_ids == (5,)
    assert from_hf(nested(eos_token_id=7, dtype="bfloat16")).dtype == "bfloat16"
    assert from_hf(nested(tie_word_embeddings=True)).tie_word_embeddings
    assert from_hf(nested(hidden_act="gelu")).activation == "silu"  # of the projector


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"text_config": [1]}, "'text_config' must be an object"),
        ({"text_config": {"model_type": "other"}}, "'model_type' of 'text_config' is 'other'"),
    ],
)
def test_another_model_inside_is_refused(change: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        from_hf(nested(**change))


def test_lists_of_unquantized_modules_have_published_names() -> None:
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "num_bits": 4,
                                      "strategy": "group", "group_size": 32}}},
        "ignore": ["language_model.lm_head", "re:language_model\\.model\\.layers\\.0\\..*"],
    }  # fmt: skip
    text = nested()["text_config"] | {"quantization_config": quantization}
    form = from_hf(nested(text_config=text)).stored_form
    assert form is not None
    wide = [
        name for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj") if form.is_wide(name)
    ]
    assert wide == ["lm_head", "model.layers.0.mlp.up_proj"]


def test_the_end_of_a_text_is_in_the_nested_configuration(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, nested(), {})
    train_tokenizer("bytes").save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text("{}")
    assert Tokenizer.from_directory(directory).eos_token_ids == (5,)
