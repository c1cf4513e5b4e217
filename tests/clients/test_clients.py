"""Real clients, unmodified, each in its own environment, against a real server: `pytest -m clients`."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from docgen.fields import listed
from jaxserve.library.serving import RunningServer, launch_server
from tests.clients import sdk_fields
from tests.clients.environments import packages
from tests.clients.run import AGENTS, interpreter, run_client, scripts
from tests.clients.scripted_model import make
from tests.conftest import SERVED

DOCUMENT = Path(__file__).parents[2] / "docs" / "clients.md"
HOW = "make the environments with `python -m tests.clients.environments DIR`, and set JAXSERVE_CLIENTS=DIR"


@pytest.fixture(scope="module")
def server(compile_cache: str) -> Iterator[RunningServer]:
    with launch_server(compile_cache=compile_cache, classifier_from_token=("0", "1"), **SERVED) as server:
        yield server


AGENTS_SERVED = SERVED | {"served_name": ("scripted",), "max_model_len": 65536}


@pytest.fixture(scope="module")
def agents_server(compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("scripted")
    make(directory)
    with launch_server(str(directory), compile_cache=compile_cache, **AGENTS_SERVED) as server:
        yield server


@pytest.fixture(scope="module")
def picture_server(compile_cache: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    directory = tmp_path_factory.mktemp("pictures")
    make(directory, pictures=True)
    with launch_server(str(directory), compile_cache=compile_cache, **AGENTS_SERVED) as server:
        yield server


@pytest.mark.clients
@pytest.mark.parametrize("script", scripts("look"))
def test_a_client_sends_pictures(script: str, request: pytest.FixtureRequest) -> None:
    root = Path(os.environ.get("JAXSERVE_CLIENTS", "/nowhere"))
    if not interpreter(script, root).exists():
        pytest.skip(HOW)
    found = run_client(script, root, request.getfixturevalue("picture_server").url)
    wrong = {name: result for name, result in found["results"].items() if result != "ok"}
    assert not wrong, f"{found['client']} {found['version']}: {wrong}\n{found['errors']}"


@pytest.mark.clients
@pytest.mark.parametrize("script", scripts())
def test_a_client_does_all_that_it_has(script: str, request: pytest.FixtureRequest) -> None:
    root = Path(os.environ.get("JAXSERVE_CLIENTS", "/nowhere"))
    if not interpreter(script, root).exists():
        pytest.skip(HOW)
    server = request.getfixturevalue("agents_server" if script in AGENTS else "server")
    found = run_client(script, root, server.url)
    wrong = {name: result for name, result in found["results"].items() if result != "ok"}
    assert not wrong, f"{found['client']} {found['version']}: {wrong}\n{found['errors']}"


@pytest.mark.clients
def test_claude_code_with_a_key_and_a_template_that_refuses_late_system_messages(
    compile_cache: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, script = Path(os.environ.get("JAXSERVE_CLIENTS", "/nowhere")), "use_claude-code.mjs"
    if not interpreter(script, root).exists():
        pytest.skip(HOW)
    make(tmp_path, refuses_late_system=True)
    with launch_server(str(tmp_path), compile_cache=compile_cache, api_key="right", **AGENTS_SERVED) as server:
        monkeypatch.setenv("JAXSERVE_SERVER__API_KEY", "right")
        found = run_client(script, root, server.url)
    wrong = {name: result for name, result in found["results"].items() if result != "ok"}
    assert "wrong key" in found["results"] and not wrong, f"{wrong}\n{found['errors']}"


@pytest.mark.clients
@pytest.mark.parametrize("api", sdk_fields.SOURCES)
def test_the_newest_sdk_has_no_field_that_is_not_listed(api: str) -> None:
    """A field that an SDK has got since is named: it gets a verdict in api/known_fields.py or a body."""
    script = "use_anthropic.py" if api == "messages" else "use_openai.py"
    python = interpreter(script, Path(os.environ.get("JAXSERVE_CLIENTS", "/nowhere")))
    if not python.exists():
        pytest.skip(HOW)
    printed = subprocess.run([python, sdk_fields.__file__, api], check=True, capture_output=True, text=True).stdout
    found = {tuple(line.split("\t")) for line in printed.splitlines()}
    assert found and not found - set(listed()), "add them to tests/api/known_fields.txt"


def test_every_client_has_a_script_and_stands_in_the_table() -> None:
    python = {script.removeprefix("use_").removesuffix(".py") for script in scripts() if script.endswith(".py")}
    assert python == packages().keys()
    table = DOCUMENT.read_text()
    for name, wanted in packages().items():
        shown = "litellm proxy" if name == "litellm_proxy" else wanted[0].partition("[")[0]
        assert f"| {shown} (PyPI) |" in table, name
    for script in scripts():
        if script.endswith(".mjs"):
            assert f"| {script.removeprefix('use_').removesuffix('.mjs')} (npm) |" in table
