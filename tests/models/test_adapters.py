"""Adapters in the dense forward of every family against merged weights, and the reading of adapters."""

from __future__ import annotations

import functools
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxserve.errors import ModelLoadError
from jaxserve.library.dense import dense_attend
from jaxserve.models.adapters import AdaptedStructure, AdapterShape, adapt
from jaxserve.models.checkpoint import adapter as adapter_module
from jaxserve.models.checkpoint.adapter import adapter_of, read_adapter
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.safetensors_file import read_rows
from jaxserve.models.checkpoint.structure import build
from jaxserve.models.tensor_names import renamed
from jaxserve.ops.linear import Products
from tests.models import test_quantize_at_load, test_stored_floats, test_stored_form
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.dense import dense_logits
from tests.models.families import CASES, STATE_CASES, golden_tensors
from tests.models.lora import Pairs, merged, peft_config, peft_tensors, random_pairs, write_adapter
from tests.models.picture_cases import CASES as PICTURE_CASES
from tests.quick import QUICK

SHAPE = AdapterShape(slots=2, rank=4)
TOKENS = [5, 9, 77, 3, 21, 60, 14, 2, 33, 90, 41, 8]
# families with a form of attention or feed-forward of their own; the others in the long form
SOME = ("llama3", "phi3", "qwen3_moe", "gemma3", "gemma4_e", "deepseek_v3", "mimo_v2", "smollm3", "apertus", "qwen3_5")
ALL = CASES | STATE_CASES | PICTURE_CASES


def stacks_of(adapted: AdaptedStructure, by_slot: dict[int, tuple[np.ndarray, ...]]) -> list[jax.Array]:
    """The stacks with these adapters in these slots."""
    found = []
    for i, stack in enumerate(adapted.stacks):
        array, axis = np.zeros(stack.shape, np.float32), 1 if stack.name.endswith(".a") else len(stack.shape) - 1
        for slot, updates in by_slot.items():
            place = [slice(None)] * array.ndim
            place[axis] = slice(slot * adapted.shape.rank, (slot + 1) * adapted.shape.rank)
            array[tuple(place)] = updates[i]
        found.append(jnp.asarray(array))
    return found


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def adapted_logits(adapted: Any, arrays: tuple[jax.Array, ...], ids: jax.Array, slot: jax.Array) -> jax.Array:
    adapted = adapted.value
    linear = Products(adapters=adapted.shape.rows(jnp.full(ids.shape, slot)))
    config = adapted.structure.config
    model, positions = adapted.bind(arrays), jnp.arange(ids.shape[0], dtype=jnp.int32)
    hidden, _ = model(ids, positions, (None,) * config.num_layers, dense_attend(config), linear)
    return model.logits(hidden)


class ById:
    """A static argument that is compared by identity."""

    def __init__(self, value: Any) -> None:
        self.value = value


def load(directory: Path) -> LoadedModel:
    return load_model(directory, dtype=jnp.dtype("float32"), config=read_config(directory).for_context(128))


@pytest.mark.parametrize("case", [case if case in SOME else pytest.param(case, marks=pytest.mark.slow) for case in ALL])
def test_every_target_equals_merged_weights(case: str, tmp_path: Path) -> None:
    tensors = golden_tensors(case)
    model = load(write_checkpoint(tmp_path / "base", ALL[case], tensors))
    adapted = adapt(model.structure, SHAPE)
    # the checkpoint's own names, which the family's rules change
    rules = model.config.tensor_names
    own = {renamed(name, rules).removesuffix(".weight"): name.removesuffix(".weight") for name in tensors}
    targets = {own.get(name, name): tensor.shape for name, tensor in adapted.tensors.items()}
    for layer in range(model.config.num_layers // (2 if model.config.falcon_h1 else 1)):
        assert any(f"layers.{layer}." in name for name in targets), layer  # Nemotron-H's may be an MLP alone
    into_state = ("in_proj", "in_proj_qkvz", "in_proj_qkv", "f_a_proj")  # the last is Kimi-Linear's
    assert case not in STATE_CASES or any(name.endswith(into_state) for name in targets), targets
    pairs = random_pairs(targets, 3, seed=1, scale=0.2)
    adapter = adapter_of(peft_tensors(pairs), peft_config(3, 6), adapted)
    ids, static = jnp.asarray(TOKENS, jnp.int32), ById(adapted)
    run = lambda by_slot, slot: np.asarray(
        adapted_logits(static, (*model.leaves, *stacks_of(adapted, by_slot)), ids, jnp.int32(slot))
    )
    plain = np.asarray(dense_logits(model.structure, model.leaves, ids))
    without = run({1: adapter.updates}, -1)
    whole = load(write_checkpoint(tmp_path / "merged", ALL[case], merged(tensors, pairs, 2.0)))
    expected = np.asarray(dense_logits(whole.structure, whole.leaves, ids))
    found = run({1: adapter.updates}, 1)
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < 1e-5 * scale
    assert np.abs(plain - expected).max() > 1e-3 * scale
    # XLA fuses what follows its own products otherwise; those of a recurrence show it
    assert np.abs(without - plain).max() <= (1e-5 * scale if any(model.config.layer_states) else 0)


AT_LOAD = ("int8", "int4", "fp8", "mxfp4", "nvfp4")
STORED = ("int8 group", "packed 4 bits with zeros", "gptq", "awq", "gptq act-order", "blocks")
QUICK_FORMS = ("gptq act-order",)


@pytest.mark.parametrize(
    "form",
    [form if form in QUICK_FORMS else pytest.param(form, marks=pytest.mark.slow) for form in (*AT_LOAD, *STORED)],
)
def test_over_quantized_weights_it_equals_merged_dequantized_ones(form: str, tmp_path: Path) -> None:
    name = "packed" if "act-order" in form else "llama"
    if form in AT_LOAD:
        files = test_stored_form.MODELS[name], random_tensors(test_stored_form.MODELS[name])
    elif form == "blocks":
        files = test_stored_floats.fp8("llama", form)
    else:
        written, _ = test_stored_form.write(random_tensors(test_stored_form.MODELS[name]), test_stored_form.FORMS[form])
        files = test_stored_form.hf_of(name, test_stored_form.FORMS[form]), written
    directory = write_checkpoint(tmp_path, *files)
    kept = test_quantize_at_load.load(directory, form if form in AT_LOAD else "stored")
    adapted = adapt(kept.structure, SHAPE)
    pairs = pairs_of(adapted)
    packed = {layer.weight for layer in adapted.layers} - {spec.name for spec in kept.structure.specs}
    assert len(packed) == len(adapted.layers) == 4 * kept.config.num_layers
    adapter = adapter_of(peft_tensors(pairs), peft_config(3, 6), adapted)
    ids = jnp.asarray(TOKENS, jnp.int32)
    arrays = (*kept.leaves, *stacks_of(adapted, {1: adapter.updates}))
    found, plain = (np.asarray(adapted_logits(ById(adapted), arrays, ids, jnp.int32(slot))) for slot in (1, -1))
    wide = test_quantize_at_load.widened(kept)
    leaves = adapt(wide.structure, SHAPE).merge(wide.leaves, adapter.updates)
    expected = np.asarray(dense_logits(wide.structure, leaves, ids))
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < 1e-5 * scale
    assert np.abs(plain - expected).max() > 1e-3 * scale


# --- reading


@pytest.fixture(scope="module")
def tiny() -> AdaptedStructure:
    return adapt(build(from_hf(TINY_LLAMA), jnp.dtype("float32")), SHAPE)


def test_merged_leaves_are_those_of_merged_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(TINY_LLAMA, seed=2)
    model = load_model(write_checkpoint(tmp_path / "base", TINY_LLAMA, tensors), dtype=jnp.dtype("float32"))
    adapted = adapt(model.structure, AdapterShape(1, 3))
    pairs = pairs_of(adapted)
    found = adapted.merge(model.leaves, adapter_of(peft_tensors(pairs), peft_config(3, 6), adapted).updates)
    whole = write_checkpoint(tmp_path / "merged", TINY_LLAMA, merged(tensors, pairs, 2.0))
    for leaf, expected in zip(found, load_model(whole, dtype=jnp.dtype("float32")).leaves, strict=True):
        np.testing.assert_allclose(leaf, expected, atol=1e-6)


def pairs_of(adapted: AdaptedStructure, rank: int = 3, seed: int = 0) -> Pairs:
    return random_pairs({name: tensor.shape for name, tensor in adapted.tensors.items()}, rank, seed)


def test_patterns_and_rslora_choose_each_layers_scale(tiny: AdaptedStructure) -> None:
    pairs = pairs_of(tiny, rank=2)
    name = "model.layers.1.mlp.down_proj"
    pairs[name] = random_pairs({name: tiny.tensors[name].shape}, 4, seed=5)[name]
    config = peft_config(
        2, 4, use_rslora=True, rank_pattern={"layers.1.mlp.down_proj": 4}, alpha_pattern={r".*\.q_proj": 1}
    )
    found = adapter_of(peft_tensors(pairs), config, tiny)
    assert found.rank == 4
    for module, tensor in tiny.tensors.items():
        alpha = 1 if module.endswith("q_proj") else 4
        scale = alpha / math.sqrt(pairs[module][0].shape[0])
        layer = next(layer for layer in tiny.layers if module in layer.tensors)
        part = list(layer.tensors).index(module)
        b = found.updates[layer.b[part]].reshape(-1, SHAPE.rank)[:, : pairs[module][0].shape[0]]
        if tensor.shape[0] == len(b):
            np.testing.assert_allclose(np.sort(b, axis=None), np.sort(pairs[module][1] * scale, axis=None), rtol=1e-6)


def test_a_digest_is_of_tensors_and_scales(tiny: AdaptedStructure) -> None:
    pairs = pairs_of(tiny)
    digest = adapter_of(peft_tensors(pairs), peft_config(3), tiny).digest
    assert (
        adapter_of(dict(reversed(peft_tensors(pairs).items())), peft_config(3, lora_dropout=0.5), tiny).digest == digest
    )
    assert adapter_of(peft_tensors(pairs), peft_config(3, 9), tiny).digest != digest
    name = next(iter(pairs))
    changed = pairs | {name: (pairs[name][0] * np.float32(1.0001), pairs[name][1])}
    assert adapter_of(peft_tensors(changed), peft_config(3), tiny).digest != digest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "all"}, "biases"),
        ({"peft_type": "IA3"}, "LORA is served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the weights of the base"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, "target_parameters"),
        ({"something_new": 3}, "something_new"),
        ({"r": 4}, "its rank is 3"),
        ({"r": -1}, "positive"),
        ({"lora_alpha": float("nan")}, "a number"),
        ({"lora_alpha": 1e41}, "not finite"),
        ({"lora_alpha": 10**400}, "a number"),
        ({"rank_pattern": {"(?=q)": 3}}, "is not read"),
        ({"rank_pattern": {"(a+)+$": 4, "(.*q_proj|.*v_proj)": 5}}, "its rank is 3"),
        ({"rank_pattern": [3]}, "expected an object"),
    ],
)
def test_keys_that_change_the_result_are_refused(tiny: AdaptedStructure, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=re.escape(message)):
        adapter_of(peft_tensors(pairs_of(tiny)), peft_config(3) | changes, tiny)


def spoiled(tensors: dict[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:  # noqa: C901  a list of cases
    a, b = (f"base_model.model.model.layers.0.self_attn.q_proj.lora_{half}.weight" for half in "AB")
    match kind:
        case "nan":
            tensors[a][0, 0] = np.nan
        case "infinity":
            tensors[b][0, 0] = -np.inf
        case "missing":
            del tensors[b]
        case "shape":
            tensors[a] = tensors[a][:, 1:]
        case "rank":
            tensors[a], tensors[b] = np.ones((5, 16), np.float32), np.ones((16, 5), np.float32)
        case "ranks":
            tensors[b] = tensors[b][:, :2]
        case "one dimension":
            tensors[a] = tensors[a][0]
        case "dora":
            tensors["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector"] = np.ones(
                (1, 16), np.float32
            )
        case "head":
            tensors["base_model.model.lm_head.lora_A.weight"] = np.ones((3, 16), np.float32)
        case "embedding":
            tensors["base_model.model.model.embed_tokens.lora_embedding_A"] = np.ones((3, 32), np.float32)
        case "experts":
            tensors["base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight"] = np.ones(
                (3, 16), np.float32
            )
        case "norm":
            tensors["base_model.model.model.norm.lora_A.weight"] = np.ones((3, 16), np.float32)
        case "other":
            tensors["base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"] = np.ones((3, 16), np.float32)
    return tensors


SPOILED = {
    "nan": "lora_A has numbers that are not finite",
    "infinity": "lora_B has numbers that are not finite",
    "missing": "lora_B is missing",
    "shape": "lora_A is [3, 15]",
    "rank": "rank 5 is above lora.max_rank, 4",
    "ranks": "lora_B [16, 2]",
    "one dimension": "lora_A is [16]",
    "dora": "DoRA",
    "head": "embeddings and of the head",
    "embedding": "adapters of embeddings",
    "experts": "experts",
    "norm": "takes no adapters",
    "other": "no such linear layer",
}


@pytest.mark.parametrize("kind", SPOILED)
def test_spoiled_tensors_are_refused_by_name(tiny: AdaptedStructure, kind: str, tmp_path: Path) -> None:
    tensors = spoiled(peft_tensors(pairs_of(tiny)), kind)
    with pytest.raises(ModelLoadError, match=re.escape(SPOILED[kind])):
        adapter_of(tensors, peft_config(3), tiny)
    (tmp_path / "adapter_config.json").write_text(json.dumps(peft_config(3)))
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(ModelLoadError, match=re.escape(SPOILED[kind])):
        read_adapter(tmp_path, tiny)


def test_hostile_directories(tiny: AdaptedStructure, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = pairs_of(tiny)
    good = write_adapter(tmp_path / "good", pairs, peft_config(3))
    assert read_adapter(good, tiny).digest == adapter_of(peft_tensors(pairs), peft_config(3), tiny).digest
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_text("{}")
    (pickled / "adapter_model.bin").write_bytes(b"x")
    with pytest.raises(ModelLoadError, match="has no adapter_model"):
        read_adapter(pickled, tiny)
    linked = tmp_path / "linked"
    linked.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (linked / name).symlink_to(good / name)
    with pytest.raises(ModelLoadError):
        read_adapter(linked, tiny)
    for text in ("[]", "{", "[" * 100_000):
        broken = write_adapter(tmp_path / "broken", pairs, peft_config(3))
        (broken / "adapter_config.json").write_text(text)
        with pytest.raises(ModelLoadError):
            read_adapter(broken, tiny)
    whole = (good / "adapter_model.safetensors").read_bytes()
    cut = write_adapter(tmp_path / "cut", pairs, peft_config(3))
    for size in (0, 4, 100, len(whole) - 1):
        (cut / "adapter_model.safetensors").write_bytes(whole[:size])
        with pytest.raises(ModelLoadError):
            read_adapter(cut, tiny)

    key = len('{"":[]}')
    for name, text in (("adapter_config.json", b""), ("adapter_model.safetensors", (5 * 2**20).to_bytes(8, "little"))):
        long = write_adapter(tmp_path / "long", pairs, peft_config(3))
        (long / name).write_bytes(text + b'{"":[%b]}' % (b" " * (5 * 2**20 - key)))
        with pytest.raises(ModelLoadError, match=r"at most 4194304 are read|header of 5242880 bytes"):
            read_adapter(long, tiny)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        pipe = write_adapter(tmp_path / f"pipe {name}", pairs, peft_config(3))
        (pipe / name).unlink()
        os.mkfifo(pipe / name)
        with pytest.raises(ModelLoadError, match="no regular file"):
            read_adapter(pipe, tiny)

    huge, rank = write_adapter(tmp_path / "huge", pairs, peft_config(3)), 10**10
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    shapes, size = {"A": [rank, 16], "B": [16, rank]}, 64 * rank
    entries = {
        name.format(half): {"dtype": "F32", "shape": shape, "data_offsets": [n * size, (n + 1) * size]}
        for n, (half, shape) in enumerate(shapes.items())
    }
    header = json.dumps(entries).encode()
    with (huge / "adapter_model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 2 * size)  # 1.3 TB, none of it on the disk
    with pytest.raises(ModelLoadError, match=f"rank {rank} is above lora.max_rank"):
        read_adapter(huge, tiny)

    def replacing(*args: Any) -> np.ndarray:
        (good / "adapter_model.safetensors").write_bytes(whole)
        os.utime(good / "adapter_model.safetensors", ns=(1, 1))
        return read_rows(*args)

    monkeypatch.setattr(adapter_module, "read_rows", replacing)
    with pytest.raises(ModelLoadError, match="changed while it was read"):
        read_adapter(good, tiny)
