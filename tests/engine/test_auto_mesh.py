"""mesh.tensor and mesh.expert auto: the split that is chosen, and what is said if none fits.

Four simulated devices exist only in a process of their own: its part of this file is what runs under __main__.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve import Engine, SamplingParams
from jaxserve.config import Config, MeshSection
from jaxserve.engine import factory
from jaxserve.errors import ConfigError
from jaxserve.models.checkpoint.files import ModelFiles
from tests.conftest import SharedData
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint, write_words
from tests.models.families import CASES, ENCODERS
from tests.models.published import PUBLISHED
from tests.quick import QUICK_FLAGS

GIB = 2**30
LIMITS: dict[str, Any] = {"max_num_seqs": 1, "max_num_batched_tokens": 16, "num_pages": 8, "compile_cache": None}
Choose = Callable[..., tuple[int, int]]


@pytest.fixture
def choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Choose:
    """Choose the mesh of a config.json on so many GPUs of so many bytes -> (tensor, expert)."""

    def chosen(hf: dict[str, Any], count: int, size: int, **keys: Any) -> tuple[int, int]:
        device = SimpleNamespace(
            platform="gpu",
            process_index=0,
            device_kind="NVIDIA H200",
            compute_capability="9.0",
            memory_stats=lambda: {"bytes_limit": size},
        )
        mesh: Any = SimpleNamespace(platform="gpu", devices=[device] * count)
        seen: list[MeshSection] = []
        monkeypatch.setattr(factory, "configured_mesh", lambda section: seen.append(section) or mesh)
        (tmp_path / "config.json").write_text(json.dumps(hf))
        config = Config.of(str(tmp_path), **{"tensor": "auto", "load_format": "random", **keys})
        config, _, split = factory.choose_mesh(config, ModelFiles.open(tmp_path))
        tensor, expert = seen[-1].split
        assert config.mesh == seen[-1] and split.startswith(f"tensor {tensor}, expert {expert}: ")
        assert f" {tensor * expert} of {count} devices" in split
        return tensor, expert

    return chosen


@pytest.mark.parametrize("name", ["Qwen--Qwen3-30B-A3B-FP8", "openai--gpt-oss-20b", "openai--gpt-oss-120b"])
def test_published_mixtures_over_eight_devices_are_split_by_experts(
    name: str, choose: Choose, shared_data: SharedData
) -> None:
    """Their rows cannot be split over 8 or 4 devices. Two layers are as good as all."""
    hf = json.loads((shared_data / f"hf_configs/{name}_config.json").read_text())
    hf |= {"num_hidden_layers": 2, "layer_types": hf.get("layer_types", [])[:2] or None}
    assert choose(hf, 8, 8 * GIB) == (2, 4)
    assert choose(hf, 8, 8 * GIB, expert=8) == (1, 8), "a number that is given is kept"
    assert choose(hf, 8, 8 * GIB, tensor=1, expert="auto") == (1, 8)


def test_a_dense_model_takes_the_devices_that_its_heads_can_share(choose: Choose) -> None:
    hf = PUBLISHED["Llama-3.1-8B"].hf | {"num_hidden_layers": 2}
    assert choose(hf, 8, 4 * GIB) == (8, 1)
    assert choose(hf, 7, 4 * GIB) == (4, 1), "over 7 devices each would have the whole KV cache"
    assert choose(hf, 1, 4 * GIB) == (1, 1)


def test_what_does_not_fit_says_how_many_devices_would_do(choose: Choose) -> None:
    hf = PUBLISHED["Llama-3.1-8B"].hf | {"num_hidden_layers": 2}  # 2.8 GiB, of which 2 GiB are embeddings and head
    with pytest.raises(ConfigError, match=r"^2 of gpu with 1\.0 GiB each have room for 0 tokens beside") as found:
        choose(hf, 2, GIB)
    assert found.value.fix is not None and found.value.fix.startswith("use 8 devices, lower model.max_model_len")
    assert choose(hf, 2, 7 * GIB // 4) == (2, 1), "the context is cut to what fits, as without auto"
    with pytest.raises(ConfigError, match="a full context has 131072") as found:
        choose(hf, 2, 7 * GIB // 4, max_model_len=131072)
    assert found.value.fix is not None and found.value.fix.startswith("use 4 devices, ")


@pytest.mark.parametrize(
    ("hf", "keys", "message", "fix"),
    [
        (TINY_LLAMA, {"expert": 16}, "mesh.expert is 16, and there are 8 of gpu", "lower mesh.expert"),
        (TINY_LLAMA, {"tensor": 3, "expert": "auto"}, "4 attention heads cannot be split over 3 devices", ""),
        (ENCODERS["bert"], {}, "for models with a KV cache", "set both, or leave them out"),
    ],
)
def test_what_cannot_be_chosen_is_refused(
    hf: dict[str, Any], keys: dict[str, Any], message: str, fix: str, choose: Choose
) -> None:
    with pytest.raises(ConfigError, match=message) as found:
        choose(hf, 8, GIB, **keys)
    assert fix in str(found.value.fix)


def test_one_auto_makes_the_other_auto_unless_it_is_given() -> None:
    for given, found in (
        ({}, (1, 1)),
        ({"tensor": "auto"}, ("auto", "auto")),
        ({"expert": "auto"}, ("auto", "auto")),
        ({"tensor": "auto", "expert": 4}, ("auto", 4)),
        ({"tensor": 2, "expert": "auto"}, (2, "auto")),
    ):
        mesh = Config.parse({"mesh": given}).mesh
        assert (mesh.tensor, mesh.expert, mesh.is_auto) == (*found, "auto" in found)
        assert Config.model_validate_json(Config.parse({"mesh": given}).model_dump_json()).mesh == mesh


def answer(directory: Path, prompt: list[int], **keys: Any) -> tuple[list[int], Any]:
    """Greedy tokens of an engine, and what it says of itself."""
    with Engine(str(directory), device="cpu", dtype="float32", **LIMITS, **keys) as engine:
        [[found]] = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True))
        return found.token_ids, engine.info


@pytest.mark.slow
def test_an_engine_on_four_devices_answers_as_on_one(tmp_path: Path) -> None:
    hf = CASES["qwen3_moe"] | {"moe_intermediate_size": 22}  # not over four devices
    write_words(write_checkpoint(tmp_path, hf, random_tensors(hf)), hf["vocab_size"])
    flags = f"--xla_force_host_platform_device_count=4 {QUICK_FLAGS}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.engine.test_auto_mesh", str(tmp_path)]
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    tokens, info = answer(tmp_path, [5, 17, 40, 8, 23])
    assert (info.tensor, info.expert, info.split) == (1, 1, "")
    assert found["mesh"] == [2, 2] and found["devices"] == 4
    assert found["split"].startswith("tensor 2, expert 2: 4 of 4 devices, ")
    assert found["tokens"] == tokens


if __name__ == "__main__":
    tokens, info = answer(Path(sys.argv[1]), [5, 17, 40, 8, 23], tensor="auto")
    mesh = [info.tensor, info.expert]
    print(json.dumps({"tokens": tokens, "mesh": mesh, "devices": len(info.devices), "split": info.split}))
