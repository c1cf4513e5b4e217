"""Experts in the forms in which checkpoints store them, and the routers that no family's golden has."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint.checkpoint import Checkpoint, HeldTensor
from jaxserve.models.checkpoint.hf_config import from_hf, read_config
from jaxserve.models.checkpoint.loader import PartReader, load_model
from jaxserve.models.checkpoint.structure import build
from jaxserve.models.config import MoEConfig
from jaxserve.models.moe import route
from tests.models.checkpoints import random_tensors, write_checkpoint
from tests.models.families import CASES

E, F, D = 3, 4, 8
RNG = np.random.default_rng(0)
GATE, UP = RNG.normal(size=(2, E, F, D)).astype(np.float32)
DOWN = RNG.normal(size=(E, D, F)).astype(np.float32)
PREFIX = "model.layers.0.mlp"
PARTS = (("gate_proj", GATE), ("up_proj", UP), ("down_proj", DOWN))
FORMS: Mapping[str, dict[str, np.ndarray]] = {
    "none": {f"experts.{e}.{name}.weight": whole[e] for name, whole in PARTS for e in range(E)},
    "stacked": {f"{name}.weight": whole for name, whole in PARTS},
    "rows": {"experts.gate_up_proj": np.concatenate([GATE, UP], axis=1), "experts.down_proj": DOWN},
    "columns": {
        "experts.gate_up_proj": np.concatenate([GATE, UP], axis=1).swapaxes(1, 2),
        "experts.down_proj": DOWN.swapaxes(1, 2),
    },
    "bfloat16": {
        "experts.gate_up_proj": np.stack([GATE, UP], axis=2).reshape(E, 2 * F, D).swapaxes(1, 2),
        "experts.down_proj": DOWN.swapaxes(1, 2),
    },
}


@pytest.mark.parametrize("form", FORMS)
def test_experts_are_the_same_in_every_form(form: Any) -> None:
    sizes = {"num_experts": E, "moe_intermediate_size": F, "hidden_size": D, "num_hidden_layers": 1}
    config = from_hf(CASES["qwen3_moe"] | sizes | {"mlp_only_layers": []}).replace(packed_experts=form)
    specs = {spec.name: spec for spec in build(config, jnp.dtype("float32")).specs if ".experts." in spec.name}
    held = {f"{PREFIX}.{name}": HeldTensor(np.ascontiguousarray(array)) for name, array in FORMS[form].items()}
    reader = PartReader(Checkpoint.of(None, held), None)  # type: ignore[arg-type]
    expected = {"gate_up_proj": np.stack([GATE, UP], axis=2), "down_proj": DOWN}
    for name, whole in expected.items():
        spec = specs[f"{PREFIX}.experts.{name}.weight"]
        assert {part.name for part in spec.parts} <= held.keys()
        for index in (
            tuple(slice(0, n) for n in whole.shape),
            (slice(1, 3), slice(1, 4), *(slice(0, n) for n in whole.shape[2:])),
        ):
            np.testing.assert_array_equal(reader.read(spec, index), whole[index])


@pytest.mark.parametrize("declared", ["none", "rows"])
def test_the_files_say_how_experts_are_packed(declared: Any, tmp_path: Path) -> None:
    hf = CASES["qwen3_moe"] | {"num_hidden_layers": 1, "mlp_only_layers": []}
    tensors = random_tensors(hf)
    each = {name: tensor for name, tensor in tensors.items() if ".experts." in name}
    rest = {name: tensor for name, tensor in tensors.items() if name not in each}
    gate, up, down = (np.stack([each[f"{PREFIX}.experts.{e}.{name}.weight"] for e in range(8)]) for name, _ in PARTS)
    both = np.concatenate([gate, up], axis=1)
    forms = {
        "none": each,
        "rows": {f"{PREFIX}.experts.gate_up_proj": both, f"{PREFIX}.experts.down_proj": down},
        "columns": {
            f"{PREFIX}.experts.gate_up_proj": np.ascontiguousarray(both.swapaxes(1, 2)),
            f"{PREFIX}.experts.down_proj": np.ascontiguousarray(down.swapaxes(1, 2)),
        },
    }
    loaded = []
    for form, found in forms.items():
        directory = write_checkpoint(tmp_path / form, hf, rest | found)
        config = read_config(directory).replace(packed_experts=declared)
        loaded.append(load_model(directory, dtype=jnp.dtype("float32"), config=config))
        assert loaded[-1].config.packed_experts == form
    for other in loaded[1:]:
        for ours, theirs in zip(other.leaves, loaded[0].leaves, strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_router_with_every_part() -> None:
    """Against numpy: a soft cap, sigmoid, a correction, groups, normalisation with an epsilon, a scale."""
    config = MoEConfig(8, 3, 4, (True,), "sigmoid", soft_cap=0.5, correction=True, normalize_eps=0.25, scale=3.0,
                       num_groups=4, topk_groups=2)  # fmt: skip
    scores, correction = RNG.normal(size=(20, 8)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
    found = route(jnp.asarray(scores), jnp.asarray(correction), config)
    gates = 1 / (1 + np.exp(-0.5 * np.tanh(scores / 0.5)))
    for gate, ids, weights in zip(gates, np.asarray(found.ids), np.asarray(found.weights), strict=True):
        choice = gate + correction
        groups = np.argsort(-np.sort(choice.reshape(4, 2))[:, -2:].sum(axis=1))[:2]
        allowed = [e for e in range(8) if e // 2 in groups]
        best = sorted(allowed, key=lambda e: -choice[e])[:3]
        assert ids.tolist() == best
        np.testing.assert_allclose(weights, 3 * gate[best] / (gate[best].sum() + 0.25), rtol=1e-5)


def test_a_softmax_router_with_a_correction() -> None:
    config = MoEConfig(8, 2, 4, (True,), correction=True, normalize=False)
    scores, correction = RNG.normal(size=(20, 8)).astype(np.float32), RNG.normal(size=8).astype(np.float32)
    found = route(jnp.asarray(scores), jnp.asarray(correction), config)
    gates = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    best = np.argsort(-(gates + correction), axis=1)[:, :2]
    assert np.asarray(found.ids).tolist() == best.tolist()
    np.testing.assert_allclose(found.weights, np.take_along_axis(gates, best, axis=1), rtol=1e-5)
