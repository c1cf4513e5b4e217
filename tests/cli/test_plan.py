"""`jaxserve plan` and `jaxserve convert`."""

import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.cli.main import main
from jaxserve.models.loader import load_model
from tests.models.checkpoints import TINY_LLAMA, random_tensors, write_checkpoint
from tests.models.published import PUBLISHED


def test_a_plan_of_three_meshes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Llama-3.1-70B"].hf))
    assert main(["plan", str(config)]) == 0
    head, _, _, columns, *rows = capsys.readouterr().out.splitlines()
    assert head == "LlamaForCausalLM: 70.554 billion parameters, as bfloat16"
    assert columns.split()[:4] == ["devices", "tensor", "expert", "weights"]
    assert [row.split()[:5] for row in rows] == [
        ["1", "1", "1", "131.42", "GiB"],
        ["8", "8", "1", "16.43", "GiB"],
        ["16", "16", "1", "8.37", "GiB"],  # kv heads twice
    ]
    assert "does not fit" in rows[0] and float(rows[1].split()[-1]) > 10
    assert main(["plan", str(config), "--mesh", "4x1", "--memory", "141"]) == 0
    assert capsys.readouterr().out.splitlines()[4].split()[:3] == ["4", "4", "1"]


def test_a_plan_says_what_windows_spare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["gpt-oss-120b"].hf | {"sliding_window": 128}))
    assert main(["plan", str(config), "--mesh", "4", "--max-num-seqs", "64"]) == 0
    columns, row = capsys.readouterr().out.splitlines()[3:]
    assert columns.endswith("all kept")
    tokens, _, kept = row.split()[-3:]
    assert 1.9 < int(tokens) / int(kept) < 2


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        (["--mesh", "0"], "--mesh 0 is neither"),
        (["--mesh", "8x2x1"], "--mesh 8x2x1 is neither"),
        (["--mesh", "3"], "cannot be split over 3 devices"),
    ],
)
def test_a_wrong_plan_is_explained(
    words: list[str], cause: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(PUBLISHED["Llama-3.1-8B"].hf))
    assert main(["plan", str(config), *words]) == 2
    assert cause in capsys.readouterr().err
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert main(["plan", str(config)]) == 2
    assert "is missing" in capsys.readouterr().err


def test_convert_then_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(tmp_path / "source", TINY_LLAMA, random_tensors(TINY_LLAMA))
    target = tmp_path / "target"
    assert main(["convert", str(source), str(target), "--device", "cpu", "--dtype", "bfloat16"]) == 0
    assert "LlamaForCausalLM, 0.00 GB as bfloat16" in capsys.readouterr().out
    loaded, before = (load_model(d, dtype=jnp.dtype("bfloat16")) for d in (target, source))
    assert all(np.array_equal(a, b) for a, b in zip(loaded.leaves, before.leaves, strict=True))
    assert main(["convert", str(source), str(target), "--device", "cpu"]) == 2
    assert "is not empty" in capsys.readouterr().err


def test_the_command_is_found() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxserve", "--help"], capture_output=True, text=True, check=True)
    assert "convert" in done.stdout and "plan" in done.stdout
