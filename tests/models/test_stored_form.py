"""Integer checkpoints (compressed-tensors, GPTQ, AWQ), written number by number here: as they are, and widened."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.config import Config
from jaxserve.engine.factory import build_engine
from jaxserve.errors import ConfigError, ModelLoadError
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import build, load_model
from jaxserve.models.checkpoint.published_size import published_size
from jaxserve.models.checkpoint.quantization import read_stored_form
from jaxserve.models.checkpoint.weight_sources import source_of
from tests.models import paged
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.models.test_quantization import assert_equal_models
from tests.models.test_quantize_at_load import load, widened

FLOAT32 = jnp.dtype("float32")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MODELS = {
    "llama": TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16},
    "packed": CASES["phi3"] | {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16},
    "experts": CASES["qwen3_moe"] | {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64},
}
Tensors = dict[str, np.ndarray]
PROJECTION = re.compile(r"_proj(_qkvz|_qkv|_z|_with_mqa)?\.weight$")


def compressed(
    bits: int, group: int | None, symmetric: bool = True, form: str = "pack-quantized", **others: Any
) -> dict[str, Any]:
    scheme = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel"}
    layers = {"targets": ["Linear"], "weights": scheme | {"group_size": group} | others, "input_activations": None}
    ignored = ["lm_head", "re:.*mlp.gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": layers},
        "ignore": ignored,
    }


def with_activations(form: dict[str, Any]) -> dict[str, Any]:
    """The same weights for activations of 8 bits: W8A8."""
    [group] = form["config_groups"].values()
    dynamic = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    return form | {"config_groups": {"group_0": group | {"input_activations": dynamic}}}


def gptq(bits: int, group: int, **others: Any) -> dict[str, Any]:
    skipped = ["mlp.gate"] if others.pop("experts", False) else []
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "modules_to_not_convert": skipped} | others


def edited(form: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Changes of the format's own keys, of a group of layers, or of the weights' scheme."""
    groups = {
        name: layers
        | {key: value for key, value in changes.items() if key in layers}
        | {"weights": layers["weights"] | {key: value for key, value in changes.items() if key in layers["weights"]}}
        for name, layers in form.get("config_groups", {}).items()
    }
    own = {key: value for key, value in changes.items() if key not in str(form.get("config_groups"))}
    return form | ({"config_groups": groups} if groups else {}) | own


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "modules_to_not_convert": ["mlp.gate."]}
FORMS: dict[str, dict[str, Any]] = {
    "int8 channel": compressed(8, None, form="int-quantized") | {"sparsity_config": {"format": "dense"}},
    "int4 in bytes, W4A8": with_activations(compressed(4, 32, form="int-quantized")),
    "int8 channel, W8A8": with_activations(compressed(8, None, form="int-quantized")),
    "int8 group": compressed(8, 32, form="int-quantized"),
    "packed 8 bits": compressed(8, None),
    "packed 4 bits": compressed(4, 64),
    "packed 4 bits with zeros": compressed(4, 32, symmetric=False),
    "gptq": gptq(4, 32),
    "gptq of rows": gptq(4, -1, checkpoint_format="gptq_v2"),
    "gptq 8 bits": gptq(8, 64),
    "awq": AWQ,
    "gptq act-order": gptq(4, 32, desc_act=True, checkpoint_format="gptq_v2"),
    "gptq act-order 8 bits": gptq(8, 32, desc_act=True),
    "packed act-order": compressed(4, 32, symmetric=False, actorder="group"),
}


def put(words: np.ndarray, place: tuple[int, int], code: int, slot: int, bits: int) -> None:
    words[place] |= np.uint32(code << (slot * bits))


def write(tensors: Tensors, form: dict[str, Any]) -> tuple[Tensors, Tensors]:
    """Return (the checkpoint in a form, the same decoded number by number). A row's last group may be shorter."""
    stored, plain, rng = dict(tensors), dict(tensors), np.random.default_rng(2)
    scheme = form.get("config_groups") or {"": {"weights": form}}
    [scheme] = [layers["weights"] for layers in scheme.values()]
    bits, method = scheme.get("num_bits") or form["bits"], form.get("format", form["quant_method"])
    per, middle = 32 // bits, 2 ** (bits - 1)
    for name, weight in tensors.items():
        if not PROJECTION.search(name):
            continue
        del stored[name]
        base, (rows, depth) = name.removesuffix("weight"), weight.shape
        size = scheme["group_size"] or -1
        size = depth if size == -1 else size
        count = -(-depth // size)
        places = np.arange(depth) // size
        if form.get("desc_act") or scheme.get("actorder"):  # one order for the layers that share an input
            block = base.rpartition("_proj")[0].rpartition(".")[0]
            places = np.random.default_rng(list(block.encode())).permutation(places)
        codes = rng.integers(0, 2**bits, (rows, depth))
        scales = rng.uniform(0.01, 0.03, (rows, count)).astype(np.float16).astype(np.float32)
        has_zeros = method in ("gptq", "awq") or not scheme.get("symmetric", True)
        zeros = rng.integers(1, 2**bits, (rows, count)) if has_zeros else np.full((rows, count), middle)
        numbers = [
            [np.float32(int(codes[r, k]) - int(zeros[r, places[k]])) * scales[r, places[k]] for k in range(depth)]
            for r in range(rows)
        ]
        plain[name] = np.array(numbers, np.float32)
        if method == "int-quantized":
            stored |= {name: (codes - middle).astype(np.int8), f"{base}weight_scale": scales}
            continue
        words = np.zeros((rows, depth // per) if method == "pack-quantized" else
                         (depth // per, rows) if method == "gptq" else (depth, rows // per), np.uint32)  # fmt: skip
        packed_zeros = np.zeros((rows // per, count) if method == "pack-quantized" else (count, rows // per), np.uint32)
        order = [0, 2, 4, 6, 1, 3, 5, 7] if method == "awq" else list(range(per))
        for r in range(rows):
            slot = order.index(r % per)
            for k in range(depth):
                if method == "awq":
                    put(words, (k, r // per), int(codes[r, k]), slot, bits)
                elif method == "gptq":
                    put(words, (k // per, r), int(codes[r, k]), k % per, bits)
                else:
                    put(words, (r, k // per), int(codes[r, k]), k % per, bits)
            for g in range(count):
                shift = 1 if method == "gptq" and form.get("checkpoint_format") != "gptq_v2" else 0
                place = (r // per, g) if method == "pack-quantized" else (g, r // per)
                put(packed_zeros, place, int(zeros[r, g]) - shift, slot, bits)
        if method == "pack-quantized":
            stored |= {f"{base}weight_packed": words.view(np.int32), f"{base}weight_scale": scales}
            stored[f"{base}weight_shape"] = np.array([rows, depth])
            stored |= {f"{base}weight_zero_point": packed_zeros.view(np.int32)} if has_zeros else {}
            stored |= {f"{base}weight_g_idx": places.astype(np.int32)} if scheme.get("actorder") else {}
        else:
            half = np.ascontiguousarray(scales.T).astype(np.float16)
            stored |= {f"{base}qweight": words.view(np.int32), f"{base}qzeros": packed_zeros.view(np.int32)}
            stored |= {f"{base}scales": half}
            stored |= {f"{base}g_idx": places.astype(np.int32)} if method == "gptq" else {}
    return stored, plain


def hf_of(name: str, form: dict[str, Any]) -> dict[str, Any]:
    return MODELS[name] | {"quantization_config": form}


@pytest.mark.parametrize("form", FORMS)
def test_kept_and_widened(form: str, tmp_path: Path) -> None:
    stored, plain = write(random_tensors(MODELS["llama"]), FORMS[form])
    directory = write_checkpoint(tmp_path / "stored", hf_of("llama", FORMS[form]), stored)
    expected = load(write_checkpoint(tmp_path / "plain", MODELS["llama"], plain), "none")
    kept = load(directory, "stored")
    assert sum(spec.packing is not None and spec.packing.role == "values" for spec in kept.structure.specs) == 8
    assert kept.structure.num_bytes < expected.structure.num_bytes / 2
    assert_equal_models(load(directory, "none"), expected)
    assert_equal_models(widened(kept), expected)
    assert paged.greedy(kept, PROMPT, 12, 8) == paged.greedy(expected, PROMPT, 12, 8)


@pytest.mark.parametrize("form", FORMS)
def test_published_size(form: str, tmp_path: Path) -> None:
    stored, _ = write(random_tensors(MODELS["experts"]), FORMS[form])
    (tmp_path / "config.json").write_text(json.dumps(hf_of("experts", FORMS[form])))
    found = published_size(build(read_config(tmp_path), FLOAT32))
    integers = sum(array.nbytes for array in stored.values() if array.dtype.kind == "i")
    assert found.num_bytes == integers + sum(2 * array.size for array in stored.values() if array.dtype.kind == "f")
    assert "-bit integers" in found.form


@pytest.mark.parametrize("form", ["packed 4 bits with zeros", "gptq", "awq"])
@pytest.mark.parametrize("name", ["packed", "experts"])
def test_fused_weights(name: str, form: str, tmp_path: Path) -> None:
    stored, plain = write(random_tensors(MODELS[name]), FORMS[form])
    directory = write_checkpoint(tmp_path / "stored", hf_of(name, FORMS[form]), stored)
    expected = load(write_checkpoint(tmp_path / "plain", MODELS[name], plain), "none")
    assert_equal_models(widened(load(directory, "stored")), expected)
    assert_equal_models(load(directory, "none"), expected)


# What Kimi K2.5 leaves unquantized, as its config.json says it: only routed experts have 4 bits.
KIMI_IGNORED = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]


def test_only_the_routed_experts_of_a_nested_model_are_packed(tmp_path: Path) -> None:
    text = CASES["deepseek_v3"] | {"hidden_size": 64, "moe_intermediate_size": 32}
    tensors = random_tensors(text)
    experts = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." in name}
    form = compressed(4, 32) | {"ignore": KIMI_IGNORED}
    stored, plain = write(experts, form)
    expected = load(write_checkpoint(tmp_path / "plain", text, tensors | plain), "none")
    rest = {name: tensor for name, tensor in tensors.items() if name not in experts}
    inside = {f"language_model.{name}": tensor for name, tensor in (rest | stored).items()}
    names = {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    nested = names | {"text_config": text | {"model_type": "kimi_k2", "quantization_config": form}}
    tower = {"vision_tower.patch_embed.proj.weight": np.zeros((2, 2), np.float32)}
    directory = write_checkpoint(tmp_path / "stored", nested, inside | tower)
    kept = load(directory, "stored")
    packed = {spec.name.rpartition(".")[0] for spec in kept.structure.specs if spec.packing is not None}
    assert packed and all(".mlp.experts." in name for name in packed)
    assert_equal_models(widened(kept), expected)


def transforms(*locations: str) -> dict[str, Any]:
    """Rotations of weights and activations, as llm-compressor writes them."""
    apply = [{"targets": ["Linear"], "location": location, "inverse": False} for location in locations]
    return {"config_groups": {"R4": {"type": "hadamard", "apply": apply}}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (edited(compressed(8, None), input_activations={"num_bits": 4}), "'input_activations' of a quantized checkpoint"),
    (edited(compressed(4, 32), num_bits=3), "'num_bits' of a quantized checkpoint is 3"),
    (edited(compressed(4, 32), group_size=48), "'group_size' is 48"),
    (edited(compressed(4, 32), strategy="block"), "'strategy' of a quantized checkpoint"),
    (edited(compressed(4, 32), targets=["Conv"]), "'targets' of a quantized checkpoint"),
    (edited(compressed(4, 32), format="marlin-24"), "compressed-tensors 'marlin-24' is not supported"),
    (edited(compressed(4, 32), sparsity_config={"format": "sparse"}), "'format' of a quantized checkpoint is 'sparse'"),
    (edited(compressed(4, 32), transform_config=transforms("weight_input", "input")), "'location' of a quantized"),
    (edited(compressed(4, 32), ignore=["re:("]), "'ignore' has no regular expression"),
    (edited(compressed(4, 32), ignore=["re:(?!b)(a+)+$"]), "'ignore' has no regular expression"),
    (edited(compressed(4, 32), ignore="lm_head"), "'ignore' must be a list of names"),
    (edited(compressed(4, 32), config_groups={}), "'config_groups' has 0 groups"),
    (edited(compressed(4, 32), config_groups={"a": 1}), "'config_groups' must be an object of objects"),
    (gptq(4, 32, desc_act="some"), "'desc_act' of a quantized checkpoint is 'some'"),
    (gptq(3, 32), "'bits' of a quantized checkpoint is 3"),
    (gptq(4, 32, dynamic={"-:x": {}}), "'dynamic' of a quantized checkpoint"),
    (gptq(4, 32, lm_head=True), "'lm_head' of a quantized checkpoint"),
    (AWQ | {"version": "gemv"}, "'version' of a quantized checkpoint is 'gemv'"),
    (AWQ | {"bits": 8}, "'bits' of a quantized checkpoint is 8"),
]


@pytest.mark.parametrize(("form", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_is_not_computed_is_refused_by_name(form: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, hf_of("llama", form), {})
    with pytest.raises(ModelLoadError) as error:
        read_config(tmp_path)
    assert message in str(error.value)


# entries of published lists, and the modules of a layer that each leaves as they are
IGNORED = {
    "re:.*self_attn.*": ["model.layers.0.self_attn.q_proj"],
    "re:.*shared_experts.*": ["model.layers.0.mlp.shared_experts.up_proj"],
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*": ["model.layers.0.mlp.up_proj"],
    r"re:.*layers\.0\..*": [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.mlp.shared_experts.up_proj",
        "model.layers.0.mlp.experts.1.up_proj",
        "model.layers.0.mlp.up_proj",
    ],
    r"re:.*\.(q|k|v|o)_proj$|.*lm_head.*": ["model.layers.0.self_attn.q_proj"],
    "re:.*mlp.*experts.*[0-9]+.*up.*": ["model.layers.0.mlp.experts.1.up_proj"],
    "re:(?!.*experts).*": ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"],
    "re:(a+)+$": [],
    "model.layers.0.self_attn*": ["model.layers.0.self_attn.q_proj"],
    "model.layers.[!1-9].mlp.up?proj": ["model.layers.0.mlp.up_proj"],
    "layers.0.mlp.up_proj": [],
}
MODULES = IGNORED[r"re:.*layers\.0\..*"]


@pytest.mark.parametrize("method", ["compressed-tensors", "fp8"])
@pytest.mark.parametrize("entry", IGNORED)
def test_entries_of_published_lists_are_read(entry: str, method: str) -> None:
    form = compressed(4, 32) if method == "compressed-tensors" else {"quant_method": "fp8"}
    read = read_stored_form(form | {"ignore": ["lm_head", entry]})
    assert read is not None
    assert sorted(module for module in MODULES if read.is_wide(module)) == sorted(IGNORED[entry])
    assert read.is_wide("lm_head")


def test_a_name_is_matched_in_linear_time() -> None:
    read = read_stored_form(compressed(4, 32) | {"ignore": ["re:" + ".*a" * 12 + "b"]})
    assert read is not None
    began = time.monotonic()
    assert not read.is_wide("a" * 400)
    assert time.monotonic() - began < 5


def test_a_mixture_is_refused_by_name(tmp_path: Path) -> None:
    form = edited(compressed(4, 32), ignore=["lm_head", "model.layers.1.self_attn.k_proj"])
    stored, plain = write(random_tensors(MODELS["llama"]), form)
    name = "model.layers.1.self_attn.k_proj."
    stored = {key: value for key, value in stored.items() if not key.startswith(name)}
    directory = write_checkpoint(tmp_path, hf_of("llama", form), stored | {f"{name}weight": plain[f"{name}weight"]})
    with pytest.raises(
        ModelLoadError, match=r"self_attn.q_proj is quantized and model.layers.1.self_attn.k_proj is not"
    ):
        load(directory, "stored")
    assert load(directory, "none").structure.num_parameters


def test_wide_numbers_in_place_of_codes_are_named(tmp_path: Path) -> None:
    """At load, and before an update replaces anything."""
    stored, plain = write(random_tensors(MODELS["llama"]), FORMS["awq"])
    name = "model.layers.1.mlp.down_proj."
    wide = {f"{name}weight": plain[f"{name}weight"]}
    mixed = {key: array for key, array in stored.items() if not key.startswith(name)} | wide
    directory = write_checkpoint(tmp_path, hf_of("llama", FORMS["awq"]), mixed)
    structure = build(read_config(directory).replace(quantization="stored"), FLOAT32)
    message = rf"missing: {name}qweight.*unknown: {name}weight"
    with pytest.raises(ModelLoadError, match=message):
        load(directory, "stored")
    for given, partial in ((mixed, False), (wide, True)):
        with pytest.raises(ModelLoadError, match=message):
            source_of(list(given.items()), structure, partial=partial)


def test_damaged_tensors_are_named(tmp_path: Path) -> None:
    stored, _ = write(random_tensors(MODELS["llama"]), FORMS["gptq"])
    name = "model.layers.0.mlp.down_proj."
    order = stored[f"{name}g_idx"]
    bad = stored[f"{name}scales"].copy()
    bad[0, 0] = np.nan
    cases: list[tuple[Tensors, str]] = [
        (
            stored | {f"{name}g_idx": order[::-1].copy()},
            "permuted (act-order), which is not computed packed for a check",
        ),
        (stored | {f"{name}g_idx": order + 1}, "g_idx names a group that is not there"),
        (stored | {f"{name}scales": bad}, "not all scales are numbers"),
        ({key: value for key, value in stored.items() if key != f"{name}qzeros"}, f"missing: {name}qzeros"),
        (stored | {f"{name}qweight": stored[f"{name}qweight"][:-1]}, "qweight is [15, 64], expected [16, 64]"),
    ]
    for i, (tensors, message) in enumerate(cases):
        directory = write_checkpoint(tmp_path / str(i), hf_of("llama", FORMS["gptq"]), tensors)
        with pytest.raises(ModelLoadError) as error:
            load(directory, "stored")
        assert message in str(error.value)


ACT_ORDER = [name for name in FORMS if "act-order" in name]


@pytest.mark.parametrize("form", ACT_ORDER)
def test_permuted_inputs_are_sorted_by_group(form: str, tmp_path: Path) -> None:
    """Act-order: each input has the scale and the zero of the group that g_idx names, and meets its own column."""
    stored, plain = write(random_tensors(MODELS["packed"]), FORMS[form])
    directory = write_checkpoint(tmp_path / "stored", hf_of("packed", FORMS[form]), stored)
    expected = load(write_checkpoint(tmp_path / "plain", MODELS["packed"], plain), "none")
    kept = load(directory, "stored")
    orders = [leaf for spec, leaf in zip(kept.structure.specs, kept.leaves, strict=True) if spec.name.endswith("order")]
    assert len(orders) == 4 * kept.config.num_layers
    assert not any(np.array_equal(order, np.arange(len(order))) for order in orders)
    assert_equal_models(widened(kept), expected)
    assert kept.structure.num_bytes == sum(leaf.nbytes for leaf in kept.leaves)


def test_orders_that_are_not_computed_packed_are_refused_by_name(tmp_path: Path) -> None:
    form = FORMS["gptq act-order"]
    stored, _ = write(random_tensors(MODELS["llama"]), form)
    up, down = "model.layers.1.mlp.up_proj.g_idx", "model.layers.1.mlp.down_proj.g_idx"
    uneven = stored[down].copy()
    uneven[uneven == 1] = 0
    cases: list[tuple[str, Tensors, str]] = [
        ("llama", stored | {up: stored[up][::-1].copy()}, "up_proj.weight have inputs in different orders"),
        ("llama", stored | {down: uneven}, "down_proj.weight: its groups of permuted inputs differ in size"),
        ("experts", write(random_tensors(MODELS["experts"]), form)[0], "is not computed packed for experts"),
    ]
    for i, (name, tensors, message) in enumerate(cases):
        directory = write_checkpoint(tmp_path / str(i), hf_of(name, form), tensors)
        with pytest.raises(ModelLoadError, match=message):
            load(directory, "stored")
        load(directory, "none")


def test_a_shorter_last_group(tmp_path: Path) -> None:
    """Rows of 96 and 160 numbers in groups of 64, as GPTQ writes them: only widened."""
    hf = TINY_LLAMA | {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24, "num_hidden_layers": 1}
    stored, plain = write(random_tensors(hf), form := gptq(4, 64))
    directory = write_checkpoint(tmp_path / "stored", hf | {"quantization_config": form}, stored)
    expected = load(write_checkpoint(tmp_path / "plain", hf, plain), "none")
    assert_equal_models(load(directory, "none"), expected)
    with pytest.raises(ModelLoadError, match="no whole groups of 64"):
        load(directory, "stored")


def test_an_integer_checkpoint_is_not_quantized_again(tmp_path: Path) -> None:
    stored, _ = write(random_tensors(MODELS["llama"]), FORMS["awq"])
    directory = write_checkpoint(tmp_path, hf_of("llama", FORMS["awq"]), stored)
    with pytest.raises(ConfigError, match=r"the checkpoint has 4-bit integers \(awq\) already"):
        build_engine(Config.of(str(directory), quantization="int8", device="cpu"), lambda _: None)
    model = load_model(directory, dtype=FLOAT32)
    assert model.config == dataclasses.replace(model.config, quantization="none")


@pytest.mark.parametrize(
    ("form", "kind", "dtype"),
    [
        ("packed 4 bits", "weight_packed", np.float32),
        ("packed 4 bits", "weight_packed", np.int64),
        ("packed 4 bits", "weight_scale", np.int32),
        ("packed 4 bits with zeros", "weight_zero_point", np.int64),
        ("int8 channel", "weight", np.float32),
        ("int8 channel", "weight", np.int32),
        ("gptq", "qweight", np.int64),
        ("gptq act-order", "g_idx", np.float32),
        ("awq", "qzeros", np.int64),
    ],
)
def test_a_tensor_of_another_dtype_is_named(form: str, kind: str, dtype: Any, tmp_path: Path) -> None:
    """Its bytes would be taken for other codes."""
    hf = MODELS["llama"] | {"quantization_config": FORMS[form]}
    stored, _ = write(random_tensors(MODELS["llama"]), FORMS[form])
    name = f"model.layers.0.mlp.down_proj.{kind}"
    damaged = stored | {name: stored[name].astype(dtype)}
    write_checkpoint(tmp_path, hf, damaged)
    structure = build(read_config(tmp_path).replace(quantization="stored"), FLOAT32)
    message = f"{name} is {np.dtype(dtype)}, expected "
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, dtype=FLOAT32)
    with pytest.raises(ModelLoadError, match=message):  # before an update replaces anything
        source_of(list(damaged.items()), structure)


@pytest.mark.parametrize(
    ("quantization", "named", "others"),
    [
        (
            {"quant_method": "fp8", "modules_to_not_convert": ["mlp.gate", "model.layers.3", ".lm_head."]},
            ["model.layers.0.mlp.gate", "model.layers.3.self_attn.q_proj", "lm_head", "mlp.gate.x", "mtp.lm_head"],
            ["model.layers.0.mlp.gate_proj", "model.layers.31.self_attn.q_proj", "model.layers.13.up", "xmlp.gate"],
        ),
        (
            compressed(8, 32)
            | {"ignore": ["lm_head", "model.layers.0.*", "*.shared?.up", "re:.*mlp.gate$", "a.[bc].d"]},
            ["lm_head", "model.layers.0.mlp.x", "m.shared1.up", "model.layers.1.mlp.gate", "a.b.d", "a.c.d"],
            ["xlm_head", "model.layers.01.mlp", "m.shared.up", "model.layers.1.mlp.gate_proj", "a.e.d", "a.bc.d", ""],
        ),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "FP8",
                "exclude_modules": ["model.layers.7.self_attn*", "visual*"],
            },
            ["lm_head", "model.layers.7.self_attn", "model.layers.7.self_attn.q_proj", "visual.blocks.0"],
            ["model.layers.7.mlp", "model.layers.70.self_attn", "model.visual"],
        ),
        (AWQ, ["lm_head", "model.layers.0.mlp.gate.x"], ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"]),
        (
            compressed(8, 32) | {"ignore": ["re:(?!.*experts).*up$", "re:.*gate$"]},
            ["model.mlp.up", "model.mlp.gate"],
            ["model.experts.up", "model.mlp.gate_proj"],
        ),
    ],
    ids=["parts", "compressed-tensors", "modelopt", "awq", "look-around"],
)
def test_modules_that_a_checkpoint_leaves_unquantized(
    quantization: dict[str, Any], named: list[str], others: list[str]
) -> None:
    form = read_stored_form(quantization)
    assert form is not None
    assert [module for module in named if not form.is_wide(module)] == []
    assert [module for module in others if form.is_wide(module)] == []


@pytest.mark.parametrize(
    "entries",
    [
        [f"model.layers.{layer}.mlp.gate" for layer in range(300)],
        [f"model.layers.{layer}.self_attn*" for layer in range(300)],
    ],
)
def test_entries_of_plain_text_are_no_expressions(entries: list[str]) -> None:
    """A list has an entry per layer, and tens of thousands of experts are looked up in it."""
    for quantization in (
        compressed(8, 32) | {"ignore": entries},
        {"quant_method": "fp8", "modules_to_not_convert": entries},
        {"quant_method": "fp8", "ignore": entries},
        gptq(4, 32) | {"modules_to_not_convert": entries},
    ):
        form = read_stored_form(quantization)
        assert form is not None and form.unquantized.expressions == ()


def beside(name: str, found: dict[str, Any]) -> Callable[[Path], None]:
    """The description of the weights in a file of its own, and none in config.json."""

    def apply(directory: Path) -> None:
        config = json.loads((directory / "config.json").read_text())
        del config["quantization_config"]
        (directory / "config.json").write_text(json.dumps(config))
        (directory / name).write_text(json.dumps(found))

    return apply


def nothing(directory: Path) -> None:
    pass


def as_middle(stored: Tensors) -> Tensors:
    """Every zero of an AWQ or GPTQ checkpoint in the middle of the codes, which are of 4 bits."""
    eights = {name: np.full_like(array, 0x77777777) for name, array in stored.items() if name.endswith("qzeros")}
    return stored | eights


SYMMETRIC = {"zero_point": False}
LLM_AWQ = {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}
BARE_GPTQ = {"bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.01}
# as it lies on disks: the form that the tensors are written in, what config.json says, the tensors left out, the files
AS_PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any], str, Callable[[Path], None]]] = {
    "gptq without g_idx": (gptq(4, 32), gptq(4, 32), "g_idx", nothing),
    "gptq without g_idx, 8 bits": (gptq(8, 32), gptq(8, 32), "g_idx", nothing),
    "gptq without g_idx and zeros": (gptq(4, 32), gptq(4, 32, sym=True), "g_idx qzeros", nothing),
    "awq without zeros": (AWQ, AWQ | SYMMETRIC, "qzeros", nothing),
    "awq without zeros that config.json does not tell": (AWQ, AWQ, "qzeros", nothing),
    "awq with zeros though symmetric": (AWQ, AWQ | SYMMETRIC, "", nothing),
    "awq by llm-awq's names": (AWQ, {"quant_method": "awq"} | LLM_AWQ, "", nothing),
    "quant_config.json": (AWQ, AWQ, "", beside("quant_config.json", LLM_AWQ | {"zero_point": True})),
    "quantize_config.json": (gptq(4, 32), gptq(4, 32), "", beside("quantize_config.json", BARE_GPTQ)),
    "quantize_config.json without g_idx": (
        gptq(4, 32),
        gptq(4, 32),
        "g_idx",
        beside("quantize_config.json", BARE_GPTQ),
    ),
}


@pytest.mark.parametrize("wide", [False, True], ids=["stored", "none"])
@pytest.mark.parametrize("name", AS_PUBLISHED)
def test_quantized_checkpoints_as_they_lie_on_disks(name: str, wide: bool, tmp_path: Path) -> None:
    form, found, left_out, files = AS_PUBLISHED[name]
    stored, _ = write(random_tensors(MODELS["llama"]), form)
    zeroless = "qzeros" in left_out
    if zeroless and form["quant_method"] == "gptq":
        stored = as_middle(stored)  # one is added to each
    elif zeroless:
        stored |= {key: np.full_like(array, -2004318072) for key, array in stored.items() if key.endswith("qzeros")}
    whole = write_checkpoint(tmp_path / "whole", hf_of("llama", form), stored)
    kept = {key: array for key, array in stored.items() if key.rpartition(".")[2] not in left_out.split()}
    biases = {f"model.layers.{i}.mlp.down_proj.bias": np.zeros(64, np.float16) for i in range(2)}
    directory = write_checkpoint(tmp_path / "published", hf_of("llama", found), kept | biases)
    files(directory)
    assert_equal_models(load(directory, "none"), load(whole, "none"))
    if not wide:
        assert_equal_models(widened(load(directory, "stored")), load(whole, "none"))


def test_what_is_needed_of_a_quantized_checkpoint_is_named(tmp_path: Path) -> None:
    form, zero = gptq(4, 32, desc_act=True), "model.layers.0.mlp.down_proj.bias"
    stored, _ = write(random_tensors(MODELS["llama"]), form)
    kept = {key: array for key, array in stored.items() if not key.endswith("g_idx")}
    with pytest.raises(ModelLoadError, match="g_idx"):
        load(write_checkpoint(tmp_path / "order", hf_of("llama", form), kept), "stored")
    for form in (AWQ | {"zero_point": True}, gptq(4, 32, sym=False)):
        stored, _ = write(random_tensors(MODELS["llama"]), form)
        kept = {key: array for key, array in stored.items() if not key.endswith("qzeros")}
        with pytest.raises(ModelLoadError, match=r"missing: .*qzeros"):
            load(write_checkpoint(tmp_path / str(form["quant_method"]), hf_of("llama", form), kept), "stored")
    with pytest.raises(ModelLoadError, match=f"unknown: {zero}"):
        biased = stored | {zero: np.full(64, 0.5, np.float16)}
        load(write_checkpoint(tmp_path / "bias", hf_of("llama", form), biased), "none")
    with pytest.raises(ModelLoadError, match=r"config\.json has no quantization_config") as caught:
        load(write_checkpoint(tmp_path / "bare", MODELS["llama"], stored), "none")
    assert "quantize_config.json" in str(caught.value.fix)
