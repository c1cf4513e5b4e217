"""The examples run as their first lines say: a new user's first contact."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick import QUICK_FLAGS

ROOT = Path(__file__).parent.parent
# few programs, and quick ones: with their own max_num_seqs the examples share none with the other tests
FEW = {"JAXSERVE_SCHEDULER__MAX_NUM_BATCHED_TOKENS": "16", "XLA_FLAGS": QUICK_FLAGS, "PYTHONPATH": str(ROOT)}


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
