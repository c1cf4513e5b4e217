"""No process of the server imports from the directory it was started in, which may be a hostile model's."""

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli.main import without_empty_entries
from jaxserve.transport.child import child_environment, python_command
from tests.waiting import LAST_RESORT


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "here.py").write_text("print('ran')")
    return tmp_path


def output(folder: Path, python_path: str) -> str:
    environment = child_environment(os.environ | {"PYTHONPATH": python_path})
    command = python_command("here")
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize("python_path", ["", ":", ":/nothing", "/nothing:"])
def test_a_child_does_not_import_from_the_working_directory(folder: Path, python_path: str) -> None:
    assert output(folder, python_path) == ""


@pytest.mark.parametrize("python_path", [".", "{}", ":{}:"])
def test_a_child_imports_from_what_pythonpath_names(folder: Path, python_path: str) -> None:
    assert output(folder, python_path.format(folder)) == "ran\n"


def test_empty_entries_are_taken_from_the_import_path() -> None:
    here = os.getcwd()
    path = [here, "/a", "/lib"]
    assert without_empty_entries(path, {"PYTHONPATH": ":/a"}) == ["/a", "/lib"]
    for named in ("", f":{here}", ":.", "/a"):
        assert without_empty_entries(path, {"PYTHONPATH": named}) == path


def hostile_names(folder: Path) -> set[str]:
    """Every module that could be imported, but for those that Python itself loads before it runs a `-m` module."""
    (folder / "loaded.py").write_text("import sys; print(*sys.modules)")
    early = subprocess.run([sys.executable, "-m", "loaded"], cwd=folder, capture_output=True, text=True, check=True)
    (folder / "loaded.py").unlink()
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions()}
    names -= {module.partition(".")[0] for module in early.stdout.split()}
    return {name for name in names if name.isidentifier()} - {"jaxserve"}


def plant(folder: Path, mark: Path) -> int:
    """Files in `folder` that write to `mark` if they are imported; how many."""
    names = hostile_names(folder)
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write(__name__ + '\\n')\n")
    return len(names)


def test_a_child_that_waits_for_its_parent_may_end_by_itself() -> None:
    """While the thread waits for stdin, whose lock Python needs at its end."""
    script = "import time; from jaxserve.transport.child import end_with_parent; end_with_parent(); time.sleep(0.3)"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.wait(LAST_RESORT) == 0, child.stderr and child.stderr.read()
