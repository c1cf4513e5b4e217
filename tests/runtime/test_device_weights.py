"""New weights on the devices: bitwise those of a load, without mixtures, other people's memory or a second copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.errors import ConflictError, InvalidValueError, ModelLoadError, WeightsLostError
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.weight_sources import directory_source, source_of
from jaxserve.runtime import weights
from jaxserve.runtime.compilation.compiler import CompileCounter
from jaxserve.runtime.mesh import make_mesh
from jaxserve.runtime.weights import DeviceWeights
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_modules
from tests.models.families import CASES, ENCODERS

FLOAT32 = jnp.dtype("float32")
# Left out: one whose checkpoints have codes by other names, and one of which a name here is another norm's name there.
FAMILIES = {name: hf for name, hf in (CASES | ENCODERS).items() if hf["model_type"] not in ("gpt_oss", "glm4")}
WIDE = TINY_LLAMA | {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
DOWN = "model.layers.0.mlp.down_proj.weight"
DEEP = TINY_LLAMA | {"num_hidden_layers": 16}


@dataclass
class Holder:
    """A runner, as far as its weights go."""

    leaves: tuple[jax.Array, ...]
    draft_leaves: tuple[jax.Array, ...] = ()


class Model:
    """A model with the tensors of `seed`, and its weights as a runner holds them."""

    def __init__(self, directory: Path, hf: dict[str, Any], seed: int = 0, quantization: Any = "none") -> None:
        self.tensors = random_tensors(hf, seed)
        self.directory = write_checkpoint(directory / str(seed), hf, self.tensors)
        config = read_config(self.directory).replace(quantization=quantization)
        self.loaded: LoadedModel = load_model(self.directory, dtype=FLOAT32, config=config, mesh=make_mesh("cpu").mesh)
        self.structure = self.loaded.structure
        self.holder = Holder(self.loaded.leaves)
        self.weights = DeviceWeights(self.holder, self.structure)

    def bits(self) -> list[bytes]:
        return [np.asarray(leaf).tobytes() for leaf in self.holder.leaves]


MakeModel = Callable[..., Model]


@pytest.fixture
def make(tmp_path: Path) -> MakeModel:
    return lambda hf=WIDE, seed=0, **options: Model(tmp_path, hf, seed, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_by_name_are_those_of_a_load(make: MakeModel, family: str) -> None:
    served, new = make(FAMILIES[family]), make(FAMILIES[family], seed=1)
    with CompileCounter() as counter:
        served.weights.replace(source_of(iter(new.tensors.items()), served.structure))
    assert served.bits() == new.bits() and counter.count == 0
    source = directory_source(
        make(FAMILIES[family], seed=2).directory, served.structure, ModelFiles.open(served.directory)
    )
    served.weights.replace(served.weights.staged(source))
    assert served.bits() == make(FAMILIES[family], seed=2).bits()


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_are_read_back(make: MakeModel, family: str) -> None:
    model = make(FAMILIES[family])
    names = {part.name for spec in model.structure.specs for part in spec.parts}
    assert len(names) > 5 and names <= model.tensors.keys()
    with CompileCounter() as counter:
        for name in names:
            expected = model.tensors[name][:2] if model.tensors[name].ndim else model.tensors[name]
            np.testing.assert_array_equal(model.weights.read(name, 2), expected.astype(np.float32), name)
    assert counter.count == 0


def test_what_cannot_be_read_back_is_refused_by_name(make: MakeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    model, packed = make(), make(WIDE, seed=1, quantization="int8")
    with pytest.raises(InvalidValueError, match="no tensor 'lm_heat'"):
        model.weights.read("lm_heat", 1)
    with pytest.raises(InvalidValueError, match="held in int8"):
        packed.weights.read(DOWN, 1)
    monkeypatch.setattr(weights, "MAX_NUMBERS", 96 * 8)
    assert model.weights.read(DOWN, 8).shape == (8, 96)
    with pytest.raises(InvalidValueError, match="at most 8"):
        model.weights.read(DOWN, 9)
    model.weights.to_host()
    with pytest.raises(ConflictError, match="not on the devices"):
        model.weights.read(DOWN, 1)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_quantized_weights_are_quantized_alike(make: MakeModel, kind: str, family: str) -> None:
    hf = {"llama": WIDE, "qwen3_moe": CASES["qwen3_moe"] | {"hidden_size": 64, "moe_intermediate_size": 32}}[family]
    served, new, wide = make(hf, quantization=kind), make(hf, 1, quantization=kind), make(hf, 2)
    served.weights.replace(source_of(new.tensors, served.structure))
    assert served.bits() == new.bits()
    served.weights.replace(source_of(list(wide.holder.leaves), served.structure))
    assert served.bits() == make(hf, 2, quantization=kind).bits()
    served.weights.replace(source_of(list(new.holder.leaves), served.structure))
    assert served.bits() == new.bits()


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_stay_so_when_quantized(make: MakeModel, kind: str, number: float) -> None:
    """A request then ends with an error, instead of an answer from other numbers."""
    served, new = make(quantization=kind), make(seed=1)
    new.tensors[DOWN][3, 5] = number
    served.weights.replace(source_of(new.tensors, served.structure))
    scales = next(
        leaf
        for spec, leaf in zip(served.structure.specs, served.holder.leaves, strict=True)
        if spec.name == f"{DOWN}.scales"
    )
    wrong = np.argwhere(~np.isfinite(np.asarray(scales)))
    assert wrong.tolist() == [[3, 0]]


TREES: dict[str, Callable[[Model], Any]] = {
    "tuple": lambda model: model.holder.leaves,
    "numpy": lambda model: [np.asarray(leaf) for leaf in model.holder.leaves],
    "strided": lambda model: [np.asarray(leaf).T.copy().T for leaf in model.holder.leaves],
    "elsewhere": lambda model: [jax.device_put(np.asarray(leaf)) for leaf in model.holder.leaves],
    "by name": lambda model: dict(zip(names(model), model.holder.leaves, strict=True)),
    "nested": lambda model: nested(dict(zip(names(model), model.holder.leaves, strict=True))),
}


def names(model: Model) -> list[str]:
    return [spec.name for spec in model.structure.specs]


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, leaf in flat.items():
        place = tree
        *path, last = name.split(".")
        for step in path:
            place = place.setdefault(step, {})
        place[last] = leaf
    return tree


@pytest.mark.parametrize("form", TREES)
def test_a_tree_of_leaves(make: MakeModel, form: str) -> None:
    served, new = make(), make(seed=1)
    bits = new.bits()
    with CompileCounter() as counter:
        served.weights.replace(source_of(TREES[form](new), served.structure))
    assert served.bits() == bits == new.bits() and counter.count == 0


@pytest.mark.parametrize("form", ["tuple", "numpy", "elsewhere", "pairs"])
def test_the_callers_memory_is_not_used(make: MakeModel, form: str) -> None:
    """Whatever the caller does to its arrays afterwards; numpy arrays that are aligned are the trap."""
    served, new = make(), make(seed=1)
    bits = new.bits()
    arrays: list[Any] = list(new.tensors.values()) if form == "pairs" else list(TREES[form](new))
    if form == "numpy":
        arrays = [aligned(array) for array in arrays]
    given = list(zip(new.tensors, arrays, strict=True)) if form == "pairs" else arrays
    served.weights.replace(source_of(given, served.structure))
    for array in arrays:
        if isinstance(array, np.ndarray):
            array[...] = 0
        else:
            array.delete()
    assert served.bits() == bits


def aligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    out = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@pytest.mark.parametrize("view", [False, True])
def test_arrays_of_the_model_itself(make: MakeModel, view: bool) -> None:
    """Layers that change places: every old leaf is the source of another one."""
    served = make()
    swap = {"0": "1", "1": "0"}
    wanted = dict(zip(names(served), served.holder.leaves, strict=True))
    tree = {name: wanted[".".join(swap.get(part, part) for part in name.split("."))] for name in wanted}
    expected = [np.asarray(leaf).tobytes() for leaf in tree.values()]
    given = {name: np.asarray(leaf) for name, leaf in tree.items()} if view else tree
    served.weights.replace(source_of(given, served.structure))
    assert served.bits() == expected


def bad(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda tensors: tensors | changes


NORM, Q = "model.norm.weight", "model.layers.1.self_attn.q_proj.weight"
BAD: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "missing": (lambda t: {name: t[name] for name in t if name != NORM}, "missing: model.norm.weight"),
    "unknown": (lambda t: t | {"model.extra.weight": t[NORM]}, "unknown: model.extra.weight"),
    "twice": (lambda t: [*t.items(), (NORM, t[NORM])], "in more than one place: model.norm.weight"),
    "shape": (lambda t: t | {Q: t[Q][:-1]}, f"of the wrong shape: {Q}"),
    "integers": (lambda t: t | {Q: t[Q].astype(np.int32)}, f"{Q} is int32"),
    "no array": (lambda t: t | {Q: [1.0]}, f"{Q}: expected a numpy or jax array, and list was given"),
    "nothing": (lambda t: t | {Q: None}, f"{Q}: expected a numpy or jax array, and NoneType was given"),
    "empty": (lambda t: {}, "missing"),
    "too few leaves": (lambda t: list(t.values())[:-1], "leaves given"),
    "a number": (lambda t: 1.0, "missing"),
}


@pytest.mark.parametrize("case", BAD)
def test_an_update_that_does_not_fit_changes_nothing(make: MakeModel, case: str) -> None:
    served, new = make(), make(seed=1)
    before, leaves, (spoil, message) = served.bits(), served.holder.leaves, BAD[case]
    with pytest.raises(ModelLoadError) as error:
        source_of(spoil(new.tensors), served.structure)
    assert message in str(error.value)
    assert served.bits() == before and served.holder.leaves is leaves


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda leaf: leaf[..., :-1], "expected float32["),
        (lambda leaf: leaf.astype(np.float64), "is float64["),
        (lambda leaf: leaf.astype(jnp.bfloat16), "is bfloat16["),
        (lambda leaf: None, "NoneType was given"),
        (lambda leaf: float(leaf[0]), "float was given"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named(make: MakeModel, spoil: Callable[[Any], Any], message: str) -> None:
    served = make()
    name = names(served)[-1]
    tree = dict(zip(names(served), TREES["numpy"](make(seed=1)), strict=True))
    with pytest.raises(ModelLoadError, match=name) as error:
        source_of(tree | {name: spoil(tree[name])}, served.structure)
    assert message in str(error.value)


def test_a_deleted_array_and_a_traced_one_are_refused(make: MakeModel) -> None:
    served, new = make(), make(seed=1)
    leaves = list(new.holder.leaves)
    leaves[1].delete()
    with pytest.raises(ModelLoadError, match="has been deleted"):
        source_of(leaves, served.structure)

    def traced(leaf: jax.Array) -> jax.Array:
        source_of([leaf, *leaves[1:]], served.structure)
        return leaf

    with pytest.raises(ModelLoadError, match="was given"):
        jax.jit(traced)(leaves[0])


@pytest.mark.parametrize(("family", "chosen"), [("bert", ""), ("deepseek_v3", "q_b_proj"), ("llama3", "norm")])
def test_a_mapping_of_checkpoint_names_that_are_those_of_leaves(make: MakeModel, family: str, chosen: str) -> None:
    """It is converted as pairs are: here from bfloat16, and of DeepSeek-V3 from another shape."""
    served, new = make(FAMILIES[family]), make(FAMILIES[family], seed=1)
    given = {name: t.astype(jnp.bfloat16) for name, t in new.tensors.items() if chosen in name}
    source = source_of(given, served.structure, partial=True)
    assert source.parameters == source_of(list(given.items()), served.structure, partial=True).parameters
    served.weights.replace(source)
    name, tensor = next(iter(given.items()))
    np.testing.assert_array_equal(served.weights.read(name, 4), tensor[:4].astype(np.float32))


def test_some_parameters_only(make: MakeModel) -> None:
    served, new = make(), make(seed=1)
    before, bits = dict(zip(names(served), served.bits(), strict=True)), new.bits()
    layer = {name: tensor for name, tensor in new.tensors.items() if ".1." in name}
    served.weights.replace(source_of(layer, served.structure, partial=True))
    for name, now, old, wanted in zip(names(served), served.bits(), before.values(), bits, strict=True):
        assert now == (wanted if ".1." in name else old), name
    with pytest.raises(ModelLoadError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        source_of({name: t for name, t in layer.items() if "k_proj" not in name}, served.structure, partial=True)
    for nothing in ({}, []):
        with pytest.raises(ModelLoadError, match=r"no tensors|leaves given"):
            source_of(nothing, served.structure, partial=True)
    with pytest.raises(ModelLoadError, match="unknown"):
        source_of(layer | {"model.layers.9.x": layer[Q]}, served.structure, partial=True)


def test_a_failure_half_way_leaves_no_mixture(make: MakeModel) -> None:
    served, new = make(), make(seed=1)
    before, source = served.bits(), source_of(new.tensors, served.structure)
    failing = Failing(source, after=0)
    with pytest.raises(OSError, match="gone"):  # nothing was replaced yet
        served.weights.replace(failing)
    assert served.bits() == before and served.weights.place == "device"
    with pytest.raises(OSError, match="gone"):
        served.weights.staged(Failing(source, after=3))
    assert served.bits() == before
    with pytest.raises(WeightsLostError, match="gone"):
        served.weights.replace(Failing(source, after=3))
    assert served.weights.place == "none" and all(leaf.is_deleted() for leaf in served.holder.leaves)
    with pytest.raises(ConflictError, match="must have all"):
        served.weights.replace(source_of({NORM: new.tensors[NORM]}, served.structure, partial=True))
    served.weights.replace(source)
    assert served.bits() == new.bits() and served.weights.place == "device"


class Failing:
    """A source that fails after some parameters."""

    def __init__(self, inner: Any, after: int) -> None:
        self._inner = inner
        self._left = after
        self.parameters = inner.parameters
        self.arrays: list[Any] = []

    def make(self, specs: Any, shardings: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise OSError("the file is gone")
        return self._inner.make(specs, shardings)


@pytest.mark.parametrize("form", ["pairs", "tree"])
def test_memory_peaks_at_one_parameter_more_than_the_weights(make: MakeModel, form: str) -> None:
    served, new = make(DEEP), make(DEEP, seed=1)
    given = new.tensors if form == "pairs" else TREES["numpy"](new)
    size, most = sum(leaf.nbytes for leaf in served.holder.leaves), 0
    others = live_bytes() - size

    def look() -> None:
        nonlocal most
        most = max(most, live_bytes() - others)

    served.weights.replace(Watched(source_of(given, served.structure), look), look)
    assert size <= most <= 1.1 * size and live_bytes() - others == size


class Watched(Failing):
    """A source that calls `look` while the new leaves of a parameter and its old ones are there."""

    def __init__(self, inner: Any, look: Callable[[], None]) -> None:
        super().__init__(inner, after=2**31)
        self._look = look

    def make(self, specs: Any, shardings: Any) -> Any:
        leaves = super().make(specs, shardings)
        self._look()
        return leaves


def live_bytes() -> int:
    """Bytes of all arrays; a shard that was looked at is an array of its own, of the same memory."""
    live = [array for array in jax.live_arrays() if not array.is_deleted() and len(array.devices()) == 1]
    return sum({array.unsafe_buffer_pointer(): array.nbytes for array in live}.values())


def test_asleep_and_awake(make: MakeModel) -> None:
    served, new = make(), make(seed=1)
    before = served.bits()
    with CompileCounter() as counter:
        served.weights.to_host()
        served.weights.to_host()
        assert served.weights.place == "host" and all(leaf.is_deleted() for leaf in served.holder.leaves)
        served.weights.to_device()
        assert served.weights.place == "device" and served.bits() == before
        served.weights.to_host()
        norm = {NORM: new.tensors[NORM]}
        served.weights.replace(source_of(norm, served.structure, partial=True))  # of weights in the host's memory
        changed = [i for i, (a, b) in enumerate(zip(served.bits(), before, strict=True)) if a != b]
        assert [names(served)[i] for i in changed] == [NORM]
        served.weights.to_host()
        served.weights.replace(source_of(new.tensors, served.structure))
        assert served.bits() == new.bits() and served.weights.place == "device"
        served.weights.drop()
        served.weights.to_device()
        assert served.weights.place == "none"
    assert counter.count == 0


def test_the_weights_of_a_draft_model_wait_in_the_memory_of_the_host(make: MakeModel) -> None:
    """Also while the model's own are dropped, because no update has them."""
    served, new = make(), make(seed=1)
    draft = make(seed=2)
    bits, leaves = draft.bits(), draft.holder.leaves
    holder = Holder(served.holder.leaves, leaves)
    weights = DeviceWeights(holder, served.structure)
    for away in (weights.to_host, weights.drop, weights.to_host, weights.drop):
        before = holder.draft_leaves
        away()
        assert all(leaf.is_deleted() for leaf in before)
        if away == weights.to_host:
            weights.to_device()
        else:
            weights.to_device()
            assert holder.draft_leaves[0].is_deleted()
            weights.replace(source_of(new.tensors, served.structure))
        draft.holder.leaves = holder.draft_leaves
        assert weights.place == "device" and draft.bits() == bits


def test_another_model_is_refused_by_the_fields_that_differ(make: MakeModel, tmp_path: Path) -> None:
    served = make()
    other = Model(tmp_path / "other", WIDE | {"rope_theta": 777.0, "rms_norm_eps": 1e-3})
    with pytest.raises(ModelLoadError, match="rope, norm_eps differ"):
        directory_source(other.directory, served.structure, ModelFiles.open(served.directory))
    same = Model(tmp_path / "same", WIDE | {"torch_dtype": "bfloat16", "eos_token_id": [3]}, seed=1)
    served.weights.replace(directory_source(same.directory, served.structure, ModelFiles.open(served.directory)))
    assert served.bits() == same.bits()


def test_another_pooling_is_refused(make: MakeModel) -> None:
    served, new = make(ENCODERS["bert"]), make(ENCODERS["bert"], seed=1)
    assert directory_source(new.directory, served.structure, ModelFiles.open(served.directory))
    write_modules(new.directory, ["Transformer", "Pooling"], {"pooling_mode_cls_token": True})
    with pytest.raises(ModelLoadError, match=": pooling differ"):
        directory_source(new.directory, served.structure, ModelFiles.open(served.directory))


def test_a_head_of_its_own_is_refused_where_the_embeddings_are_the_head(make: MakeModel) -> None:
    served, new = make(WIDE | {"tie_word_embeddings": True}), make(WIDE, seed=1)
    table = new.tensors["model.embed_tokens.weight"]
    assert source_of(new.tensors | {"lm_head.weight": table}, served.structure)
    for other in (new.tensors["lm_head.weight"], jnp.asarray(new.tensors["lm_head.weight"]), table[:-1]):
        with pytest.raises(ModelLoadError, match=r"lm_head\.weight differs from the embeddings"):
            source_of(new.tensors | {"lm_head.weight": other}, served.structure)
