"""GGUF files of the format's own package: their numbers, codes, configuration and tokens."""

from __future__ import annotations

import os
from importlib.resources import files
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.api.sglang.weights import checked_directory
from jaxserve.cli import doctor_devices
from jaxserve.config import Config
from jaxserve.engine.factory import build_engine, served_names
from jaxserve.errors import ConfigError, InvalidValueError, ModelLoadError
from jaxserve.library.dense import dense_logits
from jaxserve.model_files import check_local_model, gguf_parts
from jaxserve.models.checkpoint import gguf_models, loader
from jaxserve.models.checkpoint.chosen_form import choose_quantization
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.gguf_models import published_tensors
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.hub import resolve
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.published_size import published_size
from jaxserve.models.checkpoint.structure import build
from jaxserve.models.checkpoint.weight_sources import directory_source, source_of
from jaxserve.models.rope import LinearScaling, Llama3Scaling, RopeConfig, Scaling, YarnScaling, inverse_frequencies
from jaxserve.models.tensor_names import published_names
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.page_file import fingerprint
from tests.conftest import ONE_ROW
from tests.models import paged
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.families import CASES, STATE_CASES
from tests.models.gguf_files import Tensors, write_gguf
from tests.models.test_quantization import assert_equal_models
from tests.models.test_quantize_at_load import load, widened

FLOAT32 = jnp.dtype("float32")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = TINY_LLAMA | SIZES
MODELS = {
    "llama": LLAMA,
    "llama of blocks": LLAMA | {"hidden_size": 256, "intermediate_size": 256},
    "qwen2": CASES["qwen2"] | SIZES,
    "qwen3": CASES["qwen3"] | SIZES,
    "lfm2": STATE_CASES["lfm2"]
    | SIZES
    | {"norm_eps": 2e-4, "conv_L_cache": 4, "block_ff_dim": 144, "block_ffn_dim_multiplier": 1.0},
    "lfm2 of blocks": STATE_CASES["lfm2"]
    | SIZES
    | {"hidden_size": 256, "intermediate_size": 256, "block_ff_dim": 384, "block_ffn_dim_multiplier": 1.0},
}
# What a file does not say: dt has no limits, and experts have no scale. Falcon-H1's scales are in its weights, and its
# norm comes last.
_UNSAID = {
    **dict.fromkeys(("time_step_limit", "ssm_multipliers", "mlp_multipliers")),
    **dict.fromkeys(("key_multiplier", "embedding_multiplier", "lm_head_multiplier"), 1.0),
    **{f"{name}_multiplier": 1.0 for name in ("attention_in", "attention_out", "ssm_in", "ssm_out")},
    "mamba_norm_before_gate": False,
}
# of whole blocks
_WIDTHS = {"intermediate_size": 64, "moe_latent_size": 32} | dict.fromkeys(
    ("moe_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size"), 32
)
_WIDTHS["shared_expert_intermediate_size"] = 32


def with_states(name: str, **changes: Any) -> dict[str, Any]:
    hf = STATE_CASES[name]
    unsaid = {} if name == "granite4" else _UNSAID  # Granite's scales are in the file
    changes = {key: value for key, value in {**_WIDTHS, **unsaid}.items() if key in hf} | changes
    return hf | changes | ({"time_step_limit": None} if "time_step_limit" in hf else {})


STATES = {
    **{name: with_states(name) for name in ("qwen3_5", "qwen3_5_moe", "granite4", "bamba", "nemotron_h", "falcon_h1")},
    "qwen3_next": with_states("qwen3_next", mlp_only_layers=[]),
    "qwen3_moe": CASES["qwen3_moe"] | {"moe_intermediate_size": 32, "mlp_only_layers": []},
    "lfm2_moe": with_states("lfm2_moe", routed_scaling_factor=1.0),
    "granite_dense": with_states("granite4", num_local_experts=0),
    "nemotron_dense": with_states("nemotron_h", hybrid_override_pattern="M-M*-M"),
    "falcon_h1_norm": with_states("falcon_h1_norm"),
    "qwen3_5 of blocks": with_states(
        "qwen3_5", hidden_size=256, intermediate_size=256, num_attention_heads=16, linear_num_value_heads=8
    ),
}
MODELS |= STATES
PLAIN = [("llama", kind) for kind in ("F32", "F16", "BF16")] + [("qwen2", "F32"), ("qwen3", "F16")]
PLAIN += [("lfm2", "F16")]
KEPT = [(name, kind) for name in ("llama", "qwen2", "qwen3") for kind in ("Q8_0", "Q4_0")]
KEPT += [("llama", "Q5_0"), ("llama of blocks", "Q6_K"), ("lfm2", "Q4_0")]
WITH_MINIMA = [("llama", "Q4_1"), ("llama", "Q5_1"), ("llama of blocks", "Q4_K"), ("llama of blocks", "Q5_K")]
WITH_MINIMA += [("lfm2 of blocks", "Q4_K")]
# As llama.cpp mixes Q4_K_M: the values and the last matrix of half of the layers, and the head, have more bits.
Q4_K_M = {"blk.0.attn_v": "Q6_K", "blk.0.ffn_down": "Q6_K", "output": "Q6_K"}


def written(directory: Path, name: str, kind: str, **others: str) -> tuple[Path, Path]:
    """(A GGUF file, a published checkpoint of the same numbers)."""
    hf = MODELS[name]
    (directory / "gguf").mkdir(parents=True)
    file = directory / "gguf" / "model.gguf"
    decoded = write_gguf(file, hf, published(hf), kind, **others)
    return file, write_checkpoint(directory / "plain", hf, decoded)


def published(hf: dict[str, Any]) -> Tensors:
    """Random tensors by the names of the published checkpoint."""
    rules, tensors = from_hf(hf).tensor_names, random_tensors(hf)
    parts = {name: name.rpartition(".") for name in tensors}
    return {f"{published_names(parts[name][0], rules)[-1]}.{parts[name][2]}": each for name, each in tensors.items()}


@pytest.mark.parametrize(("name", "kind"), PLAIN)
def test_numbers(name: str, kind: str, tmp_path: Path) -> None:
    file, plain = written(tmp_path, name, kind)
    got, expected = load(file, "none"), load(plain, "none")
    assert got.config.stored_form is None
    assert got.config.dtype == {"F32": "float32", "F16": "float16"}.get(kind, "bfloat16")
    assert_equal_models(got, expected)
    assert paged.greedy(got, PROMPT, 12, 8) == paged.greedy(expected, PROMPT, 12, 8)


@pytest.mark.parametrize("name", STATES)
def test_hybrid_models_and_experts(name: str, tmp_path: Path) -> None:
    """Their configuration is the published one, and so are the numbers, whatever the converter did with them."""
    file, plain = written(tmp_path, name, "F32")
    got, expected = load(file, "none"), load(plain, "none")
    assert_equal_models(got, expected)
    same = expected.config.replace(
        norm_eps=got.config.norm_eps,  # float32 in the file
        predictor=None,  # no head of predicted tokens is read from a file
        packed_experts="none",
        packed_gate_up=False,
        delta_tensors="gates_joined" if name == "qwen3_next" else expected.config.delta_tensors,
    )
    assert got.config.norm_eps == pytest.approx(expected.config.norm_eps)
    assert got.config == same


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3_5", "Q8_0"),
        ("qwen3_5 of blocks", "Q4_K"),
        ("qwen3_5_moe", "Q4_0"),
        ("granite4", "Q8_0"),
        ("nemotron_h", "Q4_0"),
    ],
)
def test_codes_of_hybrid_models_and_experts(name: str, kind: str, tmp_path: Path) -> None:
    """Columns of value heads and single experts are quantized values at their published places."""
    file, plain = written(tmp_path, name, kind)
    kept, expected = load(file, "stored"), load(plain, "none")
    held = {spec.name for spec in kept.structure.specs if spec.packing is not None and spec.packing.role == "values"}
    ends = {"o_proj", "out_proj", "down_proj"} | ({"experts.down_proj"} if kept.config.moe else set())
    assert all(any(name.endswith(f"{end}.weight.values") for name in held) for end in ends), held
    close = assert_close_models if kind == "Q4_K" else assert_equal_models
    close(widened(kept), expected)


@pytest.mark.full
def test_an_answer_of_codes_with_experts_and_states(tmp_path: Path) -> None:
    file, plain = written(tmp_path, "qwen3_5_moe", "Q8_0")
    kept, expected = load(file, "stored"), load(plain, "none")
    assert paged.greedy(kept, PROMPT, 12, 8) == paged.greedy(expected, PROMPT, 12, 8)


@pytest.mark.parametrize(("name", "kind"), KEPT)
def test_codes(name: str, kind: str, tmp_path: Path) -> None:
    file, plain = written(tmp_path, name, kind)
    kept, expected = load(file, "stored"), load(plain, "none")
    held = [spec for spec in kept.structure.specs if spec.packing is not None and spec.packing.role == "values"]
    tied, convolutions = kept.config.tie_word_embeddings, sum(map(bool, kept.config.layer_states))
    assert len(held) == 4 * kept.config.num_layers + (not tied) - convolutions, "a convolution's in_proj is not held"
    assert {spec.dtype for spec in held} == {jnp.dtype("uint8" if kind == "Q4_0" else "int8")}
    assert_equal_models(widened(kept), expected)
    assert_equal_models(load(file, "none"), expected)
    assert paged.greedy(kept, PROMPT, 12, 8) == paged.greedy(expected, PROMPT, 12, 8)


def assert_close_models(got: LoadedModel, expected: LoadedModel) -> None:
    """A number differs by less than 1e-6 of the largest of its weight."""
    for spec, a, b in zip(got.structure.specs, got.leaves, expected.leaves, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6 * np.abs(b).max(), err_msg=spec.name)


@pytest.mark.parametrize(("name", "kind"), WITH_MINIMA)
def test_types_with_minima(name: str, kind: str, tmp_path: Path) -> None:
    """Their numbers are scale * value - minimum, and those of the held form scale * (value - zero)."""
    file, plain = written(tmp_path, name, kind)
    kept, expected = load(file, "stored"), load(plain, "none")
    found = {(jnp.dtype(spec.dtype).name, spec.packing.role) for spec in kept.structure.specs if spec.packing}
    values = "uint8" if kind.startswith("Q4") else "int8"
    assert found == {(values, "values"), ("float32", "scales"), ("float32", "zeros")}
    assert_close_models(widened(kept), expected)
    assert_equal_models(load(file, "none"), expected)


def packings(model: LoadedModel) -> dict[str, tuple[str, int, bool]]:
    """How each quantized weight is held: kind, group, and whether it has zeros."""
    found = ((spec.wide().name, spec.packing) for spec in model.structure.specs)
    return {name: (packing.kind, packing.group, packing.zeros) for name, packing in found if packing is not None}


def test_a_mixture_of_types(tmp_path: Path) -> None:
    file, plain = written(tmp_path, "llama of blocks", "Q4_K", **Q4_K_M)
    kept, expected = load(file, "stored"), load(plain, "none")
    four, six = ("int4", 32, True), ("int8", 16, False)
    names = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    held = {f"model.layers.{layer}.{name}.weight": four for layer in (0, 1) for name in names}
    held |= {"model.layers.0.self_attn.qkv_proj.weight": ("int8", 16, True)}  # q and k as v
    held |= {"model.layers.0.mlp.down_proj.weight": six, "lm_head.weight": six}
    assert packings(kept) == held
    assert_close_models(widened(kept), expected)
    assert_equal_models(load(file, "none"), expected)
    tokens = jnp.asarray(PROMPT, jnp.int32)
    got, want = (np.asarray(dense_logits(model.structure, model.leaves, tokens)) for model in (kept, expected))
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    assert paged.greedy(kept, PROMPT, 12, 8) == paged.greedy(expected, PROMPT, 12, 8)
    sizes = published_size(kept.structure)
    assert sizes.form == "Q4_K and Q6_K of GGUF"
    assert kept.structure.num_bytes == sum(leaf.nbytes for leaf in kept.leaves)
    of_file = [int(tensor.n_bytes) for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) == 2]
    assert sizes.num_bytes == 5 * 256 * 2 + sum(of_file)


@pytest.mark.parametrize("others", [{"attn_v": "Q8_0"}, {"attn_v": "Q4_1"}, {"attn_k": "Q5_0", "ffn_up": "Q5_1"}])
def test_a_fused_weight_of_several_types(
    others: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with copies of kv heads, as for devices that share one, and a few rows at a time."""
    file, plain = written(tmp_path, "llama", "Q4_0", **others)
    assert_close_models(widened(load(file, "stored")), load(plain, "none"))
    monkeypatch.setattr(loader, "PIECE", 3 * 64)
    config = read_config(file).for_tensor(4)
    assert config.kv_repeat == 2
    got = load_model(file, dtype=FLOAT32, config=config.replace(quantization="stored"))
    assert_close_models(widened(got), load_model(plain, dtype=FLOAT32, config=config.replace(stored_form=None)))


def test_what_is_not_held_is_refused_by_name(tmp_path: Path) -> None:
    file, plain = written(tmp_path, "llama of blocks", "Q3_K", attn_v="Q5_K")
    config = read_config(file)
    assert choose_quantization("auto", config, ModelFiles.open(file)) == "stored"
    with pytest.raises(ModelLoadError, match="weights of GGUF's type Q3_K do not stay quantized") as error:
        load(file, "stored")
    assert error.value.fix == "set model.quantization: none"
    assert_equal_models(load(file, choose_quantization("none", config, ModelFiles.open(file))), load(plain, "none"))
    assert choose_quantization("int8", config, ModelFiles.open(file)) == "int8"
    demo = str(files("jaxserve") / "assets" / "demo")
    asked = Config.parse({"model": {"path": str(file), "tokenizer": demo, "quantization": "none"}})
    assert {finding.state for finding in doctor_devices._model(asked, None)} == {"ok"}
    file, _ = written(tmp_path / "kept", "llama", "Q4_0", attn_v="Q8_0")
    with pytest.raises(ConfigError, match="has Q4_0 and Q8_0 of GGUF already"):
        choose_quantization("int8", read_config(file), ModelFiles.open(file))
    file, _ = written(tmp_path / "partly", "llama", "Q4_0", attn_v="F16")
    with pytest.raises(ModelLoadError, match=r"q_proj is quantized and .*v_proj is not"):
        load(file, "stored")


def test_new_weights_must_have_the_same_types(tmp_path: Path) -> None:
    file, plain = written(tmp_path, "llama", "Q8_0")
    structure = load(file, "stored").structure
    other, _ = written(tmp_path / "other", "llama", "Q4_0")
    with pytest.raises(ModelLoadError, match="stored_form differ"):
        directory_source(other, structure, ModelFiles.open(file))
    with pytest.raises(ModelLoadError, match=r"lm_head.weight is float32, expected Q8_0 of GGUF"):
        source_of(load_file(plain / "model.safetensors"), structure)


def test_the_configuration(tmp_path: Path) -> None:
    for name in ("llama", "qwen2", "qwen3", "lfm2"):
        file, plain = written(tmp_path / name, name, "F32")
        got, expected = read_config(file), read_config(plain)
        assert got.eos_token_ids == (2,)
        assert got.bos_token_id == 1
        same = expected.replace(eos_token_ids=(2,), bos_token_id=1, norm_eps=got.norm_eps)
        assert got == same
        assert np.float32(got.norm_eps) == np.float32(expected.norm_eps)


def test_the_rotation_of_llama_3(tmp_path: Path) -> None:
    rope = RopeConfig(16, 10000.0, Llama3Scaling(8.0, 1.0, 4.0, 32))
    expected, _ = inverse_frequencies(rope)
    plain, _ = inverse_frequencies(RopeConfig(16, 10000.0))
    factors = (plain / expected).astype(np.float32)
    assert factors.min() == 1 < factors.max()
    file = with_tensors(tmp_path, {"rope_freqs.weight": factors})
    for config in (read_config(file), read_config(file).for_context(32)):
        got, attention = inverse_frequencies(config.rope)
        np.testing.assert_allclose(got, expected, rtol=1e-6)
        assert attention == 1


def with_tensors(directory: Path, tensors: Tensors, architecture: str = "llama", **values: Any) -> Path:
    """A header of a model, without most of its tensors."""
    path = directory / "few.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {"embedding_length": 64, "block_count": 2, "feed_forward_length": 96, "attention.head_count": 4}
    for key, value in (sizes | {"context_length": 64, "attention.layer_norm_rms_epsilon": 1e-5} | values).items():
        if value is None:
            continue
        if key.startswith("tokenizer."):
            writer.add_uint32(key, int(value))
        elif isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, bool):
            writer.add_bool(f"{architecture}.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", int(value))
    for name, array in (tensors | {"token_embd.weight": np.zeros((32, 64), np.float32)}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"expert_count": 8}, "values that are not supported: expert_count"),
        ({"attention.sliding_window": 32}, r"not supported: attention\.sliding_window"),
        ({"rope.dimension_count": 8}, "partly rotated heads"),
        ({"rope.scaling.type": "longrope"}, "rope scaling 'longrope' of GGUF is not supported"),
        ({"rope.scaling.type": "default"}, "rope scaling 'default' of GGUF is not supported"),
        ({"attention.causal": False}, r"attention to later tokens \(attention.causal\)"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention.head_count": 0}, "heads of"),
        ({"attention.head_count": "many"}, "heads of"),
        ({"block_count": 10**9}, "'num_hidden_layers' must be an integer"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_config(with_tensors(tmp_path, {}, **values))


SHORT: dict[str, Any] = {"block_count": 3, "attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention.head_count_kv": [0, 2]}, "head_count_kv must have 0 or one number for each of 3 layers"),
        ({"attention.head_count_kv": [0, 2, 0, 2]}, "head_count_kv must have 0 or one number for each of 3 layers"),
        ({"attention.head_count_kv": [0, 2, 4]}, "head_count_kv must have 0 or one number for each of 3 layers"),
        ({"attention.head_count_kv": [0, 0, 0]}, "head_count_kv must have 0 or one number for each of 3 layers"),
        ({"attention.head_count_kv": [0, -2, 0]}, "num_key_value_heads"),
        ({"attention.head_count_kv": 0}, "num_key_value_heads"),
        (
            {"attention.head_count_kv": ["no", "yes"], "block_count": 2},
            "0 or one number for each of 2 layers",
        ),
        ({"attention.head_count": [4, 8, 4]}, "heads of"),
        ({"shortconv.l_cache": None}, r"shortconv\.l_cache is missing"),
        ({"shortconv.l_cache": 0}, "conv_L_cache"),
        ({"shortconv.l_cache": 2**31}, "conv_L_cache"),
        ({"shortconv.l_cache": "three"}, "conv_L_cache"),
        ({"shortconv.l_cache": [3, 3, 3]}, "conv_L_cache"),
        ({"attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon is missing"),
        ({"attention.sliding_window": 32}, r"not supported: attention\.sliding_window"),
        ({"expert_count": 8}, "not supported: expert_count"),
    ],
)
def test_a_wrong_lfm2_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert read_config(with_tensors(tmp_path, {}, "lfm2", **SHORT)).num_layers == 3
    with pytest.raises(ModelLoadError, match=message) as error:
        read_config(with_tensors(tmp_path, {}, "lfm2", **SHORT | values))
    assert "\n" not in str(error.value)


DELTA: dict[str, Any] = {
    "attention.key_length": 16,
    "rope.dimension_count": 4,
    "full_attention_interval": 3,
    "block_count": 3,
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ssm.group_count": None}, r"ssm\.group_count is missing"),
        ({"ssm.group_count": 3}, "4 value heads are no multiple of 3 key heads"),
        ({"ssm.time_step_rank": 0}, r"'ssm\.time_step_rank' must be a positive integer"),
        ({"ssm.time_step_rank": 3}, r"'ssm\.inner_size' 64 is no multiple of 'ssm\.time_step_rank' 3"),
        ({"ssm.inner_size": "wide"}, r"'ssm\.inner_size' must be a positive integer, not 'wide'"),
        ({"ssm.state_size": [16, 8, 16]}, r"'ssm\.state_size' must be a positive integer, not 'an array of 3'"),
        ({"rope.dimension_count": 0}, r"'rope\.dimension_count' must be a positive integer"),
        ({"attention.recurrent_layers": [True, False]}, "recurrent_layers must have 0 or one number for each of 3"),
        ({"block_count": 0}, r"'block_count' must be a positive integer"),
        ({"nextn_predict_layers": 3}, "num_hidden_layers"),
        ({"expert_count": 8}, "not supported: expert_count"),
    ],
)
def test_a_wrong_qwen3_5_is_refused_by_name(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert read_config(with_tensors(tmp_path, {}, "qwen35", **DELTA)).num_layers == 3
    with pytest.raises(ModelLoadError, match=message) as error:
        read_config(with_tensors(tmp_path, {}, "qwen35", **DELTA | values))
    assert "\n" not in str(error.value)


def test_too_many_experts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = written(tmp_path, "qwen3_moe", "F32")
    monkeypatch.setattr(gguf_models, "_MAX_TENSORS", 20)
    with pytest.raises(ModelLoadError, match="more than 20 tensors, each expert's counted"):
        read_config(file)
    monkeypatch.setattr(gguf_models, "_MAX_EXPERTS", 7)
    monkeypatch.setattr(gguf_models, "_MAX_TENSORS", 2**20)
    with pytest.raises(ModelLoadError, match="81 tensors do not fit"):
        load(file, "none")


def test_heads_of_predicted_tokens_are_left_out(tmp_path: Path) -> None:
    norm = {f"blk.{i}.attn_norm.weight": np.ones(64, np.float32) for i in range(3)}
    file = with_tensors(tmp_path, norm, "qwen35", **DELTA | {"full_attention_interval": 2, "nextn_predict_layers": 1})
    assert read_config(file).num_layers == 2
    found = [name for name in published_tensors(file) if "norm" in name]
    assert found == [*(f"model.layers.{i}.input_layernorm.weight" for i in range(2)), "mtp.blk.2.attn_norm.weight"]


def test_what_other_architectures_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="'kimi-linear' of GGUF is not supported"):
        read_config(with_tensors(tmp_path, {}, "kimi-linear", **SHORT))
    with pytest.raises(ModelLoadError, match=r"not supported: shortconv\.l_cache"):
        read_config(with_tensors(tmp_path, {}, "llama", **{"shortconv.l_cache": 3}))


def test_an_lfm2_of_attention_alone(tmp_path: Path) -> None:
    for heads in (2, [2, 2, 2]):
        config = read_config(with_tensors(tmp_path, {}, "lfm2", **SHORT | {"attention.head_count_kv": heads}))
        assert (config.layer_states, config.num_kv_heads) == ((None, None, None), 2)


def test_an_lfm2_of_ollama(tmp_path: Path) -> None:
    """Its final norm has another name, and its width is the one of config.json from which the model's is computed."""
    norm, gate = np.arange(64, dtype=np.float32), np.zeros((96, 64), np.float32)
    tensors = {"output_norm.weight": norm, "blk.0.ffn_gate.weight": gate}
    file = with_tensors(tmp_path, tensors, "lfm2", **SHORT | {"feed_forward_length": 144})
    assert read_config(file).intermediate_size == 96
    assert "model.norm.weight" in published_tensors(file)
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight twice"):
        published_tensors(with_tensors(tmp_path, tensors | {"token_embd_norm.weight": norm}, "lfm2", **SHORT))


def test_a_file_with_a_tower_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"a tower for pictures and no language model \(mmproj\)") as error:
        read_config(with_tensors(tmp_path, {}, "clip"))
    assert error.value.fix is not None and "safetensors" in error.value.fix


@pytest.mark.parametrize(
    "values",
    [
        {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2], "feed_forward_length": [96, 96]},
        {"attention.scale": 0.25, "rope.scaling.attn_factor": 1.0, "logit_scale": 1.0, "residual_scale": 1.0},
        {"attention.sliding_window": 64, "attention.max_alibi_bias": 0.0},
        {"attention.sliding_window": [64, 64], "rope.dimension_count": [16, 16]},
        {"expert_count": 0, "expert_used_count": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5},
        {"tensor_data_layout": "Meta AI original pth", "use_parallel_residual": False, "embedding_scale": 1.0},
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_values_that_change_nothing_are_accepted(architecture: str, values: dict[str, Any], tmp_path: Path) -> None:
    heads = {"attention.head_count_kv": 2}
    plain = read_config(with_tensors(tmp_path, {}, architecture, **heads))
    assert read_config(with_tensors(tmp_path, {}, architecture, **heads | values)) == plain


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"attention.head_count_kv": [2, 4]}, "num_key_value_heads"),
        ({"feed_forward_length": [96, 64]}, "intermediate_size"),
        ({"attention.scale": 0.5}, r"not supported: attention\.scale"),
        ({"logit_scale": 0.5}, "not supported: logit_scale"),
        ({"rope.scaling.attn_factor": 0.5}, r"not supported: rope\.scaling\.attn_factor"),
        ({"attention.sliding_window": [32, 64]}, r"not supported: attention\.sliding_window"),
    ],
)
def test_values_that_change_the_numbers_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=message):
        read_config(with_tensors(tmp_path, {}, **values))


FOUR: dict[str, Any] = {"rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 16}


@pytest.mark.parametrize(
    ("values", "scaling"),
    [
        ({"attention.causal": True}, None),
        (FOUR, LinearScaling(4.0)),
        (FOUR | {"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear"}, None),
        ({"rope.scaling.factor": 0.0}, None),
        (YARN, YarnScaling(1.0, 16)),
        (YARN | {"rope.scaling.yarn_beta_fast": 8.0}, YarnScaling(1.0, 16, beta_fast=8.0)),
    ],
)
def test_a_rotation_means_what_it_does_in_llama_cpp(
    values: dict[str, Any], scaling: Scaling | None, tmp_path: Path
) -> None:
    """A file without a type has the type linear, and one without a factor the factor 1."""
    assert read_config(with_tensors(tmp_path, {}, **values)).rope == RopeConfig(16, 10000.0, scaling)


def test_two_scalings_of_a_rotation_are_refused(tmp_path: Path) -> None:
    divisors = {"rope_freqs.weight": np.ones(8, np.float32)}
    for number, values in enumerate((FOUR, YARN)):
        (tmp_path / str(number)).mkdir()
        with pytest.raises(ModelLoadError, match=r"rope_freqs.weight beside rope scaling '(linear|yarn)'"):
            read_config(with_tensors(tmp_path / str(number), divisors, **values))


def test_heads_without_a_size_share_the_width(tmp_path: Path) -> None:
    assert read_config(with_tensors(tmp_path, {}, architecture="qwen3")).head_dim == 64 // 4


def test_all_tokens_that_end_an_output_are_read(tmp_path: Path) -> None:
    ends: dict[str, Any] = {f"tokenizer.ggml.{name}_token_id": i for i, name in enumerate(("eos", "eot", "eom"), 5)}
    assert read_config(with_tensors(tmp_path, {}, **ends)).eos_token_ids == (5, 6, 7)


def test_missing_and_unknown_tensors_are_named(tmp_path: Path) -> None:
    file = with_tensors(tmp_path, {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)})
    with pytest.raises(ModelLoadError, match=r"model.norm.weight.*unknown: blk.0.attn_sinks.weight"):
        load_model(file, dtype=FLOAT32)


def test_the_size_of_codes(tmp_path: Path) -> None:
    for kind in ("Q8_0", "Q4_0"):
        file, _ = written(tmp_path / kind, "llama", kind, token_embd="F16", output="F16")
        found = published_size(build(read_config(file), FLOAT32))
        of_file = [tensor for tensor in gguf.GGUFReader(file).tensors if len(tensor.shape) == 2]
        norms = 5 * 64 * 2  # counted as of two bytes a number
        assert found.num_bytes == norms + sum(int(tensor.n_bytes) for tensor in of_file)
        assert found.form == f"{kind} of GGUF"


# --- where the file is -----------------------------------------------------------------------------------------


def test_a_directory_with_one_file_is_the_file(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "F32")
    assert resolve(file) == file
    assert read_config(resolve(file.parent)) == read_config(file)
    assert served_names(Config.of(str(file))) == ["model"]
    (file.parent / "other.gguf").write_bytes(file.read_bytes())
    with pytest.raises(ModelLoadError, match="has 2 GGUF files") as error:
        read_config(resolve(file.parent))
    assert error.value.fix == f"name one of them, such as {file}"
    assert read_config(resolve(file)).num_layers == 2


def in_parts(file: Path) -> list[Path]:
    """Write a file again in three parts, as llama.cpp does: the metadata in the first, which has no tensor here."""
    reader, (head, *middle) = gguf.GGUFReader(file), gguf_parts(file.with_name("model-00001-of-00003.gguf"))
    tensors = [(each.name, np.array(each.data), each.tensor_type) for each in reader.tensors]
    values = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for number, (path, some) in enumerate(zip([head, *middle], ([], tensors[:3], tensors[3:]), strict=True)):
        writer = gguf.GGUFWriter(path, "llama")
        if number:
            writer.kv_data[0].clear()  # its architecture
        for key, field in values.items() if not number else ():
            if key != "general.architecture":
                kind = field.types[0], field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(key, field.contents(), *kind)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 3)
        writer.add_int32("split.tensors.count", len(tensors))
        for name, array, plain in some:
            writer.add_tensor(name, array, raw_dtype=plain)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return [head, *middle]


def test_a_file_in_parts(tmp_path: Path) -> None:
    file, plain = written(tmp_path, "llama", "Q8_0")
    directory, parts = file.parent, in_parts(file)
    with pytest.raises(ModelLoadError, match="has 2 GGUF files"):
        read_config(directory)
    file.unlink()
    expected = load(plain, "none")
    for path in (directory, parts[0], parts[2]):
        assert_equal_models(widened(load(resolve(path), "stored")), expected)
    before = fingerprint(parts[0])
    os.utime(parts[2], (0, 0))
    assert fingerprint(parts[0]) != before
    last = parts[2].read_bytes()
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00003.gguf is no part 3 of"):
        read_config(directory)
    parts[2].unlink()
    with pytest.raises(ModelLoadError, match=r"model-00003-of-00003.gguf is missing"):
        read_config(directory)
    parts[2].write_bytes(last)
    parts[0].unlink()
    with pytest.raises(ModelLoadError, match=r"model-00001-of-00003.gguf does not exist"):
        check_local_model(directory)


def test_an_upper_case_name(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "F32")
    upper = file.rename(file.with_name("MODEL.GGUF"))
    assert resolve(upper) == upper
    assert read_config(resolve(upper.parent)) == read_config(upper)
    assert load(upper.parent, "none").config.num_layers == 2
    with pytest.raises(InvalidValueError):
        checked_directory("links", [linked(tmp_path, upper)])


def linked(directory: Path, file: Path) -> Path:
    """A directory whose folder `links` has a link to `file`, which is outside."""
    (directory / "root" / "links").mkdir(parents=True)
    (directory / "root" / "links" / file.name).symlink_to(file)
    return directory / "root"


def test_a_link_out_of_the_directory_is_refused(tmp_path: Path) -> None:
    file, _ = written(tmp_path, "llama", "F32")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "model.gguf").symlink_to(file)
    with pytest.raises(ModelLoadError, match="no regular file inside"):
        resolve(tmp_path / "links" / "model.gguf")


def test_it_is_served(tmp_path: Path) -> None:
    demo = Path(str(files("jaxserve") / "assets" / "demo"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((demo / name).read_bytes())
    hf = LLAMA | {"vocab_size": 2048, "tie_word_embeddings": True, "num_hidden_layers": 1}
    write_gguf(tmp_path / "tiny-Q8_0.gguf", hf, random_tensors(hf), "Q8_0")
    built = build_engine(
        Config.of(str(tmp_path / "tiny-Q8_0.gguf"), device="cpu", max_model_len=32, **ONE_ROW), lambda _: None
    )
    assert built.info.served_names == ["tiny-Q8_0"]
    assert built.info.eos_token_ids == [2, 2038], "the file's and the tokenizer's"
    runner = built.core.runner
    assert isinstance(runner, ModelRunner)
    assert jnp.dtype("int8") in {leaf.dtype for leaf in runner.leaves}
