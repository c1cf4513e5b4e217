"""docs/errors.md is what the code says. conftest.py holds each error that the tests of the API provoke to it."""

from pathlib import Path
from typing import Any

import pytest

from docgen.errors import FIXES, entries, index

from .conftest import LiveServer, check_indexed

DOCUMENT = Path(__file__).parents[2] / "docs" / "errors.md"


def sections(text: str) -> list[str]:
    """Status, type, code and what to do of each error. Its messages may be worded anew between two releases."""
    return [line for line in text.splitlines() if line.startswith(("#", "type "))]


def test_the_document_is_up_to_date() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert sections(written) == sections(index()), "run: python -m docgen.errors > docs/errors.md"


def test_every_error_says_what_to_do() -> None:
    assert {(entry.status, entry.code) for entry in entries()} == set(FIXES)


def test_an_error_that_is_not_in_it_fails_the_test_that_provokes_it(server: LiveServer) -> None:
    response: Any = server.http.get("/v1/nothing")
    check_indexed(response)
    response._content = response.content.replace(b'"not_found"', b'"made_up"')
    with pytest.raises(AssertionError, match="made_up"):
        check_indexed(response)
