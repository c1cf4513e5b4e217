"""A head changes the number of steps and no token. Its guesses are those of the head run on the whole text.

One runner a head for all tests: MTP heads of the forms of MiMo, of Qwen3-Next, whose model has states, and of MiMo-V2,
which has a window and reads the hidden states before the final norm; and one of EAGLE-3. Each test gives it other
weights.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.core import EngineCore
from jaxserve.errors import ConfigError
from jaxserve.library.dense import dense_attend
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_config, read_eagle
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.checkpoint.structure import ModelStructure
from jaxserve.models.config import EagleHead
from jaxserve.models.decoder import Taps
from jaxserve.models.draft_head import predictor_config
from jaxserve.ops.linear import Products
from jaxserve.runtime.draft_model import behind, check_draft_model, head_levels, keep_hidden, kept_hidden
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.runtime.sampling.slots import SlotState, state_shapes
from jaxserve.runtime.step_input import TokenInput
from jaxserve.speculation.device import DeviceDrafts
from jaxserve.types.scheduling import StateSizes
from tests.fakes import make_request, run_all
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.families import CASES
from tests.models.heads import FORMS, OF_THREE, eagle_config, eagle_tensors, head_tensors, write_with_head
from tests.quick import QUICK, QUICK_FLAGS
from tests.runtime.conftest import CONFIG
from tests.runtime.test_draft_model import DRAFTS, RESTS_SOON, TOKENS, Recorder, other_weights
from tests.runtime.test_draft_model import core_of as make_core_of
from tests.runtime.test_speculation import FEATURES, PROMPTS, Seen, accepted, assert_same, requests_of, seen

V, LENGTH, BORDER, FLOAT = 96, 128, 64, jnp.dtype("float32")
LLAMA = TINY_LLAMA | {"vocab_size": V, "max_position_embeddings": LENGTH, "num_hidden_layers": 3}


class Pair(NamedTuple):
    runner: ModelRunner
    model: LoadedModel
    head: LoadedModel


def mtp(
    directory: Path, mesh: DeviceMesh, form: str = "mimo", weights: Any = "none"
) -> tuple[LoadedModel, LoadedModel]:
    """weights: the kind of quantization of both"""
    published = (FORMS | OF_THREE)[form]
    path = write_with_head(directory, published, head_tensors(published))
    config = read_config(path).replace(quantization=weights)
    model, head = (load_model(path, dtype=FLOAT, config=c, mesh=mesh.mesh) for c in (config, predictor_config(config)))
    return model, head


def with_states(directory: Path, mesh: DeviceMesh) -> tuple[LoadedModel, LoadedModel]:
    return mtp(directory, mesh, "qwen3_next")


def windowed(directory: Path, mesh: DeviceMesh) -> tuple[LoadedModel, LoadedModel]:
    return mtp(directory, mesh, "mimo_v2")


def of_three(directory: Path, mesh: DeviceMesh) -> tuple[LoadedModel, LoadedModel]:
    return mtp(directory, mesh, "mimo_v2 of three")


def chained(directory: Path, mesh: DeviceMesh) -> tuple[LoadedModel, LoadedModel]:
    return mtp(directory, mesh, "step3p7 of three")


def eagle3(
    directory: Path, mesh: DeviceMesh, of: dict[str, Any] = LLAMA, weights: Any = "none"
) -> tuple[LoadedModel, LoadedModel]:
    """of: the config.json of a model of three layers. weights: the kind of its quantization; the head has none"""
    path = write_checkpoint(directory / "model", of, random_tensors(of, 1))
    config = read_config(path).replace(quantization=weights)
    model = load_model(path, dtype=FLOAT, config=config, mesh=mesh.mesh)
    hf = eagle_config(LLAMA | {"hidden_size": config.hidden_size}, 60, (1, 2, 3))
    path = write_checkpoint(directory / "head", hf, eagle_tensors(hf))
    return model, load_model(path, dtype=FLOAT, config=read_eagle(ModelFiles.open(path)), mesh=mesh.mesh)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((mtp, False), marks=pytest.mark.slow),
        (mtp, True),
        pytest.param((eagle3, False), marks=pytest.mark.slow),
        pytest.param((eagle3, True), marks=pytest.mark.slow),
        pytest.param((with_states, False), marks=pytest.mark.slow),
        pytest.param((with_states, True), marks=pytest.mark.slow),
        pytest.param((windowed, True), marks=pytest.mark.slow),
        pytest.param((of_three, False), marks=pytest.mark.slow),
        pytest.param((of_three, True), marks=pytest.mark.slow),
        pytest.param((chained, False), marks=pytest.mark.slow),
        pytest.param((chained, True), marks=pytest.mark.slow),
    ],
    ids=[
        *("mtp fast", "mtp", "eagle3 fast", "eagle3", "states fast", "states", "windows"),
        *("three fast", "three", "chained fast", "chained"),
    ],
)
def pair(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    mesh: DeviceMesh,
    make_runner: Callable[..., ModelRunner],
) -> Pair:
    make, deterministic = request.param
    model, head = make(tmp_path_factory.mktemp("head"), mesh)
    more = make in (of_three, chained)  # guesses than layers
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_drafts": DRAFTS + more}
    if model.config.layer_states:
        sizes |= {"num_state_pages": 8, "state_interval": BORDER, "state_border": BORDER}
    return Pair(make_runner(model, draft=head, deterministic=deterministic, **sizes), model, head)


def core_of(pair: Pair, drafter: DeviceDrafts | None, **changes: object) -> EngineCore:
    if count := pair.runner.plan.num_state_pages:
        changes["states"] = StateSizes(count, BORDER, BORDER)
    changes = {"max_drafts": pair.runner.config.max_drafts} | changes
    return make_core_of(pair.runner, drafter, **changes)


@pytest.fixture(autouse=True)
def own_weights(request: pytest.FixtureRequest) -> Iterator[None]:
    """Give both their own weights again."""
    yield
    if "pair" in request.fixturenames:
        pair: Pair = request.getfixturevalue("pair")
        pair.runner.leaves, pair.runner.draft_leaves = pair.model.leaves, pair.head.leaves


@pytest.fixture(scope="module")
def plain(pair: Pair) -> dict[str, Seen]:
    return seen(run_all(core_of(pair, None), requests_of(FEATURES)))


@pytest.mark.parametrize(
    ("spread", "rests"), [(0.0, {}), (np.nan, {}), (0.0, RESTS_SOON)], ids=["random", "not finite", "rests"]
)
def test_tokens_are_those_without_drafts(
    pair: Pair, plain: dict[str, Seen], spread: float, rests: dict[str, Any]
) -> None:
    """Every parameter of the sampler, masks among them, in a crowd, with prompts between the steps and preemption.

    rests: when the head rests, if not as late as for a user
    """
    if np.isnan(spread):
        pair.runner.draft_leaves = tuple(
            leaf if leaf.dtype == jnp.int32 else other_weights((leaf,), spread)[0] for leaf in pair.head.leaves
        )
    core = core_of(pair, DeviceDrafts(V), num_pages=14, new_token_ratio=0.01)
    with patch.multiple("jaxserve.scheduler.speculation", **rests) if rests else nullcontext():
        assert_same(pair.runner, seen(run_all(core, requests_of(FEATURES))), plain)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_draft_tokens > 0
    assert not rests or 20 < drafts.num_rest_steps < core.scheduler.counters.steps - 20
    assert core.scheduler.counters.retractions
    assert pair.model.config.layer_states or core.scheduler.counters.cached_tokens  # a state is kept after 64 tokens
    assert pair.runner.num_compiles() == 0


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICK)
def guess_after(
    model: ModelStructure,
    head: ModelStructure,
    place: int,
    leaves: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]],
    tokens: jax.Array,
    fed: jax.Array,
    num_known: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The head on the whole text [L] -> the guess of a place after each token, and what goes on [L, D]

    fed: [L, D] in place of the hidden states that the place's layer reads from `num_known` on
    """
    served, layers = model.bind(leaves[0]), head.bind_head(leaves[1])
    positions, taps = jnp.arange(LENGTH, dtype=jnp.int32), Taps(layers[0].taps)
    hidden, _ = served(tokens, positions, (None,) * model.config.num_layers, dense_attend(model.config), taps=taps)
    states = layers[0].states(tuple(taps.states) or (hidden,), Products())
    last = min(place, len(layers) - 1)
    out = result = states
    for index in range(last + 1):
        x = served.embed(jnp.roll(tokens, -1 - index))
        read = jnp.where((positions < num_known)[:, None], states, fed) if index == last else states
        attend = functools.partial(dense_attend(head.config), index)
        out, result, _ = layers[index](x, read, positions, None, attend, Products())
        if head_levels(head.config) > 1:
            states = result
    return layers[last].guess(out, served, Products(), Products()), result


def expected_drafts(pair: Pair, tokens: list[int], count: int) -> list[int]:
    """The guesses after a text, whose last token's hidden state is not known."""
    num_known, padded = len(tokens) - 1, np.zeros(LENGTH, np.int32)
    fed, found = jnp.zeros((LENGTH, pair.head.config.hidden_size)), list(tokens)
    layers = pair.head.config.num_layers
    for place in range(count):
        padded[: len(found)] = found
        leaves = pair.runner.leaves, pair.runner.draft_leaves
        args = leaves, jnp.asarray(padded), fed, jnp.int32(num_known)
        guesses, next_fed = guess_after(pair.model.structure, pair.head.structure, place, *args)
        last = num_known - 1 + max(0, place - (layers - 1))  # the layers after the first guess at the same position
        fed = fed.at[last + 1].set(next_fed[last])
        found.append(int(guesses[last]))
    return found[len(tokens) :]


def test_drafts_are_what_the_head_yields_alone(pair: Pair) -> None:
    """After chunks, rejected drafts, prefix hits and preemption: only the page before a hit's end may differ."""
    drafter = Recorder()
    core = core_of(pair, drafter, num_pages=14, new_token_ratio=0.01)
    requests = [
        make_request(f"{name} {i}", [*prompt, *prompt][:30], max_tokens=TOKENS, seed=i, temperature=name)
        for name in (0.0, 1.0)
        for i, prompt in enumerate(PROMPTS)
    ]
    with patch("jaxserve.scheduler.speculation.PATIENCE", 10**9):  # drafts behind a rest differ
        run_all(core, requests)
    assert core.scheduler.counters.retractions
    whole = [(tokens, drafts[: drafts.index(-1)] if -1 in drafts else drafts) for tokens, drafts in drafter.found]
    right = [expected_drafts(pair, tokens, len(drafts)) == drafts for tokens, drafts in whole if drafts]
    assert len(right) > 15 and sum(right) >= 0.95 * len(right)
    core = core_of(pair, drafter := Recorder(), prefix_cache=False)
    with patch("jaxserve.scheduler.speculation.PATIENCE", 10**9):
        run_all(core, requests[:4])
    assert all(expected_drafts(pair, tokens, len(drafts)) == drafts for tokens, drafts in drafter.found)
    assert not any(-1 in drafts for _, drafts in drafter.found)


Make = Callable[..., tuple[LoadedModel, LoadedModel]]
# the models and changes of the runner; the draft's own K and V are rounded too
WITH: dict[str, tuple[Make, dict[str, Any]]] = {
    "windows, eagle3": (functools.partial(eagle3, of=CASES["gemma3"]), {}),
    "windows in all layers, eagle3": (functools.partial(eagle3, of=CASES["mistral"]), {}),
    "latent attention, mtp": (functools.partial(mtp, form="deepseek_v3"), {}),
    "latent attention, eagle3": (functools.partial(eagle3, of=CASES["deepseek_v3"]), {}),
    "int8 weights, mtp": (functools.partial(mtp, weights="int8"), {}),
    "int8 weights, eagle3": (functools.partial(eagle3, of=CASES["qwen2"], weights="int8"), {}),
    "int8 pages, mtp": (mtp, {"cache_dtype": jnp.dtype("int8")}),
    "fp8 pages, eagle3": (eagle3, {"cache_dtype": jnp.dtype("float8_e4m3fn")}),
}


@pytest.mark.slow  # for compiling
@pytest.mark.parametrize("case", WITH)
def test_tokens_and_drafts_with(
    case: str, tmp_path: Path, mesh: DeviceMesh, make_runner: Callable[..., ModelRunner]
) -> None:
    """Models of other forms than the pair's: the tokens are those without drafts, the drafts those of the head alone.

    Over pages of 8 bits only tokens are compared: the head alone has other numbers, and a sum whose last bit differs
    may be rounded otherwise.
    """
    make, changes = WITH[case]
    model, head = make(tmp_path, mesh)
    runner = make_runner(model, draft=head, max_num_seqs=4, max_num_batched_tokens=8, max_drafts=DRAFTS, **changes)
    pair, names = Pair(runner, model, head), ("greedy", "random", *(() if changes else ("grammar",)))
    assert any(leaf.dtype == jnp.int8 for leaf in runner.leaves) == case.startswith("int8 weights")
    plain = seen(run_all(core_of(pair, None), requests_of(names)))
    core = core_of(pair, drafter := Recorder(), num_pages=14, new_token_ratio=0.01)
    with patch("jaxserve.scheduler.speculation.PATIENCE", 10**9):
        assert_same(runner, seen(run_all(core, requests_of(names))), plain)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_draft_tokens > 0
    assert core.scheduler.counters.retractions and runner.num_compiles() == 0
    if not changes:
        found = [(tokens, [each for each in drafts if each != -1]) for tokens, drafts in drafter.found]
        right = [expected_drafts(pair, tokens, len(drafts)) == drafts for tokens, drafts in found if drafts]
        assert len(right) > 15 and sum(right) >= 0.95 * len(right)


@pytest.mark.slow
def test_four_devices_give_the_same_tokens(tmp_path: Path) -> None:
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.runtime.test_draft_heads", str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(directory: Path) -> None:
    """Serve on four devices, with two copies of each kv head: with heads, and with a model that guesses for itself."""
    mesh = make_mesh("cpu", tensor=4)
    changes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "max_drafts": DRAFTS}
    config, requests = dataclasses.replace(CONFIG, **changes), requests_of(("greedy", "random", "grammar"))
    for name, make in (("mtp", mtp), ("eagle3", eagle3), ("itself", None)):
        model, head = (make or eagle3)(directory / name, mesh)
        runner = ModelRunner(model, config, mesh, draft=head if make else model)
        assert len(mesh.devices) == 4 and any(not leaf.sharding.is_fully_replicated for leaf in runner.draft_leaves)
        pair = Pair(runner, model, head)
        plain = seen(run_all(core_of(pair, None), requests))
        core = core_of(pair, drafter := Recorder())
        assert_same(runner, seen(run_all(core, requests)), plain)
        assert drafter.found and (make is not None or accepted(core) > 20)
        if make is not None:
            found = [(tokens, drafts) for tokens, drafts in drafter.found if -1 not in drafts][:12]
            right = [expected_drafts(pair, tokens, len(drafts)) == drafts for tokens, drafts in found]
            assert len(right) == 12 and sum(right) >= 11, name


def test_a_right_head_saves_steps(pair: Pair) -> None:
    """A model whose next token depends on the last one alone, and a head that hands on its embedding."""
    if pair.head.config.architecture != "MiMoForCausalLM":
        pytest.skip("this head has tokens of its own")
    runner, form = pair.runner, FORMS["mimo"]
    runner.leaves = zeroed(pair.model, ("o_proj", "down_proj"))
    leaves = dict(
        zip((spec.name for spec in pair.head.structure.specs), zeroed(pair.head, ("o_proj", "down_proj")), strict=True)
    )
    size = form.hf["hidden_size"]
    leaves["join.weight"] = jnp.concatenate([jnp.zeros((size, size)), jnp.eye(size)], axis=1)
    leaves["token_norm.weight"] = jnp.ones(size)
    final = next(i for i, spec in enumerate(pair.model.structure.specs) if spec.name == "model.norm.weight")
    leaves["norm.weight"] = runner.leaves[final]
    places = [leaf.sharding for leaf in pair.head.leaves]
    runner.draft_leaves = tuple(map(jax.device_put, leaves.values(), places))
    request = make_request("0", PROMPTS[0], max_tokens=TOKENS)
    tokens = run_all(core_of(pair, None), [request])["0"].token_ids
    core = core_of(pair, DeviceDrafts(V))
    assert run_all(core, [request])["0"].token_ids == tokens
    assert core.scheduler.counters.steps <= 2 + TOKENS // (1 + DRAFTS)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_accepted_tokens >= drafts.num_draft_tokens - DRAFTS


def zeroed(loaded: LoadedModel, names: tuple[str, ...]) -> tuple[jax.Array, ...]:
    """The weights, those of modules with these names 0."""
    pairs = zip(loaded.structure.specs, loaded.leaves, strict=True)
    return tuple(jnp.zeros_like(leaf) if spec.name.split(".")[-2] in names else leaf for spec, leaf in pairs)


def slots_of(kept: int, size: int) -> SlotState:
    """Three slots that keep nothing yet."""
    shapes = state_shapes(3, V, 4, hidden=jax.ShapeDtypeStruct((kept, size), FLOAT))
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    return state.replace(hidden_at=jnp.full_like(state.hidden_at, -1))


def tokens_of(rows: list[tuple[int, int, int]], count: int) -> TokenInput:
    """Rows (slot, start, number) of a step of `count` tokens, whose ids are 10 times their positions."""
    slots, starts, lengths = (jnp.asarray(column, jnp.int32) for column in zip(*rows, strict=True))
    positions = [start + i for _, start, length in rows for i in range(length)]
    row = [r for r, (_, _, length) in enumerate(rows) for _ in range(length)]
    pad = count - len(row)
    positions = jnp.asarray(positions + [0] * pad, jnp.int32)
    return TokenInput(positions * 10, positions, jnp.asarray(row + [len(rows)] * pad), slots, starts, lengths)


def test_where_a_head_runs() -> None:
    """The hidden state of p - 1 with the token at p, at p - 1; without that hidden state one position later."""
    state, tokens = slots_of(3, 1), tokens_of([(0, 0, 3), (1, 8, 2)], 6)
    hidden = jnp.arange(1.0, 7.0)[:, None]
    moved, before = behind(tokens, hidden, state)
    assert moved.positions[:5].tolist() == [0, 1, 2, 8, 9] and moved.starts.tolist() == [0, 8]
    assert moved.token_ids[:5].tolist() == [10, 20, 20, 90, 90] and before[:5, 0].tolist() == [1, 2, 3, 4, 5]
    state = keep_hidden(state, tokens, hidden)
    found, known = kept_hidden(state, jnp.asarray([0, 0, 1, 1, 2, 3]), jnp.asarray([2, 3, 9, 7, 0, 0]))
    assert known.tolist() == [True, False, True, False, False, False] and found[0, 0] == 3 and found[2, 0] == 5

    tokens, hidden = tokens_of([(1, 10, 1), (0, 3, 3)], 4), jnp.arange(11.0, 15.0)[:, None]
    moved, before = behind(tokens, hidden, state)
    assert moved.positions.tolist() == [9, 2, 3, 4] and moved.starts.tolist() == [9, 2]
    assert moved.token_ids.tolist() == [100, 30, 40, 50] and before[:, 0].tolist() == [5, 3, 12, 13]
    again = behind(tokens_of([(0, 2, 1)], 1), hidden[:1], keep_hidden(state, tokens, hidden))
    assert again[0].positions.tolist() == [2]  # position 1 is no longer kept: 3, 4 and 5 are


def test_drafts_of_a_slot_are_rows_of_their_own() -> None:
    """Each follows the one before it; a first one whose hidden state is unknown is written by the second too."""
    state, row = slots_of(3, 1), tokens_of([(2, 5, 1), (2, 6, 1), (0, 5, 1)], 3)
    moved, before = behind(row, jnp.asarray([[1.0], [2.0], [3.0]]), state)
    assert moved.positions.tolist() == [5, 5, 5] and moved.token_ids.tolist() == [60, 60, 50]
    assert before[:, 0].tolist() == [1, 1, 3]


def test_heads_of_other_models_are_refused(pair: Pair) -> None:
    served, head = pair.model.config, pair.head.config
    with pytest.raises(ConfigError, match="has 97 tokens in its vocabulary"):
        check_draft_model(head.replace(vocab_size=97), served)
    if isinstance(head.head, EagleHead):
        with pytest.raises(ConfigError, match="reads hidden states of 16 numbers and embeddings of 16"):
            check_draft_model(head, served.replace(hidden_size=32))
        with pytest.raises(ConfigError, match=r"reads the layers \(1, 2, 3\) of a model of 2"):
            check_draft_model(head, served.replace(num_layers=2))
        with pytest.raises(ConfigError, match="counts the published layers of"):
            check_draft_model(head, served.replace(mlp_layers=(True,) * served.num_layers))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
