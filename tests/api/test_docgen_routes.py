"""docs/routes.md is what the models say."""

import re
from pathlib import Path

from docgen.routes import reference
from jaxserve.api.app import create_app
from jaxserve.config import Config
from jaxserve.store import Store

from .fakes import fake_engine

DOCUMENT = Path(__file__).parents[2] / "docs" / "routes.md"


def test_the_document_is_up_to_date() -> None:
    assert DOCUMENT.read_text() == reference(), "run: python -m docgen.routes > docs/routes.md"


def test_every_route_is_in_it(tmp_path: Path) -> None:
    app = create_app(fake_engine()[0], Config(), store=Store(tmp_path))
    table = reference().partition("\n## ")[0]
    shown = {re.sub(r"{[^}]*}", "{}", word) for word in re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", table)}
    paths = {re.sub(r"{[^}]*}", "{}", path) for path in app.openapi()["paths"]}
    assert {"/v1/files/{}/content", "/v1/batches/{}/cancel"} < paths <= shown
