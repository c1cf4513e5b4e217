"""docs/python.md is made from the code, and every public name can be had."""

from pathlib import Path

import jaxserve
from docgen.python import reference

DOCUMENT = Path(__file__).parent.parent / "docs" / "python.md"


def test_the_page_is_that_of_the_code() -> None:
    assert DOCUMENT.read_text("utf-8") == reference(), "run: python -m docgen.python > docs/python.md"


def test_every_public_name_can_be_had() -> None:
    for name in jaxserve.__all__:
        assert getattr(jaxserve, name).__name__ == name
