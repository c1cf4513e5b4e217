"""Hints name a command that works, for a checkout and for a wheel."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from jaxserve.system import DISTRIBUTION, install_command

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_the_distribution_has_a_name_of_its_own() -> None:
    assert PROJECT["name"] == DISTRIBUTION != "jaxserve"
    assert PROJECT["scripts"] == {"jaxserve": "jaxserve.cli:main"}


def test_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("cuda") == "pip install -e '.[cuda]'"
    monkeypatch.chdir(tmp_path)
    assert install_command("cuda") == f"pip install -e '{ROOT}[cuda]'"


def test_a_wheel(tmp_path: Path) -> None:
    """The package without the rest of the checkout, as it lies in site-packages."""
    (tmp_path / "jaxserve").mkdir()
    for path in (ROOT / "jaxserve").glob("*.py"):
        (tmp_path / "jaxserve" / path.name).write_bytes(path.read_bytes())
    program = "from jaxserve.system import install_command; print(install_command('tpu'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout == f"pip install '{DISTRIBUTION}[tpu]'\n", done.stderr


def test_every_hint_is_made_by_the_function() -> None:
    for path in (ROOT / "jaxserve").rglob("*.py"):
        if path.name != "system.py":
            assert not re.search(r"pip install '|jaxserve\[", path.read_text(encoding="utf-8")), path
    for path in [ROOT / "README.md", ROOT / "BENCHMARKS.md", *(ROOT / "docs").rglob("*.md")]:
        text = path.read_text(encoding="utf-8")
        assert "jaxserve[" not in text, path
        extras = set(re.findall(rf"(?:{DISTRIBUTION}|\.)\[([a-z]+)\]'", text))
        assert extras <= set(PROJECT["optional-dependencies"]), path
