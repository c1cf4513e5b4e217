"""The audit hook is at work: in this process, and in the processes that tests start."""

import ast
import asyncio
import functools
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve.config import Config
from tests.api.conftest import LiveServer
from tests.audit import hook
from tests.audit.hook import VARIABLE

ROOT = Path(__file__).parents[2]
PICKLED = pickle.dumps(Path("."))
CRIMES: dict[str, Callable[[], object]] = {
    "pickle.find_class": lambda: pickle.loads(PICKLED),
    "compile": lambda: compile("1 + 1", "x", "eval"),
    "exec": lambda: eval((lambda: 1).__code__),
}


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's findings go, so that they do not fail the session."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "found"))
    yield tmp_path / "found"


async def in_thread(event: str) -> dict[str, str]:
    await asyncio.to_thread(CRIMES[event])
    return {}


async def at_once(event: str) -> dict[str, str]:
    CRIMES[event]()
    return {}


def in_pool(event: str) -> dict[str, str]:
    CRIMES[event]()
    return {}


@pytest.mark.parametrize("route", [at_once, in_thread, in_pool])
@pytest.mark.parametrize("event", CRIMES)
def test_code_that_comes_from_a_request_is_found(found: Path, event: str, route: Callable[..., Any]) -> None:
    with LiveServer(Config()) as server:
        server.call(lambda: server.app.get("/crime")(functools.partial(route, event)))
        assert server.http.get("/crime").status_code == 500
        assert server.http.get("/live").status_code == 200
    assert found.read_text().startswith(event)


def test_code_of_our_own_is_not(found: Path) -> None:
    for crime in CRIMES.values():
        crime()
    assert not found.exists()


def test_processes_that_tests_start_have_it_too(found: Path) -> None:
    program = """
def child():
    compile("1", "x", "eval")
exec(compile("def run():\\n child()", "/jaxserve/grammar/worker.py", "exec"))
run()
"""
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, capture_output=True, text=True)
    assert done.returncode == 1 and "forbidden by the tests' audit hook" in done.stderr
    assert found.read_text().startswith("compile")


@pytest.mark.parametrize(
    "file,function", [place for place in (*hook.HANDLERS, *hook.ALLOWED) if "jaxserve" in place[0]]
)
def test_the_places_exist(file: str, function: str) -> None:
    """A place that was moved would be watched no longer, in silence."""
    tree = ast.parse((ROOT / file.removeprefix("/")).read_text())
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not function or function in names
