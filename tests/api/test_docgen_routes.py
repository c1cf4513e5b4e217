"""docs/routes.md and docs/routes/ are what the models say, and their examples run."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docgen.routes import reference
from jaxserve.api.app import create_app
from jaxserve.config import Config
from jaxserve.store import Store

from .conftest import LiveServer, serving
from .fakes import fake_engine

DOCS = Path(__file__).parents[2] / "docs"
PAGES = reference()
MOST = 30_000  # bytes of a page


def test_the_pages_are_up_to_date() -> None:
    assert {path: (DOCS / path).read_text() for path in PAGES} == PAGES, "run: python -m docgen.routes"
    assert {path.name for path in (DOCS / "routes").iterdir()} == {Path(path).name for path in PAGES} - {"routes.md"}
    assert {path: size for path, page in PAGES.items() if (size := len(page.encode())) > MOST} == {}


def test_every_route_is_in_it(tmp_path: Path) -> None:
    app = create_app(fake_engine()[0], Config(), store=Store(tmp_path))
    shown = {re.sub(r"{[^}]*}", "{}", word) for word in re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", PAGES["routes.md"])}
    paths = {re.sub(r"{[^}]*}", "{}", path) for path in app.openapi()["paths"]}
    assert {"/v1/files/{}/content", "/v1/batches/{}/cancel"} < paths <= shown


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(store=tmp_path_factory.mktemp("store")) as server:
        yield server


@pytest.mark.skipif(shutil.which("curl") is None, reason="runs curl")
@pytest.mark.parametrize("path", sorted(PAGES.keys() - {"routes.md"}))
def test_the_examples_run(stored: LiveServer, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```(python|sh)\n(.*?)```", PAGES[path], re.DOTALL)
    assert blocks
    with serving(stored, is_embedding=path == "routes/scoring.md"):
        for language, code in blocks:
            code = code.replace("http://127.0.0.1:8000", stored.url)
            if language == "python":
                names: dict[str, Any] = {}
                exec(compile(code, path, "exec"), names)
                names["client"].close()
                assert capsys.readouterr().out.strip()
            else:
                command = code.replace("curl ", "curl -sS --fail-with-body ")
                done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60)
                assert done.returncode == 0 and done.stdout.startswith("{"), done
