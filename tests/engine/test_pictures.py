"""A whole engine of a model with a tower, from its files: what it says of itself, and tokens after a picture."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import tokenizers

from jaxserve.api.state import ServerState
from jaxserve.config import Config
from jaxserve.engine.factory import build_engine, load
from jaxserve.library.in_process import Engine, _SteppedEngine
from jaxserve.models.checkpoint.files import ModelFiles
from jaxserve.runtime.mesh import make_mesh
from jaxserve.telemetry.metrics import Metrics
from jaxserve.telemetry.tracing import make_tracing
from jaxserve.types.picture import PictureInfo
from tests.fakes import make_request, run_all
from tests.models.picture_cases import PAD
from tests.models.test_pictures import GOLDENS, pictures_of, write_case
from tests.quick import quick_programs

CASE = "qwen3_vl_pictures"


def test_no_tower_is_loaded_if_a_prompt_may_have_no_pictures(tmp_path: Path):
    files = ModelFiles.open(write_case(CASE, tmp_path))
    config, mesh = Config.of(str(tmp_path), max_items=0, dtype="float32"), make_mesh("cpu")
    found = load(config, files, mesh, lambda message: None)
    assert found.config.vision is None
    assert not any(spec.name.startswith("visual") for spec in found.structure.specs)
    assert any(spec.name.startswith("model.layers") for spec in found.structure.specs)


def test_an_engine_takes_pictures(tmp_path: Path):
    directory = write_case(CASE, tmp_path / "model")
    words = {f"w{index}": index for index in range(64)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0")).save(str(directory / "tokenizer.json"))
    limits = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 32, "max_model_len": 128}
    with quick_programs():
        built = build_engine(Config.of(str(directory), **limits), lambda message: None)
    info = built.info.pictures
    assert info is not None
    assert (info.kind, info.patch_size, info.merge_size, info.width) == ("qwen3_vl", 4, 2, 48)
    assert (info.token_id, info.max_tokens) == (PAD, 128)
    ids, pictures = pictures_of("five")
    found = run_all(built.core, [make_request("a", ids, pictures=pictures, max_tokens=6)])
    assert found["a"].token_ids == np.load(GOLDENS / f"{CASE}.npz")["five_greedy"].tolist()
    assert built.core.runner.num_compiles() == 0
    built.core.close()


def test_an_engine_in_this_process_finds_the_processor_of_a_hub_id(tmp_path: Path) -> None:
    """The operator's name of such a model is not a directory. Its files are where the tokenizer is."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"min_pixels": 64, "max_pixels": 1024}))
    half, sizes = (0.5, 0.5, 0.5), {"patch_size": 4, "merge_size": 2, "width": 48, "token_id": PAD, "max_tokens": 128}
    pictures = PictureInfo(kind="qwen3_vl", mean=half, std=half, **sizes)
    info, config = SimpleNamespace(model_path="org/model", pictures=pictures), Config()
    engine = cast("Engine", SimpleNamespace(config=config, info=info, _tokenizer_dir=str(tmp_path)))
    state = ServerState(_SteppedEngine(engine), config, Metrics(), make_tracing(config.logging))
    assert (state.pictures.settings.min_pixels, state.pictures.settings.max_pixels) == (64, 1024)
    state.stop_pictures()
