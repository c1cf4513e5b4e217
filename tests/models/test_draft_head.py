"""Heads against the published definitions in numpy.

The halves and their norms of an MTP head are numpy. Its layer and output head are compared with a model of that layer
alone, which reads the joined rows as its embeddings: the families' layers have goldens of transformers.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ModelLoadError
from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import from_hf, read_config, read_eagle
from jaxserve.models.checkpoint.loader import load_model
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import EagleHead
from jaxserve.models.draft_head import predictor_config, with_taps
from jaxserve.ops.linear import Products
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.dense import dense_hidden
from tests.models.heads import FORMS, OF_THREE, Form, alone, eagle_config, eagle_tensors, head_tensors, write_with_head
from tests.quick import QUICK

TOKENS, FLOAT = 17, jnp.dtype("float32")


def norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def run_head(
    head: ModelStructure, leaves: tuple[jax.Array, ...], x: jax.Array, states: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    """Embeddings and hidden states [T, D] from position 0 on -> (out, what goes on) [T, D]"""
    (module,), positions = head.bind_head(leaves), jnp.arange(x.shape[0], dtype=jnp.int32)
    attend = functools.partial(dense_attend(head.config), 0)
    out, fed, _ = module(x, module.states(states, Products()), positions, None, attend, Products())
    return out, fed


@pytest.mark.parametrize("name", FORMS)
def test_an_mtp_head_is_the_published_one(name: str, tmp_path: Path) -> None:
    form, rng = FORMS[name], np.random.default_rng(1)
    own = head_tensors(form)
    directory = write_with_head(tmp_path / "model", form, own)
    config = read_config(directory)
    model = load_model(directory, dtype=FLOAT, config=config)
    wanted = predictor_config(config)
    assert wanted is not None
    head = load_model(directory, dtype=FLOAT, config=wanted)
    hidden = rng.normal(0, 2, (TOKENS, config.hidden_size)).astype(np.float32)
    tokens = rng.integers(0, config.vocab_size, TOKENS)

    stored = random_tensors(form.hf, 3)
    table, halves = stored["model.embed_tokens.weight"], {}
    for part, x in (("token_norm", table[tokens]), ("hidden_norm", hidden)):
        halves[part] = norm(x, own[f"{form.parts[part]}weight"] + form.offset, config.norm_eps)
    order = list(halves.values()) if form.token_first else list(halves.values())[::-1]
    joined = np.concatenate(order, axis=1) @ own[f"{form.parts['join']}weight"].T
    of_layer = [name for name in random_tensors(alone(form)) if name.startswith("model.layers.0.")]
    rows = np.zeros_like(table)
    rows[:TOKENS] = joined
    last = own[f"{form.parts['norm']}weight"] if "norm" in form.parts else stored["model.norm.weight"]
    outer = {"model.embed_tokens.weight": rows, "model.norm.weight": last}
    tensors = {name: own[form.published(name)] for name in of_layer} | outer
    tensors["lm_head.weight"] = (
        own[f"{form.parts['lm_head']}weight"] if "lm_head" in form.parts else stored["lm_head.weight"]
    )
    reference = load_model(write_checkpoint(tmp_path / "layer", alone(form), tensors), dtype=FLOAT)
    normed = dense_hidden(reference.structure, reference.leaves, jnp.arange(TOKENS, dtype=jnp.int32))
    logits = normed @ tensors["lm_head.weight"].T

    (module,), served = head.structure.bind_head(head.leaves), model.bind(model.leaves)
    assert module.taps == ((config.num_layers,) if form.before_norm else ())
    out, fed = run_head(head.structure, head.leaves, served.embed(jnp.asarray(tokens)), (jnp.asarray(hidden),))
    np.testing.assert_array_equal(module.guess(out, served, Products(), Products()), np.argmax(logits, axis=1))
    found = (out, fed) if form.feeds_normed else (out, norm(np.asarray(fed), last + form.offset, config.norm_eps))
    for each in found if "norm" in form.parts else found[1:]:
        np.testing.assert_allclose(each, normed, atol=1e-4 * float(jnp.abs(normed).max()))


@pytest.mark.parametrize("name", OF_THREE)
def test_a_head_of_three_layers_has_those_of_three_heads(name: str, tmp_path: Path) -> None:
    form, single = OF_THREE[name], FORMS[name.removesuffix(" of three")]

    def weights(directory: str, form: Form, seed: int) -> dict[str, np.ndarray]:
        config = read_config(write_with_head(tmp_path / directory, form, head_tensors(form, seed)))
        head = load_model(tmp_path / directory, dtype=FLOAT, config=predictor_config(config))
        return {spec.name: np.asarray(leaf) for spec, leaf in zip(head.structure.specs, head.leaves, strict=True)}

    found = weights("three", form, 5)
    for index in range(3):
        of_layer = weights(str(index), single, 5 + index)
        for part, leaf in of_layer.items():
            np.testing.assert_array_equal(found.pop(f"layers.{index}.{part}"), leaf)
    assert not found


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *((name, {"num_nextn_predict_layers": 0}) for name in FORMS if name != "qwen3_next"),
        ("qwen3_next", {"mtp_num_hidden_layers": 0}),
        ("mimo_v2", {"layer_types": ["full_attention"] * 3}),
        ("exaone_moe", {"mtp_layer_types": ["sliding_attention"]}),
        ("exaone_moe", {"layer_types": ["sliding_attention"] * 3}),
        ("step3p7", {"swiglu_limits_shared": [0.2, 0.0, 0.15, 0.7]}),
        ("step3p7", {"rope_theta": [500.0, 100.0, 500.0, 90.0]}),
        ("step3p7", {"moe_layers_enum": "1,2,3"}),
        ("step3p7", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        ("nemotron_h", {"mtp_hybrid_override_pattern": "*-"}),
        ("nemotron_h", {"hybrid_override_pattern": "M-M*-M"}),
    ],
)
def test_a_head_of_another_form_is_not_served(name: str, changes: dict[str, object]) -> None:
    assert from_hf(FORMS[name].hf).predictor is not None
    assert from_hf(FORMS[name].hf | changes).predictor is None


def test_layers_of_a_head_behind_one_of_another_kind_guess_nothing() -> None:
    hf = OF_THREE["step3p7 of three"].hf
    assert (head := from_hf(hf).predictor) is not None and head.layers == 3
    for changes in ({"layer_types": [*hf["layer_types"][:-1], "full_attention"]}, {"moe_layers_enum": "1,2,5"}):
        assert (head := from_hf(hf | changes).predictor) is not None and head.layers == 2


def test_a_head_that_clamps_its_mlp_is_like_such_a_layer() -> None:
    hf = FORMS["step3p7"].hf | {"swiglu_limits_shared": [0.2, 0.3, 0.15, 0.3]}
    head = predictor_config(from_hf(hf))
    assert head is not None and head.layer_limits == ((0.0, 0.3),) and head.layer_windows == (12,)


@pytest.mark.parametrize("norm_first", [False, True])
def test_an_eagle_head_is_the_published_one(norm_first: bool, tmp_path: Path) -> None:
    hf = eagle_config(TINY_LLAMA | {"num_hidden_layers": 4}, 11, (1, 2, 4)) | {"norm_before_residual": norm_first}
    own, rng = eagle_tensors(hf), np.random.default_rng(2)
    config = read_eagle(ModelFiles.open(write_checkpoint(tmp_path, hf, own)))
    head = load_model(tmp_path, dtype=FLOAT, config=config)
    assert head.config.head is not None and head.structure.bind_head(head.leaves)[0].taps == (1, 2, 4)
    size, eps, head_dim = config.hidden_size, config.norm_eps, config.head_dim
    states = [rng.normal(0, 1, (TOKENS, size)).astype(np.float32) for _ in range(3)]
    x = rng.normal(0, 1, (TOKENS, size)).astype(np.float32)

    w = {name.removeprefix("midlayer.").removesuffix(".weight"): tensor for name, tensor in own.items()}
    h = np.concatenate(states, axis=1) @ w["fc"].T
    normed = norm(h, w["hidden_norm"], eps)
    joined = np.concatenate([norm(x, w["input_layernorm"], eps), normed], axis=1)
    angles = np.arange(TOKENS)[:, None] / 10000 ** (np.arange(0, head_dim, 2) / head_dim)

    def heads(name: str) -> np.ndarray:
        """[T, N, H], rotated unless they are values"""
        y = (joined @ w[f"self_attn.{name}"].T).reshape(TOKENS, -1, head_dim)
        if name == "v_proj":
            return y
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(y, 2, axis=2)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)

    q, k, v = heads("q_proj"), heads("k_proj"), heads("v_proj")
    group = q.shape[1] // k.shape[1]
    scores = np.einsum("tnh,snh->nts", q, k.repeat(group, axis=1)) * head_dim**-0.5
    scores = np.where(np.tril(np.ones((TOKENS, TOKENS), bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    weights /= weights.sum(axis=2, keepdims=True)
    attended = np.einsum("nts,snh->tnh", weights, v.repeat(group, axis=1)).reshape(TOKENS, -1)
    y = (normed if norm_first else h) + attended @ w["self_attn.o_proj"].T
    z = norm(y, w["post_attention_layernorm"], eps)
    gate = z @ w["mlp.gate_proj"].T
    y = y + (gate / (1 + np.exp(-gate)) * (z @ w["mlp.up_proj"].T)) @ w["mlp.down_proj"].T
    logits = norm(y, w["norm"], eps) @ w["lm_head"].T

    out, fed = run_head(head.structure, head.leaves, jnp.asarray(x), tuple(map(jnp.asarray, states)))
    np.testing.assert_allclose(fed, y, atol=1e-4 * np.abs(y).max())
    module: Any = head.structure.bind_head(head.leaves)[0]
    np.testing.assert_allclose(module.lm_head(out, Products()), logits, atol=1e-4 * np.abs(logits).max())
    best = np.argmax(logits, axis=1)
    guess = module.guess(out, None, Products(), Products())
    np.testing.assert_array_equal(guess, best + own["d2t"][best])
    assert own["t2d"][np.asarray(guess)].all()


def test_the_layers_that_an_eagle_head_reads(tmp_path: Path) -> None:
    """After 2, half, and all but 3 layers, or as its file names them: the last of these layers, or the one behind."""
    model = read_config(write_checkpoint(tmp_path, TINY_LLAMA | {"num_hidden_layers": 32}, {"x": np.zeros(1)}))
    hf = eagle_config(TINY_LLAMA, 11, (3, 5, 8))
    key = "eagle_aux_hidden_state_layer_ids"
    for changes, taps in (({}, (3, 5, 8)), ({"eagle_config": None}, (2, 16, 29)),
                          ({"eagle_config": None, key: [2, 7, 9]}, (2, 7, 9))):  # fmt: skip
        files = ModelFiles.open(write_checkpoint(tmp_path, hf | changes, {"x": np.zeros(1)}))
        head = with_taps(read_eagle(files), model).head
        assert isinstance(head, EagleHead) and head.taps == taps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM' is no head of EAGLE-3"),
        ({"num_hidden_layers": 2}, "several layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}}, "three layers, ascending"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"norm_before_fc": True}, "norm_before_fc"),
    ],
)
def test_other_heads_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    hf = eagle_config(TINY_LLAMA, 11, (1, 2, 3)) | changes
    with pytest.raises(ModelLoadError, match=message):
        read_eagle(ModelFiles.open(write_checkpoint(tmp_path, hf, {"x": np.zeros(1)})))
