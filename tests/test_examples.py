"""The examples run as their first lines say: a new user's first contact."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import QUICK_FLAGS

ROOT = Path(__file__).parent.parent
# few programs, and quick ones: with their own max_num_seqs the examples share none with the other tests
FEW = {"JAXSERVE_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "16", "XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(ROOT)}


# a cell shows the value of its last line, as in a notebook
CELLS = """
import ast, json, sys
names = {}
for code in json.loads(sys.stdin.read()):
    lines = ast.parse(code).body
    last = lines.pop() if isinstance(lines[-1], ast.Expr) else None
    exec(compile(ast.Module(lines, []), "cell", "exec"), names)
    value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    print("" if value is None else repr(value))
"""


@pytest.mark.parametrize(
    ("script", "shown"),
    [("generate.py", "  ["), ("step_by_step.py", "<-"), ("own_function.py", "#")],
)
def test_an_example_runs(script: str, shown: str, compile_cache: str) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script)],
        env=os.environ | FEW | {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len([line for line in run.stdout.splitlines() if shown in line]) >= 2, run.stdout


@pytest.mark.slow
def test_an_adapter_is_trained_and_each_answer_has_its_version(compile_cache: str, tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "reinforce_adapter.py"), "12", "0", str(tmp_path / "curve.svg")],
        env=os.environ | FEW | {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    steps = [line.split() for line in run.stdout.splitlines() if line.startswith("step")]
    rewards, differences = ([float(words[place]) for words in steps] for place in (3, 5))
    assert rewards[0] < 0.3 and rewards[-1] > 0.6
    assert max(differences) < 1e-4
    assert [words[7] for words in steps] == [f"policy@{number}" for number in range(1, 13)]
    assert "polyline" in (tmp_path / "curve.svg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_draft_model_is_trained_and_guesses_stories(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-m", "examples.draft_model", str(tmp_path / "draft"), "--steps", "100", "--per-skill", "6"],
        env=os.environ | FEW,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shares = dict(part.rsplit(" ", 1) for part in run.stdout.splitlines()[-1].partition(": ")[2].split(", "))
    assert float(shares["stories"]) > 0.4 and float(shares["json"]) > 0.3, shares
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size < 2_000_000


@pytest.mark.slow
def test_a_head_is_written_in_the_published_form(tmp_path: Path) -> None:
    """tests/e2e/test_draft_heads.py serves one."""
    command = [sys.executable, "-m", "examples.draft_model", str(tmp_path), "--head", "--widen", "2"]
    run = subprocess.run(
        [*command, "--steps", "2", "--per-skill", "2"],
        env=os.environ | FEW,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "stories" in run.stdout.splitlines()[-1]
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["hidden_size"], config["draft_vocab_size"]) == (512, 768)
    assert (tmp_path / "model.safetensors").stat().st_size < 10_000_000


def test_the_notebook_runs(compile_cache: str) -> None:
    """Its cells one after the other in one process, without a notebook server."""
    book = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))
    assert (book["nbformat"], all(not cell.get("outputs") for cell in book["cells"])) == (4, True)
    cells = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    run = subprocess.run(
        [sys.executable, "-c", CELLS],
        input=json.dumps(cells),
        env=os.environ | FEW | {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("Paris") >= 3 and "TokenLogprobs" in run.stdout and "2/2" in run.stderr, run.stdout
