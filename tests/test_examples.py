"""The examples run as their first lines say: a new user's first contact."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SMALL

ROOT = Path(__file__).parent.parent
SIZES = {f"JAXSERVE_SCHEDULER__{name.upper()}": str(value) for name, value in SMALL.items()}


@pytest.mark.parametrize(
    ("script", "shown"),
    [("generate.py", "  ["), ("step_by_step.py", "<-"), ("own_function.py", "#")],
)
def test_an_example_runs(script: str, shown: str, compile_cache: str) -> None:
    run = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script)],
        env=os.environ | SIZES | {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert len([line for line in run.stdout.splitlines() if shown in line]) >= 2, run.stdout
