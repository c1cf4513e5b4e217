"""Requests with pictures through the engine's core, with real programs of tiny models: the tokens are transformers'."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from jaxserve.engine.core import CoreOptions, EngineCore
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.models.checkpoint.hf_config import read_eagle
from jaxserve.models.checkpoint.loader import LoadedModel, load_model
from jaxserve.models.draft_head import predictor_config
from jaxserve.models.vision import tower
from jaxserve.runtime import towers
from jaxserve.runtime.compilation.compiler import compiler_options
from jaxserve.runtime.mesh import DeviceMesh, make_mesh
from jaxserve.runtime.model_runner import ModelRunner
from jaxserve.scheduler.pictures import PicturePool
from jaxserve.speculation.device import DeviceDrafts
from jaxserve.speculation.ngram import Drafter
from jaxserve.types.picture import Picture
from jaxserve.types.sampling import EngineRequest, SamplingParams
from jaxserve.types.scheduling import SchedulerConfig, StateSizes, TowerLimits
from jaxserve.types.step import EncodePart, Request
from tests.fakes import Transcripts, make_request, run_all
from tests.models.checkpoints import write_checkpoint
from tests.models.families import golden_tensors
from tests.models.heads import FORMS, eagle_config, eagle_tensors, head_tensors
from tests.models.picture_cases import CASES, DELTA, TEXT, prompts_of
from tests.models.test_pictures import GOLDENS, pictures_of, write_case
from tests.quick import QUICK_FLAGS, quick_programs
from tests.runtime.conftest import CONFIG

PAGE, BORDER, FLOAT = 8, 64, jnp.dtype("float32")
CASE, STATES = "qwen3_vl_pictures", "qwen3_5_pictures"
MakeRunner = Callable[..., ModelRunner]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> MakeRunner:
    def of(case: str, **changes: Any) -> ModelRunner:
        with quick_programs():
            return make_runner(case, tmp_path_factory.mktemp(case), compile_cache=Path(compile_cache), **changes)

    return of


def make_runner(case: str, directory: Path, tensor: int = 1, guesses: str = "", **changes: Any) -> ModelRunner:
    mesh = make_mesh("cpu", tensor=tensor)
    model = load_model(write_case(case, directory), dtype=FLOAT, mesh=mesh.mesh)
    draft = guessing(guesses, model, directory, mesh) if guesses else None
    if any(model.config.layer_states):
        changes |= {"max_model_len": 256, "num_state_pages": 16, "state_interval": BORDER, "state_border": BORDER}
    config = dataclasses.replace(CONFIG, num_pages=256, **changes)
    return ModelRunner(model, config, mesh, draft=draft)


def guessing(kind: str, model: LoadedModel, directory: Path, mesh: DeviceMesh) -> LoadedModel:
    """The model that guesses for itself, or a head with random weights."""
    if kind == "itself":
        return model
    if kind == "eagle3":
        hf = eagle_config(TEXT | {"architectures": ["LlamaForCausalLM"]}, 40, (1, 2, 3))
        path = write_checkpoint(directory / "head", hf, eagle_tensors(hf))
        return load_model(path, dtype=FLOAT, config=read_eagle(ModelFiles.open(path)), mesh=mesh.mesh)
    text = TEXT | DELTA | {"architectures": ["Qwen3_5ForCausalLM"]}
    form = FORMS["qwen3_next"]._replace(hf=text, alone={"layer_types": ["full_attention"]})
    path = write_checkpoint(directory / "head", CASES[STATES], golden_tensors(STATES) | head_tensors(form))
    return load_model(path, dtype=FLOAT, config=predictor_config(model.config), mesh=mesh.mesh)


@pytest.fixture(scope="module")
def runner(make: MakeRunner) -> ModelRunner:
    return make(CASE)


@pytest.fixture(scope="module")
def hybrid(make: MakeRunner) -> ModelRunner:
    return make(STATES)


@pytest.fixture(scope="module", params=[CASE, pytest.param(STATES, marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest) -> tuple[str, ModelRunner]:
    """A case and its runner: one with pages alone, and one with recurrent states too."""
    return request.param, request.getfixturevalue("runner" if request.param == CASE else "hybrid")


def make_core(runner: ModelRunner, drafter: Drafter | None = None, **changes: object) -> EngineCore:
    runner.rebuild()
    limits, vision = runner.tower_limits, runner.structure.config.vision
    assert limits is not None
    assert vision is not None
    sizes: dict[str, object] = {
        "num_pages": 256,
        "page_size": PAGE,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "max_model_len": runner.config.max_model_len,
        "pictures": limits,
    }
    if runner.plan.num_state_pages:
        sizes["states"] = StateSizes(runner.plan.num_state_pages, BORDER, BORDER)
    options = CoreOptions(vocab_size=64, eos_token_ids=(), pictures=vision.info(64), drafter=drafter)
    return EngineCore(runner, SchedulerConfig(**(sizes | changes)), options)  # type: ignore[arg-type]


def requests_of(case: str) -> list[EngineRequest]:
    return [request_of(case, name, name) for name in prompts_of(case)]


def request_of(case: str, name: str, request_id: str, **changes: object) -> EngineRequest:
    ids, pictures = pictures_of(name)
    count = len(golden(case, name))
    return make_request(request_id, ids, pictures=pictures, **({"max_tokens": count, "logprobs": 1} | changes))


def golden(case: str, name: str) -> list[int]:
    return np.load(GOLDENS / f"{case}.npz")[f"{name}_greedy"].tolist()


def tokens(transcripts: Transcripts) -> dict[str, list[int]]:
    return {name: each.token_ids for name, each in transcripts.items()}


def expected(case: str) -> dict[str, list[int]]:
    return {name: golden(case, name) for name in prompts_of(case)}


def pool(core: EngineCore):
    assert core.scheduler.pictures is not None
    return core.scheduler.pictures


@pytest.mark.parametrize("case", [CASE, *(pytest.param(c, marks=pytest.mark.slow) for c in CASES if c != CASE)])
def test_tokens_are_those_of_transformers(case: str, make: MakeRunner, runner: ModelRunner):
    own = runner if case == CASE else make(case)
    assert tokens(run_all(make_core(own), requests_of(case))) == expected(case)
    assert own.num_compiles() == 0


@pytest.mark.parametrize("chunk", [2, PAGE, 13, 32])
def test_chunks_of_any_size_give_the_same_tokens(chunk: int, served: tuple[str, ModelRunner]):
    case, runner = served
    core = make_core(runner, prefill_chunk_size=chunk)
    for _ in range(2):  # the second time from cached pages and states
        assert tokens(run_all(core, requests_of(case))) == expected(case)


def test_a_small_pool_and_slices_of_one_block_give_the_same_tokens(served: tuple[str, ModelRunner]):
    case, runner = served
    largest = max(each.num_tokens for name in prompts_of(case) for each in pictures_of(name)[1])
    limits = runner.tower_limits
    assert limits is not None
    core = make_core(runner, pictures=dataclasses.replace(limits, num_rows=largest))
    assert tokens(run_all(core, requests_of(case))) == expected(case)
    assert pool(core).num_encoded >= 8


def test_a_running_stream_gets_a_token_in_every_step_beside_an_encode(runner: ModelRunner):
    limits = runner.tower_limits
    assert limits is not None
    core, transcripts = make_core(runner), Transcripts()
    core.add(request_of(CASE, "none", "stream", max_tokens=40, ignore_eos=True))
    for _ in range(3):
        transcripts.take(core.step())
    core.add(request_of(CASE, "five", "pictures"))
    while "pictures" not in transcripts:
        before = len(transcripts["stream"].token_ids)
        transcripts.take(core.step())
        assert len(transcripts["stream"].token_ids) == before + 1
    assert pool(core).num_encoded == 5
    steps = len(transcripts["stream"].token_ids)
    assert steps >= len(limits.pieces[256]), "several pieces ran in a step"


def test_pictures_that_are_wanted_at_once_share_a_program(runner: ModelRunner):
    assert runner.tower is not None
    limits, counts = runner.tower.limits, []
    for packs in (True, False):
        core = make_core(runner, pictures=dataclasses.replace(limits, packs=packs))
        before = runner.tower.num_dispatches
        assert tokens(run_all(core, [request_of(CASE, "five", "five")])) == {"five": golden(CASE, "five")}
        counts.append(runner.tower.num_dispatches - before)
    each = 1 + 2 * 3 + 2 + 1  # start, halves of blocks, two deepstack blocks, end
    assert counts == [2 * each, 5 * each], "four of them are in the first chunk"


@pytest.mark.parametrize("case", [CASE, "qwen2_5_vl_pictures"])  # the second attends in windows
def test_attention_in_parts_makes_the_same_rows(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Equal to the bit, whether attention is cut or not, and in steps of any number of pieces."""
    model = load_model(write_case(case, tmp_path), dtype=jnp.dtype("float32"))
    monkeypatch.setattr(tower, "QUERY_TILE", 32)  # a part is of whole tiles
    found: list[np.ndarray] = []
    for parts in (1, 8):
        monkeypatch.setattr(towers, "MOST_SCORES", 256 * 256 // parts)
        runner = make_tower(model)
        kinds = runner.limits.pieces[256]
        assert (kinds.count("attend"), kinds.count("queries")) == ((3, 0) if parts == 1 else (0, 3 * parts))
        for step in (len(kinds), 5, 1):
            runner.rebuild()
            for first in range(0, len(kinds), step):
                last = min(first + step, len(kinds))
                runner.run(model.leaves, EncodePart(pictures_of("five")[1], first, last, list(range(20, 0, -1))))
            found.append(np.asarray(runner.pool))
    assert all(np.array_equal(rows, found[0]) for rows in found)
    assert found[0][:, 1:21].any(axis=-1).all()


def make_tower(model: LoadedModel) -> towers.TowerRunner:
    """The tower of a model for pictures of 256 patches, with the options of deterministic mode."""
    vision = model.config.vision
    assert vision is not None
    limits = towers.tower_limits(vision, "cpu", 32, deterministic=True)
    programs = towers.TowerPrograms(
        model.structure, dataclasses.replace(limits, num_rows=32, pieces={256: limits.pieces[256]})
    )
    options = dict(compiler_options("cpu", deterministic=True))
    pool = jax.ShapeDtypeStruct(programs.pool_shape, programs.dtype)

    def compiled(name: str, function: Any, args: Any, donated: tuple[int, ...], _: Any) -> tuple[str, Any]:
        jitted = jax.jit(function, donate_argnums=donated, compiler_options=options)
        return name, jitted.lower(*args).compile()

    return towers.TowerRunner(
        programs, dict(programs.programs(model.leaves, pool, None, compiled)), lambda: jnp.zeros(pool.shape, pool.dtype)
    )


def test_an_abort_leaves_the_pictures_that_share_its_program(runner: ModelRunner):
    """Rows that it gave back are another picture's before the program writes."""
    limits = runner.tower_limits
    assert limits is not None
    core, transcripts = make_core(runner, pictures=dataclasses.replace(limits, num_rows=19)), Transcripts()
    core.add(request_of(CASE, "one", "gone"))
    core.add(request_of(CASE, "two", "two"))
    transcripts.take(core.step())
    assert [entry.picture.num_tokens for entry in pool(core)._begun] == [15, 4]
    core.abort(["gone"])
    core.scheduler.check_integrity()
    core.add(request_of(CASE, "five", "five"))
    found = tokens(run_all(core, transcripts=transcripts))
    assert {name: found[name] for name in ("two", "five")} == {name: golden(CASE, name) for name in ("two", "five")}


def test_the_same_picture_is_encoded_once_and_its_pages_are_shared(runner: ModelRunner):
    core = make_core(runner)
    run_all(core, [request_of(CASE, "five", "first")])
    encoded = pool(core).num_encoded
    again = run_all(core, [request_of(CASE, "five", "again")])
    assert tokens(again) == {"again": golden(CASE, "five")}
    assert pool(core).num_encoded == encoded == 5
    assert again["again"].outputs[0].num_cached_tokens == len(pictures_of("five")[0]) // PAGE * PAGE
    core.scheduler.kv.flush()  # the pages are gone, the rows are there
    assert tokens(run_all(core, [request_of(CASE, "five", "third")])) == {"third": golden(CASE, "five")}
    assert pool(core).num_encoded == encoded
    core.flush_prefix_cache()
    run_all(core, [request_of(CASE, "five", "fourth")])
    assert pool(core).num_encoded == 2 * encoded


@pytest.mark.parametrize("cut", [8, 16, 24])
def test_a_hit_that_ends_in_or_beside_a_picture_gives_the_same_tokens(cut: int, runner: ModelRunner):
    """The picture of `one` is at tokens 8 to 22, so the hits end at its start, in it, and behind it."""
    core = make_core(runner)
    run_all(core, [request_of(CASE, "one", "first")])
    cache = core.scheduler.kv.cache
    while cache.num_pages > cut // PAGE:  # the last page of the prompt is the first to go
        cache.evict(1)
    found = run_all(core, [request_of(CASE, "one", "hit")])
    assert found["hit"].outputs[0].num_cached_tokens == cut
    assert tokens(found) == {"hit": golden(CASE, "one")}


def altered(picture: Picture) -> Picture:
    """Another picture of the same size."""
    patches = bytes(255 - value for value in picture.patches)
    return msgspec.structs.replace(picture, patches=patches, digest=hashlib.sha256(patches).digest())


@pytest.mark.slow
def test_a_state_in_or_behind_a_picture_is_found_by_its_pictures_only(hybrid: ModelRunner):
    """In `long` the first picture is at tokens 41 to 64, the second at 112 to 127. States are kept at 64 and 128."""
    ids, (first, second) = pictures_of("long")
    cases = {
        "first": ((first, second), 0),
        "again": ((first, second), 2 * BORDER),
        "another second": ((first, altered(second)), BORDER),
        "another first": ((altered(first), second), 0),
    }
    asked = {name: make_request(name, ids, pictures=pictures, max_tokens=6) for name, (pictures, _) in cases.items()}
    alone = {name: run_all(make_core(hybrid), [request])[name].token_ids for name, request in asked.items()}
    assert alone["first"] == alone["again"] == golden(STATES, "long")
    core = make_core(hybrid)
    for name, (_, cached) in cases.items():
        found = run_all(core, [asked[name]])[name]
        assert found.outputs[0].num_cached_tokens == cached, name
        assert found.token_ids == alone[name]


def test_another_picture_of_equal_size_shares_no_page(runner: ModelRunner):
    core = make_core(runner)
    ids, (picture,) = pictures_of("one")
    run_all(core, [request_of(CASE, "one", "first")])
    other = make_request("other", ids, pictures=(altered(picture),), max_tokens=6)
    found = run_all(core, [other])
    assert found["other"].outputs[0].num_cached_tokens == PAGE  # the page of text before the picture
    assert tokens(found) == tokens(run_all(make_core(runner), [other]))
    salted = run_all(core, [request_of(CASE, "one", "salted", namespace="another tenant")])
    assert salted["salted"].outputs[0].num_cached_tokens == 0


def test_tokens_after_a_preemption_and_after_a_device_failure_are_the_same(served: tuple[str, ModelRunner]):
    case, runner = served
    for disturb in (lambda core: core.scheduler.preempt_all(), lambda core: core.recover()):
        for steps in (1, 2, 3, 5, 7, *((12, 20, 30) if case == STATES else ())):
            core, transcripts = make_core(runner, prefill_chunk_size=PAGE), Transcripts()
            for request in requests_of(case):
                core.add(request)
            for _ in range(steps):
                transcripts.take(core.step())
            disturb(core)
            assert tokens(run_all(core, transcripts=transcripts)) == expected(case), steps


def test_an_aborted_request_gives_up_its_pictures(runner: ModelRunner):
    core = make_core(runner, prefill_chunk_size=2)
    for steps in range(1, 6):
        core.add(request_of(CASE, "five", f"gone {steps}"))
        for _ in range(steps):
            core.step()
        core.abort([f"gone {steps}"])
        core.scheduler.check_integrity()
    assert tokens(run_all(core, requests_of(CASE))) == expected(CASE)


def test_a_resumed_request_goes_on_with_the_same_tokens(runner: ModelRunner):
    whole = golden(CASE, "five")
    request = msgspec.structs.replace(request_of(CASE, "five", "resumed"), resumed_token_ids=whole[:3])
    assert tokens(run_all(make_core(runner), [request])) == {"resumed": whole[3:]}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "guesses"), [(CASE, "itself"), (CASE, "eagle3"), (STATES, "mtp")])
def test_a_model_or_head_that_guesses_without_the_pictures_changes_no_token(case: str, guesses: str, make: MakeRunner):
    runner = make(case, guesses=guesses, max_drafts=3)
    rows = {"max_drafts": 3, "draft_rows": max(runner.buckets.draft), "verify_sizes": runner.buckets.verify}
    core = make_core(runner, DeviceDrafts(64), **rows)
    for _ in range(2):  # the second time from cached pages and states
        assert tokens(run_all(core, requests_of(case))) == expected(case)
    drafts = core.scheduler.stats().drafts
    assert drafts is not None and drafts.num_draft_tokens > 0
    assert runner.num_compiles() == 0


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE, STATES])
def test_deterministic_log_probabilities_are_equal_to_the_bit(case: str, make: MakeRunner):
    runner = make(case, deterministic=True)
    found = []
    for chunk in (2, PAGE, 32):
        transcripts = run_all(make_core(runner, prefill_chunk_size=chunk), requests_of(case))
        assert tokens(transcripts) == expected(case)
        found.append({n: [o.logprobs for o in each.outputs if o.logprobs] for n, each in transcripts.items()})
    for name in prompts_of(case):
        alone = run_all(make_core(runner), [request_of(case, name, name)])
        assert [o.logprobs for o in alone[name].outputs if o.logprobs] == found[0][name]
    assert found[0] == found[1] == found[2]


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASE, STATES])
def test_four_devices_give_the_same_tokens(case: str, tmp_path: Path):
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.runtime.test_pictures", case, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def main(case: str, directory: Path) -> None:
    """Serve on four devices. The tower is on each of them."""
    assert tokens(run_all(make_core(make_runner(case, directory, tensor=4)), requests_of(case))) == expected(case)


def test_a_model_without_a_tower_refuses_pictures(runner: ModelRunner):
    core = make_core(runner)
    options = CoreOptions(vocab_size=64)
    with pytest.raises(Exception, match="takes no pictures"):
        EngineCore(runner, core.scheduler.config, options).add(request_of(CASE, "one", "refused"))


def test_limits_of_a_cpu_hold_a_picture_of_256_tokens(runner: ModelRunner):
    pieces = ("attend", "mlp", "deep", "attend", "mlp", "attend", "mlp", "deep", "end")
    assert runner.tower_limits == TowerLimits(num_rows=256, merge=2, pieces={256: pieces, 1024: pieces})


def test_a_step_runs_the_pieces_that_fit_in_its_time():
    """A small picture takes three pieces a step, a large one a piece that is longer than the time."""
    small, large = (Picture(bytes([size]) * 32, b"", (1, 8, 8 * size), 1, 16 * size) for size in (1, 16))
    pieces = ("attend", "mlp", "attend", "end")
    seconds = {(piece, size): taken for piece in pieces for size, taken in ((256, 0.1), (1024, 0.4))}
    own: dict[int, tuple[str, ...]] = dict.fromkeys((256, 1024), pieces)
    cut = ("project", "queries", "queries", "mlp", "end")
    fast = {("project", 1024): 0.05, ("queries", 1024): 0.1}
    measured = TowerLimits(num_rows=512, merge=2, pieces=own, seconds=seconds, step_seconds=0.35)
    for limits, picture, parts in (
        (measured, small, [(0, 3), (3, 4)]),
        (measured, large, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (dataclasses.replace(measured, step_seconds=9.0), large, [(0, 4)]),
        (dataclasses.replace(measured, seconds=seconds | {("mlp", 256): 0.3}), small, [(0, 1), (1, 2), (2, 4)]),
        (dataclasses.replace(measured, seconds={}), small, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (
            dataclasses.replace(measured, pieces=own | {1024: cut}, seconds=seconds | fast),
            large,
            [(0, 3), (3, 4), (4, 5)],
        ),
    ):
        pictures, request = PicturePool(limits), Request("a", [0] * 300, SamplingParams(), 0.0, 0, 4)
        request.pictures = (picture,)
        assert pictures.reach(request, 300) == picture.start
        assert [(part.first, part.last) for _ in parts for part in pictures.plan()] == parts
        assert not pictures.has_work and pictures.reach(request, 300) == 300


def test_pictures_of_a_batch_are_encoded_behind_those_that_somebody_waits_for():
    pictures = PicturePool(TowerLimits(num_rows=64, merge=2, pieces={256: ("end",)}, packs=False))
    for number, (priority, aged) in enumerate([(1, False), (1, False), (0, False), (1, True), (0, False)]):
        request = Request("a", [0] * 60, SamplingParams(), 0.0, 0, 4, priority=priority, aged=aged)
        request.pictures = (Picture(bytes([number]) * 32, b"", (1, 4, 4), 1, 4),)
        assert pictures.reach(request, 60) == 1
    order = [part.pictures[0].digest[0] for _ in range(5) for part in pictures.plan()]
    assert order == [3, 2, 4, 0, 1]


@pytest.mark.parametrize("flushed_at", [None, 5, 10, 25, 45])
def test_a_prompt_never_waits_for_rows_that_it_holds_itself(flushed_at: int | None):
    """There are rows for one picture. The first comes again behind the second. Weights may be replaced within one."""
    first, second = (Picture(bytes([size]) * 32, b"", (1, 8, 8), 1, 16) for size in (1, 2))
    pictures = PicturePool(TowerLimits(num_rows=16, merge=2, pieces={256: ("attend", "end")}))
    request = Request("a", [0] * 60, SamplingParams(), 0.0, 0, 4)
    places = (first, 1), (second, 20), (first, 40)
    request.pictures = tuple(msgspec.structs.replace(picture, start=start) for picture, start in places)
    for _ in range(30):
        request.num_computed_tokens = pictures.reach(request, min(60, request.num_computed_tokens + 5))
        pictures.release_passed(request)
        pictures.plan()
        if flushed_at is not None and request.num_computed_tokens >= flushed_at:
            pictures.flush()
            flushed_at = None
        pictures.check_integrity({request})
    assert request.num_computed_tokens == 60


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
