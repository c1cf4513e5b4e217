"""The package: built, installed into an environment of its own and started from there; and what its checks find.

The requirements are those of this environment. `.ci/package` installs them anew.
"""

import json
import os
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.conftest import SMALL
from tests.deploy.package import check_files, check_server
from tests.deploy.supply import check_audit, check_bill

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which the calls change
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


def run(*words: str | Path, where: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which names this checkout
    done = subprocess.run([*map(str, words)], cwd=where, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def copied_source(folder: Path) -> Path:
    """The tracked files, because a build leaves some of its own beside them."""
    for name in run("git", "ls-files", where=ROOT).splitlines():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.mark.skipif(int(version("setuptools").partition(".")[0]) < 77, reason="needs the setuptools of the extra test")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the list of tracked files")
def test_the_wheel_serves_from_an_environment_of_its_own(tmp_path: Path, compile_cache: str) -> None:
    built, environment = tmp_path / "built", tmp_path / "environment"
    run(sys.executable, "-c", BUILD, built, where=copied_source(tmp_path / "source"))
    check_files(built)
    venv.create(environment, with_pip=False)
    [wheel], python = built.glob("*.whl"), environment / "bin" / "python"
    install = ("install", "-q", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", wheel)
    run(sys.executable, "-m", "pip", "--python", python, *install, where=tmp_path)
    [packages] = environment.glob("lib/python3*/site-packages")
    requirements = [path for path in sys.path if path.endswith("site-packages")]  # the files *.pth in them are not read
    (packages / "requirements.pth").write_text("\n".join(requirements))
    found = run(python, "-c", "import jaxserve; print(jaxserve.__file__)", where=tmp_path)
    assert Path(found.strip()).is_relative_to(environment)
    limits = {f"JAXSERVE_SCHEDULER__{name.upper()}": str(value) for name, value in SMALL.items()}
    kernels = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # of the C kernels
    check_server(environment, {"JAXSERVE_RUNTIME__COMPILE_CACHE": compile_cache, "XDG_CACHE_HOME": kernels, **limits})


def written(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_a_bill_that_lacks_a_distribution_is_refused(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("one-1.0", "The_Other-2.0"):
        (packages / f"{name}.dist-info").mkdir(parents=True)
    check_bill(tmp_path, written(tmp_path / "a", {"components": [{"name": "one"}, {"name": "the-other"}]}))
    with pytest.raises(AssertionError, match="the-other"):
        check_bill(tmp_path, written(tmp_path / "b", {"components": [{"name": "one"}]}))


def test_a_known_weakness_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sound, unknown = {"name": "one", "vulns": []}, {"name": "own", "skip_reason": "not found"}
    check_audit(written(tmp_path / "a", {"dependencies": [sound, unknown]}))
    assert "1 distributions were audited; pip-audit knows nothing of own" in capsys.readouterr().out
    weak = {"name": "other", "vulns": [{"id": "PYSEC-1"}]}
    with pytest.raises(AssertionError, match="PYSEC-1"):
        check_audit(written(tmp_path / "b", {"dependencies": [sound, weak]}))
    check_audit(tmp_path / "none")
    assert "nothing is known" in capsys.readouterr().out
